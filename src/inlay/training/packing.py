"""Short texts share rows: less is padded, and what is learnt is the same.

The examples of a micro-batch are the same with and without packing, and so are an update's loss, which is the mean over
all its labels, the order of the data and the number of updates. Only the padding goes: instead of a row for each
example there are as few rows as hold them all. Position ids begin at 0 with every example. Without a 2D mask
Transformers (`masking_utils.find_packed_sequence_indices`) sees from them where examples begin, and no token attends to
another example, whatever the mask of a layer is otherwise (a sliding window). Whether a model does so is tried, not
believed: see `check_model`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inlay.errors import InlayError, first_line
from inlay.methods.protocol import Method, hooks_of
from inlay.tasks import kinds
from inlay.tasks.encode import IGNORED

PADDING = 1  # the position of padding: not 0, with which examples begin, and in every model's table
WITHOUT = "Leave pack (--pack) out; group_by_length (--group-by-length) saves padding too."
_TRIED = (7, 5)  # the lengths of the texts by which a model is tried
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the logits' deviation; 0.1 in 16 bits
_NEAR_IN_16_BITS = 0.1

Rows = list[list[int]]  # the numbers of the examples in each row


def arrange(lengths: Sequence[int], limit: int) -> Rows:
    """Which examples share a row: of the arrangements tried, the one with the fewest tokens, padding included.

    The longest example goes into the row that is the shortest so far, then the next. No row is longer than `limit`,
    unless an example is. There are never more tokens than without packing.
    """
    total, longest = sum(lengths), max(lengths)
    limit = max(limit, longest)
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    best: Rows = [[number] for number in order]
    least = len(lengths) * longest
    for count in range(max(1, total // longest), len(lengths)):
        if count * longest >= least:
            break
        rows, width = _spread(order, lengths, count)
        if width <= limit and count * width < least:
            best, least = rows, count * width
    return best


def _spread(order: Sequence[int], lengths: Sequence[int], count: int) -> tuple[Rows, int]:
    """Examples in so many rows, each into the shortest so far; the longest row's length."""
    rows: Rows = [[] for _ in range(count)]
    heap = [(0, row) for row in range(count)]
    for number in order:
        length, row = heap[0]
        rows[row].append(number)
        heapq.heapreplace(heap, (length + lengths[number], row))
    return rows, max(length for length, _ in heap)


class PackedCollator:
    """A batch of examples in as few rows as hold them; `fill` is the padding token, `limit` the longest row.

    The first token of an example is predicted by nothing, as it is where it stands at the beginning of a row.
    """

    def __init__(self, fill: int, limit: int) -> None:
        self.fill, self.limit = fill, limit

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        lengths = [len(item["input_ids"]) for item in items]
        rows = arrange(lengths, self.limit)
        shape = len(rows), max(sum(lengths[number] for number in row) for row in rows)
        ids, labels = torch.full(shape, self.fill), torch.full(shape, IGNORED)
        positions = torch.full(shape, PADDING)
        for place, row in enumerate(rows):
            begin = 0
            for number in row:
                end = begin + lengths[number]
                ids[place, begin:end] = torch.as_tensor(items[number]["input_ids"])
                labels[place, begin:end] = torch.as_tensor(items[number]["labels"])
                labels[place, begin] = IGNORED
                positions[place, begin:end] = torch.arange(end - begin)
                begin = end
        # With a cache a model would not look for examples that share a row.
        return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


def collator(task: Any, tokenizer: Any) -> PackedCollator:
    """What makes batches of a task's examples: rows are as long as its longest texts may be."""
    return PackedCollator(int(tokenizer.pad_token_id), task.schema.max_length)


def count_examples(batch: Mapping[str, Any]) -> int:
    """How many examples a batch has."""
    if "position_ids" in batch and "attention_mask" not in batch:
        return int((batch["position_ids"] == 0).sum())
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)


# ---------------------------------------------------------------------------------------------------- what is saved


@dataclass(frozen=True)
class Saved:
    """An epoch with and without packing: examples and rows, the tokens that are real, and both with padding."""

    examples: int
    rows: int
    widest: int
    real: int
    plain: int
    packed: int

    def __str__(self) -> str:
        if self.rows == self.examples:
            return "packed: nothing is saved, since the texts of each batch are about equally long"
        before, now = (1 - self.real / each for each in (self.plain, self.packed))
        return (
            f"packed: in the first epoch {self.examples:,} examples share {self.rows:,} rows of at most "
            f"{self.widest:,} tokens; {now:.0%} of them are padding, without packing {before:.0%}"
        )


def measure(lengths: np.ndarray, order: Sequence[int], batch: int, limit: int) -> Saved:
    """What packing saves in an epoch of this order, in micro-batches of so many examples."""
    rows = widest = plain = packed = 0
    for part in _parts(lengths[np.asarray(order)].tolist(), batch):
        made = arrange(part, limit)
        width = max(sum(part[number] for number in row) for row in made)
        rows, widest = rows + len(made), max(widest, width)
        plain, packed = plain + len(part) * max(part), packed + len(made) * width
    return Saved(len(order), rows, widest, int(lengths[np.asarray(order)].sum()), plain, packed)


def _parts(lengths: list[int], batch: int) -> Iterator[list[int]]:
    return (lengths[start : start + batch] for start in range(0, len(lengths), batch))


# -------------------------------------------------------------------------------------------------------- what can be


def check(task: Any, method: Method, model: nn.Module) -> None:
    """An error where the examples of this task cannot share rows of this adapted model."""
    if task.kind not in kinds.LANGUAGE_MODELS:
        raise InlayError(
            f"pack is for tasks in which a model writes (conversations, prompts and answers); {task.name!r} is of kind "
            f"{task.kind!r}. {WITHOUT}"
        )
    if not (task.schema.answers or task.schema.chat):
        raise InlayError(
            f"{task.name!r} is running text, which fills its rows already: there is nothing to pack. Leave pack "
            "(--pack) out."
        )
    if not hooks_of(next(iter(getattr(model, "peft_config", {}).values()), None)).packable:
        raise InlayError(
            f"{method.name} adds something at the beginning or the end of a row, and texts that share a row would "
            f"share it: it cannot pack. {WITHOUT} Or take a method that acts on every token, as most do."
        )
    if (why := refusal(model)) is not None:
        raise InlayError(f"pack: {why}. {WITHOUT}")


def refusal(model: nn.Module) -> str | None:
    """Why texts cannot share a row of this model; None where they can. Two texts are read alone and in one row."""
    config: Any = model.config
    name = type(config).__name__.removesuffix("Config")
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} reads in an encoder, and writes elsewhere"
    embedding = model.get_input_embeddings()
    begin = embedding.num_embeddings // 3
    first, second = (torch.arange(begin, begin + size).remainder(embedding.num_embeddings).flip(0) for size in _TRIED)
    items = [{"input_ids": ids, "labels": ids} for ids in (first, second)]
    where = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            alone = [model(input_ids=ids[None].to(where), use_cache=False)["logits"][0] for ids in (first, second)]
            batch = PackedCollator(0, sum(_TRIED))(items)
            batch = {name: one.to(where) if isinstance(one, Tensor) else one for name, one in batch.items()}
            batch.pop("labels")
            together = model(**batch)["logits"][0]
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{name} cannot read two texts in one row ({first_line(error)})"
    wanted = torch.cat(alone)
    near = _NEAR.get(wanted.dtype, _NEAR_IN_16_BITS) * wanted.float().std()
    if bool((wanted.float() - together.float()).abs().max() <= near):
        return None
    return f"{name} does not keep texts apart that share a row: tried, the second of two came out otherwise than alone"
