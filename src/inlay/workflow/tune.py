"""Make one run: spec -> backbone + task -> method -> training -> portrait -> record.

A spec that was run before is found and not repeated; one that was cut short goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import FEW_SHOT_BATCH, FEW_SHOT_EPOCHS, FEW_UPDATES, Spec, updates
from inlay.records.store import Run, Store, model_slug, read_json
from inlay.records.versions import versions
from inlay.workflow import chance
from inlay.workflow.notes import Say, or_log

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from inlay.backbones.loading import Backbone
    from inlay.tasks import Task

DEFAULT_OUT = "runs"


def tune(
    spec: Spec,
    out: Path | str = DEFAULT_OUT,
    *,
    progress: bool = True,
    tensorboard: bool = False,
    say: Say | None = None,
    retry_failed: bool = True,
    opened: Callable[[str], None] | None = None,
    watchers: Sequence[TrainerCallback] = (),
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Adapt the model to the task and record it under `out`; the run that comes back is finished.

    `say` receives one line for each thing a person should know: where the model and the data came from, what was
    dropped, cut or assumed; without it, the logger `inlay.notes` does (see notes.py). A run that is on record as
    failed is tried again unless `retry_failed` is False.
    The rest is for whoever looks after several runs: `opened` is told the run's name as soon as it has one; of
    `watchers` and `stop` see `inlay.training.fit`.
    """
    from inlay import backbones, tasks
    from inlay.tasks.chance import majority

    say = or_log(say)
    if spec.tasks:
        from inlay.workflow.tune_joint import tune_joint

        return tune_joint(spec, out, progress=progress, tensorboard=tensorboard, say=say)
    spec = checked(spec)
    task = tasks.load(spec)
    wanted = spec.pooling
    spec, amount = trained(pooled(spec, task.kind), task.examples)
    digest = identity(spec, task)
    began = time.monotonic()
    with Store(out).open(spec, digest, retry_failed=retry_failed) as run:
        if opened is not None:
            opened(run.id)
        if run.status == "finished":
            say(f"already done: {run.id}")
            return run
        for line in (*read_before(spec, wanted, task.digest, out), f"data: {task.source}", *task.notes):
            say(line)
        backbone = backbones.load_for(spec, task)
        known = untold(backbone.notes, spec.model, out)
        for line in (f"model: {backbone.source}", *known, *read_by_the_head(spec, backbone), *amount):
            say(line)
        from inlay.training import fit

        outcome = fit(
            backbone,
            task,
            registry.get(spec.method),
            spec,
            run.folder,
            progress=progress,
            tensorboard=tensorboard,
            watchers=watchers,
            stop=stop,
        )
        told = len(task.notes)
        (task,) = outcome.tasks.values()
        beside = {"chance": majority(task), "classes_predicted": outcome.classes_predicted}
        for line in (
            *task.notes[told:],
            *outcome.notes,
            *chance.of_one(spec, task.metrics[0], outcome.metrics, beside),
        ):
            say(line)
        run.finish(
            {
                "metrics": outcome.metrics,
                "metric": task.metrics[0],
                "portrait": outcome.portrait,
                "seconds": time.monotonic() - began,
                "resumed_from": outcome.resumed_from,
                "steps": outcome.steps,
                "best_step": outcome.best_step,
                "stopped_early": outcome.stopped_early,
                "examples": {split: len(task.split(split)) for split in ("train", "validation", "test")},
                **beside,
                "task": {
                    "schema": task.to_json(),
                    "source": task.source,
                    "digest": task.digest,
                    "notes": list(task.notes),
                },
                "backbone": described(backbone),
                "versions": versions(),
            }
        )
        return run


def checked(spec: Spec) -> Spec:
    """The spec as it will be run; a clear error where it cannot be, before anything large is read."""
    check_layers(spec)
    check_settings(spec)
    spec = settled(spec)
    check_modality(spec)
    return spec


def identified(spec: Spec) -> tuple[Spec, str]:
    """The spec as it will be run, and the digest by which its run is found."""
    from inlay import tasks

    spec = checked(spec)
    task = tasks.load(spec)
    spec, _ = trained(pooled(spec, task.kind), task.examples)
    return spec, identity(spec, task)


def untold(notes: Sequence[str], model: str, out: Path | str) -> list[str]:
    """Those notes on a model that no finished run of it in this folder has on record: each is told once."""
    left = list(notes)
    for path in sorted(Path(out).glob(f"*{model_slug(model)}*/record.json")):
        if not left:
            break
        with contextlib.suppress(InlayError, KeyError, TypeError):  # a damaged record tells nothing
            known = read_json(path)["backbone"]["notes"]
            left = [note for note in left if note not in known]
    return left


