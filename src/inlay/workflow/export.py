"""Write saved tasks into a new folder: one in a form that other programs read, or those of several runs together.

Nothing that exists is changed: a finished run's record has the digest of each of its files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from inlay.backbones.locate import recall_folder
from inlay.errors import InlayError, unknown
from inlay.methods import registry
from inlay.methods.card import write_card
from inlay.methods.folder import (
    ADAPTER_FILES,
    CONFIG,
    NOTE,
    TASKS,
    AdapterFolder,
    base_fingerprint,
    copy_plain,
    preprocessing,
    task_place,
    tasks_in,
    write_tasks,
)
from inlay.records.atomic import write_folder
from inlay.records.store import read_json
from inlay.workflow.answer import describe_failed
from inlay.workflow.answer_files import find_run_of, locate_tasks, read_facts, verify_run
from inlay.workflow.notes import Say, or_log

JOINED = "tasks"  # the form in which tasks of several folders are joined
VLLM = "vllm"  # a LoRA with one rank and one scale, as vLLM reads it
ONNX = "onnx"  # a whole model, adapter and all, for other programs
ALIKE = ("method", "max_length", "precision", "pooling", "image_size")  # what all tasks of a folder have in common
KEPT = (
    "base_model",
    "fingerprint",
    "newly_initialised",
    "about",
    "preprocessing",
)  # of the note beside what is exported
EACH = "give one --task for each --adapter, in their order, as in --task reviews=mood"


@dataclass(frozen=True)
class Chosen:
    """A task of an adapter folder, what that folder says, and the name it is to have."""

    folder: Path
    facts: dict[str, Any]
    old: str
    new: str


def export(
    adapter: Path | str | Sequence[Path | str],
    task: str | Sequence[str] | None = None,
    output: Path | str | None = None,
    *,
    to: str = "lora",
    model: str | None = None,
    say: Say | None = None,
) -> Path:
    """Write tasks of adapter folders into the new folder `output`, by default <task>-<form>.

    `adapter` is a run (of several tasks or of one), its `adapter` folder, or one that `save` or this wrote; as `tasks`
    there may be several, of a method that mixes tasks. As `lora`, one adapter becomes a plain LoRA of PEFT's: which
    methods have which forms they declare (`Method.exports`). As `tasks`, those of all adapter folders are joined in
    one, or only the named ones (`rte,sst2=mood`: sst2 by another name); a list of several such texts has one for each
    folder, in their order. As `onnx`, the model with its adapter becomes an ONNX file (onnx.py). No weights of a model
    are loaded for the other forms; `model` names the base model where its config is needed and it has moved since.
    `say` receives a line for each task that failed in training; an adapter folder records that, a LoRA adapter has no
    place for it.
    """
    forms = [
        *dict.fromkeys(form for method in registry.all_methods().values() for form in method.exports),
        JOINED,
        VLLM,
        ONNX,
    ]
    if to not in forms:
        raise unknown("form to export to", to, forms)
    folders = [Path(adapter)] if isinstance(adapter, (str, Path)) else [Path(each) for each in adapter]
    names = [task] if isinstance(task, str) else list(task or ())
    if not folders or (len(names) > 1 and len(names) != len(folders)):
        raise InlayError(f"There are {len(folders)} adapter folders and {len(names)} lists of tasks: {EACH}.")
    called = "-".join(names).replace("=", "-").replace(",", "-") or "joined"
    target = Path(f"{called}-{to}" if output is None else output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InlayError(f"{target} is there already: give the name of a new folder.")
    if to == JOINED:
        return _as_tasks(folders, names, target, or_log(say))
    if len(folders) > 1:
        raise InlayError(f"The form {to} holds one task, of one folder; got {len(folders)}. Join them with --to tasks.")
    if to == ONNX:
        from inlay.workflow.onnx import export_onnx

        return export_onnx(folders[0], target, task=names[0] if names else None, model=model, say=say)
    plain, finish = to, None
    if to == VLLM:
        from inlay.workflow.vllm_folder import rewrite

        plain, finish = "lora", rewrite
    return _as_form(plain, folders[0], names[0] if names else None, target, model, or_log(say), finish)


def _as_form(
    to: str,
    folder: Path,
    task: str | None,
    target: Path,
    model: str | None,
    say: Say,
    finish: Callable[[Path], object] | None = None,
) -> Path:
    """One task in a form that its method can write; `finish` changes what was written before its note is."""
    from inlay.backbones.locate import portable
    from inlay.methods.saving import about, read

    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    names = tasks_in(folder)
    if names and task not in names:
        if task is None and len(names) > 1:
            raise InlayError(f"{folder} holds several tasks: choose one with --task, of {', '.join(names)}.")
        if task is not None:
            raise unknown("task", task, names)
    task = task or (names[0] if names else "default")
    verify_run(folder)
    method = _exporter(to, task_place(folder, task))
    config, tensors = read(method, folder, task)
    known, note = about(method, folder, task), AdapterFolder.find(folder, method, task).read_note()
    sizes = _SizesOf(folder, note, config, model)
    config.base_model_name_or_path = portable(config.base_model_name_or_path or "") or None  # an earlier inlay's
    if (folder / TASKS).is_file():  # one that `save` wrote has none
        for line in describe_failed(read_json(folder / TASKS).get("failed") or {}, [task]):
            say(line)

    def fill(place: Path) -> None:
        registry.load(method.exports[to])(config, tensors, place, sizes)
        if finish is not None:
            finish(place)
        if note:
            facts = {name: note[name] for name in KEPT if name in note}
            copy_plain(AdapterFolder.find(folder, method, task).place, preprocessing(note), place)
            AdapterFolder(place, registry.get(to)).write_note(
                facts, note.get("pooling") or getattr(config, "pooling", None)
            )
        if known is not None:
            write_card(place, registry.get(to), {"default": known})

    write_folder(target, fill)
    return target


def _exporter(to: str, place: Path) -> registry.Method:
    """The method that saved the adapter in `place`; an error where it cannot write the form."""
    from inlay.workflow.prompt_folders import method_of

    config = place / CONFIG["peft"]
    if not config.is_file():
        raise InlayError(f"{place} holds no adapter: it has no {config.name}. Give a run, or an adapter's folder.")
    note = place / NOTE["peft"]
    named = read_json(note).get("method") if note.is_file() else None
    method = method_of(place, read_json(config).get("peft_type"), named)
    if to not in method.exports:
        able = registry.names_where(lambda each: to in each.exports)
        raise InlayError(
            f"{place} holds an adapter of {method.name}, which cannot be written as {to}: it is no such thing by "
            f"another name. {', '.join(able)} can. `inlay merge` folds others into their model."
        )
    return method


class _SizesOf:
    """The inputs and outputs of a module of an adapter's base model, by its name; of that model its config alone is
    read, and only if something is asked."""

    def __init__(self, folder: Path, note: Mapping[str, Any], config: Any, model: str | None) -> None:
        self._base = model or self._find(folder, note, config)
        self._revision = None if model else config.revision

    @staticmethod
    def _find(folder: Path, note: Mapping[str, Any], config: Any) -> str:
        if (run := find_run_of(folder)) is not None:
            return run.spec.model
        known = recall_folder(str(note.get("fingerprint")))
        return str(known or note.get("base_model") or config.base_model_name_or_path or "")

    def __call__(self, name: str) -> tuple[int, int]:
        parts = name.split(".")
        # The bare model leaves out the first part of the names that a model with a head has.
        found = next((self._modules[tail] for at in range(2) if (tail := ".".join(parts[at:])) in self._modules), None)
        shape: Sequence[int] = getattr(getattr(found, "weight", None), "shape", ())
        if len(shape) != 2:
            raise InlayError(
                f"The base model {self._base!r} has no matrix at {name}, which the adapter adapts. Say where the right "
                "one is: --model (model= in Python)."
            )
        turned = hasattr(found, "nf")  # Transformers' Conv1D
        return (int(shape[0]), int(shape[1])) if turned else (int(shape[1]), int(shape[0]))

    @cached_property
    def _modules(self) -> dict[str, Any]:
        from inlay.backbones.skeleton import load_skeleton

        if not self._base:
            raise InlayError("The adapter does not say which base model it was trained on: give --model (model=).")
        return dict(load_skeleton(self._base, self._revision).named_modules())


def _as_tasks(folders: Sequence[Path], names: Sequence[str], target: Path, say: Say) -> Path:
    from inlay.backbones.locate import portable
    from inlay.methods.saving import about

    held = [(folder, read_facts(folder)) for folder in map(locate_tasks, folders)]
    if len(names) > 1:
        chosen = [each for pair, own in zip(held, names, strict=True) for each in _choose([pair], own)]
    else:
        chosen = _choose(held, names[0] if names else None)
    _check_names(chosen)
    _check_joinable(chosen)
    failed = {each.new: each.facts["failed"][each.old] for each in chosen if each.old in each.facts["failed"]}
    for each in chosen:
        for line in describe_failed(each.facts["failed"], [each.old]):
            say(line)

    abouts = {each.new: about(each.facts["method"], each.folder, each.old) for each in chosen}
    known = {name: replace(found, preprocessing=False) for name, found in abouts.items() if found is not None}

    def fill(place: Path) -> None:
        for each in chosen:
            _copy(each, place / each.new)
        kept = chosen[0].facts | {
            "model": portable(chosen[0].facts["model"]),
            "tasks": {each.new: each.facts["tasks"][each.old] for each in chosen},
            "failed": failed,
            "batch_size": min(each.facts["batch_size"] for each in chosen),
            "trust_remote_code": any(each.facts["trust_remote_code"] for each in chosen),
        }
        write_tasks(place, kept)
        if known:
            write_card(place, registry.get(chosen[0].facts["method"]), known)

    write_folder(target, fill)
    return target


def _choose(held: Sequence[tuple[Path, dict[str, Any]]], wanted: str | None) -> list[Chosen]:
    """The tasks that a list of names means among those of some folders; None means all."""
    every = [Chosen(folder, facts, name, name) for folder, facts in held for name in facts["tasks"]]
    if wanted is None:
        return every
    found = []
    for each in wanted.split(","):
        old, _, new = (part.strip() for part in each.partition("="))
        own = [task for task in every if task.old == old]
        if not own:
            raise unknown("task", old, [task.old for task in every])
        if len(own) > 1:
            raise InlayError(f"{old!r} is a task of {len(own)} of the adapter folders: {EACH}.")
        found.append(Chosen(own[0].folder, own[0].facts, old, new or old))
    return found


def _check_names(chosen: Sequence[Chosen]) -> None:
    """An error where two tasks would have one name, or one a name that no adapter can have."""
    from inlay.methods.saving import read

    for number, each in enumerate(chosen):
        if each.new in [other.new for other in chosen[:number]]:
            raise InlayError(
                f"Two tasks would be called {each.new!r}: give each a name of its own, as in {each.old}={each.new}2"
                + (f" ({EACH})." if len({other.folder for other in chosen}) > 1 else ".")
            )
        config, _ = read(each.facts["method"], each.folder, each.old)
        places = getattr(config, "places", None) or getattr(config, "target_modules", None) or ()
        parts = {part for place in ([] if isinstance(places, str) else places) for part in place.split(".")}
        if not each.new.isidentifier() or each.new == "default" or each.new in parts:
            raise InlayError(
                f"{each.new!r} cannot be a task's name: take a word of letters, digits and underscores that names no "
                "part of the model."
            )


def _check_joinable(chosen: Sequence[Chosen]) -> None:
    """An error where tasks could not share a model and a batch, before anything is written."""
    from inlay.methods.saving import read
    from inlay.tasks import TaskSchema
    from inlay.workflow.settle import check_together

    if len({each.folder for each in chosen}) < 2:
        return
    first, *others = chosen
    check_together({each.new: TaskSchema.from_json(each.facts["tasks"][each.old]) for each in chosen})
    config, _ = read(first.facts["method"], first.folder, first.old)
    shared = registry.get(first.facts["method"]).hooks.shared_settings
    base = base_fingerprint(first.folder, first.old)
    for each in others:
        if base_fingerprint(each.folder, each.old) != base:
            raise InlayError(
                f"{each.old!r} ({each.facts['model']}) and {first.old!r} ({first.facts['model']}) were trained on "
                "different base models: only tasks of one model can be joined."
            )
        own, _ = read(each.facts["method"], each.folder, each.old)
        found = [(key, each.facts[key], first.facts[key]) for key in ALIKE]
        found += [(key, getattr(own, key, None), getattr(config, key, None)) for key in shared]
        for key, mine, theirs in found:
            if mine != theirs:
                raise InlayError(
                    f"{each.old!r} was trained with {key}={mine!r} and {first.old!r} with {key}={theirs!r}: tasks that "
                    f"share a model need the same {', '.join((*ALIKE[1:], *shared))}. Train one of them again."
                )


def _copy(each: Chosen, target: Path) -> None:
    """A task's files, whether they lie in a folder of its name or, as those of a run of one task, among others."""
    source = task_place(each.folder, each.old)
    if source != each.folder:
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
        return
    target.mkdir(exist_ok=True)
    for name in ADAPTER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
