"""A task of Multi-LoRA as a plain LoRA adapter of PEFT's, and back.

A LoRA is a pair `A_i, B_i`; a task of Multi-LoRA is the pair `A, B_i` with the `A` that all tasks share. So a task
becomes a LoRA by writing its `A` down, for servers that know LoRA only, and a LoRA whose `A`s are those of the seed
becomes a task. Of a fused projection the s adapted parts become one LoRA of rank s r whose `B` is zero elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods import vetting
from inlay.methods.folder import CONFIG, WEIGHTS, AdapterFolder, read_json, sort_sets
from inlay.methods.mixture.heads import outputs_in
from inlay.methods.multi_lora.config import MultiLoraConfig
from inlay.methods.multi_lora.shared import checksum_of, digest_of, draw
from inlay.methods.plain import WRAPPED, base_of
from inlay.methods.pooling_notes import agreeing_with_note
from inlay.methods.registry import get
from inlay.methods.settings import check_settings

OURS = ".inlay_multi_lora_b.weight"
# What is taken of a LoRA's settings.
TAKEN = ("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "modules_to_save")


def drawn(config: MultiLoraConfig) -> dict[str, Tensor]:
    """The `A`s that a task was trained with, by the names of their modules, checked."""
    places = config.places or {}
    found = {
        name: draw(place["shape"], config.seed, name, config.init, lookup=place["kind"] == "embedding")
        for name, place in places.items()
    }
    checksum = checksum_of((name, digest_of(a)) for name, a in found.items())
    if checksum != config.checksum:
        raise InlayError(
            f"The A's that seed {config.seed} gives here are not those of the adapter (checksum {checksum[:12]}, saved "
            f"{str(config.checksum)[:12]}): its settings were edited, or this version of torch draws other numbers."
        )
    return found


def to_lora(config: MultiLoraConfig, tensors: dict[str, Tensor], folder: Path, sizes: object = None) -> LoraConfig:
    """Write a saved task as a LoRA into `folder`; the config that was written. A task knows the `sizes` itself."""
    shared, places = drawn(config), config.places or {}
    ranks, alphas, made = {}, {}, {}
    for key, tensor in tensors.items():
        if not key.endswith(OURS):
            made[key] = tensor  # of a head
            continue
        name = key.removesuffix(OURS).removeprefix(WRAPPED)
        place = places[name]
        parts, rank, _ = tensor.shape
        whole = tensor.new_zeros(place["width"], parts * rank)
        for number, (begin, end) in enumerate(place["parts"]):
            whole[begin:end, number * rank : (number + 1) * rank] = tensor[number].T
        a = shared[name].to(tensor.dtype)
        stem = key.removesuffix(OURS)
        if place["kind"] == "embedding":
            made |= {f"{stem}.lora_embedding_A": a.T.contiguous(), f"{stem}.lora_embedding_B": whole}
        else:
            flat = whole[:, :, None, None] if place["kind"] == "conv2d" else whole
            made |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": flat.contiguous()}
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
        ranks[name], alphas[name] = parts * rank, parts * alpha
    r, alpha = _most(ranks.values()), _most(alphas.values())
    written = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=config.lora_dropout,
        rank_pattern={name: rank for name, rank in ranks.items() if rank != r},
        alpha_pattern={name: each for name, each in alphas.items() if each != alpha},
        target_modules=sorted(ranks),
        modules_to_save=config.modules_to_save,
        fan_in_fan_out=any(place["kind"] == "conv1d" for place in places.values()),
        task_type=config.task_type,
        inference_mode=True,
        base_model_name_or_path=config.base_model_name_or_path,
    )
    save_file(made, folder / WEIGHTS["peft"], metadata={"format": "pt"})
    written.save_pretrained(str(folder))
    sort_sets(folder / CONFIG["peft"])
    if config.pooling is not None:  # for which PEFT's config has no place
        facts = {
            "base_model": config.base_model_name_or_path,
            "fingerprint": None,
            "newly_initialised": config.newly_initialised or [],
        }
        AdapterFolder(folder, get("lora")).write_note(facts, config.pooling)
    return written


def from_lora(model: Any, folder: Path | str, task: str, config: MultiLoraConfig | None = None) -> None:
    """Add a LoRA that PEFT saved as a task of a Multi-LoRA model, if its `A`s are those that the model's tasks share.

    `config` says how the model's `A`s are drawn; None: as those of the tasks which it has.
    """
    with agreeing_with_note(model, folder):
        _take(model, Path(folder), task, config)


def _take(model: Any, folder: Path, task: str, config: MultiLoraConfig | None) -> None:
    lora, tensors = _read(model, folder)
    if getattr(lora, "use_rslora", False) or getattr(lora, "use_dora", False):
        raise InlayError(
            f"{folder} is a LoRA with use_rslora or use_dora, which is another equation: it cannot be taken."
        )
    tuner = model.base_model
    layers = tuner.routing.layers
    if config is None:
        if not tuner.tasks:
            raise InlayError("The model has no task that says how its A's are drawn: give from_lora a config.")
        config = tuner.peft_config[tuner.tasks[0]]
    found, alphas = {}, {}
    ranks, scales = lora.rank_pattern or {}, lora.alpha_pattern or {}
    for name, (a, b) in _pairs(tensors, folder).items():
        if name not in layers:
            raise InlayError(f"{folder} adapts {name}, which the tasks of this model do not: their A is not drawn.")
        own = layers[name].inlay_multi_lora_a
        if a.shape != own.shape or not torch.equal(a.to(own.device, own.dtype), own):
            raise InlayError(
                f"The A of {name} in {folder} is not the one that the tasks of this model share (seed "
                f"{config.seed}): a LoRA that was trained with its own A cannot be a task of this model."
            )
        found[name] = _factor(layers[name], b, name, folder)
        rank = ranks.get(get_pattern_key(ranks.keys(), name), lora.r)
        alpha = scales.get(get_pattern_key(scales.keys(), name), lora.lora_alpha)
        alphas[name] = alpha / rank * found[name].shape[1]
    if not found:
        raise InlayError(f"{folder} holds no A and no B of a LoRA: there is nothing to take.")
    heads = {key.removeprefix(WRAPPED): value for key, value in tensors.items() if ".lora_" not in key}
    own = MultiLoraConfig(
        r=config.r,
        rank_pattern=dict(config.rank_pattern),
        seed=config.seed,
        init=config.init,
        fused=list(config.fused),
        lora_alpha=_most(alphas.values()),
        alpha_pattern=alphas,
        lora_dropout=lora.lora_dropout,
        target_modules=sorted(found),
        modules_to_save=lora.modules_to_save,
        num_labels=outputs_in(model, heads),
        newly_initialised=config.newly_initialised,
        task_type=config.task_type,
    )
    model.add_adapter(task, own)
    try:
        _fill(model, task, found, heads, folder)
    except Exception:
        model.delete_adapter(task)
        raise


def _read(model: Any, folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The settings and the tensors of a LoRA that somebody else may have written, looked at before they are obeyed."""
    path, base = folder / CONFIG["peft"], base_of(model)
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise InlayError(f"{path} has peft_type={settings.get('peft_type')!r}: a task is made of a LoRA alone.")
    vetting.check_size([folder / WEIGHTS["peft"]], base)
    tensors = vetting.read_tensors(folder / WEIGHTS["peft"], {})
    vetting.check_settings(path, settings, tensors, base)
    try:
        check_settings(get("lora"), {name: settings[name] for name in TAKEN if name in settings})
        return LoraConfig.from_pretrained(str(folder)), tensors
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise InlayError(f"{folder} holds no LoRA adapter of PEFT's that can be read: {error}") from error


