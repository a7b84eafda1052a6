"""A LoRA as vLLM reads it: one rank and one scale for all, so that nothing of it is passed over without a word.

vLLM's reader takes `r`, `lora_alpha`, `use_rslora` and the tensors, and knows no pattern of ranks or scales. So each
pair is written with the same rank, padded with zeros, and its own scale is multiplied into B: the product is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, WEIGHTS, read_json
from inlay.methods.plain import WRAPPED

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # which vLLM takes as --max-lora-rank
PAIR = (".lora_A.weight", ".lora_B.weight")
TASK = "CAUSAL_LM"


def rewrite(place: Path) -> int:
    """Make the LoRA in a folder one that vLLM reads; the rank it has then. An error for what vLLM has no place for."""
    from peft import LoraConfig
    from safetensors.torch import load_file, save_file

    settings = read_json(place / CONFIG["peft"])
    _check(settings)
    tensors = load_file(place / WEIGHTS["peft"])
    strange = sorted(name for name in tensors if not name.endswith(PAIR))
    if strange:
        raise InlayError(
            f"vLLM has no place for {strange[0]} of this LoRA: it takes low-rank products of linear layers alone. "
            "`inlay merge` writes a whole model, which vLLM serves."
        )
    config = LoraConfig.from_pretrained(str(place))
    stems = sorted(name.removesuffix(PAIR[0]) for name in tensors if name.endswith(PAIR[0]))
    most = max(len(tensors[stem + PAIR[0]]) for stem in stems)
    rank = next((each for each in RANKS if each >= most), None)
    if rank is None:
        raise InlayError(
            f"This LoRA has rank {most}; vLLM takes at most {RANKS[-1]}. `inlay merge` writes a whole model."
        )
    made: dict[str, Tensor] = {}
    for stem in stems:
        a, b = tensors[stem + PAIR[0]], tensors[stem + PAIR[1]]
        scale = _scale(config, stem.removeprefix(WRAPPED), len(a))
        made[stem + PAIR[0]] = torch.cat([a, a.new_zeros(rank - len(a), a.shape[1])]).contiguous()
        wide = torch.cat([b.double() * scale, b.new_zeros(len(b), rank - b.shape[1]).double()], dim=1)
        made[stem + PAIR[1]] = wide.to(b.dtype).contiguous()
    save_file(made, place / WEIGHTS["peft"], metadata={"format": "pt"})
    targets = [stem.removeprefix(WRAPPED) for stem in stems]
    settings |= {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    settings |= {"modules_to_save": None, "target_modules": targets}
    (place / CONFIG["peft"]).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    return rank


def _check(settings: Mapping[str, Any]) -> None:
    task = settings.get("task_type")
    if task != TASK:
        raise InlayError(
            f"This LoRA is for task_type={task!r}, and vLLM puts LoRAs into language models alone ({TASK}). "
            "`inlay serve` serves it."
        )
    if settings.get("fan_in_fan_out"):
        raise InlayError(
            "This LoRA adapts layers of GPT-2's kind (fan_in_fan_out), which vLLM does not: `inlay merge`."
        )


def _scale(config: Any, name: str, rank: int) -> float:
    """What PEFT multiplies the product of a layer with."""
    from peft.utils.other import get_pattern_key

    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return float(alpha / (rank**0.5 if config.use_rslora else rank))
