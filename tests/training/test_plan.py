"""A spec made concrete."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import ViTImageProcessor

from inlay.errors import InlayError
from inlay.methods.registry import Method, get
from inlay.records import Spec
from inlay.tasks.images import EncodedImages
from inlay.training import FitOptions, FitResult, evaluate
from inlay.training import plan as plans
from inlay.training.batches import Placement

METHOD = Method(name="m", summary="", paper="", learning_rate=0.5)
SPEC = Spec(model="toy", method="m", task="toy", batch_size=16)


def steps(examples: int = 160, **changes: object) -> list[int]:
    plan = plans.make(SPEC.with_(**changes), METHOD, examples)
    return sorted(plan.evaluation_steps)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epochs": 3}, [10, 20, 30]),
        ({"epochs": 2.5}, [10, 20, 25]),
        ({"epochs": 0.01}, [1]),
        ({"max_steps": 7}, [7]),
        ({"max_steps": 25, "epochs": 1}, [10, 20, 25]),
        ({"epochs": 30}, [30, 60, 90, 120, 150, 180, 210, 240, 270, 300]),
        ({"epochs": 30, "early_stopping": 3}, list(range(10, 301, 10))),
        ({"epochs": 1, "evaluations": 4}, [3, 5, 8, 10]),
        ({"epochs": 1, "evaluations": 99}, list(range(1, 11))),
    ],
)
def test_when_it_is_evaluated(changes: dict, expected: list[int]) -> None:
    assert steps(**changes) == expected


@pytest.mark.parametrize(
    ("held_out", "changes", "expected"),
    [
        (100, {"epochs": 3}, [10, 20, 30]),  # 480 trained on, 300 evaluated
        (161, {"epochs": 3}, [20, 30]),  # thrice would be 483
        (240, {"epochs": 3}, [20, 30]),
        (481, {"epochs": 3}, [30]),
        (10_000, {"epochs": 3}, [30]),
        (1_600, {"epochs": 30}, [100, 200, 300]),
        (10_000, {"epochs": 3, "evaluations": 3}, [10, 20, 30]),
        (10_000, {"epochs": 3, "early_stopping": 2}, [10, 20, 30]),
    ],
)
def test_no_more_is_evaluated_than_trained_on(held_out: int, changes: dict, expected: list[int]) -> None:
    assert sorted(plans.make(SPEC.with_(**changes), METHOD, 160, held_out=held_out).evaluation_steps) == expected


def test_the_last_partial_batch_counts_as_an_update() -> None:
    assert steps(161, epochs=1) == [11]


def test_the_learning_rate_is_the_methods_unless_given() -> None:
    assert plans.make(SPEC, METHOD, 10).learning_rate == 0.5
    assert plans.make(SPEC.with_(learning_rate=0.1), METHOD, 10).learning_rate == 0.1


def test_an_empty_training_set_is_refused() -> None:
    with pytest.raises(InlayError, match="empty"):
        plans.make(SPEC, METHOD, 0)


def test_a_batch_is_split_among_steps_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plans.make(SPEC.with_(gradient_accumulation=4), METHOD, 10).micro_batch == 2
    with pytest.raises(InlayError, match=r"16 parts|for example 32"):
        plans.make(SPEC.with_(batch_size=20, gradient_accumulation=8), METHOD, 10)


def test_precision_follows_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert plans.pick_dtype("auto", cpu) is None
    assert plans.pick_dtype("bfloat16", cpu) is torch.bfloat16
    assert plans.pick_dtype("float16", cuda) is torch.float16
    assert plans.pick_dtype("float32", cuda) is None


def test_examples_that_are_not_in_memory_are_read_ahead_for_an_accelerator(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8))
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    kept = EncodedImages([image] * 2, [0, 1], processor)
    made = EncodedImages([image] * 2, [0, 1], processor, limit=0)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    most = min(plans.MOST_WORKERS, multiprocessing.cpu_count() - 1)
    found = [plans.pick_workers(device, encoded) for device in (cpu, cuda) for encoded in ([], kept, made)]
    assert found == [0, 0, 0, 0, 0, most]


def test_the_schedule(tmp_path: Path) -> None:
    spec = Spec(model="toy", method="linear-probe", task="toy", batch_size=16, max_steps=10, warmup=0.2, evaluations=1)
    rates = {}
    for schedule in ("linear", "cosine", "constant"):
        outcome = toys_fit(tmp_path / schedule, spec.with_(schedule=schedule, learning_rate=1.0))
        rates[schedule] = [entry["learning_rate"] for entry in outcome.history if "learning_rate" in entry]
    rise = [1 / 3, 2 / 3]
    assert rates["linear"] == pytest.approx([*rise, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    assert rates["constant"] == pytest.approx([*rise, *[1] * 8])
    assert rates["cosine"][:3] == pytest.approx([*rise, 1])
    assert rates["cosine"][6] == pytest.approx(0.5)


@given(
    total=st.integers(1, 200),
    warmup=st.floats(0, 1, exclude_max=True),
    schedule=st.sampled_from(("linear", "cosine", "constant")),
)
def test_no_update_is_wasted(total: int, warmup: float, schedule: str) -> None:
    plan = plans.make(SPEC.with_(max_steps=total, warmup=warmup, schedule=schedule), METHOD, 10)
    shares = [plan.rate_share(step) for step in range(total)]
    assert all(0 < share <= 1 for share in shares)
    assert max(shares) == 1
    peak = shares.index(1)
    assert peak == plan.warmup_steps
    assert shares[:peak] == sorted(shares[:peak])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert plan.rate_share(total) == (1 if schedule == "constant" else 0)


def test_a_single_update_trains(tmp_path: Path) -> None:
    spec = Spec(model="toy", method="linear-probe", task="toy", batch_size=16, max_steps=1)
    before = toys.backbone().model.state_dict()
    outcome = toys_fit(tmp_path, spec)
    assert not torch.equal(outcome.model.state_dict()["classifier.weight"], before["classifier.weight"])


@pytest.mark.parametrize(
    ("rate", "advice"), [(0.003, "0.001"), (0.03, "0.01"), (0.04, "0.01, the default of linear-probe"), (1e9, "0.01,")]
)
def test_the_advice_where_a_learning_rate_is_too_high(rate: float, advice: str) -> None:
    plan = plans.make(SPEC.with_(learning_rate=rate), get("linear-probe"), 10)
    assert plan.lower_rate.startswith(advice)
    assert (float(plan.lower_rate.split(",")[0])) < rate


def test_a_precision_that_this_device_lacks_is_for_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was trained on a GPU can be used on a CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    spec = SPEC.with_(precision="float16", method="linear-probe")
    with pytest.raises(InlayError, match="needs a CUDA device"):
        plans.make(spec, METHOD, 10)
    assert Placement.of(spec).dtype is None
    model, task = toys.backbone().model, toys.text_task(16, 4, 4)
    found, expected = (evaluate(model, task, "test", None, each)[0] for each in (spec, spec.with_(precision="float32")))
    assert found == expected


def toys_fit(folder: Path, spec: Spec) -> FitResult:
    from inlay.training import fit

    return fit(toys.backbone(), toys.text_task(16, 4, 4), get(spec.method), spec, folder, FitOptions(progress=False))
