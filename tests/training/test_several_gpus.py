"""FSDP2 in several processes: the model lies in parts, and a run comes to the same as in one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import zoo
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.registry import all_methods
from inlay.records import Spec
from inlay.training import sharding
from inlay.training.shares import Filler, FillerCollator, ProcessShare, WithFillers, divide, keeps_step

# What is added up in another order, in float64; what the Trainer and an adapter keep is float32.
NEAR = {"rel": 1e-5, "abs": 1e-6}
LIMIT = 240  # seconds: where one process waits for another in vain, it waits for ever
CUT = 3  # the update after which a run is interrupted: in the middle of an epoch


def launch(processes: int, folder: Path, *what: str, limit: float = LIMIT, **environment: str) -> str:
    """Train under `accelerate launch`; what it printed. It ends well, unless one process is told to fail."""
    options = "--use_fsdp --fsdp_version 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"),
            *("--num_processes", str(processes), sharded_runs.__file__, str(folder), *what),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **environment},
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started, too
            raise
    if (process.returncode == 0) == ("FAILS" in environment):
        raise AssertionError(errors)
    return out + errors


def read(what: Path, processes: int) -> dict[str, Any]:
    """What every process found, which is the same."""
    found = [json.loads(what.with_name(f"{what.name}.{rank}.json").read_text()) for rank in range(processes)]
    assert all(each == found[0] for each in found)
    for entry in found[0].get("history", ()):
        if found[0]["failed"] and "loss" in entry and "stsb_loss" not in entry:
            # Of the update in which a task fails, the sum has those of its rows that were computed apart from the one
            # that is no number: which ones, depends on how the update was divided. The tasks' own losses do not.
            del entry["loss"]
    return found[0]


def alike(found: Any, wanted: Any, path: str = "") -> None:
    """All numbers are the same but for rounding, and all else is the same."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for name in wanted:
            alike(found[name], wanted[name], f"{path}/{name}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for number, (mine, its) in enumerate(zip(found, wanted, strict=True)):
            alike(mine, its, f"{path}/{number}")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, nan_ok=True, **NEAR), path
    else:
        assert found == wanted, path


def adapters_alike(found: Path, wanted: Path, what: str) -> None:
    found, wanted = (place / what.replace(":", "-") / "adapter" for place in (found, wanted))
    files = sorted(path.relative_to(wanted) for path in wanted.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(found) for path in found.rglob("*.safetensors"))
    assert files
    for file in files:
        mine, its = load_file(found / file), load_file(wanted / file)
        assert mine.keys() == its.keys()
        for name, tensor in its.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-6)


