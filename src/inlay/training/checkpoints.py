"""What an unfinished run goes on from: safetensors and JSON, nothing pickled, whole or absent.

    checkpoints/step-00000120/trained.safetensors     what training changes, and no more
                              optimizer.safetensors   the optimiser's tensors; optimizer.json the rest of its state
                              scheduler.json, scaler.json, random.json (one entry a process)
                              trainer_state.json      Transformers' own
                              progress.json           what we keep beside it: see progress.py
                              base.json               the fingerprint of the base model's weights
    checkpoints/best-00000080.safetensors             the best state so far, where early stopping may return to it

A checkpoint is filled under another name and renamed when all of it is on disk, and the one before is removed only
then: a kill at any moment leaves the last whole one. None is ever written over, as a folder cannot be replaced in one
step: a second one of the same step (once with its evaluation to come, then with it done) is step-00000120.1, and so on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.trainer_callback import TrainerState

from inlay.errors import InlayError
from inlay.records.atomic import clear_leftovers, sync_file, sync_folder, write_folder, writing

TRAINED, OPTIMIZER = "trained.safetensors", "optimizer.safetensors"
STEP, BEST = "step-", "best-"


class Checkpoints:
    """The folder of a run's checkpoints. `base` is the fingerprint of the model that is adapted."""

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self.base = folder, base

    def latest(self) -> Path | None:
        """The newest checkpoint, or None. Call it before writing any: it also sweeps up what a kill left half-done."""
        clear_leftovers(self.folder)
        return max(self.folder.glob(f"{STEP}*"), key=_age, default=None)

    def check_base(self, checkpoint: Path) -> None:
        """Refuse to go on from a checkpoint on top of other weights than it was trained with."""
        known = load_json(checkpoint / "base.json")["fingerprint"]
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
        """Write one checkpoint and remove those before it. `plain` are the JSON files by name."""
        tensors, rest = split_optimizer(optimizer)

        def fill(folder: Path) -> None:
            save_tensors(trained, folder / TRAINED)
            save_tensors(tensors, folder / OPTIMIZER)
            for name, data in {**plain, "optimizer": rest, "base": {"fingerprint": self.base}}.items():
                (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
            state.save_to_json(str(folder / "trainer_state.json"))

        earlier = list(self.folder.glob(f"{STEP}*"))
        again = max((_age(folder)[1] + 1 for folder in earlier if step_of(folder) == step), default=0)
        write_folder(self.folder / (f"{STEP}{step:08d}" + f".{again}" * bool(again)), fill)
        for folder in earlier:
            shutil.rmtree(folder, ignore_errors=True)

    def write_best(self, step: int, trained: Mapping[str, Tensor], keep: str | None) -> str:
        """Write the best state so far; its name. `keep` is the one that the last checkpoint knows."""
        target = self.folder / f"{BEST}{step:08d}.safetensors"
        temporary = target.with_name(f".tmp-{target.name}")
        with writing(target):
            self.folder.mkdir(parents=True, exist_ok=True)
            save_tensors(trained, temporary)
            sync_file(temporary)
            temporary.replace(target)
            sync_folder(self.folder)
        for older in self.folder.glob(f"{BEST}*"):
            if older.name not in (target.name, keep):
                older.unlink(missing_ok=True)
        return target.name

    def remove(self) -> None:
        """Remove all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The number of updates that a checkpoint was written after."""
    return _age(checkpoint)[0]


def _age(checkpoint: Path) -> tuple[int, int]:
    step, _, again = checkpoint.name.removeprefix(STEP).partition(".")
    return int(step), int(again or 0)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors, straight from memory where they are on the CPU."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors back, or say clearly that the file is not whole."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InlayError(
            f"{path} cannot be read ({error}). Remove the folder {path.parent} to start that run anew."
        ) from error


def load_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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
            tensor.copy_(saved[name])


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
