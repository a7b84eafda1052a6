"""Mixed precision around frozen weights: what autocast would do in every step, done once.

Under autocast a linear layer or a convolution computes with its weight and its input rounded to the lower precision.

- A frozen weight is rounded to the same numbers in every step. Kept rounded, it takes half of an accelerator's memory,
  nothing has to be rounded and kept for the backward pass, and the result is the same to the bit; up to a rounding,
  where a method multiplies the weight itself by something trained.
- What enters attention is rounded by the projections of queries, keys and values, each for itself. Rounded once, before
  them, the forward pass is the same to the bit and moves a third of the bytes. In the backward pass the three
  gradients are added in the lower precision, as they are where one projection makes all three.

Left alone is what someone else reads as well: a weight tied to an embedding, the stem, to whose precision models round
the pixels before anything can act on them, and the weights whose norm PEFT's DoRA takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.tuner import on_first_tensor

ROUNDED = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # exactly these: autocast rounds what they compute with


@contextmanager
def rounded_once(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, the frozen weights of a model are kept as autocast to `dtype` rounds them; None: nothing is done.

        with inlay.rounded_once(model, torch.bfloat16):
            for batch in batches:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(**batch).loss
                ...

    For any method that leaves weights frozen, PEFT's too. The weights as they were wait in ordinary memory and are put
    back in the end, to the bit: save a whole model after that, an adapter whenever you like.
    """
    if dtype is None:
        yield
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise InlayError(
            f"rounded_once: autocast rounds to torch.bfloat16 or torch.float16, not to {dtype}. Give the type that you "
            "give to torch.autocast, or None to round nothing."
        )
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    others = _read_elsewhere(model)
    frozen = [
        module.weight
        for module in model.modules()
        if type(module) in ROUNDED
        and module not in others
        and not module.weight.requires_grad
        and module.weight.dtype == torch.float32
        and owners[id(module.weight)] == 1
    ]
    originals = [weight.data.cpu() for weight in frozen]
    before = partial(_round_first, dtype=dtype)
    handles = [place.register_forward_pre_hook(before, with_kwargs=True) for place in _projecting(model)]
    try:
        for weight in frozen:
            weight.data = weight.data.to(dtype)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for weight, original in zip(frozen, originals, strict=True):
            weight.data = original.to(weight.device)


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
