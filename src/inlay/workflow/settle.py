"""Settle what a spec leaves open, and check that it can be run: every verb reads specs through here.

Nothing large is read before the checks. The digest of the settled spec is the identity of its run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.folder import DEFAULT
from inlay.records import task_fields
from inlay.records.spec import FEW_SHOT_BATCH, FEW_SHOT_EPOCHS, FEW_UPDATES, Spec, updates
from inlay.records.store import Run, Store
from inlay.tasks import kinds
from inlay.workflow.defaults_spelled_out import without_defaults
from inlay.workflow.going_on import contents_of, with_init_adapter
from inlay.workflow.writing import settings_before, with_writing_defaults

if TYPE_CHECKING:
    from inlay.tasks import Task, TaskSchema

COMMON = ("text", "label", "image", "kind")  # of all data of the user's, where a spec has several tasks
JOIN = "`inlay export --adapter <run> --adapter <run> --to tasks --output <folder>`"


@dataclass(frozen=True)
class Settled:
    """A spec as it will be run, with its tasks: one, or several by the names of their adapters.

    `data` is the digest of the data, `digest` that of the run; `notes` are lines for people. `earlier` is what the same
    spec was in an earlier inlay, where that was something else.
    """

    spec: Spec
    tasks: Mapping[str, Task]
    data: str
    notes: Sequence[str] = field(default_factory=tuple)
    earlier: Spec | None = None

    @cached_property
    def digest(self) -> str:
        """The digest by which the run is found."""
        return digest_of(without_defaults(self.spec, self.tasks), self.data)

    def digest_in(self, out: Path | str) -> str:
        """The digest of the run in a folder: where an earlier inlay made one of the same words, that one's."""
        found = self.find(out, self.spec)
        return self.digest if found is None else found.digest

    def find(self, out: Path | str, spec: Spec) -> Run | None:
        """The run of a spec with these tasks in a folder: with what is spelled out left aside, or of these words."""
        store = Store(out)
        digests = dict.fromkeys(digest_of(each, self.data) for each in (without_defaults(spec, self.tasks), spec))
        return next((run for digest in digests if (run := store.find(digest)) is not None), None)

    @property
    def first(self) -> Task:
        """The first task: several that are trained together are read in the same way."""
        return next(iter(self.tasks.values()))


def settle(spec: Spec, tasks: Mapping[str, Task] | None = None) -> Settled:
    """Check a spec, load its tasks and write in every default that depends on them; `tasks`, if they were loaded."""
    asked = with_init_adapter(spec)
    spec = check(asked)
    tasks = tasks or load_tasks(spec)
    asked, spec = with_decided(asked, tasks), with_decided(spec, tasks)
    check_head(spec, tasks)
    check_writing(spec, tasks)
    loaded = list(tasks.values())
    check_vectors(spec, loaded[0].kind)
    spec = with_pooling(spec, loaded[0].kind)
    sizes = [task.examples for task in loaded]
    examples = None if None in sizes else sum(filter(None, sizes))
    spec, told = with_writing_defaults(asked, spec, loaded[0].kind, examples)
    spec, notes = with_training_defaults(spec, examples)
    data = loaded[0].digest
    if spec.tasks:
        contents = "\n".join(f"{name} {task.digest}" for name, task in tasks.items())
        data = hashlib.sha256(contents.encode()).hexdigest()
    earlier = None if not told else settle_earlier(asked, loaded[0].kind, examples)
    return Settled(spec, tasks, data, [*told, *notes], earlier)


def settle_earlier(asked: Spec, kind: str, examples: int | None) -> Spec:
    """What the same spec came to before language models had defaults of their own."""
    before = {**asked.settings, **settings_before(asked.method)}
    spec = with_pooling(with_method_defaults(asked.with_(settings=before)), kind)
    return with_training_defaults(spec, examples)[0]


def check(spec: Spec) -> Spec:
    """The spec with what its method and the catalogue say; an error where it cannot be run. No data is read."""
    check_tasks(spec)
    check_layers(spec)
    check_settings(spec)
    check_quantisation(spec)
    spec = with_method_defaults(spec)
    check_modality(spec)
    return spec


def with_method_defaults(spec: Spec) -> Spec:
    """The spec with its tasks by their own names and the method's learning rate."""
    from inlay import tasks

    return spec.with_(
        learning_rate=pick_learning_rate(spec) if spec.learning_rate is None else spec.learning_rate,
        task=None if spec.task is None else tasks.canonical(spec.task),
        tasks=tuple(dict.fromkeys(name if name in spec.task_fields else tasks.canonical(name) for name in spec.tasks)),
        **_settle_fields(spec),
    )


