"""Make one run: spec -> task(s) + backbone -> method -> training -> portrait -> record.

A run has one task or several, and one way through. A spec that was run before is found and not repeated; one that was
cut short goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.store import Run, Store, model_slug, read_json
from inlay.records.versions import versions
from inlay.tasks import kinds
from inlay.tasks.counting import count
from inlay.workflow import chance
from inlay.workflow.notes import Say, or_log
from inlay.workflow.settle import Settled, reads_states, settle
from inlay.workflow.writing import option_before, why_recomputed

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from inlay.backbones.loading import Backbone
    from inlay.tasks import Task
    from inlay.training import FitResult
    from inlay.training.objectives import Objective

DEFAULT_OUT = "runs"
AUTO = "auto"  # in place of a method: a short comparison picks it
SPLITS = ("train", "validation", "test")


def tune(
    spec: Spec,
    out: Path | str = DEFAULT_OUT,
    *,
    progress: bool = True,
    tensorboard: bool = False,
    log_to: Sequence[str] = (),
    say: Say | None = None,
    retry_failed: bool = True,
    opened: Callable[[str], None] | None = None,
    watchers: Sequence[TrainerCallback] = (),
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Adapt the model to the task, or to all of the tasks at once, and record it under `out`; the run is finished.

    `say` receives one line for each thing a person should know: where the model and the data came from, what was
    dropped, cut or assumed; without it, the logger `inlay.notes` does (see notes.py). A run that is on record as
    failed is tried again unless `retry_failed` is False.

    The method `auto` picks one by a short comparison first (`inlay.workflow.auto`).

    `log_to` names where metrics are shown too: tensorboard, wandb, mlflow, trackio (`tensorboard=True` is the first).

    A run that is refused before it has made anything leaves no folder, unless `opened` was told its name.

    The rest is for callers that manage several runs: `opened` is called with the run's name as soon as it has one; of
    `watchers` and `stop` see `inlay.training.FitOptions`.
    """
    from inlay import backbones

    if spec.method == AUTO:
        from inlay.workflow.auto import tune_auto

        more: dict[str, Any] = {"retry_failed": retry_failed, "opened": opened, "watchers": watchers, "stop": stop}
        return tune_auto(spec, out, progress=progress, say=say, tensorboard=tensorboard, log_to=log_to, **more)
    say, asked = or_log(say), spec
    if log_to := (*log_to, *(["tensorboard"] if tensorboard else [])):
        from inlay.training import boards

        log_to = boards.check(log_to)
    settled = settle(spec)
    spec = settled.spec
    check_launch(spec)
    began = time.monotonic()
    with Store(out).open(spec, settled.digest_in(out), retry_failed=retry_failed) as run:
        run.keeps_refusals = opened is not None
        if opened is not None:
            opened(run.id)
        if run.status == "finished":
            say(f"already done: {run.id}")
            return run
        for line in (*find_earlier(asked, settled, out), *introduce(settled)):
            say(line)
        backbone = backbones.load_for(spec, settled.first)
        new = select_new(backbone.notes, spec.model, out)
        for line in (
            f"model: {backbone.source}",
            *new,
            *explain_pooling(spec, backbone, settled.first.schema.predicts),
            *settled.notes,
        ):
            say(line)
        frozen = measure_frozen(backbone, settled)
        from inlay.training.fitting import FitOptions, fit

        recompute = explain_recomputing(spec, backbone, settled.first.kind)
        options = FitOptions(progress=progress, log_to=log_to, watchers=watchers, stop=stop, recompute=recompute)
        result = fit(backbone, make_objective(settled), registry.get(spec.method), spec, run.folder, options)
        standings = {name: measure_chance(task, result, name) | frozen for name, task in result.tasks.items()}
        for line in conclude(settled, result, standings):
            say(line)
        record = describe_tasks(spec, result, standings) | {
            "metrics": result.metrics,
            "portrait": result.portrait,
            "seconds": time.monotonic() - began,
            "resumed_from": result.resumed_from,
            "steps": result.steps,
            "best_step": result.best_step,
            "stopped_early": result.stopped_early,
            "examples": {each: sum(len(task.split(each)) for task in result.tasks.values()) for each in SPLITS},
            **({"evaluated_rows": result.evaluated_rows} if result.evaluated_rows else {}),
            **({"calibration": result.calibration} if result.calibration else {}),
            "backbone": describe_backbone(backbone),
            "versions": versions(),
        }
        run.keep(result.predictions)
        run.finish(record)
        return run


