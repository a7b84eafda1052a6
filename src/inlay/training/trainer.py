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
- A method whose loss has parts is asked for them (`loss_parts` of any of the model's modules), and they are logged by
  name beside their sum.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput

from inlay.errors import InlayError
from inlay.methods.protocol import layers_of
from inlay.portrait.memory import PeakMemory
from inlay.portrait.speed import Speed
from inlay.training import checkpoints as files
from inlay.training.checkpoints import Checkpoints
from inlay.training.evaluation import NotFinitePredictions, Scored, count_items
from inlay.training.interrupts import Interrupted, Interrupts
from inlay.training.lengths import grouped
from inlay.training.modes import Modes
from inlay.training.place import Stop, gather
from inlay.training.plan import Plan
from inlay.training.progress import Journal, Progress
from inlay.training.seeds import random_state, set_random_state, undisturbed
from inlay.training.trunk.data import KeptSplit

CHECKPOINT_SHARE = 0.02  # of the time may go into writing checkpoints
FIRST_GUESS = 0.05  # seconds that a checkpoint takes, before one was written


class NotFinite(InlayError):
    """The loss or a gradient became infinite or not a number."""


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
        return iter(order if self.lengths is None else grouped(order, self.lengths, self.batch, generator))


class InlayTrainer(Trainer):
    """Trains one run. `evaluate_now` scores the validation split; the best value of the metric `watched` is kept."""

    def __init__(
        self,
        *,
        model: nn.Module,
        args: TrainingArguments,
        collate: Callable[[Any], Any],
        train_dataset: Any,
        plan: Plan,
        modes: Modes,
        shifted: bool,
        store: Checkpoints,
        journal: Journal,
        interrupts: Interrupts,
        memory: PeakMemory,
        evaluate_now: Callable[[Stop], Scored] | None,
        watched: str,
        greater_is_better: bool,
        patience: int | None,
        checkpoint_seconds: float,
        callbacks: list[TrainerCallback],
        lengths: np.ndarray | None = None,
    ) -> None:
        super().__init__(
            model=model, args=args, data_collator=collate, train_dataset=train_dataset, callbacks=callbacks
        )
        self.remove_callback(PrinterCallback)
        self.plan = plan
        self.modes = modes
        self.store = store
        self.journal = journal
        self.interrupts = interrupts
        self.memory = memory
        self.evaluate_now = evaluate_now
        self.watched = watched
        self.greater_is_better = greater_is_better
        self.patience = patience
        self.checkpoint_seconds = checkpoint_seconds
        # What a batch is turned into for the model, and how the model is run on it: see `use`.
        self.replay: Callable[[dict[str, Any]], AbstractContextManager[dict[str, Any]]] = nullcontext
        self.progress = Progress()
        self.speed = Speed(plan.total_steps)
        update = plan.micro_batch * args.gradient_accumulation_steps * plan.world
        self._sampler = EpochSampler(len(train_dataset), args.seed, lengths, update)
        self._shifted = shifted
        self._caught_up = False
        self._in_eval_mode = True
        self._stopping = False
        self._update_loss: Tensor | None = None
        self._with_parts = [layer for layer in layers_of(model) if layer.loss_parts is not None]
        self._parts: dict[str, Tensor | float] = {}
        self._parts_since = 0
        self._update_examples = 0
        self._statistics: dict[str, Tensor] = {}
        self._statistics_before: dict[str, Tensor] = {}
        self._mark = self._saved_at = time.perf_counter()
        self._save_cost = FIRST_GUESS

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

    # ---- one update

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one update, and how many labels they have together, over all processes."""
        found = list(itertools.islice(epoch_iterator, num_batches))
        self._update_loss = None
        self._statistics_before = {name: tensor.clone() for name, tensor in self._statistics.items()}
        self._update_examples = sum(_rows(batch) for batch in found) * self.plan.world
        if len(found) <= 1 and self.plan.world == 1:
            return found, None
        total = torch.stack([self._items(batch) for batch in found]).sum().to(device)
        if self.plan.world > 1:
            distributed.all_reduce(total)
        return found, total

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch."""
        if self._in_eval_mode:
            self.modes.train()
            self._in_eval_mode = False
        share: Tensor | float = 1.0
        with self.replay(self._prepare_inputs(inputs)) as inputs:
            loss = model(**inputs)["loss"]
            if num_items_in_batch is not None:
                items = self._items(inputs)
                # DDP averages the processes' gradients: times their number, it is the sum that the mean over all needs.
                # Without a single label the mean is 0 / 0, and counts for nothing.
                share = items / num_items_in_batch * self.plan.world
                loss = torch.where(items > 0, loss, 0.0) * share
            self.accelerator.backward(loss)
        for layer in self._with_parts:
            for name, part in (layer.loss_parts or {}).items():
                self._parts[name] = self._parts.get(name, 0.0) + part * share
        detached = loss.detach()
        self._update_loss = detached if self._update_loss is None else self._update_loss + detached
        return detached

    def _items(self, batch: dict[str, Any]) -> Tensor:
        labels = batch.get("labels")
        if labels is None:
            return torch.tensor(_rows(batch), device=next(iter(batch.values())).device)
        return count_items(labels, shifted=self._shifted)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        assert self._update_loss is not None
        # With float16 the scaler expects gradients that overflow, and skips the update: the loss alone tells. The
        # gradients are the same in all processes, the loss is not, and all must stop or none.
        watched = self._update_loss
        if self.plan.world > 1:
            watched = watched.clone()
            distributed.all_reduce(watched)
        if self.accelerator.scaler is None:
            watched = watched + norm
        if not torch.isfinite(watched):
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
        if hasattr(self.train_dataset, "epoch"):  # pictures that are augmented in each one anew
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
            parts = {f"{name}_loss": round(float(part) / steps, 6) for name, part in self._parts.items()}
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
        assert self.evaluate_now is not None
        self._in_eval_mode = True
        try:
            with undisturbed():
                scored = self.evaluate_now(self.check_interrupt)
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
        """Keep the best state and stop when it has not been beaten for as many evaluations as the patience."""
        if self.patience is None:
            return False
        value, best = metrics[f"eval_{self.watched}"], self.progress.best
        if best is None or (value > best["value"] if self.greater_is_better else value < best["value"]):
            self.progress.waited = 0
            self.progress.best = {
                "step": self.state.global_step,
                "value": value,
                "metrics": self.progress.validation,
                **self._write_best(),
            }
            return True
        self.progress.waited += 1
        if self.progress.waited >= self.patience:
            self.progress.stopped = self.control.should_training_stop = True
        return False

    # ---- checkpoints

    def checkpoint_is_due(self, *, last: bool = False) -> bool:
        """Often enough to lose little, seldom enough to cost little; after the last update, if it is worth it."""
        if not self.checkpoint_seconds:
            return True
        since = time.perf_counter() - self._saved_at
        return since >= max(0.0 if last else self.checkpoint_seconds, self._save_cost / CHECKPOINT_SHARE)

    def check_interrupt(self) -> None:
        """Stop here if a signal asked for it. Several processes agree between steps instead: see `Pace`."""
        if self.interrupts.wanted and self.plan.world == 1:
            raise Interrupted

    def save(self, *, evaluation_due: bool = False) -> None:
        """Write a checkpoint of this moment, which lies between two updates."""
        begin = time.perf_counter()
        self.progress.evaluation_due = evaluation_due
        self.progress.open_loss = float(self._tr_loss)
        self.progress.open_parts = {name: float(part) for name, part in self._parts.items()}
        self.progress.logged_step = self._globalstep_last_logged
        self.progress.speed = self.speed.blocks
        self.progress.peak_memory = max(self.progress.peak_memory, self.memory.now())
        randoms = gather(random_state())
        if self.args.should_save:
            scaler = self.accelerator.scaler
            self.store.write(
                self.state.global_step,
                trained=self.modes.trained_tensors(),
                optimizer=self.optimizer.state_dict(),
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

    def _write_best(self) -> dict[str, str]:
        if not self.args.should_save:
            return {"file": ""}
        return self.store.write_best(self.state.global_step, self.modes.trained_tensors())

    def load_best(self) -> None:
        """Go back to the best state."""
        if self.progress.best is None:
            return
        self.accelerator.wait_for_everyone()
        self.store.load_best(self.progress.best, self.modes.trained_tensors())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint) / files.TRAINED
        self.store.check_base(path.parent)
        files.copy_into(self.modes.trained_tensors(), files.load_tensors(path), path)
        with files.reading(path.with_name("progress.json")):
            self.progress = type(self.progress).from_json(files.load_json(path.with_name("progress.json")))
            self.speed.blocks = self.progress.speed

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder = Path(checkpoint)
            tensors = files.load_tensors(folder / files.OPTIMIZER)
            with files.reading(folder / "optimizer.json"):
                rest = files.load_json(folder / "optimizer.json")
                self.optimizer.load_state_dict(files.join_optimizer(tensors, rest))
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

    def __init__(self) -> None:
        self.trainer: InlayTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is loaded, and the Trainer has just collected what earlier runs left."""
        assert self.trainer is not None
        self.trainer._statistics = self.trainer.modes.statistics()
        self.trainer.memory.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The one place between two updates at which all of that is decided."""
        trainer = self.trainer
        assert trainer is not None
        now = time.perf_counter()
        trainer.speed.add(state.global_step, trainer._update_examples, now - trainer._mark)
        evaluate = trainer.evaluate_now is not None and state.global_step in trainer.plan.evaluation_steps
        stop, save = trainer.interrupts.wanted, trainer.checkpoint_is_due()
        if trainer.plan.world > 1:
            flags = torch.tensor([stop, save], dtype=torch.int32, device=args.device)
            distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
            stop, save = (bool(flag) for flag in flags.tolist())
        trainer._stopping = stop
        control.should_evaluate = evaluate
        control.should_save = save


def _rows(batch: dict[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)
