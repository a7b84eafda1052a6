"""Make one run of several tasks: spec -> backbone + tasks -> method -> joint training -> portrait -> record."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.store import Run, Store
from inlay.records.versions import versions
from inlay.tasks import files
from inlay.workflow.answer_files import JOIN
from inlay.workflow.tune import (
    Say,
    check_layers,
    check_modality,
    check_settings,
    default_rate,
    described,
    identity_of,
    pooled,
    read_before,
    read_by_the_head,
    trained,
    untold,
)

if TYPE_CHECKING:
    from inlay.tasks import Task


def tune_joint(spec: Spec, out: Path | str, *, progress: bool, tensorboard: bool, say: Say) -> Run:
    """Adapt the model to all of the spec's tasks at once; see `inlay.workflow.tune.tune`."""
    from inlay import backbones
    from inlay import tasks as room
    from inlay.training.joint_fitting import AVERAGE, adapter_names, check_together, fit_joint, greater_is_better

    check_method(spec)
    check_layers(spec)
    check_settings(spec)
    spec = spec.with_(
        tasks=tuple(dict.fromkeys(room.canonical(name) for name in spec.tasks)),
        learning_rate=default_rate(spec) if spec.learning_rate is None else spec.learning_rate,
    )
    for name in spec.tasks:
        check_modality(_of_one(spec, name))
    named = adapter_names(spec.tasks)
    tasks: dict[str, Task] = {named[name]: room.load(_of_one(spec, name)) for name in spec.tasks}
    check_together(tasks)
    sizes = [task.examples for task in tasks.values()]
    wanted = spec.pooling
    spec = pooled(spec, next(iter(tasks.values())).kind)
    spec, amount = trained(spec, None if None in sizes else sum(filter(None, sizes)))
    contents = "\n".join(f"{name} {task.digest}" for name, task in tasks.items())
    data = hashlib.sha256(contents.encode()).hexdigest()
    digest = identity_of(spec, data)
    with Store(out).open(spec, digest) as run:
        if run.status == "finished":
            say(f"already done: {run.id}")
            return run
        for line in read_before(spec, wanted, data, out):
            say(line)
        for name, task in tasks.items():
            for line in (f"data: {task.source}", *task.notes):
                say(f"{name}: {line}")
        told = {name: len(task.notes) for name, task in tasks.items()}
        backbone = backbones.load_for(spec, next(iter(tasks.values())))
        known = untold(backbone.notes, spec.model, out)
        for line in (f"model: {backbone.source}", *known, *read_by_the_head(spec, backbone), *amount):
            say(line)
        outcome = fit_joint(
            backbone, tasks, registry.get(spec.method), spec, run.folder, progress=progress, tensorboard=tensorboard
        )
        tasks = outcome.tasks
        for name, task in tasks.items():
            for line in task.notes[told[name] :]:
                say(f"{name}: {line}")
        for line in outcome.notes:
            say(line)
        run.finish(
            {
                "metrics": outcome.metrics,
                "metric": AVERAGE,
                "greater_is_better": greater_is_better(tasks),
                "portrait": outcome.portrait,
                "steps": outcome.steps,
                "best_step": None,
                "stopped_early": outcome.stopped_early,
                "examples": _examples(tasks),
                "tasks": {
                    name: {
                        "schema": task.to_json(),
                        "source": task.source,
                        "digest": task.digest,
                        "notes": list(task.notes),
                        "metric": task.metrics[0],
                    }
                    for name, task in tasks.items()
                },
                "notes": outcome.notes,
                "failed": outcome.failed,
                "backbone": described(backbone),
                "versions": versions(),
            }
        )
        return run


def check_method(spec: Spec) -> None:
    """Only a method that mixes tasks in one batch can be trained on several at once."""
    if spec.method != "multi-lora":
        raise InlayError(
            f"--tasks trains several tasks in mixed batches, which the method {spec.method!r} cannot. Use multi-lora, "
            "or one run a task: --task."
        )
    for name in spec.tasks:
        if files.suffix(Path(name)) in files.TABLES or Path(name).expanduser().exists():
            raise InlayError(
                f"--tasks takes names of tasks (`inlay tasks`), and {name!r} is data of your own. Train each of your "
                f"tasks by itself, with --data {name} --method {spec.method}, and join the runs: {JOIN}. Joined, they "
                "are predicted and served together."
            )


def _of_one(spec: Spec, name: str) -> Spec:
    return spec.with_(task=name, tasks=(), sampling="proportional", temperature=1.0)


def _examples(tasks: dict[str, Any]) -> dict[str, int]:
    splits = ("train", "validation", "test")
    return {split: sum(len(task.split(split)) for task in tasks.values()) for split in splits}