def check_launch(spec: Spec) -> None:
    """Refuse what `accelerate launch` asks for and cannot be, before anything is made."""
    if any(name.startswith("ACCELERATE_USE_") for name in os.environ):
        from inlay.training import sharding

        sharding.asked(spec)


def identify(spec: Spec) -> tuple[Spec, str]:
    """The spec as it will be run, and the digest by which its run is found."""
    settled = settle(spec)
    return settled.spec, settled.digest


def make_objective(settled: Settled) -> Objective | Task:
    """What the run is trained for: its one task, or all of them together."""
    if settled.first.schema.pairs_images:
        from inlay.training.contrastive import InBatch

        return InBatch(settled.first)
    if settled.first.schema.predicts == "vector":
        from inlay.training.contrastive import Contrast

        return Contrast(settled.first, settled.spec)
    if not settled.spec.tasks:
        return settled.first
    from inlay.training.joint import SeveralTasks

    return SeveralTasks(settled.tasks)


# ---- lines for people


def introduce(settled: Settled) -> Iterator[str]:
    """Where the data came from, how much it is, and what was dropped or assumed; of several tasks, each by its name."""
    for name, task in settled.tasks.items():
        yield from _of_task(settled.spec, name, (f"data: {task.source}", f"read: {count(task)}", *task.notes))


def conclude(settled: Settled, result: FitResult, standings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What was cut, how it went, and whether it is above chance."""
    spec = settled.spec
    for name, task in result.tasks.items():
        yield from _of_task(spec, name, task.notes[len(settled.tasks[name].notes) :])
    yield from result.notes
    for name, task in result.tasks.items():
        metrics = {split: select_metrics(spec, found, name) for split, found in result.metrics.items()}
        yield from _of_task(spec, name, chance.of_one(spec, task.metrics[0], metrics, standings[name]))


def _of_task(spec: Spec, name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name}: {line}" for line in lines] if spec.tasks else list(lines)


def select_metrics(spec: Spec, found: Mapping[str, float], name: str) -> dict[str, float]:
    """A task's metrics among those of a run, which has one task or several."""
    if not spec.tasks:
        return dict(found)
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}


def select_new(notes: Sequence[str], model: str, out: Path | str) -> list[str]:
    """The notes on a model that no finished run of it in this folder has on record: each is shown once."""
    left = list(notes)
    for path in sorted(Path(out).glob(f"*{model_slug(model)}*/record.json")):
        if not left:
            break
        with contextlib.suppress(InlayError, KeyError, TypeError):  # a damaged record tells nothing
            known = read_json(path)["backbone"]["notes"]
            left = [note for note in left if note not in known]
    return left


def find_earlier(asked: Spec, settled: Settled, out: Path | str) -> Iterator[str]:
    """Lines for people who gave the command of a run from before a default was another; `asked` is what they gave."""
    yield from find_earlier_pooling(settled, asked.pooling, out)
    yield from find_earlier_defaults(settled, out)
    yield from find_earlier_kind(asked, settled, out)


def find_earlier_pooling(settled: Settled, wanted: str, out: Path | str) -> list[str]:
    """A line for people who gave the command of a run from before there was a choice, and would wait for it in vain.

    `wanted` is the pooling that was asked for, and `settled` has what that came to.
    """
    spec = settled.spec
    if wanted != "auto" or spec.pooling == "auto":
        return []
    earlier = None
    with contextlib.suppress(InlayError):  # a damaged one is nothing to go on with
        earlier = settled.find(out, spec.with_(pooling="own"))
    if earlier is None:
        return []
    does = "finds" if earlier.status == "finished" else "resumes"
    return [f"an earlier run read the architecture's own feature: --pooling own {does} it ({earlier.id})"]


def find_earlier_defaults(settled: Settled, out: Path | str) -> list[str]:
    """A line for people who gave the command of a run from before language models had defaults of their own."""
    if settled.earlier is None:
        return []
    found = None
    with contextlib.suppress(InlayError):  # a damaged one is nothing to go on with
        found = settled.find(out, settled.earlier)
    if found is None:
        return []
    does = "finds" if found.status == "finished" else "resumes"
    return [f"an earlier run had the earlier defaults: {option_before(found.spec.method)} {does} it ({found.id})"]


