"""Train one run: attach the method, train, return to the best, evaluate, save."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, set_seed

from inlay.anatomy import anatomy
from inlay.backbones import image_side
from inlay.errors import InlayError
from inlay.frozen import unchanging
from inlay.methods import attach
from inlay.methods.card import About
from inlay.methods.registry import Method
from inlay.portrait.memory import PeakMemory
from inlay.portrait.parameters import parameters, saved_bytes
from inlay.portrait.speed import spread
from inlay.records.atomic import write_folder, writing
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.tasks.augment import Augmentation
from inlay.training import plan as plans
from inlay.training.checkpoints import TRAINED, Checkpoints, copy_into, load_tensors, step_of
from inlay.training.display import Display
from inlay.training.evaluation import NotFinitePredictions, score, shifts_labels, write
from inlay.training.interrupts import Interrupted, Interrupts
from inlay.training.lengths import longest, outlier
from inlay.training.modes import Modes
from inlay.training.place import Place, gather
from inlay.training.precision import rounded_once
from inlay.training.progress import Journal
from inlay.training.seeds import deterministic, undisturbed
from inlay.training.trainer import InlayTrainer, NotFinite, Pace
from inlay.training.trunk import data as trunk_data
from inlay.training.trunk.data import KeptSplit
from inlay.training.trunk.rows import FILE
from inlay.training.validation import Validation, timed

CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `resumed_from` is the step at which it was taken up again, if it was; `failed`, which of
    several tasks could not be trained to the end, and why; `classes_predicted`, how many different classes the test
    examples were given, where an example has one. `tasks` are the tasks by their names as they were trained on: with
    their prompts and length in the schema, and notes on what was cut."""

    model: nn.Module
    metrics: dict[str, dict[str, float]]
    history: list[dict[str, Any]]
    portrait: dict[str, Any]
    steps: int
    resumed_from: int | None = None
    stopped_early: bool = False
    best_step: int | None = None
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    classes_predicted: int | None = None
    tasks: dict[str, Any] = field(default_factory=dict)


