"""The attention weights of a model, block by block, while it runs, and the places of the tokens they are about.

Fused attention never forms its weights. For as long as they are wanted the plain ("eager") implementation runs, which
computes the same function and returns them; afterwards the model is as it was. A block's weights are handed over as
soon as they are there and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from inlay.anatomy import Anatomy, anatomy
from inlay.errors import InlayError
from inlay.explain import distance
from inlay.explain.windows import Windows, windows
from inlay.methods.protocol import hooks_of

# Not on Transformers' attention interface: they hand out their weights only where the model is asked for them.
ASKED = ("deberta-v2", "mpnet")


@dataclass(frozen=True)
class Reach:
    """How far one block's heads reach, (n, heads) each: `weighted` and `largest` in `unit`, `steps` in tokens.

    `uniform` (n,) is what `weighted` would be if every query attended to all that is there alike.
    """

    weighted: Tensor
    largest: Tensor
    steps: Tensor
    uniform: Tensor


def unit(parts: Anatomy) -> str:
    """What distances are measured in."""
    return "pixels" if parts.modality == "image" else "tokens"


def check_attention(model: nn.Module) -> Anatomy:
    """The model's parts, if its blocks attend; otherwise an error that says what to do in its place."""
    parts = anatomy(model)
    if any(block.attention is None for block in parts.blocks):
        raise InlayError(
            f"{type(model).__name__} ({parts.family}) has no attention, so it has no attention distance. "
            "`inlay explain cka` compares its layers with those of another model."
        )
    if parts.family.startswith("timm"):
        raise InlayError(
            f"{type(model).__name__}: timm's models do not hand out their attention weights. Take the same "
            "architecture from Transformers, or compare layers with `inlay explain cka`."
        )
    return parts


def check_order(model: nn.Module) -> None:
    """Refuse an adapter whose tokens follow the model's own: only those before them are left out."""
    for config in getattr(model, "peft_config", {}).values():
        if hooks_of(config).appends_tokens:
            raise InlayError(
                "The adapter puts its tokens (kind='concat') after the patches, where they cannot be distinguished "
                "from them. Look at the model without --adapter, or at a prompt of kind 'add'."
            )


def arguments(parts: Anatomy) -> dict[str, Any]:
    """What a forward pass must be given so that the weights are computed."""
    return {"output_attentions": True} if parts.family in ASKED else {}


@contextmanager
def reading(model: nn.Module, take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `take(block, weights)` for every block of every forward pass made inside of this; weights (n, heads, T, T).

    Blocks are counted from 1.
    """
    parts = check_attention(model)

    def hook_of(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = [v for v in (output if isinstance(output, tuple) else ()) if isinstance(v, Tensor) and v.ndim == 4]
            if not found:
                raise InlayError(
                    f"The attention of block {index} ({type(module).__name__}) does not hand out its weights. "
                    "Attention distance cannot be measured here; `inlay explain cka` can compare the layers."
                )
            take(index, found[-1])  # T5 has a position bias of the same shape before them

        return hook

    handles = []
    with eager(model):
        try:
            for block in parts.blocks:
                assert block.attention is not None
                handles.append(block.attention.module.register_forward_hook(hook_of(block.index)))
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run with the plain implementation of attention, and give every part its own back."""
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if isinstance(getattr(module, "config", None), PretrainedConfig)
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def reach(weights: Tensor, parts: Anatomy, batch: dict[str, Tensor], index: int) -> Reach:
    """How far the heads of block `index` reach in a batch.

    Class, distillation and register tokens, and prompts, stand before the patches: the patches are the last of the
    tokens. Of a text all real tokens count, its special ones too. In a Swin model attention stays within a window, and
    so does the distance; the mean is over all patches of the image, and what pads a window is passed over.
    """
    if parts.modality == "text":
        count = batch["input_ids"].shape[1]
        return _reach(weights[..., -count:, -count:], distance.line(count), batch.get("attention_mask"))
    images, height, width = (batch["pixel_values"].shape[i] for i in (0, -2, -1))
    down, across = _patch(parts)
    if down != across:
        raise InlayError(f"Patches of {down} x {across} pixels are not square: distances are measured on square ones.")
    if parts.kind == "hierarchical":
        return _in_windows(weights, windows(parts, index, down, height, width), images)
    rows, columns = height // down, width // across
    count = rows * columns
    return _reach(weights[..., -count:, -count:], distance.grid(rows, columns, down), None)


def _in_windows(weights: Tensor, found: Windows, images: int) -> Reach:
    count, (each, _) = found.side**2, found.real.shape
    if weights.shape[0] != images * each:
        raise InlayError(
            f"Attention has {weights.shape[0]} windows where {images} images of {each} were expected: this model cuts "
            "its windows in another way than Swin. `inlay explain cka` can compare its layers."
        )
    real = found.real.to(weights.device)
    alike = found.together.to(weights).repeat(images, 1, 1)[:, None]
    places = distance.grid(found.side, found.side, found.stride)
    within = _reach(weights[..., -count:, -count:] * alike, places, real.repeat(images, 1), alike)
    share = real.sum(1) / real.sum()

    def whole(values: Tensor) -> Tensor:
        """From windows to images: a window counts by the patches that it holds."""
        return torch.einsum("nw...,w->n...", values.unflatten(0, (-1, each)), share.to(values))

    return Reach(**{name: whole(values) for name, values in vars(within).items()})


def _reach(weights: Tensor, places: Tensor, real: Tensor | None, alike: Tensor | None = None) -> Reach:
    """`alike` (n, 1, P, P) is attention to all that can be seen; None where everything can."""
    apart = distance.pairwise(places).to(weights.device)
    index = distance.pairwise(distance.line(len(places))).to(weights.device)
    if alike is None:
        alike = weights.new_ones(()).expand(len(weights), 1, *apart.shape)
    return Reach(
        distance.weighted_distance(weights, apart, real),
        distance.largest_distance(weights, apart, real),
        distance.largest_distance(weights, index, real),
        distance.weighted_distance(alike, apart, real)[:, 0],
    )


def _patch(parts: Anatomy) -> tuple[int, int]:
    config: Any = parts.backbone.module.config
    size = getattr(config, "patch_size", None) or config.vision_config.patch_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
