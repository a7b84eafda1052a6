"""An unfinished run's checkpoints as files: which there are, which is the newest, whether one is as it was written.

    checkpoints/step-00000120/seal.json     the digest of every other file of the checkpoint, sealed itself
                              progress.json names the best states that belong to it, with their digests
    checkpoints/step-00000120.1/            the second one of the same step
    checkpoints/best-00000080.safetensors   a best state; of several tasks task-<name>-00000080.safetensors

What is in the other files is the affair of training/checkpoints.py. Checkpoints of an earlier inlay have no seal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from inlay.records.atomic import file_digest, remove
from inlay.records.sealed import read_digests, read_object, write_digests

STEP, BEST, BEST_OF_TASK = "step-", "best-", "task-"
SEAL, PROGRESS = "seal.json", "progress.json"
NAME = re.compile(rf"{STEP}(\d{{1,18}})(?:\.(\d{{1,9}}))?")


def age(checkpoint: Path) -> tuple[int, int]:
    """The step that a checkpoint was written after, and how many of that step came before it."""
    found = NAME.fullmatch(checkpoint.name)
    assert found, checkpoint
    return int(found[1]), int(found[2] or 0)


def oldest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder; what is called otherwise is none."""
    return sorted((each for each in folder.glob(f"{STEP}*") if NAME.fullmatch(each.name) and each.is_dir()), key=age)


def seal(checkpoint: Path) -> None:
    """Put down the digests of all files of a checkpoint that is being written."""
    write_digests(checkpoint / SEAL, {path.name: path for path in sorted(checkpoint.iterdir())})


def has_seal(checkpoint: Path) -> bool:
    """Whether there are digests to check a checkpoint by; an earlier inlay wrote none."""
    return (checkpoint / SEAL).exists()


def damage(checkpoint: Path) -> str | None:
    """What is not as it was written, in words; None where all is, or where nothing tells.

    The best states that belong to it count: a run that ends goes back to them.
    """
    try:
        if has_seal(checkpoint):
            known = read_digests(checkpoint / SEAL)
            if known is None:
                return f"{SEAL} was changed after it was written"
            for name, digest in known.items():
                if file_digest(checkpoint / Path(name).name) != digest:
                    return f"{name} was changed after it was written"
        for name, best in bests(checkpoint).items():
            found = file_digest(checkpoint.parent / name)
            if found != best.get("sha256", found):
                return f"the best state {name} was changed after it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    return None


def bests(checkpoint: Path) -> dict[str, Mapping[str, Any]]:
    """The best states that a checkpoint knows, by their files' names; a `ValueError` where that cannot be read."""
    try:
        progress = read_object(checkpoint / PROGRESS)
    except FileNotFoundError:
        return {}
    return bests_in(progress)


def bests_in(progress: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The best states of what `Progress.to_json` gave: of the run, or of each of its tasks."""
    tasks = progress.get("tasks") or {}
    if not isinstance(tasks, dict):
        raise ValueError("its tasks are not an object")
    entries = [progress.get("best"), *(task.get("best") for task in tasks.values() if isinstance(task, dict))]
    found = {}
    for entry in entries:
        if not entry:
            continue
        name = entry.get("file") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError("the name of its best state is not a file's")
        found[name] = entry
    return found


def prune(folder: Path, *, keep: Collection[Path | None], needed: Collection[str] = ()) -> None:
    """Remove all checkpoints but those in `keep`, and the best states that neither they nor the run needs."""
    known = set(needed)
    for checkpoint in oldest_first(folder):
        if checkpoint not in keep:
            remove(checkpoint)
            continue
        try:
            known |= bests(checkpoint).keys()
        except (OSError, ValueError):
            continue
    for path in (*folder.glob(f"{BEST}*"), *folder.glob(f"{BEST_OF_TASK}*")):
        if path.name not in known:
            remove(path)
