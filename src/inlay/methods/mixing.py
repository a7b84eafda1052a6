"""Batches whose rows belong to different adapters, as PEFT's `adapter_names` has them, for methods that act row by row.

Multi-LoRA has a way of its own, which is faster and trains. Here each adapter's rows are taken out, changed, put back.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from inlay.errors import InlayError, unknown

BASE = "__base__"  # PEFT's name for "no adapter"
# What is looked at first. Whatever else a model calls its input is found by the order of its forward's arguments.
INPUTS = ("input_ids", "inputs", "inputs_embeds", "pixel_values", "input_features", "decoder_input_ids")
SHARED = ("position_ids", "cache_position", "head_mask", "past_key_values", "generation_config")  # not one a row
LOCK = threading.RLock()  # one mixed pass at a time


def check_names(names: Any, known: Sequence[str], what: str = "adapter") -> list[str]:
    """The names of the rows' adapters; an error where they are no list of known ones."""
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not names or not all(isinstance(name, str) for name in names):
        raise InlayError(f"adapter_names={names!r}: give a list with the name of one {what} for each row of the batch.")
    there = {BASE, *known}
    for name in dict.fromkeys(names):
        if name not in there:
            raise unknown(f"{what} in adapter_names", name, known)
    return list(names)


def batch_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor of a call that has a row for each row of the batch: the model's own main input, one of the usual
    ones, or the first that its forward takes."""
    main = getattr(model, "main_input_name", None) or INPUTS[0]
    for name in (main, *INPUTS):
        if (found := _with_rows(kwargs.get(name))) is not None:
            return found
    for value in args:
        if (found := _with_rows(value)) is not None:
            return found
    for name in (*inspect.signature(model.forward).parameters, *kwargs):
        if name not in SHARED and (found := _with_rows(kwargs.get(name))) is not None:
            return found
    return None


def other_length(names: int, rows: int) -> InlayError:
    """What is wrong with names that are not as many as the rows."""
    return InlayError(f"adapter_names has {names} names, and the batch has {rows} rows: give one name for each row.")


def for_every_sequence(names: list[str], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for each sequence that `generate` computes: one a beam, or one a sequence that is to be returned."""
    config = kwargs.get("generation_config")
    given = (kwargs.get(name) or getattr(config, name, None) or 1 for name in ("num_beams", "num_return_sequences"))
    times = max(given)
    return [name for name in names for _ in range(times)]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or an output: itself, or those in lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    for part in parts:
        yield from tensors_in(part)


def _with_rows(value: Any) -> Tensor | None:
    return next((tensor for tensor in tensors_in(value) if tensor.ndim), None)


class MixedRows:
    """For a layer that can be told which adapter each row belongs to. Another thread's passes are not its affair."""

    _mixed: tuple[int, list[str]] | None = None

    def row_names(self) -> list[str] | None:
        """The rows' adapters in the pass that this thread is in; None where all rows are the active adapters'."""
        mixed = self._mixed
        return mixed[1] if mixed is not None and mixed[0] == threading.get_ident() else None

    def end_pass(self) -> None:
        """A mixed pass has ended: what was kept for it is not needed any more."""

    def by_row(
        self, names: list[str], x: Tensor, made: Tensor, act: Callable[[str, Tensor], Tensor], known: Any
    ) -> Tensor:
        """`made`, with the rows of each known adapter replaced by what `act` makes of those rows of `x`."""
        if len(x) != len(names):
            raise InlayError(
                f"adapter_names has {len(names)} names, and a layer was given {len(x)} rows. Give one name for each "
                "row; a model that divides or joins rows inside runs one adapter at a time."
            )
        for name in dict.fromkeys(names):
            if name in known:
                rows = torch.tensor([row for row, own in enumerate(names) if own == name], device=x.device)
                made = made.index_copy(0, rows, act(name, x.index_select(0, rows)).to(made.dtype))
        return made


@contextmanager
def mixed_pass(model: nn.Module, layers: list[Any], names: list[str]) -> Iterator[None]:
    """One forward pass in which each row has its own adapter, and its own head where adapters have trained some."""
    heads = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]

    def tell(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "adapter_names": names}

    with LOCK:
        handles = [head.register_forward_pre_hook(tell, with_kwargs=True) for head in heads]
        try:
            for layer in layers:
                layer._mixed = (threading.get_ident(), names)
            yield
        finally:
            for layer in layers:
                layer._mixed = None
                layer.end_pass()
            for handle in handles:
                handle.remove()
