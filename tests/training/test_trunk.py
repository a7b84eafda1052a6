"""Training from the trunk's kept output: the same to the bit, in memory and in a file, after a kill, and off where it
would be wrong."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.registry import get
from inlay.records import Spec
from inlay.training import FitOptions, FitResult, fit
from inlay.training.trunk.data import KeptSplit
from inlay.training.trunk.rows import FILE, LIMIT, Rows, available_memory, memory_limit

pytestmark = pytest.mark.usefixtures("trunks_are_kept")
FAMILIES = ("vit", "resnet", "swin", "convnext", "dinov2", "clip")
# Full batches and a smaller last one.
SPEC = Spec(model="toy", method="linear-probe", task="toy", epochs=2, batch_size=16, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads a row's rounding depends on its place in these tiny models, and nothing is kept."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(folder: Path, family: str, spec: Spec, task: Any = None, **options: Any) -> FitResult:
    task = task or toys.image_task(train=40)
    return fit(toys.backbone(family), task, get(spec.method), spec, folder, FitOptions(progress=False, **options))


def result(outcome: FitResult, folder: Path) -> dict[str, Any]:
    """Everything that must not depend on whether the trunk was kept."""
    adapter = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "adapter").rglob("*"))
    }
    return {"metrics": outcome.metrics, "history": outcome.history, "adapter": adapter, "steps": outcome.steps}


PROMPT = {"layers": [3], "image_size": zoo.IMAGE_SIZE}
NORM = {"layers": [3]}
CASES = [
    *((family, "activation-prompt", PROMPT) for family in FAMILIES),
    *((family, "linear-probe", {}) for family in ("dinov2", "clip")),
    *((family, "norm", NORM) for family in ("resnet", "vit")),
]


@pytest.mark.parametrize(("family", "method", "settings"), CASES, ids=[f"{family}-{name}" for family, name, _ in CASES])
def test_the_same_to_the_bit(tmp_path: Path, family: str, method: str, settings: dict[str, Any]) -> None:
    spec = SPEC.with_(method=method, settings=settings)
    without = train(tmp_path / "off", family, spec.with_(trunk_cache="off"))
    with_it = train(tmp_path / "on", family, spec)
    assert without.portrait["trunk"] == {"cached": False, "reason": "it was switched off"}
    found = with_it.portrait["trunk"]
    blocks = zoo_blocks(family)
    assert (found["cached"], found["where"]) == (True, "memory")
    assert (found["blocks_skipped"], found["blocks"]) == (blocks if method == "linear-probe" else 2, blocks)
    assert found["first_epoch_seconds"] > found["seconds"] > 0
    assert result(with_it, tmp_path / "on") == result(without, tmp_path / "off")


def zoo_blocks(family: str) -> int:
    return len(anatomy(zoo.tiny(family)[0]).blocks)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation": 2},
        {"gradient_checkpointing": True},
        {"precision": "bfloat16"},
        {"batch_size": 64},  # more than there are
        {"early_stopping": 1, "evaluations": 6},
        {"settings": {**PROMPT, "kind": "product"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_same_to_the_bit_however_it_is_trained(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = SPEC.with_(method="activation-prompt", settings=PROMPT).with_(**changes)
    without = train(tmp_path / "off", "swin", spec.with_(trunk_cache="off"))
    with_it = train(tmp_path / "on", "swin", spec)
    assert with_it.portrait["trunk"]["cached"], with_it.portrait["trunk"]
    assert result(with_it, tmp_path / "on") == result(without, tmp_path / "off")


@pytest.mark.parametrize("family", ["resnet", "clip"])
def test_validation_from_kept_rows_is_the_same_to_the_bit(tmp_path: Path, family: str) -> None:
    """The split's batches never change, the last and smaller one included."""
    passes = {"off": 0, "auto": 0}

    def run(cache: str) -> FitResult:
        def count(*_: object) -> None:
            passes[cache] += 1

        backbone, task = toys.backbone(family), toys.image_task(train=40)
        anatomy(backbone.model).blocks[0].module.register_forward_hook(count)
        spec = SPEC.with_(evaluations=6, trunk_cache=cache)
        return fit(backbone, task, get("linear-probe"), spec, tmp_path / cache, FitOptions(progress=False))

    without, with_it = run("off"), run("auto")
    # Training: two epochs of three batches. Validation and test: two batches each time.
    assert passes["off"] == 2 * 3 + 6 * 2 + 2
    # To find the cut: 4. The estimate: 4. The rows: 3, and 4 + 2 compared. The smaller last batches are of kept rows.
    # Validation: once without, once for the rows, and one batch compared. Test.
    assert passes["auto"] == 4 + 4 + 3 + 6 + 2 + 2 + 2 + 2
    assert result(with_it, tmp_path / "auto") == result(without, tmp_path / "off")
    assert without.portrait["inference_examples_per_second"]["repetitions"] == 7
    # What tells the speed of the model: the first evaluation and the test.
    assert with_it.portrait["inference_examples_per_second"]["repetitions"] == 2