def _settle_fields(spec: Spec) -> dict[str, Any]:
    """What single tasks have of their own, with the columns and the kind that the spec gives all data of the user's."""
    from inlay import tasks

    if not any("data" in own for own in spec.task_fields.values()):
        common: dict[str, Any] = {}
    else:
        common = {name: getattr(spec, name) for name in COMMON}
    found = {}
    for name, own in spec.task_fields.items():
        found[name] = {**common, **own} if "data" in own else {**own, "task": tasks.canonical(own["task"])}
    unset = {entry.name: entry.default for entry in fields(Spec) if entry.name in common}
    return {"task_fields": found, **unset}


def load_task(spec: Spec, *, need_train: bool = True) -> Task:
    """The one task of a spec, as its model reads it: one that writes takes labels that nearly every row has to itself
    for texts."""
    from inlay import backbones, tasks

    own = spec.kind is None and (spec.data is not None or not tasks.is_named(spec.task or ""))
    return tasks.load(
        spec,
        need_train=need_train,
        writes=(lambda: backbones.writes_texts(spec.model, spec.revision)) if own else None,
    )


def with_decided(spec: Spec, tasks: Mapping[str, Task]) -> Spec:
    """The spec with what its model and its data decided together, so that it says what was done."""
    if not spec.tasks:
        return spec.with_(**next(iter(tasks.values())).decided)
    decided = {name: tasks[adapter].decided for name, adapter in name_adapters(spec.tasks).items()}
    own = {name: {**fields, **decided.get(name, {})} for name, fields in spec.task_fields.items()}
    return spec.with_(task_fields=own)


def load_tasks(spec: Spec) -> dict[str, Task]:
    """The task of a spec; or its tasks, by the names of their adapters."""
    if not spec.tasks:
        task = load_task(spec)
        return {task.name: task}
    from inlay import tasks

    names, found, wrong = name_adapters(spec.tasks), {}, []
    for name in spec.tasks:
        try:
            one = select_task(spec, name)
            # A task without fields of its own has no place where the spec could say that its labels are texts.
            task = load_task(one) if name in spec.task_fields else tasks.load(one)
        except InlayError as error:
            if not spec.task_fields:
                raise
            wrong.append(f"Task {name!r}: {error}")
            continue
        found[names[name]] = task.with_schema(replace(task.schema, name=name)) if name in spec.task_fields else task
    if wrong:
        raise InlayError("\n".join(wrong))
    check_together(found)
    alone = [f"{name} ({task.kind})" for name, task in found.items() if not kinds.may_be_mixed(task.kind)]
    if alone:
        raise InlayError(
            f"Tasks of these kinds are trained each in a run of its own: {', '.join(alone)}. Leave them out; runs of "
            f"one method can be joined afterwards: {JOIN}."
        )
    return found


def select_task(spec: Spec, name: str) -> Spec:
    """The spec of one of several tasks by itself."""
    own = spec.task_fields.get(name, {"task": name})
    return spec.with_(**{"tasks": (), "task_fields": {}, "sampling": "proportional", "temperature": 1.0, **own})


def select_adapter(spec: Spec, adapter: str) -> Spec:
    """The spec of the task, among several, whose adapter has this name; of one task, the spec itself."""
    names = {own: name for name, own in name_adapters(spec.tasks).items()}
    return select_task(spec, names[adapter]) if spec.tasks else spec


def name_adapters(names: Sequence[str]) -> dict[str, str]:
    """The name of each task's adapter: PEFT wants words of letters, digits and underscores."""
    found = {name: re.sub(r"\W", "_", name.rpartition("/")[2]) for name in names}
    if len(set(found.values())) < len(names):
        raise InlayError(f"The tasks {', '.join(names)} give adapters of one name. Train them in several runs.")
    return found


def cannot_be_a_name(name: str) -> str | None:
    """Why a task of the user's cannot have this name, which is its adapter's; None where it can."""
    if name.isidentifier() and name != DEFAULT:
        return None
    word = re.sub(r"\W", "_", name)
    better = f", as in {word}" if word.isidentifier() and word != DEFAULT else ""
    return f"{name!r} cannot be a task's name: take a word of letters, digits and underscores, not {DEFAULT}{better}"


def with_pooling(spec: Spec, kind: str) -> Spec:
    """The spec with what its head reads written in, where that is not what its architecture has it read.

    So a run from before there was a choice is found by what it read, and not for a checkpoint's own pooling.
    """
    from inlay import backbones

    if spec.pooling == "pooler" and reads_states(spec.method):
        raise InlayError(
            f"pooling='pooler': {spec.method} has class vectors on the tokens' states and reads no pooler. Give mean, "
            "first or last, or leave it out."
        )
    return spec.with_(pooling=backbones.settle_pooling(spec.model, kind, spec.pooling, spec.revision))


def reads_states(name: str) -> bool:
    """Whether a method puts class vectors on a state of the tokens in place of the head."""
    return registry.get(name).takes("state")


