"""A spec made concrete: device, precision, batches, steps, learning rate; and as the Trainer's arguments.

`batch_size` is what one update sees, whatever the number of accumulation steps and of processes: it is split among
them, so that neither changes what is learnt.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from inlay.errors import InlayError
from inlay.methods.registry import Method
from inlay.records.spec import Spec

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


def make(spec: Spec, method: Method, examples: int) -> Plan:
    """The plan for a training set of this many examples."""
    if examples == 0:
        raise InlayError("The training set is empty: nothing can be learnt from it. Check the data and the split.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parts = spec.gradient_accumulation * world
    if spec.batch_size % parts:
        raise InlayError(
            f"batch_size={spec.batch_size} cannot be split into {parts} equal parts (gradient_accumulation="
            f"{spec.gradient_accumulation} times {world} process{'es' * (world > 1)}). "
            f"Give a multiple of {parts}, for example {math.ceil(spec.batch_size / parts) * parts}."
        )
    steps_per_epoch = math.ceil(examples / spec.batch_size)
    total = spec.max_steps or max(1, math.ceil(spec.epochs * steps_per_epoch))
    device = pick_device()
    return Plan(
        device=device,
        dtype=pick_dtype(spec.precision, device),
        micro_batch=spec.batch_size // parts,
        world=world,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        evaluation_steps=evaluation_steps(spec, steps_per_epoch, total),
        learning_rate=spec.learning_rate or method.learning_rate,
    )


def pick_device() -> torch.device:
    """This process's accelerator, or the CPU."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type for mixed precision: on CUDA bfloat16, or float16 where that is missing; elsewhere only if asked for."""
    if precision == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if precision == "float16" and device.type != "cuda":
        raise InlayError(f"precision='float16' needs a CUDA device, and this is {device.type}. Use auto or bfloat16.")
    return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def pick_workers(device: torch.device, encoded: Any) -> int:
    """How many processes read ahead: none unless examples are made when they are asked for (pictures that do not fit
    into memory), which would keep an accelerator waiting. On a CPU the model uses all of it anyway."""
    if device.type == "cpu" or getattr(encoded, "in_memory", True):
        return 0
    return min(MOST_WORKERS, max(0, (os.cpu_count() or 1) - 1))


def evaluation_steps(spec: Spec, steps_per_epoch: int, total: int) -> frozenset[int]:
    """After which updates to evaluate: always after the last.

    `evaluations` asks for so many, evenly spread. Without it: after every epoch, but at most ten times unless early
    stopping waits for them.
    """
    if spec.evaluations is not None:
        count = min(spec.evaluations, total)
        return frozenset(math.ceil(total * i / count) for i in range(1, count + 1))
    epochs = math.ceil(total / steps_per_epoch)
    every = 1 if spec.early_stopping else math.ceil(epochs / CURVE)
    return frozenset(min(total, steps_per_epoch * i) for i in (*range(every, epochs, every), epochs))


def arguments(plan: Plan, spec: Spec, folder: Path, workers: int = 0) -> TrainingArguments:
    """The Trainer's arguments. It neither evaluates, saves nor reports by itself: ours say when."""
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=plan.total_steps,
        per_device_train_batch_size=plan.micro_batch,
        per_device_eval_batch_size=plan.micro_batch,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=plan.learning_rate,
        weight_decay=spec.weight_decay,
        warmup_steps=math.ceil(spec.warmup * plan.total_steps),
        lr_scheduler_type="constant_with_warmup" if spec.schedule == "constant" else spec.schedule,
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


def check_tensorboard() -> None:
    """TensorBoard is an option: say how to get it where it is asked for and absent."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InlayError("TensorBoard is not installed. `pip install tensorboard`, or leave it out.")
