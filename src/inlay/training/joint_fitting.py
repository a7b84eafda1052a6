"""Train several tasks in one run: one adapter a task on one base, batches that mix them, one folder for all.

The single task's way (fitting.py) with the parts that differ: see joint.py for what is trained, and how.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, set_seed

from inlay.anatomy import anatomy
from inlay.backbones.locate import portable
from inlay.backbones.pooled import installed
from inlay.errors import InlayError
from inlay.methods import attach
from inlay.methods.card import About, write_card
from inlay.methods.registry import Method
from inlay.portrait.memory import PeakMemory
from inlay.records.atomic import write_folder, writing
from inlay.records.sealed import write_sealed
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.tasks.metrics import LOWER_IS_BETTER
from inlay.training import plan as plans
from inlay.training.checkpoints import Checkpoints, step_of
from inlay.training.display import Display
from inlay.training.evaluation import NotFinitePredictions, Scored, score, shifts_labels, write
from inlay.training.fitting import (
    CHECKPOINT_SECONDS,
    Outcome,
    portrait_of,
    take_off_autocast,
    tensorboard_callback,
)
from inlay.training.interrupts import Interrupted, Interrupts
from inlay.training.joint import NAMES, JointCollator, JointRows, JointTrainer
from inlay.training.modes import Modes
from inlay.training.place import Place, Stop
from inlay.training.precision import rounded_once
from inlay.training.progress import Journal
from inlay.training.seeds import deterministic, undisturbed
from inlay.training.trainer import NotFinite, Pace

TASKS = "tasks.json"  # beside the adapters: what predicting needs of each task
FORMAT = 1
AVERAGE = "average"


def adapter_names(names: Sequence[str]) -> dict[str, str]:
    """The name of each task's adapter: PEFT wants words of letters, digits and underscores."""
    found = {name: re.sub(r"\W", "_", name.rpartition("/")[2]) for name in names}
    if len(set(found.values())) < len(names):
        raise InlayError(f"The tasks {', '.join(names)} are not told apart by their names: train them in several runs.")
    return found


def check_together(tasks: Mapping[str, Any]) -> None:
    """An error where tasks cannot be mixed in one batch."""
    if len(tasks) < 2:
        raise InlayError("Give --tasks at least two, as in --tasks rte,sst2; one alone is --task.")
    found = {name: task.kind for name, task in tasks.items()}
    if len({kinds.get(kind).head for kind in found.values()}) > 1:
        listed = ", ".join(f"{name} ({kind})" for name, kind in found.items())
        raise InlayError(
            f"These tasks cannot be mixed in one batch: {listed}. Train together what has one class or value a row, "
            "or what is language modelling, or what labels tokens, or images."
        )