def with_training_defaults(spec: Spec, examples: int | None) -> tuple[Spec, list[str]]:
    """The spec with epochs and batch size written in, and a line for people where the examples are few.

    It says which were taken where none was given, and what to give where those that were given make hardly any updates.
    """
    epochs, batch_size = spec.amount(examples)
    filled = spec.with_(epochs=epochs, batch_size=batch_size)
    if not examples or spec.max_steps is not None:
        return filled, []
    made, longer = (updates(examples, *each) for each in ((epochs, batch_size), (FEW_SHOT_EPOCHS, FEW_SHOT_BATCH)))
    said = f"{examples} examples make {made} update{'s' * (made > 1)} in {epochs:g} epochs of batches of {batch_size}"
    if spec.epochs is None and epochs == FEW_SHOT_EPOCHS:
        return filled, [f"{said}: the default for so few; --epochs and --batch-size choose otherwise"]
    if made >= FEW_UPDATES or longer <= 2 * made:
        return filled, []
    better = f"--epochs {FEW_SHOT_EPOCHS:g} --batch-size {FEW_SHOT_BATCH}"
    return filled, [f"{said}, which is little: {better} would make {longer}"]


def pick_learning_rate(spec: Spec) -> float | None:
    """The method's learning rate on this model; None where only the loaded model can say which: timm's names do not."""
    from inlay import backbones

    method = registry.get(spec.method)
    if not method.rates:
        return method.learning_rate
    kind = backbones.kind(spec.model, spec.revision)
    return method.learning_rate_for(kind) if kind else None


def check_tasks(spec: Spec) -> None:
    """An error where a method cannot mix the several tasks of a spec, or a file is given for a name."""
    from inlay.tasks import tables

    if not spec.tasks:
        return
    if not registry.get(spec.method).mixes_tasks:
        raise InlayError(
            f"--tasks trains several tasks in mixed batches, which the method {spec.method!r} cannot. Use "
            f"{name_mixing()}, or one run a task: --task."
        )
    if (why := registry.get(spec.method).why_alone(spec.settings)) is not None:
        raise InlayError(
            f"With these settings of {spec.method} several tasks cannot be trained in mixed batches: {why}. Leave that "
            "out, or train each task in a run of its own (--task, --data)."
        )
    for name in spec.tasks:
        if name in spec.task_fields:
            if (why := cannot_be_a_name(name)) is not None:
                raise InlayError(f"{why}.")
        elif tables.suffix(Path(name)) in tables.TABLES or Path(name).expanduser().exists():
            called = re.sub(r"\W", "_", Path(name).name.split(".")[0]) or "mine"
            raise InlayError(
                f"--tasks takes names of tasks (`inlay tasks`) or a file of tasks (tasks.yaml), and {name!r} is data "
                f"of your own: give it a name, --task-data {called}={name}, or an entry in tasks.yaml. Runs of one "
                f"task each can be joined too: {JOIN}."
            )


def name_mixing() -> str:
    """The methods that can mix tasks in one batch, for people."""
    return " or ".join(name for name, method in registry.all_methods().items() if method.mixes_tasks)


def check_together(tasks: Mapping[str, Task] | Mapping[str, TaskSchema]) -> None:
    """An error where tasks cannot be mixed in one batch."""
    if len(tasks) < 2:
        raise InlayError("Give --tasks at least two, as in --tasks rte,sst2; one alone is --task.")
    found = {name: task.kind for name, task in tasks.items()}
    if vectors := [name for name, kind in found.items() if kinds.get(kind).predicts == "vector"]:
        raise InlayError(f"Vectors are trained in a run of their own: leave {', '.join(vectors)} out of the tasks.")
    if len({kinds.get(kind).head for kind in found.values()}) > 1:
        listed = ", ".join(f"{name} ({kind})" for name, kind in found.items())
        raise InlayError(
            f"These tasks cannot be mixed in one batch: {listed}. Train together what has one class or value a row, "
            "or what is language modelling, or what labels tokens, or images."
        )


