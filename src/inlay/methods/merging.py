"""Fold what a method trained into the base model's own weights: what is left is a plain model of Transformers.

It computes what the adapted model did, up to a rounding, and keeps nothing of PEFT's or of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from inlay.errors import InlayError, first_line, listed
from inlay.methods import registry
from inlay.methods.plain import base_of, plain_name
from inlay.methods.registry import Method
from inlay.methods.tuner import InlayTuner

# Merging adds to each weight once, in the weights' own precision; logits differ by a few of their last digits.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
ROUGHLY = 1e-1  # in half precision
_HALVES = (torch.bfloat16, torch.float16)
_MOST_IDS = 256
_SPREAD = 64  # ids of an embedding that is adapted as a whole


def check_mergeable(method: Method) -> None:
    """An error for a method whose work no weight of the base model can hold, with those whose work can."""
    if method.form != "peft" or method.mergeable:
        return
    able = registry.names_where(lambda each: each.form != "peft" or each.mergeable)
    raise InlayError(
        f"{method.name!r} cannot be merged: {method.unmergeable}. It stays an adapter: inlay.load and `inlay predict` "
        f"use it as it is. Can be merged: {', '.join(able)}."
    )


def may_be_held(method: Method) -> bool:
    """Whether the base may lie in half precision while this method is folded into it: one weight after the other is
    then made whole, changed, and rounded once."""
    return method.form == "peft" and method.mergeable and method.tuner is None


def is_held(model: nn.Module) -> bool:
    """Whether weights of the base lie in half precision."""
    return any(parameter.dtype in _HALVES for parameter in base_of(model).parameters())


def adapted_ids(model: nn.Module) -> list[int]:
    """Tokens whose input embeddings an adapter of PEFT changes: those that it names, or some of a whole vocabulary."""
    embedding: Any = base_of(model).get_input_embeddings()
    found: set[int] = set()
    for layer in embedding.modules():
        if isinstance(layer, TrainableTokensLayer):
            found |= set(_spread([each for ids in layer.token_indices.values() for each in ids], _MOST_IDS))
        elif isinstance(layer, BaseTunerLayer):
            found |= set(_spread(range(layer.get_base_layer().weight.shape[0]), _SPREAD))
    return sorted(found)


def _spread(ids: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, with the first and the last."""
    if len(ids) <= most:
        return list(ids)
    return [ids[round(place * (len(ids) - 1) / (most - 1))] for place in range(most)]


def fold(model: nn.Module, method: Method, example: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The base model in `dtype`, with what the active adapter trained in its weights; `model` is used up.

    On the batch `example` both must compute the same: where weights are shared in a way that merging cannot respect,
    the result would be another model without a word. A weight is changed in float32 (or what it has) and rounded once.
    """
    check_mergeable(method)
    if method.form != "peft":
        return base_of(model).to(dtype)
    example = {name: value.to(next(model.parameters()).device) for name, value in example.items()}
    held = is_held(model)
    adapted: Any = model
    try:
        wanted = _logits(model, example)
        if not isinstance(adapted.base_model, InlayTuner):
            _unwrap_heads(base_of(model))
        if held:
            _merge_one_by_one(adapted, method, dtype)
        plain: nn.Module = adapted.merge_and_unload()
    except InlayError:
        raise
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise InlayError(f"This adapter of {method.name} cannot be merged: {first_line(error)}") from error
    if held:
        plain.to(dtype)  # new parts
    _check_finite(plain, method)
    _compare(_logits(plain, example), wanted, method)
    if not held and dtype != wanted.dtype:
        _check_finite(plain.to(dtype), method)
    return plain


@torch.no_grad()
def _merge_one_by_one(model: Any, method: Method, dtype: torch.dtype) -> None:
    """Merge each adapted module for itself: its weights in float32, and then in `dtype` for good."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        host = layer.get_base_layer()
        if any(owners[id(parameter)] > 1 for parameter in host.parameters(recurse=False)):
            raise InlayError(
                f"This adapter of {method.name} adapts a weight that another module shares, that of "
                f"{plain_name(name)}: only the whole model in float32 shows what merging makes of it. Keep it as an "
                "adapter, or load the model in float32."
            )
        before = {name: parameter.data for name, parameter in host.named_parameters(recurse=False)}
        host.to(torch.float32)
        layer.merge()
        for name, parameter in host.named_parameters(recurse=False):
            place = before.get(name)
            if place is not None and (place.shape, place.dtype) == (parameter.shape, dtype):
                parameter.data = place.copy_(parameter.data)
            else:
                parameter.data = parameter.data.to(dtype)


def _check_finite(plain: nn.Module, method: Method) -> None:
    broken = [name for name, tensor in plain.state_dict().items() if not _is_finite(tensor)]
    if broken:
        raise InlayError(f"Merging {method.name} gives values that are not finite, in {listed(broken, 3)}.")


def _unwrap_heads(base: nn.Module) -> None:
    """Put the active adapter's own head and other new parts in place of PEFT's wrappers around them.

    PEFT unloads a head of several modules as if it had one weight, and some of its methods leave the wrapper.
    """
    for name, module in list(base.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            (active,) = module.active_adapters
            kept = dict(module.modules_to_save.items())
            parent, _, last = name.rpartition(".")
            setattr(base.get_submodule(parent), last, kept.get(active, module.original_module))


@torch.no_grad()
def _logits(model: nn.Module, example: Mapping[str, Any]) -> Tensor:
    found: Tensor = model.eval()(**example).logits
    return found


def _compare(found: Tensor, wanted: Tensor, method: Method) -> None:
    size = float(wanted.abs().max().clamp(min=1))
    apart = float((found - wanted).abs().max()) / size
    if not apart <= CLOSE.get(wanted.dtype, ROUGHLY):
        raise InlayError(
            f"Merged, this adapter of {method.name} gives other outputs (they differ by {apart:.2g} of the largest): "
            "it adapts a weight that another module shares, or the merged weights lose its effect to rounding. Keep it "
            "as an adapter."
        )


def _is_finite(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))  # what is no number comes out of it too
