"""Mixed precision around frozen weights: what autocast would do in every step, done once.

Under autocast a linear layer or a convolution computes with its weight and its input rounded to the lower precision.

- A frozen weight is rounded to the same numbers in every step. Kept rounded, it takes half of an accelerator's memory,
  nothing has to be rounded and kept for the backward pass, and the result is the same to the bit; up to a rounding,
  where a method multiplies the weight itself by something trained.
- What enters attention is rounded by the projections of queries, keys and values, each for itself. Rounded once, before
  them, the forward pass is the same to the bit and moves a third of the bytes. In the backward pass the three
  gradients are added in the lower precision, as they are where one projection makes all three.

Left alone is what someone else reads as well: a weight tied to an embedding, the stem, to whose precision models round
the pixels before anything can act on them, and the weights whose norm PEFT's DoRA takes. So is everything that belongs
to an adapter, also to one that is not active: it may train a moment later.

What changes a frozen weight inside must not get lost. Merging is refused, since it would write what was rounded into
the model. A weight that has changed all the same keeps its new values.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import anatomy
from inlay.errors import InlayError, listed
from inlay.methods.channels import is_plain
from inlay.methods.tuner import ChildLayer, on_first_tensor

ROUNDED = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # exactly these: autocast rounds what they compute with


@contextmanager
def rounded_once(model: nn.Module, dtype: torch.dtype | None, *, for_good: bool = False) -> Iterator[None]:
    """Inside, the frozen weights of a model are kept as autocast to `dtype` rounds them; None: nothing is done.

        with inlay.rounded_once(model, torch.bfloat16):
            for batch in batches:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(**batch).loss
                ...

    For any method that leaves weights frozen, PEFT's too. The weights as they were wait in ordinary memory and are put
    back in the end, to the bit: save a whole model after that, an adapter whenever you like. Inside,

    - run the model under autocast to this type, for evaluation too: without it, the precisions do not fit;
    - adapters may be added and changed, but not merged: that is an error. Merge afterwards;
    - change no frozen weight yourself, and unfreeze weights before. Whatever differs from what was rounded is kept in
      the end, with its few digits, and a warning names the weights.

    `for_good`: the weights as they were are not kept, and not put back. A model that is then divided among processes
    has others in their place.
    """
    if dtype is None:
        yield
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise InlayError(
            f"rounded_once: autocast rounds to torch.bfloat16 or torch.float16, not to {dtype}. Give the type that you "
            "give to torch.autocast, or None to round nothing."
        )
    hosts = _to_round(model)
    frozen: dict[str, nn.Parameter] = {f"{name}.weight": module.weight for name, module in hosts.items()}
    originals = {} if for_good else {name: weight.data.cpu() for name, weight in frozen.items()}
    before = partial(_round_first, dtype=dtype)
    handles = [place.register_forward_pre_hook(before, with_kwargs=True) for place in _projecting(model)]
    handles += [module.register_forward_pre_hook(_needs_autocast) for module in list(hosts.values())[:1]]
    refusing = _merging_into(model, set(hosts.values()))
    try:
        for weight in frozen.values():
            weight.data = weight.data.to(dtype)
        if for_good:
            frozen.clear()
        for layer in refusing:
            vars(layer).update({action: _Refusal(layer, action) for action in _REFUSED})
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in refusing:
            for action in _REFUSED:
                vars(layer).pop(action, None)
        changed = [name for name, weight in frozen.items() if _put_back(weight, originals[name], dtype)]
        if changed:
            warnings.warn(
                f"Frozen weights were changed inside rounded_once: {listed(changed, 4)}. What was changed is kept, as "
                f"precise as {dtype}. Change such weights before it or after it.",
                stacklevel=3,
            )


def _to_round(model: nn.Module) -> dict[str, Any]:
    """The modules by name whose weights are frozen, float32, and read by nobody else."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    others = _read_elsewhere(model) | _of_adapters(model)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in ROUNDED
        and module not in others
        and not module.weight.requires_grad
        and module.weight.dtype == torch.float32
        and is_plain(module.weight)  # torchao's quantised weights are of a dtype that they stand for
        and owners[id(module.weight)] == 1
    }


def _merging_into(model: nn.Module, hosts: set[nn.Module]) -> list[BaseTunerLayer]:
    """The adapters' layers that would merge into a weight of these modules."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    into = [layer for layer in layers if not isinstance(layer, ChildLayer) or "weight" in layer.merges_into]
    return [layer for layer in into if layer.get_base_layer() in hosts]


def _put_back(weight: nn.Parameter, original: Tensor, dtype: torch.dtype) -> bool:
    """Give a weight its numbers from before, except for those that are others now; whether there are any.

    Numbers are compared, since no count tells of a change: PEFT writes past autograd, and in place.
    """
    now = weight.data
    original = original.to(now.device)
    if now.shape == original.shape:
        same = now == original.to(dtype)
        changed = not bool(same.all())
        weight.data = torch.where(same, original, now.to(original.dtype)) if changed else original
    else:
        changed, weight.data = True, now.to(original.dtype)
    if weight.grad is not None:
        weight.grad = weight.grad.to(original.dtype)
    return changed


_REFUSED = {"merge", "unmerge"}


@dataclass
class _Refusal:
    """Stands in for what would write into rounded weights. No closure, so that a model can be copied and pickled."""

    layer: BaseTunerLayer
    action: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.action == "unmerge" and not self.layer.merged:
            return
        raise InlayError(
            f"{self.action}: frozen weights are rounded inside rounded_once, and would stay so. Do it before or after. "
            "(In a copy of the model that was made inside, weights are rounded for good: copy it afterwards.)"
        )


def _needs_autocast(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The hook of the first rounded module."""
    x = next((one for one in args if isinstance(one, Tensor)), None)
    if x is not None and x.dtype != module.weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InlayError(
            f"Inside rounded_once frozen weights are {module.weight.dtype}, and {type(module).__name__} was given "
            f"{x.dtype}: run the model under torch.autocast({x.device.type!r}, {module.weight.dtype}), for evaluation "
            "too, or after rounded_once."
        )


def _round_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype) -> Any:
    def rounded(features: Tensor) -> Tensor:
        wanted = torch.is_autocast_enabled(features.device.type) and features.dtype == torch.float32
        return features.to(dtype) if wanted else features

    return on_first_tensor(rounded, args, kwargs)


def _read_elsewhere(model: nn.Module) -> set[nn.Module]:
    """The modules of the stem, and those inside of a LoRA that is a DoRA."""
    try:
        found = {inner for part in anatomy(model).stem_parts for inner in part.module.modules()}
    except InlayError:
        found = set()
    for module in model.modules():
        if any(getattr(module, "use_dora", {}).values()):
            found.update(module.modules())
    return found


def _of_adapters(model: nn.Module) -> set[nn.Module]:
    """The modules of adapters and of heads that they train, active or not; what they lie around is none of them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            around = module._modules.get("base_layer", module._modules.get("original_module"))
            found.update(set(module.modules()) - set(() if around is None else around.modules()))
    return found


def _projecting(model: nn.Module) -> list[nn.Module]:
    """The attention modules whose three projections are frozen linear layers that nothing has wrapped."""
    try:
        blocks = anatomy(model).blocks
    except InlayError:
        return []
    found = []
    for block in blocks:
        if block.attention is not None and not block.attention.fused:
            parts = (block.attention.query, block.attention.key, block.attention.value)
            if all(type(p.module) is nn.Linear and not p.module.weight.requires_grad for p in parts):
                found.append(block.attention.module)
    return found