def fit_joint(
    backbone: Any,
    tasks: Mapping[str, Any],
    method: Method,
    spec: Spec,
    folder: Path,
    *,
    progress: bool = True,
    tensorboard: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    trainer_class: type[JointTrainer] = JointTrainer,
) -> Outcome:
    """Adapt `backbone` to all of `tasks`, by the names of their adapters, in `folder`.

    As `fit` does for one, it goes on from the last checkpoint when it is called again. `adapter/` holds a folder for
    each task. The metrics are those of each task, `<task>/<metric>`, and the average over tasks of the first of each.
    `trainer_class` may train otherwise.
    """
    processor = backbone.processor
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    set_seed(spec.seed)
    modes = Modes(backbone.model, new=backbone.newly_initialised, whole=False)
    model = attach_tasks(backbone, tasks, method, spec.settings, spec.seed)
    modes.adapt(model)
    if spec.gradient_checkpointing:
        modes.checkpoint()
    tasks = {
        name: task.with_length(processor, spec.max_length, model_config=model.config) for name, task in tasks.items()
    }
    cut: dict[str, list[str]] = {name: [] for name in tasks}

    def encoded(name: str, split: str) -> Any:
        made = tasks[name].encode(split, processor, spec.max_length, model_config=model.config)
        cut[name].extend(getattr(made, "notes", ()))
        return made

    encode = {name: partial(encoded, name) for name in tasks}
    train = JointRows({name: encode[name]("train") for name in tasks})
    first = next(iter(tasks.values()))
    collate = first.collator(processor, model)
    kind = anatomy(model).kind if method.rates else None
    plan = plans.make(spec, method, len(train), kind, held_out=sum(len(task.validation) for task in tasks.values()))
    if plan.world > 1:
        raise InlayError("Several tasks are trained in one process. Start it without `accelerate launch`.")
    if plan.dtype is torch.float16:
        if spec.precision == "float16":
            raise InlayError(
                "precision='float16' scales the loss of all tasks alike: one that overflows would hold up the others. "
                "Use float32, or bfloat16 where the device has it."
            )
        plan = dataclasses.replace(plan, dtype=None)  # a device without bfloat16, and no wish
    place = Place(plan.device, plan.dtype, plan.micro_batch)
    memory, interrupts, pace = PeakMemory(model, plan.device), Interrupts(), Pace()
    display = Display(f"{len(tasks)} tasks {method.name}", show=progress, log=folder / "log.txt")
    callbacks: list[TrainerCallback] = [pace, display]
    if tensorboard:
        callbacks.append(tensorboard_callback(folder))
    lacking = [name for name, task in tasks.items() if not len(task.validation)]
    if spec.early_stopping and lacking:
        raise InlayError(f"early_stopping needs a validation split, and {', '.join(lacking)} has none. Leave it out.")
    judge = Judge(model, tasks, encode, collate, place)
    trainer = trainer_class(
        values={name for name, task in tasks.items() if task.kind == kinds.REGRESSION},
        watch={name: (task.selection_metric, task.greater_is_better()) for name, task in tasks.items()},
        temperature={"proportional": 1.0, "temperature": spec.temperature, "uniform": math.inf}[spec.sampling],
        model=model,
        args=plans.arguments(plan, spec, folder / "checkpoints"),
        collate=JointCollator(collate),
        train_dataset=train,
        plan=plan,
        modes=modes,
        shifted=shifts_labels(model, first.kind),
        store=Checkpoints(folder / "checkpoints", base=backbone.fingerprint),
        journal=Journal(folder / "metrics.jsonl"),
        interrupts=interrupts,
        memory=memory,
        evaluate_now=judge if len(lacking) < len(tasks) else None,
        watched=AVERAGE,
        greater_is_better=greater_is_better(tasks),
        patience=spec.early_stopping,
        checkpoint_seconds=checkpoint_seconds,
        callbacks=callbacks,
    )
    pace.trainer = judge.trainer = trainer
    checkpoint = trainer.store.latest()
    resumed_from = None if checkpoint is None else step_of(checkpoint)
    for line in trainer.store.news(checkpoint):
        display.say(line)
    if resumed_from is not None:
        display.say(f"resumes at step {resumed_from} of {plan.total_steps}")
    with interrupts, deterministic(plan.device), rounded_once(model, plan.dtype):
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if trainer.checkpoint_is_due(last=True):
                trainer.save()
            trainer.load_best()
            try:
                metrics = _final_metrics(trainer, judge, tasks, processor, spec, place)
            except Interrupted:
                trainer.save()
                raise
        except Interrupted:
            display.say(
                f"stopped at step {trainer.state.global_step} of {plan.total_steps}; the same command resumes it"
            )
            raise
        except NotFinite as error:
            take_off_autocast(trainer)
            modes.close()
            save_tasks(model, tasks, method, backbone, spec, folder / "last-good", failures(trainer))
            raise NotFinite(f"{error} The parameters from before are in {folder / 'last-good'}.") from error
        finally:
            display.close()
            peak = memory.stop(seen=trainer.progress.peak_memory)
    take_off_autocast(trainer)
    modes.close()
    failed = failures(trainer)
    save_tasks(model, tasks, method, backbone, spec, folder / "adapter", failed, metrics)
    notes = _notes(trainer, tasks, metrics)
    for note in notes:
        display.say(note)
    portrait = portrait_of(trainer, plan, peak, len(train), folder / "adapter", None, "several tasks are trained")
    portrait["parameters"]["shared"] = model.base_model.counted_parameters()["shared"]
    return Outcome(
        model=model,
        metrics=metrics,
        history=trainer.progress.history,
        portrait=portrait,
        steps=trainer.state.global_step,
        resumed_from=resumed_from,
        stopped_early=trainer.progress.stopped,
        notes=notes,
        failed=failed,
        tasks={name: task.with_notes(cut[name]) for name, task in tasks.items()},
    )