def test_in_a_file_where_memory_does_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPEC.with_(method="activation-prompt", settings=PROMPT)
    in_memory = train(tmp_path / "memory", "convnext", spec)
    monkeypatch.setenv(LIMIT, "1KiB")
    # What a killed process left: of the right size, and never to be read.
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / FILE).write_bytes(b"x" * in_memory.portrait["trunk"]["bytes"])
    in_a_file = train(tmp_path / "file", "convnext", spec)
    assert in_a_file.portrait["trunk"]["where"] == "file"
    assert in_a_file.portrait["trunk"]["bytes"] == 40 * 16 * 4 * 4 * 4
    assert result(in_a_file, tmp_path / "file") == result(in_memory, tmp_path / "memory")
    assert "in a file" in (tmp_path / "file" / "log.txt").read_text()
    assert not (tmp_path / "file" / FILE).exists()


def test_no_file_is_left_by_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "0")
    seen = []

    def fail(*_: object) -> None:
        seen.append((tmp_path / FILE).exists())
        raise RuntimeError("on purpose")

    monkeypatch.setattr(KeptSplit, "replay", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path, "resnet", SPEC.with_(method="norm", settings=NORM, trunk_cache="on"))
    assert seen == [True]
    assert not (tmp_path / FILE).exists()


def test_a_full_disk_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        outcome = train(tmp_path, "resnet", SPEC.with_(epochs=1.5, method="norm", settings=NORM))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "no room for its 160 KiB on disk" in outcome.portrait["trunk"]["reason"]
    assert not (tmp_path / FILE).exists()


