"""Appendix C of the activation-prompt paper: Proposition 1, Lemma 1 and Theorem 1, computed.

`proposition`: when norm tuning and an activation prompt are the same function, and how far apart they are otherwise.
`network`: the two-layer, single-head ViT of C.3, its data, its prompts and its loss.
`distance`: Lemma 1, the average attention distance before and after the first layer.
`samples`: Theorem 1, the samples that SGD needs with a prompt at layer 1 or 2.
`lab`: the three as experiments, each with its claims, its numbers and its picture.
"""

from __future__ import annotations

from inlay.papers.activation_prompts.theory.distance import Distances, average_attention_distance, distances
from inlay.papers.activation_prompts.theory.network import Data, TwoLayerViT, hinge
from inlay.papers.activation_prompts.theory.proposition import (
    NormPair,
    batch_norm,
    batch_norm_from_prompt,
    layer_norm,
    layer_norm_from_prompt,
    prompt_from_batch_norm,
    prompt_from_layer_norm,
)
from inlay.papers.activation_prompts.theory.samples import (
    Needed,
    SampleSetting,
    expected_push,
    with_expected_gradient,
    with_sgd,
)

__all__ = [
    "Data",
    "Distances",
    "Needed",
    "NormPair",
    "SampleSetting",
    "TwoLayerViT",
    "average_attention_distance",
    "batch_norm",
    "batch_norm_from_prompt",
    "distances",
    "expected_push",
    "hinge",
    "layer_norm",
    "layer_norm_from_prompt",
    "prompt_from_batch_norm",
    "prompt_from_layer_norm",
    "with_expected_gradient",
    "with_sgd",
]