def attach_tasks(
    backbone: Any, tasks: Mapping[str, Any], method: Method, settings: Mapping[str, Any], seed: int = 0
) -> nn.Module:
    """The backbone with an adapter and a head for each task.

    A head of another size than the backbone's is drawn from `seed`, as the backbone's own is when it is loaded. The
    `A`s are not: tasks of several runs can only be used together if they share them.
    """
    if "num_labels" in settings:
        raise InlayError("num_labels is each task's own when several are trained: leave it out.")
    model: Any = None
    for name, task in tasks.items():
        own = {"head_seed": seed, **settings} | ({"num_labels": task.num_labels} if task.num_labels else {})
        if model is None:
            model = attach.attach(
                backbone.model,
                method,
                settings=own,
                adapter_name=name,
                newly_initialised=backbone.newly_initialised,
                task_kind=task.kind,
            )
            continue
        attach.check_adapter_name(model, name)
        config = copy.deepcopy(model.peft_config[next(iter(tasks))])  # PEFT adds to its lists
        config.num_labels = task.num_labels
        model.add_adapter(name, config)
    return model


class Judge:
    """Scores the tasks' validation splits, each with its own adapter; called by the trainer."""

    def __init__(
        self,
        model: nn.Module,
        tasks: Mapping[str, Any],
        encode: Mapping[str, Callable[[str], Any]],
        collate: Callable[[Any], Any],
        place: Place,
    ) -> None:
        self.model, self.tasks, self.encode, self.collate, self.place = model, tasks, encode, collate, place
        self.trainer: JointTrainer | None = None
        self._validation = {name: encode[name]("validation") for name, task in tasks.items() if len(task.validation)}

    def __call__(self, stop: Stop) -> Scored:
        begin, examples = time.perf_counter(), 0
        found: dict[str, dict[str, float]] = {}
        assert self.trainer is not None
        for name, encoded in self._validation.items():
            try:
                found[name] = self.of(name, encoded, stop).metrics
                examples += len(encoded)
            except NotFinitePredictions as error:
                self.trainer._fail(name, str(error), spoilt=True)
        return Scored(flat(found, self.tasks, failures(self.trainer)), None, examples, time.perf_counter() - begin)

    def of(self, name: str, encoded: Any, stop: Stop | None) -> Scored:
        """One task on one encoded split."""
        return score(self.model, self.tasks[name], encoded, self.collate, self.place, stop, partial(_named, name))


