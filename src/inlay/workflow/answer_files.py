"""An adapter folder of several tasks, as it lies on disk: found, and checked before anything of it is believed.

`tasks.json` says what each task reads and what its outputs mean, so it is worth as much as the weights. It carries a
checksum of itself, and where the folder belongs to a finished run that run's record has the digest of every file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.records.spec import POOLINGS
from inlay.records.store import checksum, load, read_json

TASKS = "tasks.json"
TYPES: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "model": str,
    "revision": (str, type(None)),
    "trust_remote_code": bool,
    "tasks": Mapping,
    "max_length": (int, type(None)),
    "precision": str,
    "batch_size": int,
}


def located(folder: Path) -> Path:
    """The folder with the adapters: itself, or that of a run."""
    found = next((place for place in (folder, folder / "adapter") if (place / TASKS).is_file()), None)
    if found is None:
        raise InlayError(
            f"{folder} holds no adapters of several tasks (it has no {TASKS}). `inlay tune --tasks ...` makes them; "
            "for a run of one task give --run."
        )
    return found


def facts_of(folder: Path) -> dict[str, Any]:
    """What `tasks.json` says; an error where it, or a file of the run that the folder belongs to, is not as written.

    A folder from before there was a checksum is believed only as part of its run.
    """
    path = folder / TASKS
    in_run = verify_run(folder)
    facts = read_json(path)
    if "checksum" in facts:
        if facts["checksum"] != checksum(facts):
            raise InlayError(
                f"{path} was changed after it was written: its checksum does not fit. Restore it from a copy, or "
                "train the tasks again."
            )
    elif not in_run:
        raise InlayError(
            f"{path} has no checksum: it was edited, or an earlier inlay wrote it. Use the folder in its run "
            "(<run>/adapter), whose record has the digest of every file, or train the tasks again."
        )
    for key, kind in TYPES.items():
        if key not in facts or not isinstance(facts[key], kind):
            what = f"has {key}={facts[key]!r}" if key in facts else f"lacks {key!r}"
            raise InlayError(f"{path} {what}: it was edited or is damaged. Train the tasks again.")
    pooling = facts.setdefault("pooling", "own")  # in an earlier inlay there was no choice
    if pooling not in POOLINGS:
        raise InlayError(f"{path} has pooling={pooling!r}: it was edited or is damaged. Train the tasks again.")
    failed = facts.setdefault("failed", {})  # which an earlier inlay did not write
    if not isinstance(failed, Mapping) or not failed.keys() <= facts["tasks"].keys():
        raise InlayError(f"{path} has failed={failed!r}: it was edited or is damaged. Train the tasks again.")
    if not facts["tasks"]:
        raise InlayError(f"{path} lists no tasks: it was edited or is damaged. Train the tasks again.")
    return facts


def verify_run(folder: Path) -> bool:
    """Whether an adapter folder belongs to a finished run; an error where a file of that run is not as it was left."""
    folder = folder.resolve()
    whole = folder.name == "adapter" and (folder.parent / "record.json").is_file()
    if whole:
        load(folder.parent).verify()
    return whole
