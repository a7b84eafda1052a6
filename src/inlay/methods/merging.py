"""Fold what a method trained into the base model's own weights: what is left is a plain model of Transformers.

It computes what the adapted model did, up to a rounding, and keeps nothing of PEFT's or of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from inlay.errors import InlayError, first_line, listed
from inlay.methods import registry
from inlay.methods.plain import base_of
from inlay.methods.registry import Method
from inlay.methods.tuner import InlayTuner

# Merging adds to each weight once, in the weights' own precision; logits differ by a few of their last digits.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
ROUGHLY = 1e-1  # in half precision


def check_mergeable(method: Method) -> None:
    """An error for a method whose work no weight of the base model can hold, with those whose work can."""
    if method.form != "peft" or method.mergeable:
        return
    able = registry.names_where(lambda each: each.form != "peft" or each.mergeable)
    raise InlayError(
        f"{method.name!r} cannot be merged: {method.unmergeable}. It stays an adapter: inlay.load and `inlay predict` "
        f"use it as it is. Can be merged: {', '.join(able)}."
    )


def fold(model: nn.Module, method: Method, example: Mapping[str, Any]) -> nn.Module:
    """The base model with what the active adapter trained in its weights; `model` is used up.

    On the batch `example` both must compute the same: where weights are shared in a way that merging cannot respect,
    the result would be another model without a word.
    """
    check_mergeable(method)
    if method.form != "peft":
        return base_of(model)
    wanted = _logits(model, example)
    adapted: Any = model
    if not isinstance(adapted.base_model, InlayTuner):
        _unwrap_heads(base_of(model))
    try:
        plain: nn.Module = adapted.merge_and_unload(safe_merge=True)
    except InlayError:
        raise
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise InlayError(f"This adapter of {method.name} cannot be merged: {first_line(error)}") from error
    broken = [name for name, tensor in plain.state_dict().items() if not _is_finite(tensor)]
    if broken:
        raise InlayError(f"Merging {method.name} gives values that are not finite, in {listed(broken, 3)}.")
    _compare(_logits(plain, example), wanted, method)
    return plain


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
    return not isinstance(tensor, Tensor) or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
