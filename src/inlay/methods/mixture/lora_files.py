"""LoRAs as they lie on disk or on the hub, read for a model without PEFT's modules: factors by place, and heads.

What a folder says is checked before it is obeyed (see vetting.py), and by its tensors' shapes before they are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.backbones.quantised import kind_of
from inlay.errors import InlayError, first_line
from inlay.methods import vetting
from inlay.methods.channels import widths
from inlay.methods.folder import CONFIG, NOTE, WEIGHTS, read_json
from inlay.methods.mixture.unmixable import why_not, why_not_at
from inlay.methods.plain import WRAPPED
from inlay.methods.pooling_notes import find_file

Stamp = tuple[tuple[int, int, int], ...]
FACTOR = re.compile(r"(?P<place>.+)\.lora_(?P<which>[AB])\.weight")
BY_MIX = "inlay.mix takes it, in a PEFT model."


@dataclass(frozen=True)
class LoraFile:
    """A LoRA that fits a model, by what its files' headers say; `read` has its numbers."""

    source: str
    weights: Path
    note: Mapping[str, Any]
    scales: dict[str, float]  # s = alpha / r, or alpha / sqrt(r), by place
    ranks: dict[str, int]
    heads: dict[str, tuple[str, ...]] = field(default_factory=dict)  # a module's name, and its parameters' below it
    outputs: int | None = None  # of the last layer of its head
    stamp: Stamp = ()  # of its files, when they were looked at

    def read(self, dtype: torch.dtype) -> LoraTensors:
        """Its numbers, which are finite: A and s B of each place, and the heads' parameters."""
        tensors = {
            key.removeprefix(WRAPPED): value for key, value in vetting.read_tensors(self.weights, self.note).items()
        }
        if _stamp(self.weights) != self.stamp:
            raise InlayError(f"{self.source} is not what it was when it was added: remove it, and add it again.")
        pairs = {}
        for place, scale in self.scales.items():
            a, b = tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"]
            wide = torch.promote_types(b.dtype, torch.float32)
            pairs[place] = (a.to(dtype).contiguous(), (b.to(wide).mT * scale).to(dtype).contiguous())
        heads = {
            name: {own: tensors[f"{name}.{own}"].to(dtype) for own in parameters}
            for name, parameters in self.heads.items()
        }
        return LoraTensors(pairs, heads)


@dataclass(frozen=True)
class LoraTensors:
    """A LoRA's numbers: of each place `A` (r, d) and `s B^T` (r, m), and each head's parameters."""

    pairs: dict[str, tuple[Tensor, Tensor]]
    heads: dict[str, dict[str, Tensor]]

    @cached_property
    def size(self) -> int:
        """In bytes."""
        each = [tensor for pair in self.pairs.values() for tensor in pair]
        each += [tensor for head in self.heads.values() for tensor in head.values()]
        return sum(tensor.nbytes for tensor in each)

    def pinned(self) -> LoraTensors:
        """In memory that a GPU copies from while it computes."""
        pairs = {place: (a.pin_memory(), b.pin_memory()) for place, (a, b) in self.pairs.items()}
        heads = {name: {own: t.pin_memory() for own, t in head.items()} for name, head in self.heads.items()}
        return LoraTensors(pairs, heads)


def look(source: str, base: nn.Module, **hub: Any) -> LoraFile:
    """A LoRA in a folder or a repository, for this base model; an `InlayError` says why it is none of its.

    `hub`: `revision`, `token`, `subfolder`, ... as of `PeftModel.from_pretrained`.
    """
    try:
        return _look(source, base, hub)
    except InlayError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # what PEFT makes of settings of other types
        raise InlayError(f"{source} has settings that are none of a LoRA's: {first_line(error)}") from error


def _look(source: str, base: nn.Module, hub: Mapping[str, Any]) -> LoraFile:
    place = find_file(source, CONFIG["peft"], hub)
    weights = find_file(source, WEIGHTS["peft"], hub)
    if place is None or weights is None:
        lacking = CONFIG["peft"] if place is None else WEIGHTS["peft"]
        raise InlayError(
            f"{source} has no {lacking}: give the folder of an adapter in PEFT's format, or its name on the hub (which "
            "must be within reach, or in its cache)."
        )
    stamp = _stamp(weights)
    settings = read_json(place)
    if settings.get("peft_type") != "LORA":
        raise InlayError(f"{source} is an adapter of type {settings.get('peft_type')!r}, not a LoRA.")
    shapes = {key.removeprefix(WRAPPED): value for key, value in vetting.read_shapes(weights).items()}
    note = find_file(source, NOTE["peft"], hub)
    vetting.check_settings(place, settings, shapes, base, vouched=note is not None)
    config: Any = LoraConfig.from_pretrained(str(place.parent))
    if (why := why_not(config)) is not None:
        raise InlayError(f"{source} cannot be mixed with others in one pass: {why}.")
    facts = {} if note is None else read_json(note)
    if not isinstance(facts.get("fingerprint") or "", str) or not isinstance(facts.get("sha256", {}), dict):
        raise InlayError(f"{note} was edited or is damaged: save the adapter again.")
    if any(not isinstance(name, str) for name in facts.get("newly_initialised") or ()):
        raise InlayError(f"{note} was edited or is damaged: save the adapter again.")
    modules = dict(base.named_modules())
    scales, ranks = _factors(source, config, shapes, modules)
    rest = [key for key in shapes if FACTOR.fullmatch(key) is None]
    _check_whole(source, config, shapes, modules)
    heads = _heads(source, config, {key: shapes[key] for key in rest}, modules)
    outputs = _outputs(base, shapes, heads)
    return LoraFile(source, weights, facts, scales, ranks, heads, outputs, stamp)


