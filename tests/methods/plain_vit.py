"""A vision transformer written out in plain torch from the weights of Transformers' ViT, with room for prompts.

The oracle of the methods that put prompts into one: no hooks, no attention interface, no state, any precision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass
class Prompting:
    """What a method does, by block, counted from 1: prompts that enter, gates, temperatures, added keys and values."""

    prompts: dict[int, Tensor] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    temperatures: dict[int, Tensor] = field(default_factory=dict)
    keys_values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def logits(model: Any, pixels: Tensor, prompting: Prompting, hidden: Tensor | None = None) -> Tensor:
    """A ViTForImageClassification's logits; `hidden` is true for patches (class token included) that nobody sees."""
    x = model.vit.embeddings(pixels)
    image, running = x.shape[1], 0
    for number, layer in enumerate(model.vit.layers, start=1):
        if number in prompting.prompts:
            entering = prompting.prompts[number]
            x = torch.cat([x[:, :1], entering.expand(len(x), -1, -1), x[:, 1 + running :]], dim=1)
            running = len(entering)
        entered = x[:, 1 : 1 + running]
        x = block(layer, x, number, prompting, hidden, running)
        if number in prompting.gates:
            gate = torch.sigmoid(prompting.gates[number])
            x = torch.cat([x[:, :1], gate * x[:, 1 : 1 + running] + (1 - gate) * entered, x[:, 1 + running :]], dim=1)
    x = torch.cat([x[:, :1], x[:, 1 + running :]], dim=1)
    assert x.shape[1] == image
    norm = model.vit.layernorm
    x = functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return functional.linear(x[:, 0], model.classifier.weight, model.classifier.bias)


def block(layer: Any, x: Tensor, number: int, prompting: Prompting, hidden: Tensor | None, running: int) -> Tensor:
    """One block: attention and feed-forward, each behind a norm and beside a residual."""
    before, after = layer.layernorm_before, layer.layernorm_after
    normed = functional.layer_norm(x, before.normalized_shape, before.weight, before.bias, before.eps)
    x = x + attention(layer.attention, normed, number, prompting, hidden, running)
    normed = functional.layer_norm(x, after.normalized_shape, after.weight, after.bias, after.eps)
    wide = functional.gelu(functional.linear(normed, layer.mlp.fc1.weight, layer.mlp.fc1.bias))
    return x + functional.linear(wide, layer.mlp.fc2.weight, layer.mlp.fc2.bias)


def attention(
    module: Any, x: Tensor, number: int, prompting: Prompting, hidden: Tensor | None = None, running: int = 0
) -> Tensor:
    """Attention head by head."""
    size, count = module.head_dim, module.num_attention_heads
    query, key, value = (functional.linear(x, p.weight, p.bias) for p in (module.q_proj, module.k_proj, module.v_proj))
    added_key, added_value = prompting.keys_values.get(number, (x.new_zeros(0, size * count),) * 2)
    temperature = prompting.temperatures.get(number, torch.ones(1, dtype=x.dtype))
    heads = []
    for head in range(count):
        channels = slice(head * size, (head + 1) * size)
        q, k, v = query[..., channels], key[..., channels], value[..., channels]
        scores = q @ k.transpose(-1, -2)
        if hidden is not None:
            unseen = torch.cat([hidden[:, :1], hidden.new_zeros(len(x), running), hidden[:, 1:]], dim=1)
            scores = scores.masked_fill(unseen[:, None, :], float("-inf"))
        scores = torch.cat([q @ added_key[:, channels].T, scores], dim=-1)
        weights = torch.softmax(scores / (size**0.5 * temperature), dim=-1)
        heads.append(weights @ torch.cat([added_value[:, channels].expand(len(x), -1, -1), v], dim=1))
    return functional.linear(torch.cat(heads, dim=-1), module.o_proj.weight, module.o_proj.bias)
