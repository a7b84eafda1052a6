"""The loss of a language model without all of its logits.

    loss = mean over labelled tokens i of  logsumexp(W h_i) - (W h_i)[y_i]

`W h_i` has as many numbers as there are words: for 8,192 tokens and 128,256 words 2.1 GB in bfloat16 and 4.2 GB in
float32, several times over in a backward pass. Here the head runs on the tokens that have a label, a piece at a time,
and the gradient of a piece is taken while its logits are there:

    d loss / d h_i = W^T (softmax(W h_i) - onehot(y_i)) / labels

What is kept is as large as `h`. The numbers are those of the whole, but for the order of sums.

An evaluation (`token_scores`) does the same without gradients: of each token it keeps its loss, and whether it is the
likeliest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.loss.loss_utils import ForCausalLMLoss

from inlay.training.seeds import random_state, set_random_state

PIECE = 2**25
"""Logits at once: 128 MiB in float32."""
IGNORED = -100


@contextmanager
def lean_loss(model: nn.Module) -> Iterator[bool]:
    """Inside, a causal language model that is given labels makes its loss without all logits; `logits` are then None.

        with inlay.lean_loss(model):
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()

    The loss and its gradients are those of Transformers, but for the order of sums. With any method, PEFT's too, and
    with a quantised head. Passes without gradients or without labels are as ever. Models that change their logits after
    the head (Gemma 2), or whose loss is not Transformers' for causal language models, keep their own way: it is False.
    """
    base, head = _parts(model)
    if base is None or head is None:
        yield False
        return
    lean = _Lean(base, head)
    before = {name: vars(base)[name] for name in ("forward", "_loss_function") if name in vars(base)}
    head_before = vars(head).get("forward")
    base.forward, base.loss_function, head.forward = lean, _Loss(lean), _Head(lean)
    try:
        yield True
    finally:
        # Someone may have wrapped it by now: what is wrapped does nothing from here on.
        lean.active = False
        _restore(base, "forward", before.get("forward"), lean)
        _restore(head, "forward", head_before, None)
        vars(base).pop("_loss_function", None)
        vars(base).update({name: value for name, value in before.items() if name == "_loss_function"})


class TokenScores:
    """What is known of the tokens of the last pass: see `token_scores`."""

    def __init__(self, lean: _Lean | None) -> None:
        self._lean = lean

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The loss of each token that follows a place (0 where it has no label), and whether it is the likeliest;
        None where the pass had all logits."""
        if self._lean is None:
            return None
        found, self._lean.scored = self._lean.scored, None
        return found


@contextmanager
def token_scores(model: nn.Module) -> Iterator[TokenScores]:
    """Inside, passes without gradients that are given labels make no logits, where `lean_loss` makes none.

    It can be used within `lean_loss`, and does nothing for a model that keeps its own way there.
    """
    outer = getattr(_base_of(model), "loss_function", None)
    if isinstance(outer, _Loss):
        with _scoring(outer.lean) as found:
            yield found
        return
    with lean_loss(model) as works:
        inner = getattr(_base_of(model), "loss_function", None) if works else None
        with _scoring(inner.lean if isinstance(inner, _Loss) else None) as found:
            yield found


@contextmanager
def _scoring(lean: _Lean | None) -> Iterator[TokenScores]:
    if lean is None:
        yield TokenScores(None)
        return
    lean.scoring = True
    try:
        yield TokenScores(lean)
    finally:
        lean.scoring, lean.scored = False, None


def _base_of(model: nn.Module) -> Any:
    base: Any = model
    return base.get_base_model() if hasattr(base, "get_base_model") else base


def _parts(model: nn.Module) -> tuple[Any, Any]:
    """The causal language model inside of adapters, and its head; None where its loss is another."""
    base = _base_of(model)
    if not hasattr(base, "get_output_embeddings") or base.get_output_embeddings() is None:
        return None, None
    if getattr(base, "loss_function", None) is not ForCausalLMLoss:
        return None, None
    code = inspect.unwrap(type(base).forward).__code__
    return (base, base.get_output_embeddings()) if "loss_function" in code.co_names else (None, None)


def _restore(module: nn.Module, name: str, before: Any, ours: Any) -> None:
    if ours is not None and vars(module).get(name) is not ours:
        return
    vars(module).pop(name, None)
    if before is not None:
        vars(module)[name] = before


