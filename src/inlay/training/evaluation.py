"""How good a model is on a split: one pass over it, or texts generated and scored.

Nothing here depends on the Trainer, so that evaluating a reloaded adapter takes the same steps as evaluating it while
it is trained, and gives the same bits. Under `accelerate launch` every process takes every n-th example and all of them
hold the whole result afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.training.plan import pick_device, pick_dtype
from inlay.training.seeds import undisturbed

PAD = -100  # what the Trainer's own collators mark as "no label"
Stop = Callable[[], None]


@dataclass(frozen=True)
class Scored:
    """A split's predictions and metrics, and what it took to get them."""

    metrics: dict[str, float]
    predictions: Any
    examples: int
    seconds: float


@dataclass(frozen=True)
class Place:
    """Where and how batches are run."""

    device: torch.device
    dtype: torch.dtype | None
    batch_size: int

    @classmethod
    def of(cls, spec: Spec) -> Place:
        """The place a spec asks for. The batch is the one that fitted into memory in training."""
        device = pick_device()
        return cls(device, pick_dtype(spec.precision, device), max(1, spec.batch_size // spec.gradient_accumulation))

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision, where the spec asks for it."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)


def evaluate(model: nn.Module, task: Any, split: str, processor: Any, spec: Spec) -> tuple[dict[str, float], Any]:
    """Metrics and predictions of a model on one split of a task."""
    place = Place.of(spec)
    model.to(place.device)
    with undisturbed():
        scored = score(model, task, split, processor, spec, place)
    return scored.metrics, scored.predictions


def score(
    model: nn.Module, task: Any, split: str, processor: Any, spec: Spec, place: Place, stop: Stop | None = None
) -> Scored:
    """The whole evaluation: by generated texts where the task is scored by them."""
    if getattr(task, "generates", False):
        return _score_texts(model, task, split, processor, spec, place, stop)
    encoded = task.encode(split, processor, spec.max_length, model_config=model.config)
    return score_batches(model, task, encoded, task.collator(processor, model), place, stop)


def score_batches(
    model: nn.Module,
    task: Any,
    encoded: Sized,
    collate: Callable[[Any], Any],
    place: Place,
    stop: Stop | None = None,
    *,
    loss_only: bool = False,
) -> Scored:
    """One pass over an encoded split: the loss, averaged over what it is a mean of, and the task's metrics."""
    begin = time.perf_counter()
    reduce = getattr(task, "reduce_logits", None)
    shifted = shifts_labels(model, task.kind)
    kept: list[np.ndarray] = []
    truth: list[np.ndarray] = []
    losses: list[tuple[float, int]] = []
    for batch in batches(model, encoded, collate, place, stop):
        with torch.no_grad(), place.autocast():
            outputs = model(**batch)
        labels = batch["labels"]
        losses.append((float(outputs["loss"]), int(count_items(labels, shifted=shifted))))
        if not loss_only:
            logits = outputs["logits"].float()
            kept.append((logits if reduce is None else reduce(logits, labels)).cpu().numpy())
            truth.append(labels.cpu().numpy())
    gathered = _gather((kept, truth, losses))
    seconds = time.perf_counter() - begin
    metrics = {}
    predictions = None
    if not loss_only:
        predictions, known = (_interleave([part[i] for part in gathered], len(encoded)) for i in (0, 1))
        if not np.isfinite(predictions).all():
            raise InlayError(
                "The model's predictions are not finite numbers: it was trained at too high a learning rate, or runs "
                "in too low a precision. Lower learning_rate, or use precision='float32'."
            )
        metrics = {name: float(value) for name, value in task.compute_metrics(predictions, known).items()}
    # A batch without a single label has no mean loss, and no weight.
    weighted = [(mean * items, items) for _, _, part in gathered for mean, items in part if items]
    total = sum(items for _, items in weighted)
    loss = math.fsum(value for value, _ in weighted) / total if total else math.nan
    return Scored({**metrics, "loss": loss}, predictions, len(encoded), seconds)


def batches(
    model: nn.Module, encoded: Sized, collate: Callable[[Any], Any], place: Place, stop: Stop | None
) -> Iterator[dict[str, Tensor]]:
    """This process's share of a split, batch by batch, on the device, with the model in eval mode."""
    rank, world = _rank()
    mine: Any = encoded if world == 1 else Subset(encoded, range(rank, len(encoded), world))
    model.eval()
    for batch in DataLoader(mine, batch_size=place.batch_size, collate_fn=collate):
        if stop is not None:
            stop()
        yield {name: value.to(place.device) for name, value in batch.items()}


def _score_texts(
    model: nn.Module, task: Any, split: str, processor: Any, spec: Spec, place: Place, stop: Stop | None
) -> Scored:
    """Let the model write, and score what it wrote."""
    from inlay.training.generation import generate

    begin = time.perf_counter()
    texts = generate(model, task, split, processor, spec, place, stop)
    seconds = time.perf_counter() - begin
    metrics = {name: float(value) for name, value in task.score_texts(texts, split).items()}
    return Scored(metrics, texts, len(texts), seconds)


def count_items(labels: Tensor, *, shifted: bool) -> Tensor:
    """How many labels a mean loss is the mean of: all numbers, or the classes and tokens that are not masked."""
    if labels.is_floating_point():
        return torch.tensor(labels.numel(), device=labels.device)
    return (labels[..., 1:] if shifted else labels).ne(PAD).sum()


def shifts_labels(model: nn.Module, kind: str) -> bool:
    """Whether the first label of a row is never predicted: in a causal language model nothing stands before it, unless
    the method puts virtual tokens there. An encoder-decoder's labels are not shifted."""
    if kind not in kinds.LANGUAGE_MODELS or getattr(model.config, "is_encoder_decoder", False):
        return False
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    return not getattr(config, "is_prompt_learning", False) or config.peft_type == "PREFIX_TUNING"


def _rank() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _gather(mine: Any) -> list[Any]:
    """What every process found, in the order of the processes."""
    _, world = _rank()
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    distributed.all_gather_object(found, mine)
    return found


def _interleave(parts: list[list[np.ndarray]], total: int) -> np.ndarray:
    """Put the processes' rows back in the split's order; rows of unequal length are padded at the end."""
    longest = max((chunk.shape[1] for part in parts for chunk in part if chunk.ndim > 1), default=0)
    rows = [np.concatenate([_widen(chunk, longest) for chunk in part]) for part in parts if part]
    if not rows:
        raise InlayError("The split is empty: there is nothing to evaluate on.")
    whole = np.empty((total, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for rank, part in enumerate(rows):
        whole[rank :: len(parts)] = part
    return whole


def _widen(chunk: np.ndarray, width: int) -> np.ndarray:
    if chunk.ndim < 2 or chunk.shape[1] == width:
        return chunk
    return np.pad(chunk, [(0, 0), (0, width - chunk.shape[1])] + [(0, 0)] * (chunk.ndim - 2), constant_values=PAD)