WHOLE = ("lora:bert", "full:vit", "prefix:gpt2", "idpg:bert", "tasks:lora")
RESUMED = ("lora:bert", "full:vit", "tasks:lora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs made by one process, this one, and by two; begun by one or by two, and gone on with by others."""
    folder = tmp_path_factory.mktemp("runs")
    for place in ("one", "two", "from-one", "from-two", "from-two-in-one"):
        (folder / place).mkdir()
    one = [f"one/{what}" for what in (*WHOLE, "texts:prompt")] + [f"from-one/{what}@{CUT}" for what in RESUMED]
    sharded_runs.main(folder, one)
    two = [f"two/{what}" for what in (*WHOLE, "texts:prompt")] + [f"from-one/{what}" for what in RESUMED]
    launch(2, folder, *two, *(f"from-two/{what}@{CUT}" for what in RESUMED), STOPS="1")
    shutil.rmtree(folder / "from-two-in-one")
    shutil.copytree(folder / "from-two", folder / "from-two-in-one")
    sharded_runs.main(folder, [f"from-two-in-one/{what}" for what in RESUMED])
    return folder


@pytest.mark.parametrize("what", WHOLE)
def test_two_processes_come_to_what_one_does(folder: Path, what: str) -> None:
    """Losses, metrics, and the adapter that is saved."""
    one, two = read(folder / "one" / what, 1), read(folder / "two" / what, 2)
    assert "metrics" in one
    alike(two, one)
    adapters_alike(folder / "two", folder / "one", what)


def test_two_processes_write_what_one_does(folder: Path) -> None:
    one, two = read(folder / "one" / "texts:prompt", 1), read(folder / "two" / "texts:prompt", 2)
    assert two == one
    assert len({len(text.split()) for text in one["texts"]}) > 1, "they end at other places"


@pytest.mark.parametrize(("place", "processes"), [("from-one", 2), ("from-two-in-one", 1)])
@pytest.mark.parametrize("what", RESUMED)
def test_a_run_goes_on_in_another_number_of_processes(folder: Path, what: str, place: str, processes: int) -> None:
    one, other = read(folder / "one" / what, 1), read(folder / place / what, processes)
    assert other.pop("resumed_from") is not None
    alike(other, {name: value for name, value in one.items() if name != "resumed_from"})
    adapters_alike(folder / place, folder / "one", what)


@pytest.mark.parametrize("fails", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_process_that_fails_ends_the_others(tmp_path: Path, fails: str) -> None:
    """It says why, the other that it is alone, and nobody waits."""
    (tmp_path / "two").mkdir()
    printed = launch(2, tmp_path, "two/lora:bert", FAILS=fails)
    assert "ZeroDivisionError: as a mistake in one process does" in printed
    assert not (tmp_path / "two" / "lora-bert" / "adapter").exists()
    if "Another of the 2 processes of this run has ended" not in printed:  # the launcher was faster
        assert "SIGTERM" in printed


@pytest.mark.slow
def test_two_processes_are_followed_by_three(folder: Path) -> None:
    what = RESUMED[:2]
    launch(3, folder, *(f"from-two/{each}" for each in what))
    for each in what:
        one, three = read(folder / "one" / each, 1), read(folder / "from-two" / each, 3)
        assert three.pop("resumed_from") is not None
        alike(three, {name: value for name, value in one.items() if name != "resumed_from"})
        adapters_alike(folder / "from-two", folder / "one", each)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2"])
def test_every_method_comes_to_what_it_does_in_one_process(tmp_path: Path, family: str) -> None:
    """Those that do not work on a family say so in two processes too."""
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    methods = list(all_methods())
    sharded_runs.main(tmp_path, [f"one/{method}:{family}" for method in methods])
    launch(2, tmp_path, *(f"two/{method}:{family}" for method in methods), limit=900)
    trained = 0
    for method in methods:
        what = f"{method}:{family}"
        one, two = read(tmp_path / "one" / what, 1), read(tmp_path / "two" / what, 2)
        if method == "infoprompt" and "refused" not in one:  # it draws what it compares, in each process anew
            assert two["metrics"]["test"]["loss"] == pytest.approx(one["metrics"]["test"]["loss"], rel=0.01)
            continue
        alike(two, one)
        if "refused" not in one:
            adapters_alike(tmp_path / "two", tmp_path / "one", what)
            trained += 1
    assert trained >= 15


@pytest.mark.parametrize("family", ["bert", "t5", "swin", "gpt2", "resnet"])
def test_all_blocks_are_units_and_inner_ones_come_first(family: str) -> None:
    model, _ = zoo.tiny(family)
    found = sharding.units(model)
    assert {block.module for block in anatomy(model).blocks} <= set(found)
    for number, unit in enumerate(found):
        assert not set(found[number + 1 :]) & set(unit.modules())
    if family == "t5":
        assert set(model.get_decoder().block) <= set(found)


# ------------------------------------------------------------------------------------------------ shares of an epoch


class Order(list[int]):
    """A sampler with a given order."""


@given(rows=st.integers(1, 60), micro_batch=st.integers(1, 7), world=st.integers(1, 5))
def test_every_row_comes_once_and_all_keep_step(rows: int, micro_batch: int, world: int) -> None:
    order = Order(reversed(range(rows)))
    shares = [list(ProcessShare(order, micro_batch, rank, world)) for rank in range(world)]
    assert {len(share) for share in shares} == {len(ProcessShare(order, micro_batch, 0, world))}
    seen = []
    for round_ in zip(*shares, strict=True):
        kept = [row for batch in round_ for row in batch if row >= 0]
        assert all(len(batch) <= micro_batch for batch in round_)
        assert all(len(batch) == 1 for batch in round_ if batch[0] < 0), "a filler is one row"
        sizes = [len([row for row in batch if row >= 0]) for batch in round_]
        assert max(sizes) - min(sizes) <= 1
        seen += kept
    assert seen == order


@given(rows=st.integers(1, 40), batch_size=st.integers(1, 9), world=st.integers(1, 5))
def test_who_must_keep_step_in_evaluation(rows: int, batch_size: int, world: int) -> None:
    batches = [-(-len(range(rank, rows, world)) // batch_size) for rank in range(world)]
    keep = [keeps_step(range(rows), batch_size, rank, world) for rank in range(world)]
    assert len({count + kept for count, kept in zip(batches, keep, strict=True)}) == 1


def test_a_filler_is_made_of_a_row_and_known_as_one() -> None:
    rows = WithFillers([{"x": 1}, {"x": 2}])
    collate = FillerCollator(lambda items: {"x": [item["x"] for item in items]})
    assert collate([rows[0], rows[1]]) == {"x": [1, 2]}
    assert not isinstance(collate([rows[1]]), Filler)
    filler = collate([rows[~1]])
    assert isinstance(filler, Filler)
    assert filler == {"x": [2]}
    assert divide([5, 6, 7], 2) == [[5, 6], [7]]


# ------------------------------------------------------------------------------------------------- what is asked for


def test_what_the_launcher_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sharding.asked() is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InlayError, match=r"fsdp_version=1 is not supported: give .* --fsdp_version 2"):
        sharding.asked()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert sharding.asked() == sharding.Sharding(reshard=True)
    with sharding.hidden():
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert sharding.asked() == sharding.Sharding(reshard=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert sharding.asked() is None, "one process has nobody to divide it with"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed is not supported.*--fsdp_version 2"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM is not supported.*--fsdp_version 2"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "use_parallelism_config.*not supported"),
        ("FSDP_OFFLOAD_PARAMS", "fsdp_offload_params is not supported"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "--gradient-checkpointing"),
    ],
)
def test_what_cannot_be_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    for key, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2", name: "true"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InlayError, match=message):
        sharding.asked()


def test_quantised_bases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    spec = Spec(model="toy", method="lora", task="toy", quantize="int8")
    with pytest.raises(InlayError, match="quantize='int8' cannot be divided by FSDP"):
        sharding.asked(spec)