def _pairs(tensors: dict[str, Tensor], folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The `A`, as ours is laid out, and the `B` of each module that a LoRA adapts."""
    sides: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for key in (key for key in tensors if ".lora_" in key):
        name, _, what = key.removeprefix(WRAPPED).partition(".lora_")
        if what in ("embedding_A", "embedding_B"):
            sides[what[-1]][name] = tensors[key].T if what == "embedding_A" else tensors[key]
        elif what in ("A.weight", "B.weight"):
            sides[what[0]][name] = tensors[key]
        else:
            raise InlayError(f"{folder} holds {key}, which is no part of LoRA's equation: it cannot be taken.")
    for side, other in (("A", "B"), ("B", "A")):
        lacking = sorted(sides[other].keys() - sides[side].keys())
        if lacking:
            raise InlayError(f"{folder} holds no {side} of {lacking[0]}, and a {other}: it is not a whole LoRA.")
    return {name: (sides["A"][name], sides["B"][name]) for name in sides["A"]}


@torch.no_grad()
def _fill(model: Any, task: str, factors: dict[str, Tensor], heads: dict[str, Tensor], folder: Path) -> None:
    """Copy a LoRA's `B`s and heads into a task that was made for them; all of them fit, or none is copied."""
    routing = model.base_model.routing
    places = {
        f"{place}.{name}": parameter
        for place, head in routing.heads.items()
        if task in head.modules_to_save
        for name, parameter in head.modules_to_save[task].state_dict(keep_vars=True).items()
    }
    for name, value in heads.items():
        if name not in places:
            raise InlayError(f"{folder} holds {name}, for which the model has no place: another architecture?")
        if value.shape != places[name].shape:
            raise InlayError(
                f"{name} is {tuple(value.shape)} in {folder}, and {tuple(places[name].shape)} in this model: another "
                "architecture?"
            )
    lacking = sorted(places.keys() - heads.keys())
    if lacking:
        raise InlayError(f"{folder} holds no {lacking[0]}, which is of the task's own head: it is not whole.")
    for name, factor in factors.items():
        routing.layers[name].inlay_multi_lora_b[task].weight.copy_(factor)
    for name, value in heads.items():
        places[name].copy_(value)


def _factor(layer: Any, b: Tensor, name: str, folder: Path) -> Tensor:
    """Our `B` of a LoRA's: the adapted parts of the output; what lies outside of them must be zero."""
    flat = b.flatten(1)  # (m, s r), also of a convolution
    parts = layer.parts
    wanted = layer.width_out, layer.place()["shape"][1 if isinstance(layer.host, nn.Embedding) else 0]
    if flat.shape != wanted:
        raise InlayError(f"The B of {name} in {folder} is {tuple(flat.shape)}, and must be {wanted} in this model.")
    rank = flat.shape[1] // len(parts)
    rest = flat.clone()
    found = []
    for number, (begin, end) in enumerate(parts):
        ours = slice(number * rank, (number + 1) * rank)
        found.append(flat[begin:end, ours].T)
        rest[begin:end, ours] = 0
    if rest.any():
        raise InlayError(f"{folder} adapts all of {name}, and the tasks of this model only parts of its output.")
    return torch.stack(found)


def _most(values: Any) -> Any:
    """The value that is there most often: the others go into a pattern."""
    listed = list(values)
    return max(dict.fromkeys(listed), key=listed.count)
