"""Let the head of a classifier of texts read another feature than its architecture has it read.

Every such head reads the last states that its backbone returns, each at a place of its own: the first token, the last
one, or what a pooler made of them. So the backbone returns the wanted feature in all of these places, by one hook, and
the head reads it wherever it looks. A pooler that is no longer read is taken out of the model: it would be trained,
saved and counted for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy import anatomy
from inlay.errors import InlayError, unknown

CHILD = "inlay_pooling"
POOLER = "pooler"
WAYS = ("mean", "first", "last")
CLASSIFIER = "ForSequenceClassification"


class Pooling(nn.Module):
    """Without parameters: a child of the backbone, whose output it changes."""

    def __init__(self, how: str, backbone: nn.Module) -> None:
        super().__init__()
        self.how = how
        self.paused = False
        self.hook: Any = None
        self.as_pooler = isinstance(getattr(backbone, POOLER, None), nn.Module)
        self._arguments = list(inspect.signature(backbone.forward).parameters)

    def extra_repr(self) -> str:
        return self.how

    def after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The backbone's forward hook."""
        if self.paused:
            return None
        states = output[0]
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        pooled = pool(exact, _real(given.get("attention_mask"), states), self.how).to(states.dtype)
        everywhere = pooled.unsqueeze(1).expand_as(states)
        if isinstance(output, tuple):
            return (states, pooled, *output[1:]) if self.as_pooler else (everywhere, *output[1:])
        if self.as_pooler:
            output["pooler_output"] = pooled
        else:
            output["last_hidden_state"] = everywhere
        return output


class Vector(Pooling):
    """Of a backbone without a head: what it returns has the pooled states, of length 1, as `logits` too, which is where
    a head's outputs are."""

    def after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The backbone's forward hook."""
        if self.paused or isinstance(output, tuple):
            return None
        states = output[0]
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        pooled = pool(exact, _real(given.get("attention_mask"), states), self.how)
        output["logits"] = nn.functional.normalize(pooled, dim=-1)
        return output


def install(model: nn.Module, how: str | None) -> None:
    """Let the head read the `mean`, the `first` or the `last` of the last states; None changes nothing.

    A model without a head gives them as a vector of length 1.
    """
    if how is None:
        return
    if how not in WAYS:
        raise unknown("pooling", str(how), WAYS)
    if _is_bare(model):
        _put_in(Vector(how, model), model)
        return
    if not type(model).__name__.endswith(CLASSIFIER):
        raise InlayError(f"pooling={how!r} is what a text classifier's head reads, and {type(model).__name__} is none.")
    backbone = anatomy(model).backbone.module
    _put_in(Pooling(how, backbone), backbone)


def _is_bare(model: nn.Module) -> bool:
    """Whether this is a body of Transformers' without a head."""
    name = type(model).__name__
    return isinstance(model, PreTrainedModel) and name.endswith("Model") and "LMHead" not in name


def _put_in(layer: Pooling, backbone: Any) -> None:
    if layer.as_pooler:
        backbone.pooler = None
    backbone.add_module(CHILD, layer)
    layer.hook = backbone.register_forward_hook(layer.after, with_kwargs=True)


def installed(model: nn.Module) -> str | None:
    """What was put in place of the feature that the architecture's own head reads; None: nothing."""
    layer = _layer(model)
    return None if layer is None else layer.how


def agree(model: nn.Module, wanted: str | None, what: str, beside: Collection[str] = ()) -> None:
    """Have the head read what `what` was trained with, put in where the model is as its architecture has it.

    What was put in before cannot be taken back, as a pooler may be gone: an error. So is a pooling that would change
    what the adapters called `beside`, which the model has already, read.
    """
    found = installed(model)
    if found == wanted:
        return
    trained = wanted or "own"
    if found is None and beside:
        names = ", ".join(repr(name) for name in sorted(beside))
        raise InlayError(
            f"{what} was trained with pooling={trained!r}, and this model has {names} already, for which its head has "
            "pooling='own'. All adapters of a model read one feature: load this one into a base model of its own, by "
            f"inlay.load_backbone(..., pooling={trained!r})."
        )
    if found is not None:
        raise InlayError(
            f"{what} was trained with pooling={trained!r}, and the head of this model has pooling={found!r}. Load the "
            f"base model again, by inlay.load_backbone(..., pooling={trained!r})."
        )
    install(model, wanted)


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Inside, a pooling may be put in; it is taken out again where an error comes out."""
    before = _layer(model)
    poolers = {module: pooler for module in model.modules() if (pooler := getattr(module, POOLER, None)) is not None}
    try:
        yield
    except BaseException:
        layer = _layer(model)
        if layer is not None and before is None:
            layer.hook.remove()
            backbone = next(module for module in model.modules() if module._modules.get(CHILD) is layer)
            delattr(backbone, CHILD)
            if layer.as_pooler:
                backbone.pooler = poolers[backbone]
        raise


@contextmanager
def paused(backbone: nn.Module) -> Iterator[None]:
    """Inside, the backbone returns its own states."""
    layer = _layer(backbone)
    if layer is None:
        yield
        return
    before, layer.paused = layer.paused, True
    try:
        yield
    finally:
        layer.paused = before


def pool(states: Tensor, real: Tensor, how: str) -> Tensor:
    """One vector a row (B x H) of B x S x H: of the first or last real slot, or the real ones' mean."""
    if how == "mean":
        weight = real.to(states.dtype).unsqueeze(-1)
        return (states * weight).sum(1) / weight.sum(1).clamp(min=1)
    place = first_of(real) if how == "first" else last_of(real)
    return states.gather(1, place[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


def first_of(marked: Tensor) -> Tensor:
    """The first place that is marked in each row (B) of B x L; 0 where none is."""
    return marked.byte().argmax(1)


def last_of(marked: Tensor) -> Tensor:
    """The last place that is marked in each row (B) of B x L; L - 1 where none is."""
    return marked.shape[1] - 1 - first_of(marked.flip(1))


def _layer(model: nn.Module) -> Pooling | None:
    return next((module for module in model.modules() if isinstance(module, Pooling)), None)


def _real(mask: Tensor | None, states: Tensor) -> Tensor:
    """Which states are of tokens, B x S. A prefix has keys but no states: the mask of those stands first."""
    rows, length = states.shape[:2]
    if mask is None:
        return torch.ones(rows, length, dtype=torch.bool, device=states.device)
    if mask.ndim != 2 or mask.shape[1] < length:
        raise InlayError(
            f"attention_mask has shape {tuple(mask.shape)}, and there are {rows} x {length} states to pool: give a row "
            "a text."
        )
    return mask[:, mask.shape[1] - length :].bool()