def test_rows_on_the_device_are_picked_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an accelerator, on the one device that every machine has."""
    spec = SPEC.with_(method="activation-prompt", settings=PROMPT)
    expected = train(tmp_path / "memory", "vit", spec)
    monkeypatch.setattr(Rows, "_place", lambda *_: "device")
    found = train(tmp_path / "device", "vit", spec)
    assert found.portrait["trunk"]["where"] == "device"
    assert result(found, tmp_path / "device") == result(expected, tmp_path / "memory")


@pytest.mark.parametrize(
    ("given", "expected"), [("", None), ("0", 0), ("1500", 1500), ("2GiB", 2**31), ("0.5 mb", 2**19)]
)
def test_the_limit_is_set_in_words(monkeypatch: pytest.MonkeyPatch, given: str, expected: int | None) -> None:
    monkeypatch.setenv(LIMIT, given)
    assert memory_limit() == expected
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(InlayError, match="'much' is no size"):
        memory_limit()


CGROUP_2 = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 500\ninactive_file 150\n"}
CGROUP_1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "700",
    "memory.stat": "inactive_file 0\ntotal_inactive_file 150\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {".": CGROUP_2}, 450),
        ("0::/", {".": CGROUP_2 | {"memory.current": "1200"}}, 0),
        ("0::/", {".": CGROUP_2 | {"memory.max": "max"}}, None),
        ("0::/", {".": CGROUP_2 | {"memory.max": str(2**62)}}, None),
        ("0::/slice/job", {"slice": CGROUP_2, "slice/job": CGROUP_2 | {"memory.max": "max"}}, 450),
        ("0::/another", {"slice": CGROUP_2}, None),
        ("0::/outside/of/the/container", {".": CGROUP_2}, 450),
        ("5:cpu,cpuacct:/\n4:memory:/docker/1", {"memory": CGROUP_1}, 450),
        ("4:memory:/job", {"memory/job": CGROUP_1}, 450),
        ("0::/", {}, None),
        (None, {}, None),
    ],
)
def test_memory_is_what_the_container_leaves(
    tmp_path: Path, groups: str | None, files: dict[str, dict[str, str]], expected: int | None
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    for folder, contents in files.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (root / folder / name).write_text(text + "\n")
    if groups is not None:
        own.write_text(groups + "\n")
    found = available_memory(root, own)
    assert found == expected if expected is not None else found > 2**20, "what the machine has"


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 4),
    order=st.randoms(),
    sliced=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@settings(deadline=None, max_examples=60)
def test_rows_come_back_as_they_lay(shape: list[int], batch: int, order: Any, sliced: bool, dtype: torch.dtype) -> None:
    """Whatever the layout: channels last, transposed, a slice of something larger; with the same strides."""
    whole = [batch, *shape]
    places = list(range(1, len(whole)))
    order.shuffle(places)
    base = torch.randn([whole[i] for i in (0, *places)] + [2 if sliced else 1]).to(dtype)
    example = base[..., 0].permute(*torch.tensor([0, *places]).argsort().tolist())
    assert list(example.shape) == whole
    rows = Rows(example, batch, torch.device("cpu"), Path(), 1.0)
    rows.put(0, example)
    numbers = torch.randperm(batch)
    picked = rows.pick(numbers)
    assert torch.equal(picked, example[numbers])
    assert picked.dtype == dtype
    assert picked.stride()[1:] == example.stride()[1:] or batch == 1


# ---- where it would be wrong, or of no use


class Augmented(list):
    deterministic = False


def test_off_with_a_line_that_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = toys.image_task(train=40)
    task.train = Augmented(task.train)
    outcome = fit(toys.backbone("vit"), task, get("linear-probe"), SPEC, tmp_path)
    assert outcome.portrait["trunk"]["reason"].startswith("the images are augmented")
    assert "toy linear-probe: trunk not cached: the images are augmented" in capsys.readouterr().err
    with pytest.raises(InlayError, match="trunk_cache='on' cannot be: the images are augmented"):
        fit(toys.backbone("vit"), task, get("linear-probe"), SPEC.with_(trunk_cache="on"), tmp_path / "on")


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("vit", {"method": "full", "learning_rate": 1e-4}, "at the input or in the first block"),
        ("vit", {"method": "norm"}, "at the input or in the first block"),
        ("vit", {"method": "lora", "settings": {"target_modules": ["q_proj"]}}, "at the input or in the first block"),
        ("resnet", {"epochs": 1}, "no example would be read a second time"),
        ("bert", {}, "texts are padded"),
    ],
    ids=["full", "norm", "lora", "one-epoch", "text"],
)
def test_off_where_it_is_of_no_use(tmp_path: Path, family: str, changes: dict[str, Any], reason: str) -> None:
    task = toys.text_task(train=40) if family == "bert" else None
    outcome = train(tmp_path, family, SPEC.with_(epochs=2).with_(**changes), task)
    assert reason in outcome.portrait["trunk"]["reason"]


def other_at_the_first_place(factor: float) -> toys.ToyBackbone:
    """A ViT in which the features of a batch's first row are multiplied."""

    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:1] * factor, x[1:]])

    backbone = toys.backbone("vit")
    backbone.model.vit.layernorm = nn.Sequential(backbone.model.vit.layernorm, First())
    return backbone


