"""Checkpoints that are not as they were written are passed over, and the run ends as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import toys
from torch import nn
from transformers import TrainerState

from inlay.errors import InlayError
from inlay.methods.registry import get
from inlay.records import Spec, steps
from inlay.training import FitOptions, FitResult, Interrupted, fit
from inlay.training.checkpoints import Checkpoints, save_tensors

SPEC = Spec(
    model="toy",
    method="lora",
    task="toy",
    max_steps=6,
    batch_size=16,
    learning_rate=3e-2,
    early_stopping=9,
    evaluations=6,
)


def weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(folder: Path, stop_after: int | None = None) -> FitResult:
    """All of it, or up to the checkpoint after so many updates."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return stop_after is not None and len(list((folder / "checkpoints").glob(f"step-{stop_after:08d}*"))) > 0

    return fit(
        toys.backbone(),
        toys.text_task(),
        get("lora"),
        SPEC,
        folder,
        FitOptions(progress=False, checkpoint_seconds=0, stop=stop),
    )


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its fourth update."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    with pytest.raises(Interrupted):
        train(folder, stop_after=4)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return train(tmp_path_factory.mktemp("whole"))


def copy_of(cut: Path, folder: Path) -> tuple[Path, list[Path]]:
    """A copy of the stopped run, and its checkpoints, the newest first."""
    shutil.copytree(cut, folder)
    return folder, steps.oldest_first(folder / "checkpoints")[::-1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def same(found: FitResult, expected: FitResult) -> bool:
    return (weights(found.model), found.history, found.metrics) == (
        weights(expected.model),
        expected.history,
        expected.metrics,
    )


def test_two_are_kept_and_they_know_their_files(cut: Path) -> None:
    old, new = steps.oldest_first(cut / "checkpoints")
    assert steps.age(new) > steps.age(old)
    for checkpoint in (old, new):
        assert steps.damage(checkpoint) is None
        known = json.loads((checkpoint / "seal.json").read_text())["files"]
        assert known.keys() == {path.name for path in checkpoint.iterdir()} - {"seal.json"}


@pytest.mark.parametrize("file", ["trained.safetensors", "random.json"])
def test_one_flipped_bit_is_found_and_the_run_goes_on_from_the_checkpoint_before(
    cut: Path, whole: FitResult, tmp_path: Path, file: str
) -> None:
    folder, (new, old) = copy_of(cut, tmp_path / "run")
    flip(new / file)
    resumed = train(folder)
    assert resumed.resumed_from == steps.age(old)[0]
    assert same(resumed, whole)
    log = (folder / "log.txt").read_text()
    assert f"the checkpoint {new.name} is damaged and passed over: {file} was changed after it was written" in log


def test_where_all_are_damaged_the_run_begins_anew(cut: Path, whole: FitResult, tmp_path: Path) -> None:
    folder, checkpoints = copy_of(cut, tmp_path / "run")
    for checkpoint in checkpoints:
        (checkpoint / "progress.json").write_bytes(b'{"best": \xff')
    resumed = train(folder)
    assert resumed.resumed_from is None
    assert same(resumed, whole)
    assert "no whole checkpoint is left: the run begins anew" in (folder / "log.txt").read_text()


def test_a_best_state_that_is_damaged_counts(cut: Path, whole: FitResult, tmp_path: Path) -> None:
    """Nobody would go back to it unseen: the checkpoints that know it are passed over."""
    folder, (new, old) = copy_of(cut, tmp_path / "run")
    (best,) = steps.bests(new)
    flip(folder / "checkpoints" / best)
    resumed = train(folder)
    assert resumed.resumed_from == (None if best in steps.bests(cut / "checkpoints" / old.name) else steps.age(old)[0])
    assert same(resumed, whole)


def test_an_earlier_inlays_checkpoint_without_digests_still_resumes(
    cut: Path, whole: FitResult, tmp_path: Path
) -> None:
    folder, (new, old) = copy_of(cut, tmp_path / "run")
    for checkpoint in (new, old):
        (checkpoint / "seal.json").unlink()
        progress = json.loads((checkpoint / "progress.json").read_text())
        del progress["best"]["sha256"]
        (checkpoint / "progress.json").write_text(json.dumps(progress))
    resumed = train(folder)
    assert resumed.resumed_from == steps.age(new)[0]
    assert same(resumed, whole)
    assert f"nothing vouches for {new.name}" in (folder / "log.txt").read_text()
    broken, (new, old) = copy_of(cut, tmp_path / "broken")
    for checkpoint in (new, old):
        (checkpoint / "seal.json").unlink()
    (new / "scheduler.json").write_text("{")
    assert train(broken).resumed_from == steps.age(old)[0]


def test_no_more_than_two_and_never_room_for_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, most = Checkpoints(tmp_path / "checkpoints", base="f"), []
    from inlay.training import checkpoints as module

    real = module.save_tensors

    def watched(tensors: dict[str, torch.Tensor], path: Path) -> None:
        most.append(len(list(store.folder.iterdir())))
        real(tensors, path)

    monkeypatch.setattr(module, "save_tensors", watched)
    for step in (1, 2, 2, 3, 5, 8):
        write(store, step)
        assert len(steps.oldest_first(store.folder)) <= 2
    assert max(most) == 2, "one that is whole, and the one that is being written"
    assert [steps.age(each) for each in steps.oldest_first(store.folder)] == [(5, 0), (8, 0)]


def write(store: Checkpoints, step: int) -> None:
    state = {"state": {}, "param_groups": []}
    store.write(step, trained={"x": torch.zeros(3)}, optimizer=state, plain={}, state=TrainerState())


def test_what_is_called_like_a_checkpoint_and_is_none(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints", base="f")
    write(store, 3)
    for name in ("step-", "step-x", "step-00000009.x", "step-99999999999999999999999", "step--1"):
        (store.folder / name).mkdir()
    (store.folder / "step-00000010").write_text("a file")
    assert Checkpoints(store.folder, base="f").latest() == store.folder / "step-00000003"


def test_a_best_state_that_is_damaged_while_the_run_goes_on(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints", base="f")
    tensors = {"x": torch.arange(8.0)}
    best = {"step": 4, **store.write_best(4, tensors)}
    store.load_best(best, tensors)
    save_tensors({"x": torch.zeros(8)}, store.folder / best["file"])
    with pytest.raises(InlayError, match="was changed after it was written"):
        store.load_best(best, tensors)