@contextmanager
def _named(name: str, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield batch | {NAMES: [name] * len(batch["labels"])}


def flat(
    found: Mapping[str, Mapping[str, float]], tasks: Mapping[str, Any], failed: Collection[str] = ()
) -> dict[str, float]:
    """All tasks' metrics under one roof, and the average of the first metric of each over the tasks that did not
    fail."""
    metrics = {f"{name}/{metric}": value for name, own in found.items() for metric, value in own.items()}
    firsts = [metrics[first] for first in averaged(metrics, tasks, failed).values()]
    return metrics | {AVERAGE: sum(firsts) / len(firsts) if firsts else math.nan}


def greater_is_better(tasks: Mapping[str, Any]) -> bool:
    """Which way the average improves: downwards where less of every task's first metric is better. It is said by the
    tasks alone, so that it is the same on every split and with every seed, whatever could be scored."""
    return any(task.metrics[0] not in LOWER_IS_BETTER for task in tasks.values())


def averaged(metrics: Mapping[str, float], tasks: Mapping[str, Any], failed: Collection[str] = ()) -> dict[str, str]:
    """What the average is over: of each task its first metric, if there is one. Where more of some and less of others
    is better, those of which more is: an error and an accuracy have no mean. A task that failed has no say: its
    metrics are those of what it was when it did."""
    up = greater_is_better(tasks)
    firsts = {n: f"{n}/{t.metrics[0]}" for n, t in tasks.items() if (t.metrics[0] not in LOWER_IS_BETTER) == up}
    return {name: first for name, first in firsts.items() if first in metrics and name not in failed}


def _final_metrics(
    trainer: JointTrainer, judge: Judge, tasks: Mapping[str, Any], processor: Any, spec: Spec, place: Place
) -> dict[str, dict[str, float]]:
    """Metrics of the states that are kept, task by task: on validation they are known, but for texts to be written."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    model: Any = trainer.modes.model
    with undisturbed():
        for name, task in tasks.items():
            for split in ("validation", "test"):
                if not len(task.split(split)):
                    continue
                if split == "validation":
                    own = _validated(trainer, name)
                else:
                    try:
                        scored = judge.of(name, judge.encode[name]("test"), trainer.check_interrupt)
                    except NotFinitePredictions as error:
                        trainer.progress.tasks[name] |= {"failed": str(error), "spoilt": True}
                        continue
                    own = scored.metrics
                    if scored.seconds:
                        trainer.progress.inference.append([scored.examples, scored.seconds])
                if task.generates:
                    model.set_adapter(name, inference_mode=True)
                    own = own | write(model, task, split, processor, spec, place, trainer.check_interrupt).metrics
                    model.set_adapter(name)
                found.setdefault(split, {})[name] = own
    failed = failures(trainer)
    metrics = {split: flat(each, tasks, failed) for split, each in found.items()}
    trainer.note({"final": metrics})
    return metrics


def _validated(trainer: JointTrainer, name: str) -> dict[str, float]:
    """A task's metrics on validation when it was best, or last."""
    best = trainer.progress.tasks[name].get("best")
    if best is not None:
        return dict(best["metrics"])
    known = trainer.progress.validation or {}
    return {metric.partition("/")[2]: value for metric, value in known.items() if metric.startswith(f"{name}/")}


def failures(trainer: JointTrainer) -> dict[str, str]:
    """The tasks that could not be trained to the end: why, and what is kept of them."""
    found = {}
    for name, entry in trainer.progress.tasks.items():
        if "failed" in entry:
            best = entry.get("best")
            kept = "those from before that" if best is None else f"its best, of step {best['step']}"
            if entry.get("spoilt") and best is None:
                kept = "those that give it: do not use them"
            found[name] = f"{entry['failed']}; its parameters are {kept}"
    return found


def _notes(trainer: JointTrainer, tasks: Mapping[str, Any], metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    failed = failures(trainer)
    notes = [f"{name} failed: {why}" for name, why in failed.items()]
    for name, entry in trainer.progress.tasks.items():
        best = entry.get("best")
        if name not in failed and entry.get("ended") is not None and best is not None:
            notes.append(f"{name} stopped at step {entry['ended']}; best at step {best['step']}")
    for split, own in metrics.items():
        counted = averaged(own, tasks, failed)
        out = [name for name, task in tasks.items() if len(task.split(split)) and name not in counted]
        if out:
            why = {name: f"{tasks[name].metrics[0]}, of which less is better" for name in out}
            why |= {name: "not scored" for name in out if f"{name}/{tasks[name].metrics[0]}" not in own}
            why |= {name: "failed" for name in out if name in failed}
            listed = ", ".join(f"{name} ({why[name]})" for name in out)
            notes.append(f"the average on {split} leaves out {listed}")
    return notes


def save_tasks(
    model: nn.Module,
    tasks: Mapping[str, Any],
    method: Method,
    backbone: Any,
    spec: Spec,
    target: Path,
    failed: Mapping[str, str] | None = None,
    metrics: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """One folder: an adapter for each task, and what predicting needs of all; with the tasks that `failed`, and why."""
    facts = {
        "format": FORMAT,
        "method": method.name,
        "model": portable(spec.model),
        "revision": spec.revision,
        "pooling": installed(model) or "own",
        "trust_remote_code": spec.trust_remote_code,
        "max_length": spec.max_length,
        "precision": spec.precision,
        "batch_size": Place.of(spec).batch_size,
        "tasks": {name: task.to_json() for name, task in tasks.items()},
        "failed": dict(failed or {}),
    }

    def own(name: str) -> dict[str, dict[str, float]]:
        start = f"{name}/"
        return {
            split: {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
            for split, found in (metrics or {}).items()
        }

    abouts = {name: About.of(backbone, task, spec.seed, own(name)) for name, task in tasks.items()}

    def fill(folder: Path) -> None:
        for name in tasks:
            attach.save(
                model,
                method,
                folder,
                adapter_name=name,
                base_model_name=backbone.address,
                fingerprint=backbone.fingerprint,
                about=abouts[name],
            )
        write_card(folder, method, abouts)
        write_sealed(folder / TASKS, facts)

    write_folder(target, fill)
