"""Make one run: spec -> backbone + task -> method -> training -> portrait -> record.

A spec that was run before is found and not repeated; one that was cut short goes on where it stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.store import Run, Store
from inlay.records.versions import versions

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from inlay.backbones.loading import Backbone
    from inlay.tasks import Task

DEFAULT_OUT = "runs"
FEW_UPDATES = 50
FEW_SHOT_EPOCHS, FEW_SHOT_BATCH = 30, 8  # as few-shot studies train
Say = Callable[[str], None]


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
    dropped, cut or assumed. A run that is on record as failed is tried again unless `retry_failed` is False.
    The rest is for whoever looks after several runs: `opened` is told the run's name as soon as it has one; of
    `watchers` and `stop` see `inlay.training.fit`.
    """
    from inlay import backbones, tasks

    say = say or (lambda line: None)
    if spec.tasks:
        from inlay.workflow.tune_joint import tune_joint

        return tune_joint(spec, out, progress=progress, tensorboard=tensorboard, say=say)
    spec = checked(spec)
    task = tasks.load(spec)
    digest = identity(spec, task)
    began = time.monotonic()
    with Store(out).open(spec, digest, retry_failed=retry_failed) as run:
        if opened is not None:
            opened(run.id)
        if run.status == "finished":
            say(f"already done: {run.id}")
            return run
        for line in (f"data: {task.source}", *task.notes):
            say(line)
        told = len(task.notes)
        backbone = backbones.load(
            spec.model,
            kind=task.kind,
            num_labels=task.num_labels,
            label_names=task.label_names,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            seed=spec.seed,
        )
        for line in (f"model: {backbone.source}", *backbone.notes, *few_updates(spec, len(task.train))):
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
        for line in (*task.notes[told:], *outcome.notes):
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
                "task": {"schema": task.to_json(), "source": task.source, "digest": task.digest, "notes": task.notes},
                "backbone": described(backbone),
                "versions": versions(),
            }
        )
        return run


def checked(spec: Spec) -> Spec:
    """The spec as it will be run; a clear error where it cannot be, before anything large is read."""
    check_layers(spec)
    spec = settled(spec)
    check_modality(spec)
    return spec


def identified(spec: Spec) -> tuple[Spec, str]:
    """The spec as it will be run, and the digest by which its run is found."""
    from inlay import tasks

    spec = checked(spec)
    return spec, identity(spec, tasks.load(spec))


def described(backbone: Backbone) -> dict[str, Any]:
    """What a record keeps of the model."""
    return {
        "name": backbone.name,
        "source": backbone.source,
        "fingerprint": backbone.fingerprint,
        "newly_initialised": list(backbone.newly_initialised),
        "notes": backbone.notes,
    }


def few_updates(spec: Spec, examples: int) -> list[str]:
    """A line for people where so few examples make hardly any updates; nothing where their number was chosen."""
    made = math.ceil(spec.epochs * math.ceil(examples / spec.batch_size))
    longer = FEW_SHOT_EPOCHS * math.ceil(examples / FEW_SHOT_BATCH)
    if spec.max_steps is not None or made >= FEW_UPDATES or longer <= 2 * made:
        return []
    said = f"{examples} examples make {made} update{'s' * (made > 1)} in {spec.epochs:g} epochs of batches of "
    said += f"{spec.batch_size}, which is little: --epochs {FEW_SHOT_EPOCHS} --batch-size {FEW_SHOT_BATCH} would make "
    return [f"{said}{longer}"]


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
        able = [name for name, other in registry.all_methods().items() if other.tuner and other.takes("layers")]
        raise InlayError(
            f"layers={spec.settings['layers']!r}: the method {method.name!r} has no layers to choose. Leave it out, or "
            f"take one that has: {', '.join(able)}."
        )


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