class _Lean:
    """Stands in for a model's forward. `fits` says whether what its loss is given is what its head was given; None
    before that is known. No closures, so that a model can be copied and pickled."""

    def __init__(self, base: Any, head: Any) -> None:
        self.forward, self.head, self.loss = base.forward, head.forward, base.loss_function
        self.weights = list(head.parameters())
        self.active, self.holding = True, False
        self.fits: bool | None = None
        self.held: Tensor | None = None
        self.scoring = False
        self.scored: tuple[Tensor, Tensor] | None = None
        functools.update_wrapper(self, self.forward)  # who asks for its arguments sees the model's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("labels") is not None and kwargs.get("return_dict") is not False
        wanted = wanted and (self.scoring or torch.is_grad_enabled())
        if not (self.active and wanted and self.fits is not False):
            return self.forward(*args, **kwargs)
        before = random_state() if self.fits is None else None
        self.holding = True
        try:
            found = self.forward(*args, **kwargs)
        finally:
            self.holding, self.held = False, None
        if self.fits is False and before is not None:
            set_random_state(before)
            return self.forward(*args, **kwargs)
        found.logits = None
        return found


class _Head:
    """Stands in for a head's forward: what it is given goes to the loss."""

    def __init__(self, lean: _Lean) -> None:
        self.lean = lean
        functools.update_wrapper(self, lean.head)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lean = self.lean
        if not lean.holding:
            return lean.head(*args, **kwargs)
        (lean.held,) = args
        return lean.held


class _Loss:
    """Stands in for a model's loss function: `ForCausalLMLoss` of what the head would have been given."""

    def __init__(self, lean: _Lean) -> None:
        self.lean = lean

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        lean = self.lean
        if not lean.holding:
            more = {
                "num_items_in_batch": num_items_in_batch,
                "ignore_index": ignore_index,
                "shift_labels": shift_labels,
            }
            return lean.loss(logits, labels, vocab_size, **more, **kwargs)
        lean.fits = logits is lean.held
        if not lean.fits:
            return logits.new_zeros(())  # the pass is made again
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        chosen = shift_labels.flatten().to(logits.device)
        real = chosen != ignore_index
        rows, wanted = logits.flatten(0, -2)[real], chosen[real]
        size = max(1, PIECE // vocab_size)
        if torch.is_grad_enabled():
            trained = [weight for weight in lean.weights if weight.requires_grad]
            total = _InPieces.apply(rows, wanted, lean.head, size, *trained)
        else:
            losses, likeliest = _score(rows, wanted, lean.head, size)
            whole = losses.new_zeros(real.shape), torch.zeros_like(real)
            whole[0][real], whole[1][real] = losses, likeliest
            lean.scored = whole[0].view(shift_labels.shape), whole[1].view(shift_labels.shape)
            total = losses.sum()
        count = wanted.numel() if num_items_in_batch is None else num_items_in_batch
        # As ever, the mean over nothing is not a number.
        return total / (count.to(total.device) if isinstance(count, Tensor) else total.new_tensor(count))


def _score(rows: Tensor, wanted: Tensor, head: Any, size: int) -> tuple[Tensor, Tensor]:
    """The cross entropy of each row of `head(rows)`, and whether what was wanted is its likeliest, piece by piece."""
    losses, likeliest = [], []
    for part, labels in zip(rows.split(size), wanted.split(size), strict=True):
        logits = head(part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="none"))
        likeliest.append(logits.argmax(-1) == labels)
    return torch.cat(losses), torch.cat(likeliest)


class _InPieces(torch.autograd.Function):
    """The sum of the cross entropies of `head(rows)`, its gradients taken piece by piece while it is computed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: Tensor, head: Any, size: int, *trained: Tensor) -> Tensor:
        total = torch.zeros((), device=rows.device, dtype=torch.promote_types(rows.dtype, torch.float32))
        for_rows = torch.empty_like(rows)
        for_trained = [torch.zeros_like(weight) for weight in trained]
        begin = 0
        for part, labels in zip(rows.split(size), wanted.split(size), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                logits = head(part)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            own, *others = torch.autograd.grad(loss, [part, *trained], allow_unused=True)
            total += loss.detach()
            for_rows[begin : begin + len(part)] = own
            for grad, more in zip(for_trained, others, strict=True):
                if more is not None:  # of an adapter that is not active
                    grad += more
            begin += len(part)
        ctx.save_for_backward(for_rows, *for_trained)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found: tuple[Tensor, ...] = ctx.saved_tensors
        if len(found[0]):  # of the mean over nothing the gradient would be no number either
            found = tuple(each * grad.to(each.dtype) for each in found)
        return (found[0], None, None, None, *found[1:])
