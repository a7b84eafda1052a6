"""How good a model is on a split: one pass over it, and texts written and scored where the task is about texts.

Nothing here depends on the Trainer, so that evaluating a reloaded adapter takes the same steps as evaluating it while
it is trained, and gives the same bits. Rows of about the same length are run together, so that little is padded; what
comes back is in the split's order. Under `accelerate launch` every process takes every n-th example and all of them
hold the whole result afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from inlay.backbones.answer_outputs import has_answer
from inlay.errors import InlayError
from inlay.methods.protocol import hooks_of, layers_of
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.training.batches import Placement, Stop, batches, gather, order_by_length, settle_length
from inlay.training.lean_loss import TokenScores, token_scores
from inlay.training.seeds import undisturbed
from inlay.training.sharding import is_divided
from inlay.training.shares import Filler

if TYPE_CHECKING:
    from inlay.training.trunk.cut import TrunkCache
    from inlay.training.trunk.data import KeptSplit

PAD = -100  # what the Trainer's own collators mark as "no label"


class NotFinitePredictions(InlayError):
    """The model answers with infinities, or with what is not a number."""


@dataclass(frozen=True)
class Scored:
    """A split's predictions and metrics, and what it took to get them.

    `seconds` is None where they do not tell how fast the model is: see `Validation` and `score_timed`. `targets` is
    what the loss compared the predictions with.
    """

    metrics: dict[str, float]
    predictions: Any
    examples: int
    seconds: float | None
    targets: Any = None


def evaluate(
    model: nn.Module,
    task: Any,
    split: str,
    processor: Any,
    spec: Spec,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[str, float], Any]:
    """Metrics and predictions of a model on one split of a task; `say` receives what was cut."""
    with undisturbed():
        task, encoded, scored = _scored(model, task, split, processor, spec)
        if say is not None:
            for note in getattr(encoded, "notes", ()):
                say(note)
        if not task.generates:
            return scored.metrics, scored.predictions
        written = write(model, task, split, processor, spec, Placement.of(spec))
    return scored.metrics | written.metrics, written.predictions


def outputs_of(model: nn.Module, task: Any, split: str, processor: Any, spec: Spec) -> tuple[np.ndarray, Any]:
    """A model's outputs on one split of a task, as `reduce_logits` leaves them, and the split as it was encoded; no
    texts are written."""
    with undisturbed():
        _, encoded, scored = _scored(model, task, split, processor, spec)
    return scored.predictions, encoded


def _scored(model: nn.Module, task: Any, split: str, processor: Any, spec: Spec) -> tuple[Any, Any, Scored]:
    place = Placement.of(spec)
    model.to(place.device)
    length = settle_length(model, task, processor, spec.max_length)
    task = task.with_length(processor, length, model_config=model.config)
    encoded = task.encode(split, processor, length, model_config=model.config)
    return task, encoded, score(model, task, encoded, task.collator(processor, model), place)


def score(
    model: nn.Module,
    task: Any,
    encoded: Sized,
    collate: Callable[[Any], Any],
    place: Placement,
    stop: Stop | None = None,
    replay: Callable[[dict[str, Tensor]], AbstractContextManager[dict[str, Tensor]]] = nullcontext,
) -> Scored:
    """One pass over an encoded split: the loss, averaged over what it is a mean of, and the task's metrics.

    `replay` turns a batch into what the model is called with: see trunk/data.py.
    """
    begin = time.perf_counter()
    counted = counting(model, task.kind)
    kept: list[np.ndarray] = []
    truth: list[np.ndarray] = []
    losses: list[tuple[float, int]] = []
    order = order_by_length(encoded)
    with _without_logits(model, task) as tokens:
        for batch in batches(model, encoded, collate, place, stop, order):
            with torch.no_grad(), place.autocast(), replay(batch) as inputs:
                outputs = model(**inputs)
            if isinstance(batch, Filler):
                continue
            labels = batch.get("labels")
            scores = None if tokens is None else tokens.take()
            if scores is not None:
                reduced = task.schema.reduce_tokens(*scores, labels)
            else:
                reduced = task.reduce_logits(outputs["logits"].float(), labels)
            kept.append(reduced.cpu().numpy())
            if labels is None:  # vectors: what is known of them is not known row by row
                continue
            losses.append((float(outputs["loss"]), int(counted(labels))))
            truth.append(labels.cpu().numpy())
    gathered = gather((kept, truth, losses))
    seconds = time.perf_counter() - begin
    predictions = _whole([part[0] for part in gathered], order)
    known = _whole([part[1] for part in gathered], order) if truth else None
    if not np.isfinite(predictions).all():
        raise NotFinitePredictions(
            "The model's predictions are not finite numbers: it was trained at too high a learning rate"
            + (", or runs in too low a precision." if place.dtype else ".")
        )
    metrics = {name: float(value) for name, value in task.compute_metrics(predictions, known, encoded).items()}
    if known is None:
        return Scored(metrics, predictions, len(encoded), seconds)
    # A batch without a single label has no mean loss, and no weight.
    weighted = [(mean * items, items) for _, _, part in gathered for mean, items in part if items]
    total = sum(items for _, items in weighted)
    loss = math.fsum(value for value, _ in weighted) / total if total else math.nan
    return Scored({**metrics, "loss": loss}, predictions, len(encoded), seconds, known)


def _without_logits(model: nn.Module, task: Any) -> AbstractContextManager[TokenScores | None]:
    """What scores a causal language model token by token, so that its logits are never there all at once. None where
    they are needed, and where the model lies in parts: its head is whole only while the model runs it."""
    schema = getattr(task, "schema", None)  # a task of one's own may have none
    writes = schema is not None and schema.writes_text and not schema.two_parts
    return token_scores(model) if writes and not is_divided(model) else nullcontext()


def write(
    model: nn.Module, task: Any, split: str, processor: Any, spec: Spec, place: Placement, stop: Stop | None = None
) -> Scored:
    """Let the model write an answer to every prompt of a split, and score the texts."""
    from inlay.training.generation import generate

    begin = time.perf_counter()
    rows = task.split(split)
    texts = generate(model, task, rows, processor, spec.max_length, place, stop)
    seconds = time.perf_counter() - begin
    metrics = {name: float(value) for name, value in task.score_texts(texts, rows).items()}
    return Scored(metrics, texts, len(texts), seconds)


class Validation:
    """Scores the validation split when called, again and again while a model is trained.

    `trunk` is set once it is known that training has one worth keeping here. The split's order never changes, so the
    output of the frozen trunk is the same every time, batch by batch, to the bit wherever the same computation twice
    gives the same bits. The first time it is scored without: that is how fast the model infers. The second time the
    trunk's output is kept, where memory has room, and used from then on; such a pass tells nothing of the model's
    speed. The cut was found in the modes of training: in eval mode a model may read more than passes through it, so the
    first batch is scored both ways, and nothing kept if it comes out differently.
    """

    def __init__(
        self, model: nn.Module, task: Any, encoded: Any, collate: Callable[[Any], Any], place: Placement
    ) -> None:
        self.model, self.task, self.encoded, self.collate, self.place = model, task, encoded, collate, place
        self.trunk: TrunkCache | None = None
        self.times = 0
        self._kept: KeptSplit | None = None

    def __call__(self, stop: Stop) -> Scored:
        self.times += 1
        if self.trunk is not None and self.times == 2:
            self._keep(self.trunk, stop)
        if self._kept is None:
            return score_timed(self.model, lambda: self._scored(stop))
        kept = self._kept
        scored = score(self.model, self.task, kept, kept.collate, self.place, stop, kept.replay)
        return dataclasses.replace(scored, seconds=None)

    def _scored(self, stop: Stop) -> Scored:
        return score(self.model, self.task, self.encoded, self.collate, self.place, stop)

    def _keep(self, trunk: TrunkCache, stop: Stop) -> None:
        from inlay.training.trunk.cut import NotReached
        from inlay.training.trunk.data import KeptSplit, NotKept

        kept = KeptSplit(self.encoded, self.collate, trunk, self.place.batch_size, self.place.device, shuffled=False)
        self.model.eval()
        try:
            with torch.no_grad(), self.place.autocast():
                kept.fill(None, stop)
                kept.check_first(stop)
        except (NotKept, NotReached):
            kept.close()
            return
        self._kept = kept


def score_timed(model: nn.Module, run: Callable[[], Scored]) -> Scored:
    """Score a split; the seconds are left out where the method remembered more texts than it computed.

    The layers that remember anything say how many texts they remembered and computed so far.
    """
    before = {layer: layer.recalled for layer in layers_of(model)}
    scored = run()
    for layer, counts in before.items():
        if counts and layer.recalled and layer.recalled[0] - counts[0] > layer.recalled[1] - counts[1]:
            return dataclasses.replace(scored, seconds=None)
    return scored


def predict(model: nn.Module, task: Any, rows: Sequence[Any], processor: Any, spec: Spec) -> tuple[Any, Any]:
    """Predictions for new rows without labels, and the rows as they were encoded: what `decode` of the task takes.

    `task` is a `Task` or its `TaskSchema`. Texts where the model writes, otherwise the logits.
    """
    place = Placement.of(spec)
    model.to(place.device)
    with undisturbed():
        encoded = task.encode_inputs(rows, processor, settle_length(model, task, processor, spec.max_length))
        if task.kind in kinds.LANGUAGE_MODELS:
            from inlay.training.generation import generate

            return generate(model, task, rows, processor, spec.max_length, place), encoded
        if kinds.get(task.kind).predicts == "masked":
            from inlay.training.filling import fill

            return fill(model, task, encoded, rows, processor, place), encoded
        found = []
        order = order_by_length(encoded)
        for batch in batches(model, encoded, task.collator(processor, model), place, None, order):
            with torch.no_grad(), place.autocast():
                logits = model(**batch)["logits"]
            if not isinstance(batch, Filler):
                found.append(logits.float().cpu().numpy())
    return _whole(gather(found), order), encoded


def counting(model: nn.Module, kind: str) -> Callable[[Tensor], Tensor]:
    """What counts how many labels a batch's mean loss is the mean of."""
    if kinds.get(kind).predicts == "span":
        return lambda labels: has_answer(labels).sum()
    return partial(count_items, shifted=shifts_labels(model, kind))


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
    return not hooks_of(config).prepends_tokens


def _whole(parts: list[list[np.ndarray]], order: Sequence[int]) -> np.ndarray:
    """The processes' rows, read in this order, in the split's; rows of unequal length are padded at the end."""
    longest = max((chunk.shape[1] for part in parts for chunk in part if chunk.ndim > 1), default=0)
    rows = [np.concatenate([_widen(chunk, longest) for chunk in part]) for part in parts if part]
    if not rows:
        raise InlayError("The split is empty: there is nothing to evaluate on.")
    whole = np.empty((len(order), *rows[0].shape[1:]), dtype=rows[0].dtype)
    for rank, part in enumerate(rows):
        whole[order[rank :: len(parts)]] = part
    return whole


def _widen(chunk: np.ndarray, width: int) -> np.ndarray:
    if chunk.ndim < 2 or chunk.shape[1] == width:
        return chunk
    return np.pad(chunk, [(0, 0), (0, width - chunk.shape[1])] + [(0, 0)] * (chunk.ndim - 2), constant_values=PAD)
