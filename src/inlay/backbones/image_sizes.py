"""Images of another size than a vision model was pretrained on.

Models of convolutions, and of windows with relative positions, read them as they are. Where a transformer has a table
with a row for each patch of one size, that table is interpolated once, by the model's own `interpolate_pos_encoding`.
What comes out is an ordinary model of the new size: whatever is done to a model, from a dry run to an export, works on
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inlay.backbones.processors import image_side
from inlay.errors import InlayError, first_line

TABLES = ("position_embeddings", "position_embedding")  # a parameter, or an embedding with a row for each patch


def stated_size(config: Any) -> Any:
    """The size of image that a config names, of the model or of its part for images; None where it names none."""
    return getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)


def agree_on_size(model: Any, processor: Any, name: str, asked: bool, file: str) -> None:
    """Let the model read the images that the processor gives, or say that it cannot; models of any size are told the
    size. `asked`: whether another size than the checkpoint's was asked for, for which positions are interpolated."""
    side = image_side(processor)
    stated = stated_size(model.config)
    if stated is None:
        model.config.image_size = side
    elif stated not in (side, [side, side], (side, side)):
        if asked:
            _interpolate_positions(model, stated, side)
        example = torch.zeros(1, getattr(model.config, "num_channels", 3), side, side, dtype=model.dtype)
        try:
            with torch.inference_mode():
                model(example)
        except (ValueError, RuntimeError, TypeError) as error:
            better = "Leave --image-size out" if asked else f"Give --image-size {_one(stated)}"
            raise InlayError(
                f"{name!r} reads images of {_one(stated)} pixels, not {side} ({first_line(error)}). {better} "
                f"(image_size in Python), or mend the size in {file}."
            ) from error


def own_side(name: str, revision: str | None = None) -> int | None:
    """The side of the images that a model of images is given by itself; None where that cannot be found out
    without its own code."""
    from transformers import AutoConfig

    from inlay.backbones import locate
    from inlay.backbones.processors import image_processor
    from inlay.console import quiet

    try:
        place = locate.find(name, revision)
        with quiet():
            config = AutoConfig.from_pretrained(place.path, trust_remote_code=False, **place.arguments)
            return image_side(image_processor(place, config, False, None, []))
    except (InlayError, OSError, ValueError, KeyError, ImportError, TypeError):
        return None


def _interpolate_positions(model: nn.Module, stated: Any, side: int) -> None:
    """Give every table of positions a row for each patch of an image of `side` pixels."""
    for module in model.modules():
        name = next((each for each in TABLES if hasattr(module, each)), None)
        if name is None or not hasattr(module, "interpolate_pos_encoding"):
            continue
        table = getattr(module, name)
        patch = _one(getattr(module, "patch_size", None) or getattr(model.config, "patch_size", 0))
        if not patch or not isinstance(table, nn.Parameter | nn.Embedding):
            continue
        if side % patch:
            below = max(patch, side // patch * patch)
            raise InlayError(
                f"image_size={side}: the model reads patches of {patch} pixels, and this is no multiple of them. "
                f"Give {below} or {side // patch * patch + patch}."
            )
        _interpolate(module, name, _one(stated) // patch, side // patch, side)
    config: Any = model.config
    for part in [config, getattr(config, "vision_config", None)]:
        if part is not None and getattr(part, "image_size", None) is not None:
            part.image_size = side


@torch.no_grad()
def _interpolate(module: Any, name: str, before: int, after: int, side: int) -> None:
    table = getattr(module, name)
    rows = table if isinstance(table, nn.Parameter) else table.weight
    first = rows.shape[-2] - before * before  # of class tokens and the like, which stand before the patches
    if first < 0 or rows.dim() != (3 if rows is table else 2):
        return
    count, kept = first + after * after, rows.data
    rows.data = kept.float()  # bicubic interpolation knows no half precision on every machine
    found = module.interpolate_pos_encoding(rows.new_zeros(1, count, rows.shape[-1]), side, side)
    rows.data = kept
    found = found.to(kept.dtype).contiguous()
    if rows is table:
        setattr(module, name, nn.Parameter(found, requires_grad=rows.requires_grad))
    else:
        table.weight = nn.Parameter(found[0], requires_grad=rows.requires_grad)
        table.num_embeddings = count
        module.position_ids = torch.arange(count, device=kept.device).expand(1, -1)
    facts = {"image_size": side, "num_patches": after * after, "num_positions": count}
    for part in (module, getattr(module, "patch_embeddings", None)):
        for key, value in facts.items():
            known = getattr(part, key, None)
            if known is not None:
                setattr(part, key, value if isinstance(known, int) else (side, side))


def _one(size: Any) -> int:
    """The side of a square, or the first of two sides."""
    return int(size if isinstance(size, int) else size[0]) if size else 0