def fit(
    backbone: Any,
    task: Any,
    method: Method,
    spec: Spec,
    folder: Path,
    *,
    progress: bool = True,
    tensorboard: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    watchers: Sequence[TrainerCallback] = (),
    stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Adapt `backbone` to `task` by `method`, in `folder`: checkpoints on the way, `adapter/` at the end.

    Called again after any end before that (a kill, an interruption, a full disk), it goes on from the last checkpoint
    and comes to the same result, on a CPU to the bit. `progress` shows a bar or lines on stderr; `checkpoint_seconds`
    is about how much work may be lost (0: a checkpoint after every update; otherwise they never take more than 2 % of
    the time). `watchers` are called as the Trainer's own callbacks are. Where `stop` says so, the run ends as if it had
    been interrupted: with a checkpoint, at the next moment when nothing is half-done.
    """
    processor = backbone.processor
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    set_seed(spec.seed)
    modes = Modes(backbone.model, new=backbone.newly_initialised, whole=method.form == "full")
    settings, notes = _sized(spec.settings, method, task, processor)
    settings, task, told = adapt_task(settings, method, task, backbone)
    notes += told
    model = attach.attach(
        backbone.model,
        method,
        settings=settings,
        newly_initialised=backbone.newly_initialised,
        task_kind=task.kind,
    )
    modes.adapt(model)
    if spec.gradient_checkpointing:
        modes.checkpoint()
    length = longest(model, task, processor, spec.max_length)
    task = task.with_length(processor, length, model_config=model.config)
    cut: list[str] = []

    def encode(split: str, **options: Any) -> Any:
        made = task.encode(split, processor, length, model_config=model.config, **options)
        cut.extend(getattr(made, "notes", ()))
        return made

    augmented = {"augmentation": Augmentation(spec.augment, spec.seed)} if spec.augment else {}
    train = encode("train", **augmented)
    held_out = encode("validation") if len(task.validation) else ()
    kind = anatomy(model).kind if method.rates else None
    plan = plans.make(spec, method, len(train), kind, held_out=len(held_out))
    place = Place(plan.device, plan.dtype, plan.micro_batch)
    lengths = getattr(train, "lengths", None)
    if spec.group_by_length and lengths is None:
        raise InlayError("group_by_length puts texts of one length together, and these are images: leave it out.")
    collate = task.collator(processor, model)
    memory = PeakMemory(model, plan.device)
    interrupts = Interrupts(stop)
    pace = Pace()
    main = is_main()
    display = Display(f"{task.name} {method.name}", show=progress and main, log=folder / "log.txt" if main else None)
    callbacks: list[TrainerCallback] = [pace, display, *watchers]
    if tensorboard:
        callbacks.append(tensorboard_callback(folder))
    validation: Validation | None = None
    if len(task.validation):
        validation = Validation(model, task, held_out, collate, place)
    elif spec.early_stopping:
        raise InlayError("early_stopping needs a validation split, and this task has none. Leave early_stopping out.")
    trainer = InlayTrainer(
        model=model,
        args=plans.arguments(plan, spec, folder / "checkpoints", plans.pick_workers(plan.device, train)),
        collate=collate,
        train_dataset=train,
        plan=plan,
        modes=modes,
        shifted=shifts_labels(model, task.kind),
        store=Checkpoints(folder / "checkpoints", base=backbone.fingerprint),
        journal=Journal(folder / "metrics.jsonl" if main else None),
        interrupts=interrupts,
        memory=memory,
        evaluate_now=validation,
        watched=task.selection_metric,
        greater_is_better=task.greater_is_better(),
        patience=spec.early_stopping,
        checkpoint_seconds=checkpoint_seconds,
        callbacks=callbacks,
        lengths=lengths if spec.group_by_length else None,
    )
    pace.trainer = trainer
    if lengths is not None and (told_once := outlier(lengths, trainer.first_order(), plan.micro_batch)):
        notes.append(told_once)
        display.say(told_once)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise InlayError(
            "tune trains under plain data parallelism (`accelerate launch --multi_gpu`). For FSDP or DeepSpeed, attach "
            "the method with `inlay.methods.attach` and use your own Trainer."
        )
    # The first process looks and the others are told: they must not disagree.
    checkpoint = gather(trainer.store.latest() if main else None)[0]
    resumed_from = None if checkpoint is None else step_of(checkpoint)
    for line in trainer.store.news(checkpoint):
        display.say(line)
    if resumed_from is not None:
        display.say(f"resumes at step {resumed_from} of {plan.total_steps}")
    kept: KeptSplit | None = None
    # A stack that recomputes its activations itself is in train mode while it trains, and in eval mode otherwise.
    still = nullcontext() if spec.gradient_checkpointing else unchanging(model)
    with interrupts, deterministic(plan.device), rounded_once(model, plan.dtype), still:
        try:
            kept, why_not = _keep_trunk(trainer, task, train, collate, spec, place, folder, resumed_from or 0)
            if kept is not None or kinds.modality(task.kind) == "image":
                display.say(kept.says() if kept is not None else f"trunk not cached: {why_not}")
            left = sum(step > (resumed_from or 0) for step in plan.evaluation_steps)
            if kept is not None and validation is not None and left > 2:
                validation.trunk = kept.trunk
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            # Each process has its own clock, and writing takes all of them.
            if any(gather(trainer.checkpoint_is_due(last=True))):
                trainer.save()
            trainer.load_best()
            try:
                metrics, classes = _final_metrics(trainer, task, processor, spec, place, encode, collate)
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
            if main:
                _save(model, method, backbone, folder / "last-good", About.of(backbone, task, spec.seed))
            raise NotFinite(f"{error} The parameters from before are in {folder / 'last-good'}.") from error
        except NotFinitePredictions as error:
            step = _return_to_checkpoint(trainer, main)
            if step is None:
                raise
            take_off_autocast(trainer)
            modes.close()
            if main:
                _save(model, method, backbone, folder / "last-good", About.of(backbone, task, spec.seed))
            raise NotFinitePredictions(
                f"{error} The parameters after step {step}, with which they were finite, are in {folder / 'last-good'}."
            ) from error
        finally:
            if kept is not None:
                kept.close()
            display.close()
            peak = memory.stop(seen=trainer.progress.peak_memory)
    take_off_autocast(trainer)
    modes.close()
    if main:
        _save(model, method, backbone, folder / "adapter", About.of(backbone, task, spec.seed, metrics))
    trainer.accelerator.wait_for_everyone()
    best = trainer.progress.best
    if trainer.progress.stopped and best is not None:
        notes.append(f"stopped at step {trainer.state.global_step} of {plan.total_steps}; best at step {best['step']}")
        display.say(notes[-1])
    return Outcome(
        model=model,
        metrics=metrics,
        history=trainer.progress.history,
        portrait=portrait_of(trainer, plan, peak, len(train), folder / "adapter", kept, why_not),
        steps=trainer.state.global_step,
        resumed_from=resumed_from,
        stopped_early=trainer.progress.stopped,
        best_step=best["step"] if best else None,
        notes=notes,
        classes_predicted=classes,
        tasks={task.name: task.with_notes(cut)},
    )


def _sized(
    settings: Mapping[str, Any], method: Method, task: Any, processor: Any
) -> tuple[Mapping[str, Any], list[str]]:
    """A method that needs to know the size of the images is told the processor's, unless the user gave one."""
    if task.kind != kinds.IMAGES or "image_size" in settings or not method.takes("image_size"):
        return settings, []
    side = image_side(processor)
    note = f"{method.name} is made for images of {side} x {side} pixels, as the image processor gives them"
    return {**settings, "image_size": side}, [note]


def adapt_task(
    settings: Mapping[str, Any], method: Method, task: Any, backbone: Any
) -> tuple[Mapping[str, Any], Any, list[str]]:
    """The settings and the task as a method needs them, and notes. A method whose config has `for_task` is told of the
    task, the tokenizer and the model, and may change how the task's texts are encoded: prompts have places in them."""
    ask = getattr(method.config_class(), "for_task", None) if method.config else None
    schema = getattr(task, "schema", None)  # a task of one's own may have none: the method then finds places itself
    if ask is None or schema is None:
        if schema is not None and schema.prompt_tokens:
            task = task.with_schema(replace(schema, prompt_tokens=0))
        return settings, task, []
    settings, schema, notes = ask({**method.settings, **settings}, schema, backbone.processor, backbone.model)
    return settings, task.with_schema(schema), notes


def _return_to_checkpoint(trainer: InlayTrainer, main: bool) -> int | None:
    """Go back to the last checkpoint whose predictions are finite; its step, or None where there is none."""
    checkpoint = gather(trainer.store.latest() if main else None)[0]
    if checkpoint is None or trainer.evaluate_now is None:
        return None
    path = checkpoint / TRAINED
    copy_into(trainer.modes.trained_tensors(), load_tensors(path), path)
    try:
        trainer.evaluate_now(trainer.check_interrupt)
    except NotFinitePredictions:
        return None
    return step_of(checkpoint)


def _keep_trunk(
    trainer: InlayTrainer,
    task: Any,
    train: Any,
    collate: Callable[[Any], Any],
    spec: Spec,
    place: Place,
    folder: Path,
    done: int,
) -> tuple[KeptSplit | None, str | None]:
    """Let the trainer use the trunk's kept output where that is right and saves something; otherwise, why it is not."""
    (folder / FILE).unlink(missing_ok=True)  # a killed process's
    why_not = trunk_data.obstacle(spec, task.kind, train, trainer.plan, done)
    if why_not is None:
        try:
            trainer.modes.train()
            with place.autocast():
                kept = trunk_data.keep(
                    trainer.modes.model,
                    train,
                    collate,
                    batch=place.batch_size,
                    order=trainer.first_order(),
                    device=place.device,
                    folder=folder,
                    stop=trainer.check_interrupt,
                    inexact=spec.trunk_cache == "on",
                )
            trainer.use(kept)
            return kept, None
        except trunk_data.NotKept as error:
            why_not = str(error)
    if spec.trunk_cache == "on":
        raise InlayError(f"trunk_cache='on' cannot be: {why_not}. Take auto, which does without where it must.")
    return None, why_not


def take_off_autocast(trainer: InlayTrainer) -> None:
    """Undo Accelerate's wrapping of the model's forward, which it leaves behind as an attribute even when undone."""
    model = trainer.modes.model
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if getattr(model.__dict__.get("forward"), "__func__", None) is type(model).forward:
        del model.forward


def _final_metrics(
    trainer: InlayTrainer,
    task: Any,
    processor: Any,
    spec: Spec,
    place: Place,
    encode: Callable[[str], Any],
    collate: Callable[[Any], Any],
) -> tuple[dict[str, dict[str, float]], int | None]:
    """Metrics of the state that is kept, and how many classes it gives the test examples.

    On validation they are known already, but for texts still to be written.
    """
    model, progress = trainer.modes.model, trainer.progress
    found: dict[str, dict[str, float]] = {}
    classes: int | None = None
    with undisturbed():
        if len(task.validation):
            found["validation"] = progress.best["metrics"] if progress.best else progress.validation
        if len(task.test):
            test = encode("test")
            scored = timed(model, lambda: score(model, task, test, collate, place, trainer.check_interrupt))
            if scored.seconds is not None:
                progress.inference.append([scored.examples, scored.seconds])
            found["test"] = scored.metrics
            if task.kind in kinds.ONE_LABEL:
                classes = len(np.unique(scored.predictions.argmax(-1)))
        if task.generates:
            for split, known in found.items():
                written = write(model, task, split, processor, spec, place, trainer.check_interrupt)
                found[split] = known | written.metrics
    trainer.note({"final": found})
    return found, classes


def portrait_of(
    trainer: InlayTrainer,
    plan: plans.Plan,
    peak: dict[str, Any],
    examples: int,
    adapter: Path,
    kept: KeptSplit | None,
    why_not: str | None,
) -> dict[str, Any]:
    rates = trainer.speed.rates()
    epoch = spread([examples / rate for rate in rates])
    return {
        "parameters": parameters(trainer.modes.model),
        "saved_bytes": saved_bytes(adapter),
        "peak_memory": peak,
        "seconds_per_epoch": epoch,
        "train_examples_per_second": spread(rates),
        "inference_examples_per_second": spread([n / seconds for n, seconds in trainer.progress.inference]),
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type,
        "precision": str(plan.dtype or torch.float32).removeprefix("torch."),
        "processes": plan.world,
        "trunk": {"cached": False, "reason": why_not}
        if kept is None
        else kept.portrait(epoch["mean"] if epoch else None),
    }


def _save(model: nn.Module, method: Method, backbone: Any, target: Path, about: About) -> None:
    def fill(folder: Path) -> None:
        attach.save(
            model,
            method,
            folder,
            base_model_name=backbone.address,
            fingerprint=backbone.fingerprint,
            about=about,
        )

    write_folder(target, fill)


def tensorboard_callback(folder: Path) -> TrainerCallback:
    plans.check_tensorboard()
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(log_dir=str(folder / "tensorboard")) if is_main() else None)


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
