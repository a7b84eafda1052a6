"""What an unfinished run goes on from: safetensors and JSON, nothing pickled, whole or absent.

    checkpoints/step-00000120/trained.safetensors     what training changes, and no more
                              optimizer.safetensors   the optimiser's tensors; optimizer.json the rest of its state
                              scheduler.json, scaler.json, random.json (one entry a process)
                              trainer_state.json      Transformers' own
                              progress.json           what we keep beside it: see progress.py
                              base.json               the fingerprint of the base model's weights
                              seal.json               the digest of every one of these files: see records/steps.py
    checkpoints/best-00000080.safetensors             the best state so far, where early stopping may return to it

A checkpoint is filled under another name and renamed when all of it is on disk: a kill at any moment leaves the last
whole one. The one before it stays, for a disk may spoil what it holds: a checkpoint that is not as it was written is
passed over. The one before that is removed first, so that there is never room needed for three. None is ever written
over, as a folder cannot be replaced in one step: a second one of the same step (once with its evaluation to come, then
with it done) is step-00000120.1, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.trainer_callback import TrainerState

from inlay.errors import InlayError, first_line
from inlay.records import steps
from inlay.records.atomic import clear_leftovers, file_digest, open_plain, write_file, write_folder, writing
from inlay.records.sealed import parse, read_plain
from inlay.records.steps import BEST, STEP
from inlay.training.sharding import like

TRAINED, OPTIMIZER, STATE = "trained.safetensors", "optimizer.safetensors", "trainer_state.json"


class Checkpoints:
    """The folder of a run's checkpoints. `base` is the fingerprint of the model that is adapted.

    `passed_over` says, one line each, which checkpoints `latest` found damaged.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self.base = folder, base
        self.passed_over: list[str] = []
        self._last: Path | None = None

    def latest(self) -> Path | None:
        """The newest checkpoint that is as it was written, or None. Call it before writing any: it also sweeps up what
        a kill left half-done."""
        clear_leftovers(self.folder)
        self.passed_over = []
        for checkpoint in reversed(steps.oldest_first(self.folder)):
            wrong = steps.damage(checkpoint) or (None if steps.has_seal(checkpoint) else unreadable(checkpoint))
            if wrong is None:
                self._last = checkpoint
                return checkpoint
            self.passed_over.append(f"the checkpoint {checkpoint.name} is damaged and passed over: {wrong}")
        return None

    def news(self, checkpoint: Path | None) -> list[str]:
        """What a person should know of the checkpoint that `latest` gave."""
        told = list(self.passed_over)
        if checkpoint is None and told:
            told.append("no whole checkpoint is left: the run begins anew")
        if checkpoint is not None and not steps.has_seal(checkpoint):
            told.append(f"nothing vouches for {checkpoint.name}: an earlier inlay wrote it without digests")
        return told

    def check_base(self, checkpoint: Path) -> None:
        """Refuse to go on from a checkpoint on top of other weights than it was trained with."""
        with reading(checkpoint / "base.json"):
            known = str(load_json(checkpoint / "base.json")["fingerprint"])
        if known != self.base:
            raise InlayError(
                f"{checkpoint} was trained on a base model with other weights (fingerprint {known[:12]}, now "
                f"{self.base[:12]}): the model has changed since. Give the model it began with, or remove the folder "
                f"{self.folder} to start that run anew."
            )

    def write(
        self,
        step: int,
        *,
        trained: Mapping[str, Tensor],
        optimizer: Mapping[str, Any],
        plain: Mapping[str, Any],
        state: TrainerState,
    ) -> None:
        """Write one checkpoint; the one before it stays. `plain` are the JSON files by name."""
        tensors, rest = split_optimizer(optimizer)

        def fill(folder: Path) -> None:
            save_tensors(trained, folder / TRAINED)
            save_tensors(tensors, folder / OPTIMIZER)
            for name, data in {**plain, "optimizer": rest, "base": {"fingerprint": self.base}}.items():
                (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
            state.save_to_json(str(folder / STATE))
            steps.seal(folder)

        last = [self._last] if self._last or self.passed_over else steps.oldest_first(self.folder)[-1:]
        steps.prune(self.folder, keep=last, needed=steps.bests_in(plain.get("progress") or {}))
        again = max(
            (steps.age(each)[1] + 1 for each in steps.oldest_first(self.folder) if step_of(each) == step), default=0
        )
        target = self.folder / (f"{STEP}{step:08d}" + f".{again}" * bool(again))
        write_folder(target, fill)
        self._last = target

    def write_best(
        self, step: int, trained: Mapping[str, Tensor], *, needed: Collection[str] = (), start: str = BEST
    ) -> dict[str, str]:
        """Write the best state so far: its file's name and digest. Best states that neither a checkpoint nor the run
        (`needed`) knows any more are removed. `start` is how the file's name begins."""
        target = self.folder / f"{start}{step:08d}.safetensors"
        with writing(target):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_file(target, lambda temporary: save_tensors(trained, temporary))
        steps.prune(self.folder, keep=steps.oldest_first(self.folder), needed={target.name, *needed})
        return {"file": target.name, "sha256": file_digest(target)}

    def load_best(self, best: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put a best state that `write_best` wrote into a model's tensors."""
        path = self.folder / (best["file"] or f"{BEST}{best['step']:08d}.safetensors")
        if path.is_file() and "sha256" in best and file_digest(path) != best["sha256"]:
            raise InlayError(
                f"{path} was changed after it was written, so that the run cannot go back to its best state. Give the "
                "same command again: it goes on from a checkpoint before that."
            )
        copy_into(tensors, load_tensors(path), path)


def step_of(checkpoint: Path) -> int:
    """The number of updates that a checkpoint was written after."""
    return steps.age(checkpoint)[0]


def unreadable(checkpoint: Path) -> str | None:
    """Why a checkpoint without a seal cannot be gone on from, as far as its files tell without one."""
    try:
        for path in sorted(checkpoint.glob("*.json")):
            load_json(path)
        for name in (TRAINED, OPTIMIZER):
            load_tensors(checkpoint / name)
        for name in steps.bests(checkpoint):
            load_tensors(checkpoint.parent / name)
        TrainerState.load_from_json(str(checkpoint / STATE))
    except (InlayError, OSError, ValueError, TypeError, AttributeError) as error:
        return first_line(error)
    return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While what a file says is put to use: what does not fit is an error that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, InlayError):
            raise
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> InlayError:
    return InlayError(
        f"{path} cannot be used ({first_line(error)}). Remove the folder {path.parent} to go on without it."
    )


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors, straight from memory where they are on the CPU."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors back, or say clearly that the file is not whole."""
    try:
        with open_plain(path):  # safetensors would wait for a pipe
            return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InlayError(
            f"{path} cannot be read ({error}). Remove the folder {path.parent} to start that run anew."
        ) from error


def load_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint."""
    try:
        return parse(read_plain(path))
    except (OSError, ValueError) as error:
        raise InlayError(
            f"{path} cannot be read ({error}). Remove the folder {path.parent} to start that run anew."
        ) from error


def copy_into(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: Path) -> None:
    """Put saved values into a model's tensors."""
    if tensors.keys() != saved.keys():
        odd = sorted(tensors.keys() ^ saved.keys())
        raise InlayError(
            f"{source} does not hold what this model trains ({odd[0]} and {len(odd) - 1} more differ). It was "
            f"written by other code: remove {source.parent} to start the run anew."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(like(saved[name], tensor))


def split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state dict as tensors and as plain data."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                values.setdefault(str(index), {})[key] = value
    return tensors, {"param_groups": state["param_groups"], "state": values}


def join_optimizer(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `split_optimizer` took apart."""
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in rest["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in rest["param_groups"]
    ]
    return {"state": state, "param_groups": groups}