def described(backbone: Backbone) -> dict[str, Any]:
    """What a record keeps of the model."""
    return {
        "name": backbone.name,
        "source": backbone.source,
        "fingerprint": backbone.fingerprint,
        "newly_initialised": list(backbone.newly_initialised),
        "pooling": backbone.pooling,
        "notes": backbone.notes,
    }


def pooled(spec: Spec, kind: str) -> Spec:
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


def read_before(spec: Spec, wanted: str, data: str, out: Path | str) -> list[str]:
    """A line for people who gave the command of a run from before there was a choice, and would wait for it in vain.

    `wanted` is the pooling that was asked for, and `spec` has what that came to.
    """
    if wanted != "auto" or spec.pooling == "auto":
        return []
    earlier = None
    with contextlib.suppress(InlayError):  # a damaged one is nothing to go on with
        earlier = Store(out).find(identity_of(spec.with_(pooling="own"), data))
    if earlier is None:
        return []
    does = "finds" if earlier.status == "finished" else "resumes"
    return [f"an earlier run read the architecture's own feature: --pooling own {does} it ({earlier.id})"]


def read_by_the_head(spec: Spec, backbone: Backbone) -> list[str]:
    """A line for people: what the head reads. A method that stands in for the head says itself what it reads."""
    from inlay.backbones.pooling import IN_WORDS

    if backbone.pooling is None or reads_states(spec.method):
        return []
    return [f"the head reads {IN_WORDS[backbone.pooling]} (--pooling chooses)"]


def reads_states(name: str) -> bool:
    """Whether a method puts class vectors on a state of the tokens in place of the head."""
    return registry.get(name).takes("state")


def trained(spec: Spec, examples: int | None) -> tuple[Spec, list[str]]:
    """The spec with epochs and batch size written in, and a line for people where the examples are few.

    It says which were taken where none was given, and what to give where those that were given make hardly any updates.
    """
    epochs, batch_size = spec.amount(examples)
    settled = spec.with_(epochs=epochs, batch_size=batch_size)
    if not examples or spec.max_steps is not None:
        return settled, []
    made, longer = (updates(examples, *each) for each in ((epochs, batch_size), (FEW_SHOT_EPOCHS, FEW_SHOT_BATCH)))
    said = f"{examples} examples make {made} update{'s' * (made > 1)} in {epochs:g} epochs of batches of {batch_size}"
    if spec.epochs is None and epochs == FEW_SHOT_EPOCHS:
        return settled, [f"{said}: the default for so few; --epochs and --batch-size choose otherwise"]
    if made >= FEW_UPDATES or longer <= 2 * made:
        return settled, []
    better = f"--epochs {FEW_SHOT_EPOCHS:g} --batch-size {FEW_SHOT_BATCH}"
    return settled, [f"{said}, which is little: {better} would make {longer}"]


def settled(spec: Spec) -> Spec:
    """The spec as it will be run and recorded: the task by its own name, the method's learning rate written in."""
    from inlay import tasks

    return spec.with_(
        learning_rate=default_rate(spec) if spec.learning_rate is None else spec.learning_rate,
        task=None if spec.task is None else tasks.canonical(spec.task),
    )


def default_rate(spec: Spec) -> float | None:
    """The method's learning rate on this model; None where only the loaded model can say which: timm's names do not."""
    from inlay import backbones

    method = registry.get(spec.method)
    if not method.rates:
        return method.learning_rate
    kind = backbones.kind(spec.model, spec.revision)
    return method.learning_rate_for(kind) if kind else None


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
        from inlay.methods.settings import check

        check(registry.get(method or spec.method), spec.settings)


def check_modality(spec: Spec) -> None:
    """A clear error for a text task on an image model, or the reverse, before anything large is read."""
    from inlay import backbones, tasks

    if spec.task is None or not tasks.is_named(spec.task):
        return
    needs, reads = tasks.describe(spec.task).modality, backbones.modality(spec.model, spec.revision)
    if needs != reads:
        fitting = [name for name in tasks.names() if tasks.describe(name).modality == reads]
        raise InlayError(
            f"The task {spec.task!r} is about {needs}s, and the model {spec.model!r} reads {reads}s. Take a model for "
            f"{needs}s (embedded: {'minilm, smollm2' if needs == 'text' else 'vit, resnet'}), or another task, such as "
            f"{', '.join(fitting[:5])}."
        )


def identity(spec: Spec, task: Task) -> str:
    """The digest by which a run is found again: what it reads counts by its contents, not by its path."""
    return identity_of(spec, task.digest)


def identity_of(spec: Spec, data: str) -> str:
    """The digest of a run whose data have this digest."""
    from inlay import backbones

    contents = {"data": data, "test_data": "", "data_dir": ""}
    contents["revision"] = backbones.version(spec.model, spec.revision)
    if Path(spec.model).expanduser().is_dir():
        contents["model"] = ""
    return spec.digest(contents)