def _stamp(weights: Path) -> Stamp:
    """What tells a folder's files from others that take their place."""
    try:
        each = [(weights.parent / name).stat() for name in (weights.name, CONFIG["peft"])]
    except OSError:
        return ()  # of which there is none
    return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in each)


def _factors(
    source: str, config: Any, shapes: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, float], dict[str, int]]:
    scales, ranks = {}, {}
    for key, shape in shapes.items():
        found = FACTOR.fullmatch(key)
        if found is None or found["which"] == "B":
            continue
        place, b = found["place"], shapes.get(f"{found['place']}.lora_B.weight")
        host = modules.get(place)
        if host is None:
            raise InlayError(f"{source} adapts {place}, which this model lacks. Is it of this base model?")
        if b is None:
            raise InlayError(f"{source} lacks {place}.lora_B: it is not whole.")
        if (why := why_not_at(place)) is not None:
            raise InlayError(f"{source} cannot be mixed with others in one pass: {why}.")
        if type(host) not in (nn.Linear, Conv1D) and kind_of(host) is None:
            raise InlayError(f"{source} adapts {place}, a {type(host).__name__}, which a pool does not. {BY_MIX}")
        wide, narrow = widths(host)
        rank = shape.shape[0]
        if rank < 1 or shape.ndim != 2 or tuple(shape.shape) != (rank, wide) or tuple(b.shape) != (narrow, rank):
            raise InlayError(
                f"{source} has factors of {tuple(shape.shape)} and {tuple(b.shape)} at {place}, which has {wide} "
                f"inputs and {narrow} outputs here: it was trained on another base model."
            )
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), place), config.lora_alpha)
        scales[place] = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        ranks[place] = rank
    return scales, ranks


def _check_whole(source: str, config: Any, shapes: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """An error where a layer that the config means has no factors in the file, or one of the two."""
    own = tuple(config.modules_to_save or ())
    meant = [
        name
        for name, module in modules.items()
        if (isinstance(module, nn.Linear | Conv1D) or kind_of(module) is not None)
        and config.target_modules
        and check_target_module_exists(config, name)
        and not any(name.endswith(end) or f".{end}." in f".{name}" for end in own)
    ]
    there = {found["place"] for key in shapes if (found := FACTOR.fullmatch(key)) is not None}
    lacking = [
        f"{name}.lora_{which}"
        for name in dict.fromkeys([*meant, *there])
        for which in "AB"
        if f"{name}.lora_{which}.weight" not in shapes
    ]
    if lacking:
        raise InlayError(
            f"{source} lacks {lacking[0]}" + f" and {len(lacking) - 1} more" * (len(lacking) > 1) + ": it is not whole."
        )


def _heads(
    source: str, config: Any, rest: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> dict[str, tuple[str, ...]]:
    """The modules that the adapter has of its own: the outermost that `modules_to_save` means, each whole."""
    endings = tuple(config.modules_to_save or ())
    named = [name for name in modules if name and name.endswith(endings)] if endings else []
    outer = [name for name in named if not any(name.startswith(f"{other}.") for other in named)]
    heads: dict[str, tuple[str, ...]] = {}
    for key, shape in rest.items():
        name = next((name for name in outer if key.startswith(f"{name}.")), None)
        if name is None:
            raise InlayError(f"{source} holds {key}, neither a factor at a place nor of a head. {BY_MIX}")
        own = key.removeprefix(f"{name}.")
        like = dict(modules[name].named_parameters()).get(own)
        if like is None or any(True for _ in modules[name].buffers()) or isinstance(modules[name], nn.Embedding):
            raise InlayError(f"{source} holds {key}, which a pool does not mix. {BY_MIX}")
        if shape.shape[1:] != like.shape[1:]:
            raise InlayError(
                f"{source} has {key} of {tuple(shape.shape)}, and this model of {tuple(like.shape)}: its head does not "
                "fit."
            )
        heads[name] = (*heads.get(name, ()), own)
    for name in outer:
        lacking = {own for own, _ in modules[name].named_parameters()} - set(heads.get(name, ()))
        if lacking:
            raise InlayError(f"{source} lacks {name}.{min(lacking)}: its head is not whole.")
    return heads


def _outputs(base: nn.Module, shapes: Mapping[str, Tensor], heads: Mapping[str, tuple[str, ...]]) -> int | None:
    """How many outputs the head has, by the layer that gives the base model's own."""
    from inlay.methods.mixture.heads import outputs_in

    names = {f"{name}.{own}" for name, parameters in heads.items() for own in parameters}
    return outputs_in(base, {key: shapes[key] for key in names})
