"""An adapter folder of tasks, as it lies on disk: found, and checked before anything of it is believed.

`tasks.json` says what each task reads and what its outputs mean, so it is worth as much as the weights. It carries a
checksum of itself, and where the folder belongs to a finished run that run's record has the digest of every file.

A run of one task by a method that mixes tasks is a folder of one: its record says what `tasks.json` would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.backbones.locate import recall_folder
from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.folder import CONFIG, TASKS, base_fingerprint, read_tasks
from inlay.records.store import Run, load, read_json
from inlay.tasks import kinds
from inlay.workflow.settle import JOIN, name_mixing


def locate_tasks(folder: Path) -> Path:
    """The folder with the adapters: itself, or that of a run of several tasks or of one that can be mixed."""
    found = next((place for place in (folder, folder / "adapter") if (place / TASKS).is_file()), None)
    if found is not None:
        return found
    run = find_run_of(folder)
    if run is not None and holds_one_task(run):
        return run.adapter
    if run is not None and not run.spec.tasks:
        raise InlayError(
            f"The run {run.id} is of the method {run.spec.method!r}, whose task is never mixed with others. "
            f"`inlay predict --run {run.folder}` predicts with it and `inlay serve --adapter {run.folder}` serves it. "
            f"To mix, train each task with --method {name_mixing()} (--data or --task) and join the runs: {JOIN}."
        )
    raise InlayError(
        f"{folder} holds no tasks: it has no {TASKS}, and is no finished run. Give the folder of a run that "
        f"`inlay tune --method {name_mixing()}` made (`inlay runs list` shows them), or one in which such runs are "
        f"joined: {JOIN}."
    )


def find_run_of(folder: Path) -> Run | None:
    """The run that a folder is, or is the adapter of; None where there is none."""
    place = next((each for each in (folder, folder.resolve().parent) if (each / "spec.json").is_file()), None)
    return None if place is None else load(place)


def holds_one_task(run: Run) -> bool:
    """Whether a run has one task that can be mixed with those of others."""
    kind = run.record["task"]["schema"]["kind"] if "task" in run.record else run.spec.kind
    if run.spec.tasks or kind in (kinds.MASKED_LM, kinds.QUESTION_ANSWERING):  # what reads texts in a way of its own
        return False
    if run.spec.kind is not None and kinds.get(run.spec.kind).has_captions:  # whose classes are texts, and no head
        return False
    return registry.get(run.spec.method).why_alone(run.spec.settings) is None


def read_run_facts(run: Run) -> dict[str, Any]:
    """What `tasks.json` would say of a run of one task."""
    run.verify()
    spec, schema = run.spec, run.record["task"]["schema"]
    _, batch_size = spec.amount()
    return {
        "method": spec.method,
        "model": spec.model,
        "revision": spec.revision,
        "trust_remote_code": spec.trust_remote_code,
        "max_length": spec.max_length,
        "precision": spec.precision,
        "pooling": "own" if spec.pooling == "auto" else spec.pooling,
        "image_size": spec.image_size,
        "batch_size": max(1, batch_size // spec.gradient_accumulation),
        "tasks": {name_task(str(schema["name"]), run.adapter): schema},
        "failed": {},
    }


def name_task(name: str, folder: Path) -> str:
    """The name of a task as an adapter can have it: a word of letters, digits and underscores that names no part of
    the model."""
    word = re.sub(r"\W", "_", name.rpartition("/")[2])
    config = read_json(folder / CONFIG["peft"])
    targets = config.get("target_modules")
    places = [*(config.get("places") or ()), *(config.get("modules_to_save") or ())]
    places += targets if isinstance(targets, list) else ()
    taken = {"default", *(part for place in places for part in place.split("."))}
    return f"task_{word}" if word in taken or not word.isidentifier() else word


def read_facts(folder: Path) -> dict[str, Any]:
    """What `tasks.json` says; an error where it, or a file of the run that the folder belongs to, is not as written.

    A folder from before there was a checksum is believed only as part of its run. Of a run of one task, its record says
    the same.
    """
    path = folder / TASKS
    if not path.is_file() and (run := find_run_of(folder)) is not None and holds_one_task(run):
        return read_run_facts(run)
    return read_tasks(folder, verify_run(folder))


def locate_base(folder: Path, facts: Mapping[str, Any]) -> str:
    """The base model of the tasks, by the name that is written beside them. Of a folder that name has no path: it is
    where the fingerprint says that it lies on this machine, or where their run found it, or in the working folder."""
    name = str(facts["model"])
    if not name.startswith("."):
        return name
    known = recall_folder(str(base_fingerprint(folder, next(iter(facts["tasks"])))))
    if known is not None:
        return str(known)
    if (run := find_run_of(folder)) is not None:
        return run.spec.model
    if not Path(name).exists():
        raise InlayError(
            f"The tasks in {folder} were trained on a model folder called {Path(name).name!r}, and there is none at "
            f"{name!r}. Say where it is: --model FOLDER (model= in Python)."
        )
    return name


def verify_run(folder: Path) -> bool:
    """Whether an adapter folder belongs to a finished run; an error where a file of that run is not as it was left."""
    folder = folder.resolve()
    whole = folder.name == "adapter" and (folder.parent / "record.json").is_file()
    if whole:
        load(folder.parent).verify()
    return whole