def of_the_batch() -> toys.ToyBackbone:
    """A ResNet whose batch norms have no running statistics: they take the batch's, in eval mode too."""
    backbone = toys.backbone("resnet")
    for module in backbone.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return backbone


def test_a_row_whose_rounding_depends_on_its_place_is_kept_on_request(tmp_path: Path) -> None:
    task, rounded = toys.image_task(train=40), other_at_the_first_place(1 + 1e-6)
    outcome = fit(rounded, task, get("linear-probe"), SPEC, tmp_path / "auto", FitOptions(progress=False))
    assert "rounding depends on its place in the batch" in outcome.portrait["trunk"]["reason"]
    rounded, spec = other_at_the_first_place(1 + 1e-6), SPEC.with_(trunk_cache="on")
    outcome = fit(rounded, task, get("linear-probe"), spec, tmp_path / "on", FitOptions(progress=False))
    assert outcome.portrait["trunk"]["cached"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backbone", [of_the_batch, lambda: other_at_the_first_place(1.5)], ids=["norm", "place"])
def test_a_row_that_depends_on_the_rest_of_its_batch_is_never_kept(
    tmp_path: Path, backbone: Callable[[], toys.ToyBackbone], precision: str
) -> None:
    spec = SPEC.with_(precision=precision, max_steps=4)
    outcome = fit(
        backbone(), toys.image_task(train=40), get("linear-probe"), spec, tmp_path / "auto", FitOptions(progress=False)
    )
    assert "depends on the rest of its batch" in outcome.portrait["trunk"]["reason"]
    on = spec.with_(trunk_cache="on")
    with pytest.raises(InlayError, match="cannot be: in this model a row depends on the rest of its batch"):
        fit(backbone(), toys.image_task(train=40), get("linear-probe"), on, tmp_path / "on", FitOptions(progress=False))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("method", ["linear-probe", "norm", "bias", "lora", "activation-prompt"])
def test_nothing_before_the_first_trained_part_is_in_the_graph(
    tmp_path: Path, method: str, checkpointing: bool
) -> None:
    """Asserted on the graph that `fit` trains through, the trunk being run."""
    backbone = toys.backbone("vit")
    last = anatomy(backbone.model).blocks[-1]
    chosen = {"norm": {"layers": [3]}, "bias": {"layers": [3]}, "activation-prompt": PROMPT}
    chosen["lora"] = {"target_modules": rf"{last.name}\..*(q_proj|fc1)"}
    before: dict[str, nn.Module] = {"embeddings": backbone.model.vit.embeddings}
    for block in anatomy(backbone.model).blocks[: 3 if method == "linear-probe" else 2]:
        before |= {f"{block.name}.{name}": module for name, module in block.module.named_modules()}
    seen, leaves = [], set()

    def outside(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)
        assert not seen[-1].requires_grad
        assert seen[-1].grad_fn is None

    def walk(module: nn.Module, args: Any, output: Any) -> None:
        if not output.loss.requires_grad:
            return
        nodes, found = [output.loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in found:
                continue
            found.add(node)
            leaves.update({id(node.variable)} if hasattr(node, "variable") else ())
            nodes += [following for following, _ in node.next_functions]

    for module in before.values():
        module.register_forward_hook(outside)
    backbone.model.register_forward_hook(walk)
    spec = SPEC.with_(method=method, settings=chosen.get(method, {}), max_steps=2, trunk_cache="off")
    spec = spec.with_(gradient_checkpointing=checkpointing)
    outcome = fit(backbone, toys.image_task(train=40), get(method), spec, tmp_path, FitOptions(progress=False))
    assert len(seen) > 10
    trained = {id(parameter) for parameter in outcome.model.parameters() if parameter.requires_grad}
    # A checkpointed block is one node of the graph: its own parameters are behind it.
    assert leaves <= trained if checkpointing else leaves == trained
    assert leaves