def check_vectors(spec: Spec, kind: str) -> None:
    """An error where a method cannot train vectors, or an option that only those have is given for something else."""
    about = kinds.get(kind)
    if spec.towers != "both" and not about.has_captions:
        raise InlayError(
            f"towers={spec.towers!r} is of models that compare images with texts (--kind {kinds.IMAGE_TEXT}), and this "
            f"is {kind}. Leave it out."
        )
    if about.head is not kinds.VECTOR and spec.similarity_temperature is not None:
        raise InlayError(
            f"similarity_temperature={spec.similarity_temperature!r} is of texts to embed (--kind {kinds.EMBEDDING}), "
            f"and this is {kind}. Leave it out."
        )
    if not about.has_captions and about.predicts != "vector":
        return
    if about.predicts == "vector" and spec.max_eval is not None:
        raise InlayError(
            f"max_eval={spec.max_eval}: part of the validation split would be another corpus to search, and an easier "
            "one. Give --evaluations to evaluate less often."
        )
    method = registry.get(spec.method)
    if reads_states(spec.method) or method.prompts_in_text or method.form == "head":
        why = "trains a head alone" if method.form == "head" else "answers by classes of its own"
        if about.has_captions:
            able = "; `inlay evaluate --model` scores the model without training" if method.form == "head" else ""
            raise InlayError(
                f"The method {spec.method!r} {why}, and a model that compares images with texts has none. Take "
                f"another, such as lora, bias or full{able}."
            )
        raise InlayError(
            f"The method {spec.method!r} {why}, and texts that are embedded have none. Take another, such as lora, "
            "bias or full."
        )


def check_layers(spec: Spec) -> None:
    """A clear error where layers are chosen for a method that has none to choose, before anything large is read."""
    method = registry.get(spec.method)
    if "layers" in spec.settings and not method.takes("layers"):
        able = [name for name, other in registry.all_methods().items() if other.takes("layers")]
        raise InlayError(
            f"layers={spec.settings['layers']!r}: the method {method.name!r} has no layers to choose. Leave it out, or "
            f"take one that has: {', '.join(able)}."
        )


def check_settings(spec: Spec, method: str | None = None) -> None:
    """A clear error for settings that the method cannot have, before anything large is read."""
    if spec.settings:
        from inlay.methods import settings

        settings.check_settings(registry.get(method or spec.method), spec.settings)


def check_quantisation(spec: Spec) -> None:
    """A clear error where a method does not work on quantised weights, before anything large is read."""
    from inlay.methods.capabilities import refuse_quantised

    refuse_quantised(spec.method, spec.quantize)


def check_modality(spec: Spec) -> None:
    """A clear error for a text task on an image model, or the reverse, before anything large is read."""
    from inlay import backbones, tasks

    if spec.image_size is not None and backbones.modality(spec.model, spec.revision) != "image":
        raise InlayError(f"image_size={spec.image_size}: the model {spec.model!r} reads texts. Leave it out.")
    named = [select_task(spec, name).task for name in spec.tasks] if spec.tasks else [spec.task]
    for name in named:
        if name is None or not tasks.is_named(name):
            continue
        needs, reads = tasks.describe(name).modality, backbones.modality(spec.model, spec.revision)
        if needs != reads:
            fitting = [other for other in tasks.names() if tasks.describe(other).modality == reads]
            raise InlayError(
                f"The task {name!r} is about {needs}s, and the model {spec.model!r} reads {reads}s. Take a model for "
                f"{needs}s (embedded: {'minilm, smollm2' if needs == 'text' else 'vit, resnet'}), or another task, "
                f"such as {', '.join(fitting[:5])}."
            )


def check_head(spec: Spec, tasks: Mapping[str, Task]) -> None:
    """An error where a task's texts are to be continued, and the model reads in an encoder what it is to write of."""
    from inlay import backbones

    for name, task in tasks.items():
        if kinds.get(task.kind).head is kinds.LANGUAGE and backbones.has_two_parts(spec.model, spec.revision):
            own = f" --kind {kinds.SEQUENCE_TO_SEQUENCE} --text <read> --label <written>"
            raise InlayError(
                f"{spec.model!r} has an encoder and a decoder, and {name!r} is of kind {task.kind!r}, in which one "
                f"model reads a text and goes on with it. Give data of your own as --data FILE{own}, or take a model "
                "that is a decoder alone."
            )


def check_writing(spec: Spec, tasks: Mapping[str, Task]) -> None:
    """An error where labels were taken for texts, and the method can learn classes alone."""
    decided = next((task.decided for task in tasks.values() if task.decided), None)
    if decided and registry.get(spec.method).form == "head":
        raise InlayError(
            f"The method {spec.method!r} trains a new head alone, and hardly two rows share a text in "
            f"{decided['label']!r}, which {spec.model!r} would learn to write. Give --kind {kinds.CLASSIFICATION} if "
            "they are classes, or take a method for texts, such as lora."
        )


def digest_of(spec: Spec, data: str) -> str:
    """The digest by which a run is found again: what it reads counts by its contents (`data`), not by its path."""
    from inlay import backbones

    contents: dict[str, Any] = {"data": data, "test_data": "", "data_dir": ""}
    if spec.task_fields:
        contents["task_fields"] = task_fields.contents(spec.task_fields)
    contents |= contents_of(spec)
    contents["revision"] = backbones.version(spec.model, spec.revision)
    if Path(spec.model).expanduser().is_dir():
        contents["model"] = ""
    return spec.digest(contents)
