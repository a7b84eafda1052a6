"""A spec made concrete: device, precision, batches, steps, learning rate; and as the Trainer's arguments.

`batch_size` is what one update sees, whatever the number of accumulation steps and of processes: it is split among
them, so that neither changes what is learnt.

The learning rate rises over `warmup` of the updates and then falls linearly, as a cosine, or not at all. Transformers'
schedules begin at 0, which wastes the first update; ours takes the first of `warmup + 1` equal steps there.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from inlay.backbones.devices import pick_device as pick_device
from inlay.backbones.devices import pick_dtype as pick_dtype
from inlay.errors import InlayError
from inlay.methods.registry import Method
from inlay.records.spec import Spec, updates

LINES = 50  # of the training loss over time, a run
MOST_WORKERS = 8
CURVE = 10  # evaluations a run at most, where nobody asked for more and nothing hangs on them


@dataclass(frozen=True)
class Plan:
    """How a run is trained."""

    device: torch.device
    dtype: torch.dtype | None  # of the mixed precision; None for float32
    micro_batch: int
    world: int
    steps_per_epoch: int
    total_steps: int
    evaluation_steps: frozenset[int]
    learning_rate: float
    warmup_steps: int
    schedule: str
    lower_rate: str  # what to try where this learning rate is too high

    def rate_share(self, step: int) -> float:
        """The share of the learning rate that the update after `step` others takes: never 0 before the end."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        left = max(0, self.total_steps - step) / (self.total_steps - self.warmup_steps)
        if self.schedule == "cosine":
            return (1 - math.cos(math.pi * left)) / 2
        return left if self.schedule == "linear" else 1.0


def make(spec: Spec, method: Method, examples: int, kind: str | None = None, held_out: int = 0) -> Plan:
    """The plan for a training set of this many examples and a validation split of `held_out` (0: not known). `kind` is
    the model's, as `inlay.anatomy` says."""
    if examples == 0:
        raise InlayError("The training set is empty: nothing can be learnt from it. Check the data and the split.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parts = spec.gradient_accumulation * world
    epochs, batch_size = spec.amount(examples)
    if batch_size % parts:
        raise InlayError(
            f"batch_size={batch_size} cannot be split into {parts} equal parts (gradient_accumulation="
            f"{spec.gradient_accumulation} times {world} process{'es' * (world > 1)}). "
            f"Give a multiple of {parts}, for example {math.ceil(batch_size / parts) * parts}."
        )
    steps_per_epoch = math.ceil(examples / batch_size)
    total = spec.max_steps or updates(examples, epochs, batch_size)
    device = pick_device()
    learning_rate = spec.learning_rate or method.learning_rate_for(kind)
    return Plan(
        device=device,
        dtype=pick_dtype(spec.precision, device),
        micro_batch=batch_size // parts,
        world=world,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        evaluation_steps=pick_evaluation_steps(spec, steps_per_epoch, total, examples, held_out),
        learning_rate=learning_rate,
        # The shortest of runs has one update at the full rate.
        warmup_steps=min(math.ceil(spec.warmup * total), total - 1),
        schedule=spec.schedule,
        lower_rate=lower_rate(learning_rate, method),
    )


def lower_rate(learning_rate: float, method: Method) -> str:
    """A learning rate to try where this one is too high: a third, but nothing that is still far out for the method."""
    if learning_rate > max(method.grid) and method.learning_rate < learning_rate:
        return f"{method.learning_rate:.3g}, the default of {method.name}"
    return f"{learning_rate / 3:.1g}"


def pick_workers(device: torch.device, encoded: Any) -> int:
    """How many processes read ahead: none unless examples are made when they are asked for (images that do not fit
    into memory), which would keep an accelerator waiting. On a CPU the model uses all of it anyway."""
    if device.type == "cpu" or getattr(encoded, "in_memory", True):
        return 0
    return min(MOST_WORKERS, max(0, (os.cpu_count() or 1) - 1))


def pick_evaluation_steps(spec: Spec, steps_per_epoch: int, total: int, examples: int, held_out: int) -> frozenset[int]:
    """After which updates to evaluate: always after the last.

    `evaluations` asks for so many, evenly spread. Without it: after every epoch, but at most ten times, and not on more
    examples in all than are trained on, unless early stopping waits for them. Only a curve hangs on these.
    """
    if spec.evaluations is not None:
        count = min(spec.evaluations, total)
        return frozenset(math.ceil(total * i / count) for i in range(1, count + 1))
    epochs = math.ceil(total / steps_per_epoch)
    worth_it = max(1, total * examples // (steps_per_epoch * held_out)) if held_out else CURVE
    every = 1 if spec.early_stopping else math.ceil(epochs / min(CURVE, worth_it))
    return frozenset(min(total, steps_per_epoch * i) for i in (*range(every, epochs, every), epochs))


def make_arguments(plan: Plan, spec: Spec, folder: Path, workers: int = 0) -> TrainingArguments:
    """The Trainer's arguments. It neither evaluates, saves nor reports by itself: ours say when."""
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=plan.total_steps,
        per_device_train_batch_size=plan.micro_batch,
        per_device_eval_batch_size=plan.micro_batch,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=plan.learning_rate,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.clip,
        bf16=plan.dtype is torch.bfloat16,
        fp16=plan.dtype is torch.float16,
        use_cpu=plan.device.type == "cpu",
        seed=spec.seed,
        data_seed=spec.seed,
        logging_steps=max(1, plan.total_steps // LINES),
        logging_nan_inf_filter=False,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_num_workers=workers,
        dataloader_pin_memory=plan.device.type == "cuda",
    )
    made._n_gpu = min(
        made.n_gpu, 1
    )  # several GPUs are for `accelerate launch`; one process would slice batches instead
    return made
