"""Attention scaling at one projection (after Basu et al. 2023, ATTNSCALE)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inlay.methods.channels import beside
from inlay.methods.rescaling import RescalingLayer


@dataclass(frozen=True)
class ScaledChannels:
    """What is scaled of a host's output: some of its `channels`, from start to stop, `repeat` of them by one scale."""

    channels: int
    spans: tuple[tuple[int, int], ...]
    repeat: int


class Scales(nn.Module):
    """`s` of one adapter. `weight` is `s - 1`: any weight decay pulls towards the base model."""

    def __init__(self, host: nn.Module, place: ScaledChannels) -> None:
        super().__init__()
        self.place = place
        scaled = sum(stop - start for start, stop in place.spans)
        self.weight = nn.Parameter(torch.zeros(scaled // place.repeat, **beside(host.weight)))

    def forward(self) -> tuple[Tensor, None]:
        """One scale a channel of the host, 1 where nothing is scaled; and no shift."""
        spans, channels = self.place.spans, self.place.channels
        scales = (1 + self.weight).repeat_interleave(self.place.repeat).split([stop - start for start, stop in spans])
        pieces, reached = [], 0
        for (start, stop), scale in zip(spans, scales, strict=True):
            pieces += [scale.new_ones(start - reached), scale]
            reached = stop
        return torch.cat([*pieces, self.weight.new_ones(channels - reached)]), None


class AttentionScaleLayer(RescalingLayer):
    """Scales queries, and so the logits of head h, and values, and so what the head gives:

        softmax((s_q * q)^T k / sqrt(d)) (s_v * v),      s_q = s_v = 1 at the start,

    with a vector `s` for each head, or a number where there is one scale a head. The host is the projection that
    makes `q` or `v` (all three, where one does), or the norm that follows it.
    """

    adapter_layer_names = ("inlay_attention_scale_vector",)

    def update_layer(self, adapter_name: str, place: ScaledChannels) -> None:
        self.pieces[adapter_name] = Scales(self.host, place)
