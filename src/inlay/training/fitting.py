"""Train one run, of one task or of several: prepare, train, conclude, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, set_seed

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.frozen import unchanging
from inlay.methods.begin import begin_from
from inlay.methods.folder import preprocessing_in
from inlay.methods.protocol import Method
from inlay.methods.targets import in_tower
from inlay.portrait import Machine, count_bytes, summarise
from inlay.records.atomic import clear_leftovers, writing
from inlay.records.spec import Spec
from inlay.tasks import Task, kinds
from inlay.tasks.images import Augmentation
from inlay.tasks.masking import MaskedTexts
from inlay.training import boards, packing
from inlay.training import plan as plans
from inlay.training import sharding as sharded
from inlay.training.batches import (
    Placement,
    count_rows,
    describe_bound,
    describe_outlier,
    gather,
    is_main,
    settle_length,
)
from inlay.training.checkpoints import TRAINED, copy_into, load_tensors, step_of
from inlay.training.evaluation import NotFinitePredictions
from inlay.training.lean_loss import lean_loss
from inlay.training.modes import Modes
from inlay.training.objectives import Metrics, Objective, SingleTask
from inlay.training.progress import Display, Interrupted, Interrupts
from inlay.training.seeds import deterministic
from inlay.training.sharding import whole_state
from inlay.training.trainer import InlayTrainer, NotFinite, Setup

if TYPE_CHECKING:
    import pyarrow as pa

    from inlay.backbones.loading import Backbone
    from inlay.training.trunk.data import KeptSplit

CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class FitOptions:
    """How a run is watched while it is trained; nothing of this changes what it learns.

    `progress` shows a bar or lines on stderr; `log_to` names where metrics go too (boards.py); `checkpoint_seconds` is
    about how much work may be lost (0: a checkpoint after every update; otherwise they never take more than 2 % of the
    time). `watchers` are called as the Trainer's own callbacks are. Where `stop` says so, the run ends as if it had
    been interrupted: with a checkpoint, at the next moment when nothing is half-done. `recompute` is a line for people:
    why activations are computed again where the spec leaves it open; they are where the model and the method allow it.
    """

    progress: bool = True
    log_to: Sequence[str] = ()
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    watchers: Sequence[TrainerCallback] = ()
    stop: Callable[[], bool] | None = None
    recompute: str | None = None


@dataclass(frozen=True)
class FitResult:
    """What a run came to. `tasks` are its tasks as they were trained on, by the names of their adapters.

    `resumed_from` is the step at which it was taken up again, if it was; `failed`, which of several tasks could not be
    trained to the end, and why; `classes_predicted`, how many different classes a task's test examples were given,
    where an example has one; `evaluated_rows`, how many rows of a task's validation split an evaluation during
    training scored, where that was not all; `predictions`, what was said of the rows that were held out, a table for
    each task; `calibration`, its temperature and what that changes, where it was asked for.
    """

    model: nn.Module
    tasks: dict[str, Task]
    metrics: Metrics
    history: list[dict[str, Any]]
    portrait: dict[str, Any]
    steps: int
    resumed_from: int | None = None
    stopped_early: bool = False
    best_step: int | None = None
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    classes_predicted: dict[str, int] = field(default_factory=dict)
    evaluated_rows: dict[str, int] = field(default_factory=dict)
    predictions: dict[str, pa.Table] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)


def fit(
    backbone: Backbone,
    objective: Objective | Task,
    method: Method,
    spec: Spec,
    folder: Path,
    options: FitOptions | None = None,
) -> FitResult:
    """Adapt `backbone` by `method`, in `folder`: checkpoints on the way, `adapter/` at the end.

    A task alone is trained by the model's own loss; `inlay.training.joint.SeveralTasks` trains several together. Called
    again after any end before that (a kill, an interruption, a full disk), it goes on from the last checkpoint and
    comes to the same result, on a CPU to the bit.
    """
    options = options or FitOptions()
    objective = objective if isinstance(objective, Objective) else SingleTask(objective)
    run = prepare(backbone, objective, method, spec, folder, options)
    with run.guard():
        run.train()
        metrics = run.conclude()
    return run.save(metrics)


def prepare(
    backbone: Backbone, objective: Objective, method: Method, spec: Spec, folder: Path, options: FitOptions
) -> Fit:
    """Attach the method, encode the data, plan the training and make the trainer."""
    sharding = sharded.asked(spec)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    set_seed(spec.seed)
    modes = Modes(backbone.model, new=backbone.newly_initialised, whole=method.form == "full")
    settings, notes = objective.settle(spec.settings, method, backbone)
    settings = in_tower(backbone.model, method, settings, spec.towers)
    model = objective.attach(backbone, method, settings, spec.seed)
    if spec.init_adapter is not None:
        begin_from(model, method, spec.init_adapter)
        notes.append(f"begins with the adapter in {spec.init_adapter}; the head is new")
    modes.adapt(model)
    recompute = (
        options.recompute if spec.gradient_checkpointing is None and modes.why_not_checkpoint() is None else None
    )
    if spec.gradient_checkpointing or recompute:
        modes.checkpoint()
    objective.settle_lengths(model, backbone.processor, spec)
    if spec.pack:
        packing.check(objective.first, method, model)
    encode = partial(encode_split, objective, model=model, processor=backbone.processor, spec=spec)
    rows = objective.encode(encode, spec)
    kind = anatomy(model).kind if method.rates else None
    plan = objective.check(spec, plans.make(spec, method, len(rows), kind, held_out=objective.held_out))
    lengths = getattr(rows, "lengths", None)
    if spec.group_by_length and lengths is None:
        raise InlayError("group_by_length puts texts of one length together, and these are images: leave it out.")
    setup = Setup(
        backbone=backbone,
        method=method,
        spec=spec,
        folder=folder,
        model=model,
        modes=modes,
        encode=encode,
        rows=rows,
        collate=objective.collator(backbone.processor, model),
        lengths=lengths if spec.group_by_length else None,
        plan=plan,
        place=Placement(plan.device, plan.dtype, plan.micro_batch),
        interrupts=Interrupts(options.stop),
        checkpoint_seconds=options.checkpoint_seconds,
        pack=packing.collator(objective.first, backbone.processor) if spec.pack else None,
        sharding=sharding,
    )
    show = options.progress and is_main()
    display = Display(f"{objective.title} {method.name}", show=show, log=folder / "log.txt" if is_main() else None)
    trainer = InlayTrainer(setup, objective, [display, *options.watchers, *boards.make(options.log_to, spec, folder)])
    if lengths is not None and (told := describe_batches(trainer, lengths)):
        notes.append(told)
        display.say(told)
    if recompute:
        display.say(recompute)
        notes += [] if show else [recompute]
    for name, count in objective.bounded.items():
        told = describe_bound(name if len(objective.tasks) > 1 else "", count, count_rows(objective.validation[name]))
        display.say(told)
        if not show:
            notes.append(told)
    return Fit(setup, objective, trainer, display, notes)


def describe_batches(trainer: InlayTrainer, lengths: np.ndarray) -> str | None:
    """What to say of the sizes of the batches: what packing saves, or that a single text makes its batch large."""
    pack, batch, order = trainer.setup.pack, trainer.plan.micro_batch, trainer.first_order()
    if pack is None:
        return describe_outlier(lengths, order, batch)
    return str(packing.measure(lengths, order, batch, pack.limit))


def encode_split(objective: Objective, name: str, split: str, *, model: Any, processor: Any, spec: Spec) -> Any:
    """A split of a task as the model reads it; the task takes note of what was cut."""
    task = objective.tasks[name]
    length = settle_length(model, task, processor, spec.max_length)
    augmented = {"augmentation": Augmentation(spec.augment, spec.seed)} if spec.augment and split == "train" else {}
    encoded = task.encode(split, processor, length, model_config=model.config, **augmented)
    if isinstance(encoded, MaskedTexts) and split == "train":
        encoded.seed = spec.seed
    objective.tasks[name] = task.with_notes(getattr(encoded, "notes", ()))
    return encoded


class Fit:
    """A prepared run on its way from its first update, or its last checkpoint, to its result."""

    def __init__(
        self, setup: Setup, objective: Objective, trainer: InlayTrainer, display: Display, notes: list[str]
    ) -> None:
        self.setup, self.objective, self.trainer, self.display, self.notes = setup, objective, trainer, display, notes
        # The first process looks and the others are told: they must not disagree.
        self.checkpoint: Path | None = gather(trainer.store.latest() if is_main() else None)[0]
        self.resumed_from = None if self.checkpoint is None else step_of(self.checkpoint)
        self.kept: KeptSplit | None = None
        self.why_not: str | None = None
        self.check_seconds: float | None = None
        self.peak: dict[str, Any] = {}
        self.machine = Machine()
        for line in trainer.store.news(self.checkpoint):
            display.say(line)
        if self.resumed_from is not None:
            display.say(f"resumes at step {self.resumed_from} of {setup.plan.total_steps}")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Inside, signals are noted, kernels are deterministic and frozen weights are rounded once. Whatever ends the
        training early leaves what can be used of it."""
        setup, trainer, display = self.setup, self.trainer, self.display
        with ExitStack() as stack:
            stack.enter_context(setup.interrupts)
            stack.enter_context(deterministic(setup.plan.device))
            if trainer.sharding is None:  # a head in parts is whole only while the model runs it
                stack.enter_context(lean_loss(setup.model))
            if setup.plan.dtype is not None:
                from inlay.training.precision import rounded_once

                for_good = setup.sharding is not None
                stack.enter_context(rounded_once(setup.model, setup.plan.dtype, for_good=for_good))
            if setup.sharding is not None:
                setup.sharding.divide(setup.model, setup.plan.device, whole=setup.method.form == "full")
            # A stack that recomputes its activations itself is in train mode while it trains, and in eval mode
            # otherwise.
            if not setup.modes.checkpoints:
                stack.enter_context(unchanging(setup.model))
            try:
                yield
            except Interrupted:
                done, total = trainer.state.global_step, setup.plan.total_steps
                display.say(f"stopped at step {done} of {total}; the same command resumes it")
                raise
            except NotFinite as error:
                raise NotFinite(f"{error} The parameters from before are in {self.save_last_good()}.") from error
            except NotFinitePredictions as error:
                step = self.return_to_checkpoint()
                if step is None:
                    raise
                raise NotFinitePredictions(
                    f"{error} The parameters after step {step}, with which they were finite, are in "
                    f"{self.save_last_good()}."
                ) from error
            except RuntimeError as error:
                if not sharded.is_alone(error):
                    raise
                raise sharded.Alone(
                    f"Another of the {setup.plan.world} processes of this run has ended, and the others cannot go on "
                    "without it: see what it said. The same command resumes the run."
                ) from error
            finally:
                if self.kept is not None:
                    self.kept.close()
                display.close()
                self.peak = trainer.memory.stop(seen=trainer.progress.peak_memory)

    def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the end; from the trunk's kept output where that is
        right and saves something."""
        trainer, done = self.trainer, self.resumed_from or 0
        self.kept, self.why_not, self.check_seconds = keep_trunk(trainer, done)
        if self.kept is not None or kinds.modality(self.objective.first.kind) == "image":
            self.display.say(self.kept.says() if self.kept is not None else f"trunk not cached: {self.why_not}")
        left = sum(step > done for step in self.setup.plan.evaluation_steps)
        if self.kept is not None and left > 2:
            self.objective.use_trunk(self.kept.trunk)
        trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        # Each process has its own clock, and writing takes all of them.
        if any(gather(trainer.checkpoint_is_due(last=True))):
            trainer.save()

    def conclude(self) -> Metrics:
        """Go back to the best state and score it."""
        self.objective.load_best()
        try:
            metrics = self.objective.final_metrics()
        except Interrupted:
            self.trainer.save()
            raise
        self.trainer.note({"final": metrics})
        return metrics

    def save(self, metrics: Metrics) -> FitResult:
        """Write the adapter, and say what the run came to."""
        trainer, progress, objective = self.trainer, self.trainer.progress, self.objective
        adapter = self.setup.folder / "adapter"
        self.write(adapter, metrics)
        trainer.accelerator.wait_for_everyone()
        for note in objective.notes(metrics):
            self.notes.append(note)
            self.display.say(note)
        return FitResult(
            model=self.setup.model,
            tasks=objective.tasks,
            metrics=metrics,
            history=progress.history,
            portrait=self.make_portrait(adapter),
            steps=trainer.state.global_step,
            resumed_from=self.resumed_from,
            stopped_early=progress.stopped,
            best_step=progress.best["step"] if progress.best else None,
            notes=self.notes,
            failed=objective.failed,
            classes_predicted=objective.classes_predicted,
            evaluated_rows=objective.bounded,
            predictions=objective.predictions,
            calibration=objective.calibration,
        )

    def make_portrait(self, adapter: Path) -> dict[str, Any]:
        """What the run cost."""
        plan, blocks = self.setup.plan, list(self.trainer.speed.blocks.values())
        epoch = summarise(blocks, rows=len(self.setup.rows))
        mean = epoch["mean"] if epoch else None
        return {
            "parameters": self.objective.count_parameters(),
            "saved_bytes": count_bytes(adapter, but=preprocessing_in(adapter)),
            "peak_memory": self.peak,
            "seconds_per_epoch": epoch,
            "train_examples_per_second": summarise(blocks),
            "inference_examples_per_second": summarise(self.trainer.progress.inference),
            "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type,
            "precision": str(plan.dtype or torch.float32).removeprefix("torch."),
            "gradient_checkpointing": self.setup.modes.checkpoints,
            "processes": plan.world,
            "machine": self.machine.portrait(),
            "trunk": ({"cached": False, "reason": self.why_not} if self.kept is None else self.kept.portrait(mean))
            | ({} if self.check_seconds is None else {"check_seconds": self.check_seconds}),
        }

    def leave_training(self) -> None:
        """Leave the model as it is used after training: without Accelerate's wrapping of its forward, which stays
        behind as an attribute even when undone, and in eval mode."""
        model = self.setup.model
        self.trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        if getattr(model.__dict__.get("forward"), "__func__", None) is type(model).forward:
            del model.forward
        self.setup.modes.close()

    def save_last_good(self) -> Path:
        """Write the parameters as they are now into `last-good`."""
        target = self.setup.folder / "last-good"
        self.write(target)
        return target

    def write(self, target: Path, metrics: Metrics | None = None) -> None:
        """Leave training, and let the first process write what was trained."""
        self.leave_training()
        with whole_state(self.setup.model) if self.setup.method.form == "full" else nullcontext():
            if is_main():
                self.objective.save(target, metrics)

    def return_to_checkpoint(self) -> int | None:
        """Go back to the last checkpoint if its predictions are finite; its step, or None where there is none."""
        trainer = self.trainer
        checkpoint = gather(trainer.store.latest() if is_main() else None)[0]
        if checkpoint is None or not self.objective.validation:
            return None
        path = checkpoint / TRAINED
        copy_into(self.setup.modes.trained_tensors(), load_tensors(path), path)
        try:
            self.objective.validate(trainer.check_interrupt)
        except NotFinitePredictions:
            return None
        return step_of(checkpoint)


def keep_trunk(trainer: InlayTrainer, done: int) -> tuple[KeptSplit | None, str | None, float | None]:
    """Let the trainer use the trunk's kept output where that is right and saves something; otherwise, why it is not.
    And the seconds that finding this out took beside computing the output; None where it took no look at the model."""
    spent = None
    setup, place = trainer.setup, trainer.setup.place
    wanted = setup.spec.trunk_cache == "on"
    if is_main():
        clear_leftovers(setup.folder)  # the rows of a killed process
    why_not = find_obstacle(setup, trainer.objective, done)
    if why_not is None:
        from inlay.training.trunk.data import NotKept, keep

        began = time.perf_counter()
        try:
            setup.modes.train()
            with place.autocast():
                kept = keep(
                    setup.model,
                    setup.rows,
                    setup.collate,
                    place=place,
                    order=trainer.first_order(),
                    folder=setup.folder,
                    stop=trainer.check_interrupt,
                    passes=None if wanted else (setup.plan.total_steps - done) / setup.plan.steps_per_epoch - 1,
                )
            trainer.use(kept)
            return kept, None, time.perf_counter() - began - kept.seconds
        except NotKept as error:
            why_not, spent = str(error), time.perf_counter() - began
    if wanted:
        raise InlayError(f"trunk_cache='on' cannot be: {why_not}. Take auto, which does without where it must.")
    return None, why_not, spent


def find_obstacle(setup: Setup, objective: Objective, done: int) -> str | None:
    """Why the trunk's output is not kept, where that can be said without looking at the model."""
    if setup.spec.trunk_cache == "off":
        return "it was switched off"
    if len(objective.tasks) > 1:
        return "several tasks are trained"
    if kinds.get(objective.first.kind).has_captions:
        return "texts are read beside the images, and their number is not that of the images"
    if kinds.modality(objective.first.kind) != "image":
        return "texts are padded to the longest of their batch, which changes from epoch to epoch"
    if not getattr(setup.rows, "deterministic", True):
        return "the images are augmented, so that they differ from epoch to epoch"
    if setup.plan.world > 1:
        return "several processes share the data"
    if setup.plan.total_steps - done <= setup.plan.steps_per_epoch:
        return "no example would be read a second time"
    return None
