"""Pruning E2VPT's prompts and rewinding (Han et al. 2023, section 3.3), as functions on an adapted model.

    train(model)                                      # as ever, with any trainer
    scores = importance(model, batches)               # on the training data
    prune(model, scores, token_ratio=0.5, segment_ratio=0.5)
    rewind(model)                                     # what is left starts where it had started
    train(model)                                      # with a new optimizer: the parameters are other ones

What is left is saved with the adapter (`kept` in adapter_config.json), and is all that there is: the number of trained
parameters is the number that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.e2vpt.config import E2VPTConfig, Kept
from inlay.methods.e2vpt.layer import E2VPTPromptLayer, KeyValueLayer, PrunedPrompts


@dataclass(frozen=True)
class Importance:
    """By block, counted from 1: the scores of its prompts, and of each prompt's segments (prompts x segments)."""

    tokens: Mapping[int, Tensor]
    segments: Mapping[int, Tensor]


def importance(model: PeftModel, batches: Iterable[Mapping[str, Tensor]]) -> Importance:
    """How much the loss depends on each prompt and each segment, by the masks that pruning would set to 0:

        S_k = E |dL / d rho_k|      at rho = 1, where the model sees rho_k P_k; likewise for segments.

    Since rho multiplies the prompt, dL/drho_k is the sum of (dL/dP_k) P_k over the prompt's entries, or over those of
    one segment. The mean is over the batches: with batches of one it is the paper's, over examples.
    Each batch has labels, and is where the model is. The model's modes, gradients and parameters stay as they are.
    """
    found = {prompts.place.block: prompts for prompts in _prompts(model)}
    config = _config(model)
    sums: dict[int, Tensor] = {}
    tokens: dict[int, Tensor] = {}
    weights = [prompts.weight for prompts in found.values()]
    trained = [weight.requires_grad for weight in weights]
    modes = [(module, module.training) for module in model.modules()]
    seen = 0
    try:
        model.eval()
        for weight in weights:
            weight.requires_grad_(True)
        for batch in batches:
            seen += 1
            loss = model(**batch).loss
            for (block, prompts), gradient in zip(found.items(), torch.autograd.grad(loss, weights), strict=True):
                by_segment = _by_segment(prompts, gradient * prompts.weight.detach(), config)
                sums[block] = sums.get(block, 0) + by_segment.abs()
                tokens[block] = tokens.get(block, 0) + by_segment.sum(dim=1).abs()
    finally:
        for weight, flag in zip(weights, trained, strict=True):
            weight.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
    if not seen:
        raise InlayError("importance was given no batch: pass batches of training data, with labels.")
    return Importance(
        {block: value / seen for block, value in tokens.items()}, {block: value / seen for block, value in sums.items()}
    )


def prune(model: PeftModel, scores: Importance, token_ratio: float = 0.0, segment_ratio: float = 0.0) -> None:
    """Leave out the least important prompts of every block and, of each prompt left, the least important segments.

    The ratios are of what is there now, rounded down; one prompt and one segment always stay. The parameters are
    replaced: make a new optimizer.
    """
    for name, ratio in (("token_ratio", token_ratio), ("segment_ratio", segment_ratio)):
        if not 0 <= ratio < 1:
            raise InlayError(f"{name}={ratio}: give a share from 0 to below 1.")
    config = _config(model)
    kept: dict[str, Kept] = {}
    for prompts in _prompts(model):
        block = prompts.place.block
        if block not in scores.tokens or len(scores.tokens[block]) != prompts.count:
            raise InlayError(f"The scores are not of the prompts that block {block} has: compute them again.")
        present = prompts.kept or [(token, list(range(config.num_segments))) for token in range(prompts.count)]
        left: Kept = []
        for row in _best(scores.tokens[block], token_ratio):
            token, segments = present[row]
            left.append((token, [segments[piece] for piece in _best(scores.segments[block][row], segment_ratio)]))
        kept[str(block)] = left
    for prompts in _prompts(model, running_through=True):
        full = _full(prompts) if prompts.place.enters else None
        prompts.keep(kept[str(prompts.place.entry)], full)
    config.kept = kept


@torch.no_grad()
def rewind(model: PeftModel) -> None:
    """Give what is trained the values it had before training: the prompts that are left, keys, values, the new head."""
    name = _active(model)
    for module in model.modules():
        if isinstance(module, E2VPTPromptLayer):
            for prompts in _own(module, name):
                prompts.weight.copy_(prompts.part(module.start(prompts.place)))
        elif isinstance(module, KeyValueLayer) and name in module.pieces:
            added: Any = module.pieces[name]
            added.weight.copy_(module.start(added.place))
        elif isinstance(module, ModulesToSaveWrapper) and name in module.modules_to_save:
            module.modules_to_save[name].load_state_dict(module.original_module.state_dict())


def _best(scores: Tensor, ratio: float) -> list[int]:
    """The places of the highest scores, in order; of equal ones the first."""
    leave = min(int(len(scores) * ratio), len(scores) - 1)
    order = torch.sort(scores, descending=True, stable=True).indices.tolist()
    return sorted(order[: len(order) - leave])


def _by_segment(prompts: PrunedPrompts, values: Tensor, config: E2VPTConfig) -> Tensor:
    """Sums over the segments that are there: prompts x segments."""
    segments = config.num_segments if prompts.kept is None else prompts.index.shape[1]
    return values.unflatten(-1, (segments, -1)).sum(dim=-1)


def _full(prompts: PrunedPrompts) -> Tensor:
    """All prompts that there were, p x D, zero where they were pruned."""
    tokens = prompts.tokens().detach()
    if prompts.kept is None:
        return tokens
    full = tokens.new_zeros(prompts.place.config.num_prompt_tokens, tokens.shape[1])
    full[[token for token, _ in prompts.kept]] = tokens
    return full


def _prompts(model: nn.Module, running_through: bool = False) -> Iterator[PrunedPrompts]:
    """The active adapter's prompts, of the blocks at which they enter, or of all that they pass."""
    name = _active(model)
    for module in model.modules():
        if isinstance(module, E2VPTPromptLayer):
            yield from _own(module, name, running_through)


def _own(layer: E2VPTPromptLayer, name: str, running_through: bool = False) -> Iterator[PrunedPrompts]:
    if name in layer.pieces:
        prompts = layer.pieces[name]
        assert isinstance(prompts, PrunedPrompts)
        if prompts.place.enters or running_through:
            yield prompts


def _active(model: nn.Module) -> str:
    for module in model.modules():
        if isinstance(module, E2VPTPromptLayer) and len(module.active_adapters) == 1:
            return module.active_adapters[0]
    raise InlayError(f"{type(model).__name__} has no e2vpt adapter that is active: attach one, or call set_adapter.")


def _config(model: Any) -> E2VPTConfig:
    config = model.peft_config[_active(model)]
    hidden = next(_prompts(model)).place.hidden_size
    if hidden % config.num_segments:
        fitting = [number for number in range(1, hidden + 1) if hidden % number == 0]
        raise InlayError(
            f"num_segments={config.num_segments} does not divide the hidden size {hidden}. These do: {fitting}."
        )
    return config
