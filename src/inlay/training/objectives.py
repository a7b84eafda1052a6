"""What a run is trained for: the model's own loss on one task; the sum over several tasks is in joint.py.

The trainer asks its objective for whatever depends on that: the loss of a micro-batch, how gradients are clipped, what
is logged, which state is the best. `fit` asks it what to attach, to encode, to score at the end and to save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import Sampler

from inlay.errors import InlayError
from inlay.methods import attach
from inlay.methods.card import About
from inlay.methods.protocol import Method, layers_of
from inlay.portrait import count_parameters
from inlay.records.atomic import write_folder
from inlay.records.spec import Spec
from inlay.tasks import Task, calibration, kinds
from inlay.tasks.kept import keep
from inlay.training.batches import Stop, count_rows, draw_part, group_by_length, is_main, settle_length
from inlay.training.evaluation import Scored, Validation, counting, score, score_timed, write
from inlay.training.packing import count_examples
from inlay.training.plan import Plan
from inlay.training.seeds import undisturbed
from inlay.training.sharding import add_up_gradients, put_together
from inlay.training.shares import Filler

if TYPE_CHECKING:
    import pyarrow as pa

    from inlay.backbones.loading import Backbone
    from inlay.training.trainer import InlayTrainer, Setup
    from inlay.training.trunk.cut import TrunkCache

Encode = Callable[[str, str], Any]  # a task's name and a split
Metrics = dict[str, dict[str, float]]  # by split and name


class Objective(ABC):
    """Tasks, by the names of their adapters, and how a model is trained on them.

    `validation` has the encoded validation splits, `watched` what of each is scored while the model is trained.
    `failed` says of several tasks which could not be trained to the end; `classes_predicted`, how many different
    classes a task's test examples were given, where an example has one; `predictions`, what was said of the rows that
    a task held out (`inlay.tasks.kept`); `calibration`, how honest a task's probabilities are before and after.
    """

    trainer: InlayTrainer
    setup: Setup

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = dict(tasks)
        self.validation: dict[str, Any] = {}
        self.watched: dict[str, Any] = {}
        self.classes_predicted: dict[str, int] = {}
        self.predictions: dict[str, pa.Table] = {}
        self.calibration: dict[str, Any] = {}

    @property
    def first(self) -> Task:
        """The first task: several that are trained together are read in the same way."""
        return next(iter(self.tasks.values()))

    # ---- before training

    @property
    @abstractmethod
    def title(self) -> str:
        """What people see of it beside the method's name."""

    def settle(
        self, settings: Mapping[str, Any], method: Method, backbone: Backbone
    ) -> tuple[Mapping[str, Any], list[str]]:
        """The method's settings, with what the tasks say; and lines for people. A method may change how a task's texts
        are encoded, as prompts have places in them."""
        notes: list[str] = []
        for name, task in self.tasks.items():
            settings, self.tasks[name], told = adapt_task(settings, method, task, backbone)
            notes += told
        return settings, notes

    @abstractmethod
    def attach(self, backbone: Backbone, method: Method, settings: Mapping[str, Any], seed: int) -> nn.Module:
        """The backbone with what the method adds for these tasks."""

    def settle_lengths(self, model: nn.Module, processor: Any, spec: Spec) -> None:
        """Write into the tasks how long a text this model reads."""
        for name, task in self.tasks.items():
            length = settle_length(model, task, processor, spec.max_length)
            self.tasks[name] = task.with_length(processor, length, model_config=model.config)

    def encode(self, encode: Encode, spec: Spec) -> Any:
        """Encode the validation splits and the training splits; the training rows."""
        train = {name: encode(name, "train") for name in self.tasks}
        held_out = [name for name, task in self.tasks.items() if len(task.validation)]
        self.validation = {name: encode(name, "validation") for name in held_out}
        self.watched = {name: draw_part(whole, spec.max_eval, spec.seed) for name, whole in self.validation.items()}
        return self.join_rows(train)

    @property
    def held_out(self) -> int:
        """How many examples an evaluation during training scores."""
        return sum(len(encoded) for encoded in self.watched.values())

    @property
    def bounded(self) -> dict[str, int]:
        """How many rows an evaluation during training scores of each validation split that it does not score whole."""
        return {name: count_rows(part) for name, part in self.watched.items() if part is not self.validation[name]}

    @abstractmethod
    def join_rows(self, parts: Mapping[str, Any]) -> Any:
        """The training rows of all tasks."""

    def collator(self, processor: Any, model: nn.Module) -> Callable[[Any], Any]:
        """What makes batches of rows."""
        return self.first.collator(processor, model)

    def check(self, spec: Spec, plan: Plan) -> Plan:
        """The plan as it can be carried out; an error where it cannot."""
        if spec.calibrate:
            check_calibration(self.first, self.validation)
        lacking = [name for name in self.tasks if name not in self.validation]
        if spec.early_stopping and lacking:
            who = "this task" if len(self.tasks) == 1 else ", ".join(lacking)
            raise InlayError(f"early_stopping needs a validation split, and {who} has none. Leave early_stopping out.")
        return plan

    @abstractmethod
    def make_sampler(self, rows: Any, seed: int, update: int, lengths: np.ndarray | None) -> Sampler[int]:
        """The order of each epoch; `update` is how many examples an update sees."""

    def begin(self, trainer: InlayTrainer) -> None:
        """Take note of the trainer, which is made by now."""
        self.trainer, self.setup = trainer, trainer.setup

    def use_trunk(self, trunk: TrunkCache) -> None:
        """Score what is held out from the trunk's kept output as well, where that is right.

        Never called on an objective whose `trunk_obstacle` gives a reason: its trunk is not kept.
        """
        raise NotImplementedError

    # ---- one update

    @abstractmethod
    def begin_update(self, batches: Sequence[dict[str, Any]], device: torch.device) -> tuple[int, Tensor | None]:
        """How many examples the update has, and how many labels, over all processes; None: that does not matter."""

    @abstractmethod
    def step(self, model: nn.Module, batch: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """Forward and backward of one micro-batch of an update with so many labels; its part of the loss."""

    def clip(self) -> Tensor | None:
        """Clip the gradients; the norm they had. None: all together, as the Trainer does."""
        return None

    def is_finite(self, norm: Tensor) -> bool:
        """Whether the update, whose gradients have this norm, can be made."""
        return True

    @abstractmethod
    def mean_parts(self, parts: Mapping[str, float], steps: int) -> dict[str, float]:
        """The parts of the loss to log, from their sums over so many updates."""

    # ---- between updates

    @abstractmethod
    def validate(self, stop: Stop) -> Scored:
        """Score what is held out."""

    @abstractmethod
    def judge(self, metrics: Mapping[str, float]) -> bool:
        """Keep what is best by these metrics, and stop what has waited too long; whether anything is better."""

    @abstractmethod
    def load_best(self) -> None:
        """Go back to the best state."""

    # ---- at the end

    @abstractmethod
    def final_metrics(self) -> Metrics:
        """The metrics of the state that is kept. On validation they are known, but for texts still to be written."""

    def keep_predictions(
        self, name: str, encoded: Any, outputs: np.ndarray | None, texts: Sequence[str] | None
    ) -> None:
        """Take note of what was said of a task's test split. The first process writes it, and the others need not."""
        if is_main() and (table := keep(self.tasks[name], encoded, outputs, texts)) is not None:
            self.predictions[name] = table

    @abstractmethod
    def save(self, target: Path, metrics: Metrics | None = None) -> None:
        """Write what was trained into a folder."""

    @abstractmethod
    def notes(self, metrics: Metrics) -> list[str]:
        """What a person should know of how it went."""

    def count_parameters(self) -> dict[str, Any]:
        """How many parameters there are, and how many were trained."""
        return count_parameters(self.setup.model)

    @property
    def failed(self) -> dict[str, str]:
        """The tasks that could not be trained to the end, and why."""
        return {}


class EpochSampler(Sampler[int]):
    """Every example once, in an order that follows from the seed and the epoch alone, and from the examples' `lengths`
    where batches of so many are to be of one length."""

    def __init__(self, length: int, seed: int, lengths: np.ndarray | None = None, batch: int = 1) -> None:
        self.length, self.seed, self.epoch = length, seed, 0
        self.lengths, self.batch = lengths, batch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        return iter(order if self.lengths is None else group_by_length(order, self.lengths, self.batch, generator))


class SingleTask(Objective):
    """The model's own loss on one task: of an update, the mean over all its labels."""

    def __init__(self, task: Task) -> None:
        super().__init__({task.name: task})
        self._update_loss: Tensor | None = None

    @property
    def title(self) -> str:
        return self.first.name

    def attach(self, backbone: Backbone, method: Method, settings: Mapping[str, Any], seed: int) -> nn.Module:
        return attach.attach(
            backbone.model,
            method,
            settings=settings,
            newly_initialised=backbone.newly_initialised,
            task_kind=self.first.kind,
        )

    def join_rows(self, parts: Mapping[str, Any]) -> Any:
        (rows,) = parts.values()
        return rows

    def make_sampler(self, rows: Any, seed: int, update: int, lengths: np.ndarray | None) -> Sampler[int]:
        return EpochSampler(len(rows), seed, lengths, update)

    def begin(self, trainer: InlayTrainer) -> None:
        super().begin(trainer)
        setup = self.setup
        self._counted = counting(setup.model, self.first.kind)
        self._with_parts = [layer for layer in layers_of(setup.model) if layer.loss_parts is not None]
        self.scoring: Validation | None = None
        for encoded in self.watched.values():
            self.scoring = Validation(setup.model, self.first, encoded, setup.collate, setup.place)

    def use_trunk(self, trunk: TrunkCache) -> None:
        if self.scoring is not None:
            self.scoring.trunk = trunk

    def begin_update(self, batches: Sequence[dict[str, Any]], device: torch.device) -> tuple[int, Tensor | None]:
        world = self.setup.plan.world
        self._update_loss = None
        examples = sum(self.count_rows(batch) for batch in batches) * world
        if len(batches) <= 1 and world == 1:
            return examples, None
        own = [self._items(batch) * (not isinstance(batch, Filler)) for batch in batches]
        total = torch.stack(own).sum().to(device)
        if world > 1:
            distributed.all_reduce(total)
        return examples, total

    def step(self, model: nn.Module, batch: dict[str, Any], items: Tensor | int | None) -> Tensor:
        trainer = self.trainer
        share: Tensor | float = 1.0
        counts = not isinstance(batch, Filler)
        with trainer.replay(trainer._prepare_inputs(batch)) as inputs:
            loss = self.compute_loss(model, inputs)
            if items is not None:
                own = self._items(inputs) * counts
                # DDP averages the processes' gradients: times their number, it is the sum that the mean over all needs.
                # Without a single label the mean is 0 / 0, and counts for nothing.
                share = own / items * self.setup.plan.world
                loss = torch.where(own > 0, loss, 0.0) * share
            trainer.accelerator.backward(loss)
        for layer in self._with_parts:
            for name, part in (layer.loss_parts or {}).items():
                trainer.add_part(name, part * share)
        detached = loss.detach()
        self._update_loss = detached if self._update_loss is None else self._update_loss + detached
        return detached

    def clip(self) -> Tensor | None:
        """What every process holds whole has the gradients of its own rows; the Trainer clips."""
        trainer = self.trainer
        if trainer.sharding is not None:
            trained = [p for p in self.setup.model.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]
            add_up_gradients(trained, trainer.args.device, 1 / self.setup.plan.world)
        return None

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The mean loss of a micro-batch."""
        loss: Tensor = model(**batch)["loss"]
        return loss

    def count_rows(self, batch: dict[str, Any]) -> int:
        """How many examples a batch has."""
        return count_examples(batch)

    def _items(self, batch: dict[str, Any]) -> Tensor:
        labels = batch.get("labels")
        if labels is None:
            return torch.tensor(self.count_rows(batch), device=next(iter(batch.values())).device)
        return self._counted(labels)

    def is_finite(self, norm: Tensor) -> bool:
        watched = self._update_loss
        assert watched is not None
        # With float16 the scaler expects gradients that overflow, and skips the update: the loss alone tells. The
        # gradients are the same in all processes, the loss is not, and all must stop or none.
        if self.setup.plan.world > 1:
            watched = watched.clone()
            distributed.all_reduce(watched)
        if self.trainer.accelerator.scaler is None:
            watched = watched + norm
        return bool(torch.isfinite(watched))

    def mean_parts(self, parts: Mapping[str, float], steps: int) -> dict[str, float]:
        return {f"{name}_loss": round(part / steps, 6) for name, part in parts.items()}

    def validate(self, stop: Stop) -> Scored:
        assert self.scoring is not None
        return self.scoring(stop)

    def judge(self, metrics: Mapping[str, float]) -> bool:
        trainer, progress = self.trainer, self.trainer.progress
        if self.setup.spec.early_stopping is None:
            return False
        value, best = metrics[f"eval_{self.first.selection_metric}"], progress.best
        if best is None or (value > best["value"] if self.first.greater_is_better() else value < best["value"]):
            progress.waited = 0
            progress.best = {
                "step": trainer.state.global_step,
                "value": value,
                "metrics": progress.validation,
                **self._write_best(),
            }
            return True
        progress.waited += 1
        if progress.waited >= self.setup.spec.early_stopping:
            progress.stopped = trainer.control.should_training_stop = True
        return False

    def _write_best(self) -> dict[str, str]:
        trainer, tensors = self.trainer, put_together(self.setup.modes.trained_tensors())
        if not trainer.args.should_save:
            return {"file": ""}
        return trainer.store.write_best(trainer.state.global_step, tensors)

    def load_best(self) -> None:
        if (best := self.trainer.progress.best) is not None:
            self.trainer.accelerator.wait_for_everyone()
            self.trainer.store.load_best(best, self.setup.modes.trained_tensors())

    def final_metrics(self) -> Metrics:
        task, setup, progress = self.first, self.setup, self.trainer.progress
        stop = self.trainer.check_interrupt
        found: Metrics = {}
        test: Any = None
        outputs: np.ndarray | None = None
        texts: Sequence[str] | None = None
        with undisturbed():
            predicts = kinds.get(task.kind).predicts
            needs_thresholds = predicts == "labels" or (predicts == "span" and task.schema.no_answer is not None)
            if self.validation and (self.bounded or needs_thresholds or setup.spec.calibrate):
                whole = self.validation[task.name]
                scored = score(setup.model, task, whole, setup.collate, setup.place, stop)
                found["validation"] = scored.metrics
                if needs_thresholds:
                    known = scored.targets if predicts == "labels" else whole
                    choose = task.with_thresholds if predicts == "labels" else task.with_no_answer
                    task = self.tasks[task.name] = choose(scored.predictions, known)
                    found["validation"] |= task.compute_metrics(scored.predictions, scored.targets, whole)
                if setup.spec.calibrate:
                    task = self.calibrate(scored)
            elif self.validation:
                found["validation"] = progress.best["metrics"] if progress.best else progress.validation
            if len(task.test):
                test = setup.encode(task.name, "test")
                scored = score_timed(
                    setup.model, lambda: score(setup.model, task, test, setup.collate, setup.place, stop)
                )
                if scored.seconds is not None:
                    progress.inference.append([scored.examples, scored.seconds])
                found["test"], outputs = scored.metrics, scored.predictions
                if self.calibration:
                    self.measure_calibration("test", scored)
                if task.kind in kinds.ONE_LABEL:
                    self.classes_predicted[task.name] = len(np.unique(scored.predictions.argmax(-1)))
            if task.generates:
                processor = setup.backbone.processor
                for split, known in found.items():
                    written = write(setup.model, task, split, processor, setup.spec, setup.place, stop)
                    found[split] = known | written.metrics
                    texts = written.predictions if split == "test" else texts
            self.keep_predictions(task.name, test, outputs, texts)
        return found

    def calibrate(self, scored: Scored) -> Task:
        """The task with the temperature that its validation rows choose."""
        task = self.tasks[self.first.name] = self.first.with_temperature(scored.predictions, scored.targets)
        self.calibration = {"temperature": task.schema.temperature}
        self.measure_calibration("validation", scored)
        return task

    def measure_calibration(self, split: str, scored: Scored) -> None:
        """Note how honest the probabilities on a split are as they were trained, and at the temperature."""
        outputs, labels = scored.predictions[:, : self.first.num_labels], scored.targets
        self.calibration[split] = {
            "rows": len(labels),
            "before": calibration.measure_calibration(outputs, labels),
            "after": calibration.measure_calibration(outputs, labels, self.calibration["temperature"]),
        }

    def save(self, target: Path, metrics: Metrics | None = None) -> None:
        setup, backbone = self.setup, self.setup.backbone
        about = About.of(backbone, self.first, setup.spec.seed, metrics)
        how: dict[str, Any] = {"base_model_name": backbone.address, "fingerprint": backbone.fingerprint, "about": about}
        how["processor"] = backbone.processor
        write_folder(target, lambda folder: attach.save(setup.model, setup.method, folder, **how))

    def notes(self, metrics: Metrics) -> list[str]:
        progress, total = self.trainer.progress, self.setup.plan.total_steps
        told = []
        if (test := self.calibration.get("test")) is not None:
            was, now = test["before"], test["after"]
            told.append(
                f"calibration on {test['rows']:,} test rows: error (ECE) {was['ece']:.3f} to {now['ece']:.3f}, "
                f"cross-entropy {was['nll']:.3f} to {now['nll']:.3f}"
            )
        if not progress.stopped or progress.best is None:
            return told
        return [
            *told,
            f"stopped at step {self.trainer.state.global_step} of {total}; best at step {progress.best['step']}",
        ]


def check_calibration(task: Task, validation: Mapping[str, Any]) -> None:
    """Refuse a calibration that cannot be made, before anything is trained."""
    if task.kind not in kinds.ONE_LABEL:
        raise InlayError(
            f"calibrate is for tasks with one class a row, and {task.name} is of kind {task.kind!r}. Leave calibrate "
            "(--calibrate) out."
        )
    if task.name not in validation:
        raise InlayError(
            f"calibrate needs rows that are held out for validation, and {task.name} has none. Leave calibrate "
            "(--calibrate) out, or bring more data."
        )


def adapt_task(
    settings: Mapping[str, Any], method: Method, task: Task, backbone: Backbone
) -> tuple[Mapping[str, Any], Task, list[str]]:
    """The settings and the task as a method needs them, and notes: see `ConfigHooks.for_task`."""
    # A task of one's own may have no schema: the method then finds the places for its prompts itself.
    schema = getattr(task, "schema", None)
    given = {**method.settings, **settings}
    settings, settled, notes = method.hooks.for_task(given, schema, backbone.processor, backbone.model)
    return settings, task if settled is None or settled == schema else task.with_schema(settled), notes