def find_earlier_kind(asked: Spec, settled: Settled, out: Path | str) -> list[str]:
    """A line for people who gave the command of a run from before labels were taken for texts."""
    # Several tasks: none has a kind that an option gives back.
    if asked.tasks or not settled.first.decided or len(Store(out).list()) < 2:
        return []
    found = None
    with contextlib.suppress(InlayError):  # labels that make no classes, or a damaged run
        classes = settle(asked.with_(kind=kinds.CLASSIFICATION))
        found = classes.find(out, classes.spec)
    if found is None:
        return []
    does = "finds" if found.status == "finished" else "resumes"
    return [f"an earlier run took the labels for classes: --kind {kinds.CLASSIFICATION} {does} it ({found.id})"]


def explain_pooling(spec: Spec, backbone: Backbone, predicts: str) -> list[str]:
    """A line for people: what the head reads, or what a text's vector is. A method that stands in for the head says
    itself what it reads."""
    from inlay.backbones.pooling import IN_WORDS

    if backbone.pooling is None or reads_states(spec.method):
        return []
    said = "a text's vector is" if predicts == "vector" else "the head reads"
    return [f"{said} {IN_WORDS[backbone.pooling]} (--pooling chooses)"]


def explain_recomputing(spec: Spec, backbone: Backbone, kind: str) -> str | None:
    """A line for people, where activations are computed again because the spec leaves it open."""
    from inlay.backbones.devices import pick_device
    from inlay.backbones.quantised import count

    if spec.gradient_checkpointing is not None:
        return None
    parameters = sum(count(parameter) for parameter in backbone.model.parameters())
    return why_recomputed(kind, parameters, pick_device().type)


# ---- the record


def measure_chance(task: Task, result: FitResult, name: str) -> dict[str, Any]:
    """What the majority class would score on a task, and how many classes the run gives its test examples."""
    from inlay.tasks.metrics import majority

    return {"chance": majority(task), "classes_predicted": result.classes_predicted.get(name)}


def measure_frozen(backbone: Backbone, settled: Settled) -> dict[str, Any]:
    """How good the model is on the test split before anything is trained, where it can be asked: by its vectors, or by
    captions of the classes. For other tasks nothing."""
    task = settled.first
    if not (task.schema.predicts == "vector" or task.schema.has_captions) or not len(task.test):
        return {}
    from inlay.training import evaluate

    metrics, _ = evaluate(backbone.model, task, "test", backbone.processor, settled.spec)
    return {"frozen": {"examples": len(task.test), "metrics": metrics}}


def describe_tasks(spec: Spec, result: FitResult, standings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a record keeps of the task, or of several, and by which metric the run is judged."""
    found: dict[str, dict[str, Any]] = {
        name: {"schema": task.to_json(), "source": task.source, "digest": task.digest, "notes": list(task.notes)}
        | count_classes(task)
        for name, task in result.tasks.items()
    }
    if not spec.tasks:
        ((name, task),) = result.tasks.items()
        return {"metric": task.metrics[0], "task": found[name], **standings[name]}
    from inlay.training.joint import AVERAGE, greater_is_better

    for name, task in result.tasks.items():
        examples = {split: len(task.split(split)) for split in SPLITS}
        found[name] |= {"metric": task.metrics[0], "examples": examples, **standings[name]}
    return {
        "metric": AVERAGE,
        "greater_is_better": greater_is_better(result.tasks),
        "tasks": found,
        "notes": result.notes,
        "failed": result.failed,
    }


def count_classes(task: Task) -> dict[str, Any]:
    """How many rows each class has in each split, where a row has one."""
    if task.schema.predicts != "class":
        return {}
    names = task.label_names or ()
    counted = {split: Counter(task.split(split)["label"]) for split in SPLITS}
    return {"classes": {split: {names[i]: n for i, n in sorted(found.items())} for split, found in counted.items()}}


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """What a record keeps of the model."""
    return {
        "name": backbone.name,
        "source": backbone.source,
        "fingerprint": backbone.fingerprint,
        "newly_initialised": list(backbone.newly_initialised),
        "pooling": backbone.pooling,
        "quantize": backbone.quantize,
        "image_size": backbone.image_size,
        "notes": backbone.notes,
    }
