"""Transformers' Trainer, made exact where it is not: loss, modes, checkpoints, interruption.

- The loss of an update is the mean over all its labels, however many micro-batches and processes it is split into: each
  part's mean counts by its share of the labels. The stock Trainer multiplies a classification loss by the number of
  accumulation steps.
- Frozen modules stay in eval mode: see modes.py.
- Evaluation leaves the random state alone, so that its frequency does not change training.
- Checkpoints hold what is trained, without pickle, and the sums that are still open: see checkpoints.py. Resumed, a run
  goes on as if nothing had happened.
- A loss or gradient that is not finite ends the run before it reaches the parameters, and what its forward passes did
  to the statistics of batch norms is undone.
- The first update is not wasted on a learning rate of 0: see plan.py.
- What is trained for, one task or several, is its objective: see objectives.py. Parts of the loss are logged by name
  beside their sum.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput, seed_worker

from inlay.backbones.quantised import as_adapted
from inlay.errors import InlayError
from inlay.portrait import PeakMemory, Speed
from inlay.training import checkpoints as files
from inlay.training.batches import Placement, gather, is_main, mean_of_all
from inlay.training.checkpoints import Checkpoints
from inlay.training.evaluation import NotFinitePredictions
from inlay.training.modes import Modes
from inlay.training.objectives import Objective
from inlay.training.packing import PackedCollator
from inlay.training.plan import Plan, make_arguments, pick_workers
from inlay.training.progress import Interrupted, Interrupts, Journal, Progress
from inlay.training.seeds import random_state, set_random_state, undisturbed
from inlay.training.sharding import Sharding, average, hidden, load_state, put_together, state_of, whole
from inlay.training.shares import FillerCollator, ProcessShare, WithFillers

if TYPE_CHECKING:
    from inlay.backbones.loading import Backbone
    from inlay.methods.protocol import Method
    from inlay.records.spec import Spec
    from inlay.training.trunk.data import KeptSplit

CHECKPOINT_SHARE = 0.02  # of the time may go into writing checkpoints
FIRST_GUESS = 0.05  # seconds that a checkpoint takes, before one was written


class NotFinite(InlayError):
    """The loss or a gradient became infinite or not a number."""


@dataclass(frozen=True)
class Setup:
    """A run that is ready to be trained: the adapted model, its data as it reads them, and how it is trained.

    `encode` encodes a split of a task, by its name, for this model. `collate` makes batches of rows, `pack` training
    batches in which rows are shared, where they are to be. `lengths` are those of the training texts, where batches are
    to be of one length. `checkpoint_seconds` is about how much work may be lost. `sharding` divides the model among the
    processes.
    """

    backbone: Backbone
    method: Method
    spec: Spec
    folder: Path
    model: nn.Module
    modes: Modes
    encode: Callable[[str, str], Any]
    rows: Any
    collate: Callable[[Any], Any]
    lengths: np.ndarray | None
    plan: Plan
    place: Placement
    interrupts: Interrupts
    checkpoint_seconds: float
    pack: PackedCollator | None = None
    sharding: Sharding | None = None


class InlayTrainer(Trainer):
    """Trains one run for its objective: see objectives.py."""

    def __init__(self, setup: Setup, objective: Objective, callbacks: Sequence[TrainerCallback]) -> None:
        plan, folder = setup.plan, setup.folder
        self.sharding = setup.sharding
        with as_adapted(setup.model), hidden():
            super().__init__(
                model=setup.model,
                args=make_arguments(plan, setup.spec, folder / "checkpoints", pick_workers(plan.device, setup.rows)),
                data_collator=setup.pack or setup.collate,
                train_dataset=setup.rows,
                callbacks=[Pace(self), *callbacks],
            )
        self.remove_callback(PrinterCallback)
        # The Trainer's own word for a model that lies in parts when training begins: it wraps it in nothing.
        self.is_distributed_loading_by_transformers = self.sharding is not None
        self.setup, self.objective = setup, objective
        self.plan, self.modes, self.interrupts = plan, setup.modes, setup.interrupts
        self.store = Checkpoints(folder / "checkpoints", base=setup.backbone.fingerprint)
        self.journal = Journal(folder / "metrics.jsonl" if is_main() else None)
        self.memory = PeakMemory(setup.model, plan.device)
        # What a batch is turned into for the model, and how the model is run on it: see `use`.
        self.replay: Callable[[dict[str, Any]], AbstractContextManager[dict[str, Any]]] = nullcontext
        self.progress = Progress()
        self.speed = Speed(plan.total_steps)
        update = plan.micro_batch * self.args.gradient_accumulation_steps * plan.world
        self._sampler: Any = objective.make_sampler(setup.rows, self.args.seed, update, setup.lengths)
        self._caught_up = False
        self._in_eval_mode = True
        self._stopping = False
        self._parts: dict[str, Tensor | float] = {}
        self._parts_since = 0
        self._update_examples = 0
        self._statistics: dict[str, Tensor] = {}
        self._statistics_before: dict[str, Tensor] = {}
        self._mark = self._saved_at = time.perf_counter()
        self._save_cost = FIRST_GUESS
        objective.begin(self)

    def use(self, kept: KeptSplit) -> None:
        """Train from the trunk's kept output instead of the data themselves; before `train`."""
        self.train_dataset, self.data_collator, self.replay = kept, kept.collate, kept.replay
        self.args.dataloader_num_workers = 0
        assert kept.rows is not None
        if kept.rows.where == "memory":
            self.memory.kept.append(kept.rows.kept)

    def first_order(self) -> list[int]:
        """The examples in the order of the first epoch."""
        sampler = copy.copy(self._sampler)
        sampler.epoch = 0
        return list(sampler)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches of an epoch. Several processes share them so that no row comes twice: see shares.py."""
        if self.plan.world == 1:
            return super().get_train_dataloader()
        workers = self.args.dataloader_num_workers
        return DataLoader(
            WithFillers(self.train_dataset),
            batch_sampler=ProcessShare(self._sampler, self.plan.micro_batch, self.args.process_index, self.plan.world),
            collate_fn=FillerCollator(self.data_collator),
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=self.args.process_index),
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.sharding is None:
            super()._move_model_to_device(model, device)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Not here: all processes begin with the same parameters, and gradients are added up once an update."""

    # ---- one update

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one update, and how many labels they have together, over all processes."""
        found = list(itertools.islice(epoch_iterator, num_batches))
        self._statistics_before = {name: tensor.clone() for name, tensor in self._statistics.items()}
        self._update_examples, total = self.objective.begin_update(found, device)
        return found, total

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch."""
        if self._in_eval_mode:
            self.modes.train()
            self._in_eval_mode = False
        return self.objective.step(model, inputs, num_items_in_batch)

    def add_part(self, name: str, value: Tensor | float) -> None:
        """Add to what is logged of a part of the loss."""
        self._parts[name] = self._parts.get(name, 0.0) + value

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._statistics and self.plan.world > 1:
            average(self._statistics.values())
        norm = self.objective.clip()
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = whole(super()._get_grad_norm(model, grad_norm))
        if not self.objective.is_finite(norm):
            for name, before in self._statistics_before.items():
                self._statistics[name].copy_(before)
            raise NotFinite(
                f"The loss or its gradient is not a finite number at step {self.state.global_step + 1} of "
                f"{self.state.max_steps}, at a learning rate of {self._get_learning_rate():.3g}. Try a "
                f"lower learning rate, for example {self.plan.lower_rate}"
                + (", or precision float32." if self.plan.dtype else ".")
            )
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """The plan's learning rate over time."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.plan.rate_share)
        return self.lr_scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the stock estimate walks over all parameters at every step."""
        return 0

    # ---- between updates

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        evaluation_due = self.control.should_evaluate
        if self._stopping:
            self.control.should_evaluate = self.control.should_save = False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._stopping:
            self.save(evaluation_due=evaluation_due)
            raise Interrupted
        self._mark = time.perf_counter()

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._catch_up()
        if self.progress.stopped or self.state.global_step >= self.state.max_steps:
            # Resumed after the last update: the stock loop would do one more.
            self.control.should_training_stop = True
            return
        self._sampler.epoch = kwargs["epoch"]
        if hasattr(self.train_dataset, "epoch"):  # images that are augmented in each one anew
            self.train_dataset.epoch = kwargs["epoch"]
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._catch_up()
        self.modes.model.eval()
        return super()._finalize_training(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put the training loss over time into the history; the summary of the end is ours to write."""
        if "loss" in logs:
            steps = max(1, self.state.global_step - self._parts_since)
            parts = self.objective.mean_parts(mean_of_all(self._parts), steps)
            self._parts, self._parts_since = {}, self.state.global_step
            logs |= parts
            kept = ("loss", *parts, "learning_rate", "grad_norm")
            self.note({name: logs[name] for name in kept if name in logs})
            self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def note(self, entry: dict[str, Any]) -> None:
        """Add to the history and the journal."""
        whole = {"step": self.state.global_step, "epoch": round(self.state.epoch or 0.0, 6), **entry}
        self.progress.history.append(whole)
        self.journal.add(whole)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the validation split; an interruption leaves a checkpoint that begins with this evaluation."""
        self._in_eval_mode = True
        try:
            with undisturbed():
                scored = self.objective.validate(self.check_interrupt)
        except Interrupted:
            self.save(evaluation_due=True)
            raise
        except NotFinitePredictions as error:
            # The loss of the last update was still finite, and the update itself was not good: see `fit` for what is
            # kept.
            raise NotFinitePredictions(
                f"{error} This was seen after step {self.state.global_step} of {self.state.max_steps}, at a learning "
                f"rate of {self.plan.learning_rate:.3g}. Try a lower one, for example {self.plan.lower_rate}"
                + (", or precision float32." if self.plan.dtype else ".")
            ) from None
        self.progress.validation = scored.metrics
        if scored.seconds is not None:
            self.progress.inference.append([scored.examples, scored.seconds])
        self.note({"validation": scored.metrics})
        metrics = {f"eval_{name}": value for name, value in scored.metrics.items()}
        self.callback_handler.on_log(self.args, self.state, self.control, metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        return self.objective.judge(metrics)

    # ---- checkpoints

    def checkpoint_is_due(self, *, last: bool = False) -> bool:
        """Often enough to lose little, seldom enough to cost little; after the last update, if it is worth it."""
        if not self.setup.checkpoint_seconds:
            return True
        since = time.perf_counter() - self._saved_at
        return since >= max(0.0 if last else self.setup.checkpoint_seconds, self._save_cost / CHECKPOINT_SHARE)

    def check_interrupt(self) -> None:
        """Stop here if a signal asked for it. Several processes agree between steps instead: see `Pace`."""
        if self.interrupts.wanted and self.plan.world == 1:
            raise Interrupted

    def save(self, *, evaluation_due: bool = False) -> None:
        """Write a checkpoint of this moment, which lies between two updates."""
        begin = time.perf_counter()
        self.progress.evaluation_due = evaluation_due
        # Of all processes: however many go on from here, what they log is the mean of what each has.
        self.progress.open_loss = mean_of_all({"loss": self._tr_loss})["loss"]
        self.progress.open_parts = mean_of_all(self._parts)
        self.progress.logged_step = self._globalstep_last_logged
        self.progress.speed = self.speed.blocks
        self.progress.peak_memory = max(self.progress.peak_memory, self.memory.now())
        randoms = gather(random_state())
        trained, optimizer = put_together(self.modes.trained_tensors()), state_of(self.optimizer)
        if self.args.should_save:
            scaler = self.accelerator.scaler
            self.store.write(
                self.state.global_step,
                trained=trained,
                optimizer=optimizer,
                plain={
                    "scheduler": self.lr_scheduler.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "random": randoms,
                    "progress": self.progress.to_json(),
                },
                state=self.state,
            )
        self.accelerator.wait_for_everyone()
        self._saved_at = time.perf_counter()
        self._save_cost = self._saved_at - begin

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint) / files.TRAINED
        self.store.check_base(path.parent)
        files.copy_into(self.modes.trained_tensors(), files.load_tensors(path), path)
        with files.reading(path.with_name("progress.json")):
            self.progress = Progress.from_json(files.load_json(path.with_name("progress.json")))
            self.speed.blocks = self.progress.speed

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder = Path(checkpoint)
            tensors = files.load_tensors(folder / files.OPTIMIZER)
            with files.reading(folder / "optimizer.json"):
                rest = files.load_json(folder / "optimizer.json")
                load_state(self.optimizer, files.join_optimizer(tensors, rest))
            with files.reading(folder / "scheduler.json"):
                self.lr_scheduler.load_state_dict(files.load_json(folder / "scheduler.json"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.scaler is not None:
            path = Path(checkpoint) / "scaler.json"
            with files.reading(path):
                self.accelerator.scaler.load_state_dict(files.load_json(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            path = Path(checkpoint) / "random.json"
            with files.reading(path):
                states = files.load_json(path)
                if self.args.process_index < len(states):
                    set_random_state(states[self.args.process_index])

    def _catch_up(self) -> None:
        """Take up, once, what was open when the checkpoint was written: the running loss, a missed evaluation."""
        if self._caught_up:
            return
        self._caught_up = True
        self._mark = self._saved_at = time.perf_counter()
        self.journal.restart(self.progress.history)
        self._tr_loss += self.progress.open_loss
        self._parts = dict(self.progress.open_parts)
        self._parts_since = self._globalstep_last_logged = self.progress.logged_step
        if self.progress.evaluation_due:
            self.progress.evaluation_due = False
            self._determine_best_metric(self.evaluate())


class Pace(TrainerCallback):
    """After every update: count the time, and say whether to evaluate, to save, or to stop."""

    def __init__(self, trainer: InlayTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is loaded, and the Trainer has just collected what earlier runs left."""
        self.trainer._statistics = self.trainer.modes.statistics()
        self.trainer.memory.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The one place between two updates at which all of that is decided."""
        trainer = self.trainer
        now = time.perf_counter()
        trainer.speed.add(state.global_step, trainer._update_examples, now - trainer._mark)
        evaluate = bool(trainer.objective.validation) and state.global_step in trainer.plan.evaluation_steps
        stop, save = trainer.interrupts.wanted, trainer.checkpoint_is_due()
        if trainer.plan.world > 1:
            flags = torch.tensor([stop, save], dtype=torch.int32, device=args.device)
            distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
            stop, save = (bool(flag) for flag in flags.tolist())
        trainer._stopping = stop
        control.should_evaluate = evaluate
        control.should_save = save
