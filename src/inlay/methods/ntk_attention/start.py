"""Where Z_A, Z_B and kappa start: nowhere, at a random prefix (NTK-Attention, section 3.2), or at a prompt's text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.anatomy import Attention, Block
from inlay.attention import FeatureMap, prefix_to_features
from inlay.attention.features import Centred
from inlay.methods.attention_parts import bare, query_heads, scale_of
from inlay.methods.channels import like, width_in
from inlay.methods.ntk_attention.config import NTKAttentionConfig
from inlay.methods.prompts import Prompt


@dataclass(frozen=True)
class Start:
    """phi and the first values of one attention: `z_a` [heads, r, s], `z_b` [heads, s, d], `kappa` [heads, r]; `centre`
    [heads, d] where keys are taken about one. Without a `z_b`, `z_a` is Z. `skip_first`: the term is off for queries
    that see one key only."""

    features: FeatureMap
    z_a: Tensor
    z_b: Tensor | None
    kappa: Tensor
    centre: Tensor | None = None
    skip_first: bool = False


def start_at(config: NTKAttentionConfig, block: Block, prompt: Prompt | None = None) -> Start:
    """The first values at a block's attention; they follow from the config's seed and, where a prefix is drawn, from
    the frozen projections, or from the prompt that was read. A text start without one makes room for what is loaded."""
    attention = block.attention
    assert attention is not None
    assert config.seed is not None  # filled in before any layer is made
    generator = torch.Generator().manual_seed(config.seed + block.index)
    size = attention.head_size
    heads = query_heads(attention)
    rows, rank = config.rows(size), config.rank_at(size)
    on_meta = next(attention.module.parameters()).is_meta
    centre = torch.zeros(heads, size) if config.has_centre else None
    if config.start == "prefix" and not on_meta:
        z, kappa = _prefix(config, block, attention, heads, rows, generator)
        z_a, z_b = parts(z, config, rank)
    elif config.start == "text" and prompt is not None:
        z, kappa, centre = _text(config, attention, prompt.keys_and_values(block.index), heads, rows)
        z_a, z_b = parts(z, config, rank)
    elif not config.factored:
        z_a, z_b, kappa = torch.zeros(heads, rows, size), None, torch.zeros(heads, rows)
    else:
        # As a LoRA starts: one factor is 0, the other is not, or neither would ever receive a gradient.
        z_a = torch.randn(heads, rows, rank, generator=generator, device="cpu") * spread(rows)
        z_b, kappa = torch.zeros(heads, rank, size), torch.zeros(heads, rows)
    if config.centred and prompt is not None:
        key = prompt.keys_and_values(block.index)[0][:, 0]
        centre = key.repeat_interleave(heads // len(key), 0)
    z_a, z_b, kappa, centre = (
        None if value is None else like(attention.module, value) for value in (z_a, z_b, kappa, centre)
    )
    return Start(config.features(), z_a, z_b, kappa, centre, config.skip_first)


def parts(z: Tensor, config: NTKAttentionConfig, rank: int) -> tuple[Tensor, Tensor | None]:
    """Z as the adapter stores it: its factors, or itself."""
    return low_rank(z, rank) if config.factored else (z, None)


def spread(rows: int) -> float:
    """The standard deviation of Z_A at the start: `1 / sqrt(r)`, as for any matrix that r inputs go into.

    A step of size eta leaves `phi Z` at about `eta s` times this and `phi kappa` at `eta sqrt(r)`. A query whose own
    keys weigh next to nothing (a first token of a decoder: `exp(-12)` in SmolLM2) then has the quotient of the two,
    whatever eta is: in SmolLM2 2 with a spread of 1, and 1/4 with this one.
    """
    return rows**-0.5


def low_rank(z: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors of the matrices of this rank that are nearest to `z`, by its singular values shared out evenly."""
    left, values, right = torch.linalg.svd(z.double(), full_matrices=False)
    roots = values[..., :rank].sqrt()
    return left[..., :rank] * roots[..., None, :], roots[..., None] * right[..., :rank, :]


@torch.no_grad()
def _prefix(
    config: NTKAttentionConfig, block: Block, attention: Attention, heads: int, rows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Eq. (4) of `P ~ N(0, 1)`, m x hidden, through the frozen key and value projections."""
    made_by = bare(attention.key.module)
    own = next(parameter for parameter in made_by.parameters() if parameter.is_floating_point())
    prefix = torch.randn(config.prefix_length, width_in(made_by), generator=generator, device="cpu").to(own)
    if attention.fused:
        _, key, value = made_by(prefix).chunk(3, -1)
    else:
        key, value = made_by(prefix), bare(attention.value.module)(prefix)
    key, value = (x.unflatten(-1, (-1, attention.head_size)).transpose(0, 1) for x in (key, value))
    norms = [norm for norm in block.norms if norm.name.startswith(f"{attention.name}.")]
    if norms:  # of the queries, then of the keys, head by head
        key = norms[-1].module(key)
    scale = scale_of(attention)
    return prefix_to_features(key, value, config.features(), features=rows, scale=scale, heads=heads)


@torch.no_grad()
def _text(
    config: NTKAttentionConfig, attention: Attention, prompt: tuple[Tensor, Tensor], heads: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (4) of a prompt's keys, about their mean, and values; and that mean."""
    key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in prompt)
    centre = key.mean(1)
    phi = config.features()
    assert isinstance(phi, Centred)
    phi = replace(phi, centre=centre)
    z, kappa = prefix_to_features(key, value, phi, features=rows, scale=scale_of(attention), heads=heads)
    return z, kappa, centre.repeat_interleave(heads // len(centre), 0)
