"""A compact prefix without biases as PEFT's CARTRIDGE adapter, which PEFT alone loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import CartridgeConfig, PeftModel
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.compact_prefix.layer import CompactPrefixLayer
from inlay.methods.plain import base_of
from inlay.methods.prompts import rotary, rotated


@torch.no_grad()
def to_cartridge(model: PeftModel, folder: Path, base_model_name: str | None) -> None:
    """Write the active adapter of a model into a folder.

    PEFT lets the text begin behind the prefix, at position t; ours begins at 0. So keys that are rotated by their
    position are rotated t further.
    """
    base: Any = base_of(model)
    name = model.active_adapter
    layers = []
    for block in anatomy(base).blocks:
        assert block.attention is not None
        module = block.attention.module
        layer = next((child for child in module.children() if isinstance(child, CompactPrefixLayer)), None)
        if layer is None or name not in layer.pieces:
            raise InlayError(
                f"{block.attention.name} has no prefix, and a cartridge has one in every layer. Leave `layers` out."
            )
        key, value, bias = layer.pieces[name]()
        if bias is not None:
            raise InlayError(
                "A cartridge has no biases: compress with --to cartridge, or with --set biases=false and budgets=equal."
            )
        key = rotated(base, module, key[None], key.shape[1])[0] if rotary(base) else key
        layers.append(torch.stack([key, value]).permute(2, 0, 1, 3))  # token, key or value, head, channel
    tokens = layers[0].shape[0]
    if any(layer.shape != layers[0].shape for layer in layers):
        raise InlayError("A cartridge has as many keys in every layer: the adapter's layers differ.")
    _, _, heads, size = layers[0].shape
    config = CartridgeConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_model_name,
        num_virtual_tokens=tokens,
        num_frozen_tokens=0,
        num_layers=len(layers),
        num_attention_heads=heads,
        token_dim=heads * size,
        num_transformer_submodules=1,
    )
    config.save_pretrained(str(folder))
    flat = torch.stack(layers, 1).reshape(tokens, -1).float().cpu().contiguous()
    save_file({"prompt_embeddings": flat}, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
