"""Give saved tasks away: one in a form that other programs read, or some of a folder, by other names, in a new one.

What is there already is never changed: a finished run's record has the digest of each of its files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from inlay.errors import InlayError, unknown
from inlay.records.atomic import write_folder, write_json
from inlay.records.store import checksum, read_json
from inlay.workflow.answer import told_of
from inlay.workflow.answer_files import TASKS, facts_of, located, verify_run

FORMS = ("lora", "tasks")
METHOD = "multi-lora"


def export(
    adapter: Path | str,
    task: str,
    output: Path | str | None = None,
    *,
    to: str = "lora",
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write tasks of an adapter folder into the new folder `output`, by default <task>-<form>.

    `adapter` is the folder of a run of several tasks, its `adapter` folder, or one that `save` wrote. As `lora`, one
    task is a plain LoRA adapter of PEFT's. As `tasks`, the named ones (`rte,sst2=mood`: sst2 by another name) are an
    adapter folder again. No model is loaded: a task remembers what its shared factor is drawn from. `say` is told of
    tasks that failed in training; an adapter folder keeps that in mind, a LoRA adapter has no place for it.
    """
    if to not in FORMS:
        raise unknown("form to export to", to, FORMS)
    target = Path(f"{task.replace('=', '-').replace(',', '-')}-{to}" if output is None else output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InlayError(f"{target} is there already: give the name of a new folder.")
    say = say or (lambda line: None)
    if to == "tasks":
        return _as_tasks(Path(adapter), task.split(","), target, say)
    return _as_lora(Path(adapter), task, target, say)


def _as_lora(folder: Path, task: str, target: Path, say: Callable[[str], None]) -> Path:
    from inlay.methods.multi_lora.exchange import to_lora
    from inlay.methods.saving import read

    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    names = sorted(place.name for place in folder.glob("*") if (place / "adapter_config.json").is_file())
    if names and task not in names:
        raise unknown("task", task, names)
    verify_run(folder)
    config, tensors = read(METHOD, folder, task)
    if (folder / TASKS).is_file():  # one that `save` wrote has none
        for line in told_of(read_json(folder / TASKS).get("failed") or {}, [task]):
            say(line)

    def fill(place: Path) -> None:
        to_lora(config, tensors, place)

    write_folder(target, fill)
    return target


def _as_tasks(folder: Path, wanted: Iterable[str], target: Path, say: Callable[[str], None]) -> Path:
    from inlay.methods.saving import read

    folder = located(folder)
    facts = facts_of(folder)
    names: dict[str, str] = {}  # by their new ones
    for each in wanted:
        old, _, new = (part.strip() for part in each.partition("="))
        new = new or old
        if old not in facts["tasks"]:
            raise unknown("task", old, facts["tasks"])
        if new in names:
            raise InlayError(f"Two tasks would be called {new!r}: give each a name of its own, as in rte={new}2.")
        config, _ = read(facts["method"], folder, old)
        parts = {part for place in getattr(config, "places", None) or () for part in place.split(".")}
        if not new.isidentifier() or new == "default" or new in parts:
            raise InlayError(
                f"{new!r} cannot be a task's name: take a word of letters, digits and underscores that names no part "
                "of the model."
            )
        names[new] = old
    for line in told_of(facts["failed"], names.values()):
        say(line)

    def fill(place: Path) -> None:
        for new, old in names.items():
            shutil.copytree(folder / old, place / new)
        failed = {new: facts["failed"][old] for new, old in names.items() if old in facts["failed"]}
        kept = facts | {"tasks": {new: facts["tasks"][old] for new, old in names.items()}, "failed": failed}
        write_json(place / TASKS, kept | {"checksum": checksum(kept)})

    write_folder(target, fill)
    return target
