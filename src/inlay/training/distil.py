"""Distil a prompt into an adapter: the model without the prompt learns to say what the model with it says.

NTK-Attention (section G) makes any prompt an adapter; its closed form, Eq. (4), knows the prompt's keys and values and
nothing of the queries to come. Here the adapter is trained on texts that may follow the prompt, most often the prompted
model's own, to lower

    KL(p(. | prompt, x_<t) || p(. | x_<t; adapter)),   averaged over the tokens t of the texts x.

The prompt is read once. Its keys and values stand before every text: all rows of a batch share them, or each has a
copy in its cache where a model cannot share (`inlay.methods.shared_prompt.can_share`).
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from inlay.errors import InlayError
from inlay.methods.attach import trained_parameters
from inlay.methods.plain import base_of
from inlay.methods.prompts import Prompt, evaluating, read
from inlay.methods.protocol import TunerHooks
from inlay.methods.shared_prompt import can_share, sharing
from inlay.training.batches import Placement
from inlay.training.teacher import Teacher

CLIP = 1.0
WARMUP = 0.06
CHECKS = 10
FITTED_TOKENS = 16384
"""Of a batch that is fitted to, padding included."""
AT_ONCE = 64
"""Texts written together where they share the prompt: each then needs room for its own tokens alone."""


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right: ids and which of them are real, (rows, length) each."""

    ids: Tensor
    real: Tensor


@dataclass(frozen=True)
class Scores:
    """Of texts, a token: the negative log-likelihood, and the divergence from the prompted model."""

    nll: float
    divergence: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


class Relative(torch.optim.Optimizer):
    """Adam whose step for a head is `lr` times the head's size (root mean square) at the start; 1 where that is 0.

    Z and kappa of a head are sums of `exp(scale q . k)`: their sizes differ from head to head by orders of magnitude,
    and one absolute step would be nothing to some and ruin others.
    """

    def __init__(self, weights: Sequence[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(weights, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    size = weight.square().mean(tuple(range(1, weight.dim())), keepdim=True).sqrt()
                    state |= {"size": torch.where(size > 0, size, 1), "count": 0}
                    state |= {"mean": torch.zeros_like(weight), "square": torch.zeros_like(weight)}
                state["count"] += 1
                state["mean"].lerp_(weight.grad, 1 - first)
                state["square"].lerp_(weight.grad.square(), 1 - second)
                mean = state["mean"] / (1 - first ** state["count"])
                root = (state["square"] / (1 - second ** state["count"])).sqrt()
                weight.sub_(state["size"] * mean / root.clamp(min=1e-12), alpha=group["lr"])


class Pair:
    """One model twice: with the prompt before every text, and without it and with the adapter.

    `lead` is what the tokenizer puts before every text (a token of beginning, or nothing): the model without the prompt
    sees it in the prompt's place, and is asked for the first token of a text only where there is such a lead. The
    prompt is its ids, or a trained prefix, which has no last token: nothing can be drawn behind it, with no lead.
    """

    def __init__(
        self, model: PeftModel, prompt: Sequence[int] | Prompt, place: Placement, lead: Sequence[int] = ()
    ) -> None:
        self.model, self.place, self.lead = model, place, list(lead)
        with model.disable_adapter():
            found = prompt if isinstance(prompt, Prompt) else read(model, prompt, logits=True)
        self.prompt = replace(found, lead=len(self.lead))
        self.shared = can_share(model, self.prompt)
        self._keeps = "logits_to_keep" in inspect.signature(base_of(model).forward).parameters

    def prompted(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Logits with the prompt, aligned with those of `bare`; with `last_only` those at the last token alone,
        `(rows, 1, vocabulary)`, for callers that need the pass and not what comes out of it."""
        with torch.no_grad(), self._prompting(len(ids)) as cache:
            found = self._behind(None if self.shared else cache, ids, last_only=last_only)
        if self.lead and not last_only:
            assert self.prompt.logits is not None
            found = torch.cat([self.prompt.logits.expand(len(ids), 1, -1).to(found), found], 1)
        return found

    def bare(self, ids: Tensor, *, adapter: bool = True) -> Tensor:
        """Logits without the prompt, with the adapter or without it too."""
        off: AbstractContextManager[Any] = nullcontext() if adapter else self.model.disable_adapter()
        with off, self.place.autocast():
            whole = torch.cat([self.leads(ids), ids], 1)
            found: Tensor = self.model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits
        return found[:, max(len(self.lead) - 1, 0) :]

    def leads(self, ids: Tensor) -> Tensor:
        """What the tokenizer puts before each of these rows, (rows, tokens of it)."""
        return torch.tensor(self.lead, dtype=ids.dtype, device=ids.device).expand(len(ids), -1)

    def positions(self, batch: Batch) -> Tensor:
        """Which of the aligned logits stand at real tokens: those that follow a real token, or the lead."""
        return torch.cat([batch.real[:, :1], batch.real], 1) if self.lead else batch.real

    def sample(self, count: int, length: int, seed: int, tick: Callable[[int], None] | None = None) -> list[list[int]]:
        """Continuations of the prompt, drawn from the prompted model as it is (temperature 1). `tick` is told how many
        tokens have been drawn since the last time."""
        return self.write([[]] * count, length, seed, tick)

    @torch.no_grad()
    def write(
        self, starts: Sequence[Sequence[int]], length: int, seed: int, tick: Callable[[int], None] | None = None
    ) -> list[list[int]]:
        """Texts of `length` tokens behind the prompt that begin as given and go on as `sample` does."""
        generator = torch.Generator().manual_seed(seed)
        rows = AT_ONCE if self.shared else self.place.batch_size
        texts: list[list[int]] = []
        with evaluating(self.model):
            for begin in range(0, len(starts), rows):
                texts += self._written(starts[begin : begin + rows], length, generator, tick or (lambda tokens: None))
        return texts

    def _written(
        self, starts: Sequence[Sequence[int]], length: int, generator: torch.Generator, tick: Callable[[int], None]
    ) -> list[list[int]]:
        """One batch. What all rows have is read at once; where a longer beginning goes on, it overrides the draw."""
        rows, common = len(starts), min([length, *map(len, starts)])
        begun = nn.utils.rnn.pad_sequence(
            [torch.tensor(list(start[:length]), dtype=torch.long) for start in starts], True, -1
        )
        ids = begun[:, :common]
        with self._prompting(rows) as cache:
            if 0 < common < length:
                logits = self._behind(cache, ids.to(self.place.device), last_only=True)
            elif not common:
                assert self.prompt.logits is not None
                logits = self.prompt.logits.expand(rows, 1, -1)
            tick(rows * common)
            for step in range(common, length):
                # On the CPU, so that a seed draws the same on every device.
                new = torch.multinomial(logits[:, -1].float().softmax(-1).cpu(), 1, generator=generator)
                if step < begun.shape[1]:
                    new = torch.where(begun[:, step : step + 1] < 0, new, begun[:, step : step + 1])
                ids = torch.cat([ids, new], 1)
                if step + 1 < length:
                    logits = self._behind(cache, new.to(self.place.device), step, last_only=True)
                tick(rows)
        found: list[list[int]] = ids.tolist()
        return found

    @torch.no_grad()
    def go_on(self, ids: Tensor, length: int, *, prompted: bool, adapter: bool = True) -> Tensor:
        """The likeliest `length` tokens after each row of `ids` (rows, tokens), one after the other: with the prompt,
        or without it and with the adapter or not."""
        begun = ids.shape[1]
        with evaluating(self.model), self._prompting(len(ids)) if prompted else self._alone(adapter) as cache:
            for step in range(length):
                new = ids if step == 0 else ids[:, -1:]
                if prompted:
                    logits = self._behind(cache, new, ids.shape[1] - new.shape[1], last_only=True)
                elif cache is None:
                    logits = self.bare(ids, adapter=adapter)
                else:
                    whole = torch.cat([self.leads(ids), ids], 1)
                    new = whole if step == 0 else new
                    seen = torch.ones_like(whole)
                    logits = self.model(
                        input_ids=new, attention_mask=seen, past_key_values=cache, use_cache=True
                    ).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids[:, begun:]

    @contextmanager
    def _alone(self, adapter: bool) -> Iterator[Cache | None]:
        """The model without the prompt, and a cache to go on with; None where the adapter puts a prefix into it."""
        off: AbstractContextManager[Any] = nullcontext() if adapter else self.model.disable_adapter()
        with off, self.place.autocast():
            taken = adapter and self.model.active_peft_config.is_prompt_learning
            yield None if taken else DynamicCache(config=base_of(self.model).config)

    @contextmanager
    def _prompting(self, rows: int) -> Iterator[Cache]:
        """The model behind the prompt, and the cache to go on with: of the text alone where rows share the prompt's
        keys and values, and otherwise with a copy of the prompt for each row."""
        with self.model.disable_adapter(), self.place.autocast():
            if self.shared:
                with sharing(self.model, self.prompt):
                    yield DynamicCache(config=base_of(self.model).config)
            else:
                cache = copy.deepcopy(self.prompt.cache)
                cache.batch_repeat_interleave(rows)
                yield cache

    def _behind(self, cache: Cache | None, ids: Tensor, step: int = 0, last_only: bool = False) -> Tensor:
        first, before = self.prompt.following + step, step + (0 if self.shared else self.prompt.length)
        positions = torch.arange(first, first + ids.shape[1], device=ids.device).expand(len(ids), -1)
        # Everything may be seen: padding is on the right. Without a mask some models warn of ids that look like it.
        mask = ids.new_ones(len(ids), before + ids.shape[1])
        keep = {"logits_to_keep": 1} if last_only and self._keeps else {}
        found: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            **keep,
        ).logits
        return found[:, -1:] if last_only else found


def batches(texts: Sequence[Sequence[int]], place: Placement) -> Iterator[Batch]:
    """Texts in their order, padded to the longest of a batch. Causal attention never looks at what is on the right."""
    for begin in range(0, len(texts), place.batch_size):
        rows = [torch.tensor(list(text)) for text in texts[begin : begin + place.batch_size]]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        yield Batch(ids.to(place.device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(place.device))


def divergence(teacher: Tensor, student: Tensor, kept: Tensor) -> Tensor:
    """KL(teacher || student), averaged over the positions kept."""
    wanted, found = teacher[kept].float().log_softmax(-1), student[kept].float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).clamp(min=0).mean()  # rounding may leave less than 0


@torch.no_grad()
def scores(
    pair: Pair, texts: Sequence[Sequence[int]], who: Callable[[Tensor], Tensor], teacher: Teacher | None = None
) -> Scores:
    """How well `who` (ids to logits, such as `pair.bare`) expects the texts. A `teacher` remembers them by number."""
    nll = kl = 0.0
    tokens = places = done = 0
    teacher = teacher or Teacher(pair)
    with evaluating(pair.model):
        for batch in batches(texts, pair.place):
            logits, kept = who(batch.ids), pair.positions(batch)
            wanted = teacher(range(done, done + len(batch.ids)), batch)
            done += len(batch.ids)
            kl += float(divergence(wanted, logits, kept)) * int(kept.sum())
            places += int(kept.sum())
            targets, real = (batch.ids, batch.real) if pair.lead else (batch.ids[:, 1:], batch.real[:, 1:])
            losses = nn.functional.cross_entropy(logits[:, :-1][real].float(), targets[real], reduction="sum")
            nll += float(losses)
            tokens += int(real.sum())
    return Scores(nll / tokens, kl / places, tokens)


def can_fit(pair: Pair) -> bool:
    """Whether the adapter can be fitted without gradients: see `TunerHooks.can_fit`."""
    hooks = pair.model.base_model
    return isinstance(hooks, TunerHooks) and hooks.can_fit()


def fit_work(pair: Pair, texts: Sequence[Sequence[int]]) -> int:
    """How often `fit` will tick."""
    found: int = pair.model.base_model.fit_work(math.ceil(len(texts) / _fitted_at_once(pair, texts)))
    return found


@torch.no_grad()
def fit(pair: Pair, texts: Sequence[Sequence[int]], tick: Callable[[], None] | None = None) -> None:
    """Begin where the adapter fits best what the prompted model does on these texts: see `TunerHooks.fit_passes`."""
    hooks: Any = pair.model.base_model
    place = replace(pair.place, batch_size=_fitted_at_once(pair, texts))
    if hooks.fit_batch is not None:  # one batch is looked at: of texts from everywhere
        # By chance and not every third, say: kinds of texts may come in turn.
        taken = random.Random(0).sample(range(len(texts)), min(len(texts), place.batch_size))
        texts = [texts[number] for number in sorted(taken)]

    def passes() -> Iterator[tuple[Tensor, Callable[[], object]]]:
        for batch in batches(texts, place):
            ids, real = batch.ids, batch.real
            if hooks.fit_leads:
                leads = pair.leads(ids)
                ids = torch.cat([leads, ids], 1)
                real = torch.cat([torch.zeros_like(leads, dtype=torch.bool), real], 1)
            yield real, partial(pair.prompted, ids, last_only=True)

    with evaluating(pair.model):
        hooks.fit_passes(passes, pair.prompt, tick or (lambda: None))


def _fitted_at_once(pair: Pair, texts: Sequence[Sequence[int]]) -> int:
    wanted = pair.model.base_model.fit_batch
    if wanted is None:
        return pair.place.batch_size
    # Where a prompt cannot be shared, each text has a copy of it.
    longest = max(map(len, texts)) if pair.shared else pair.prompt.length
    return min(wanted, max(pair.place.batch_size, FITTED_TOKENS // longest))


def distil(
    pair: Pair,
    texts: Sequence[Sequence[int]],
    *,
    steps: int,
    learning_rate: float,
    seed: int = 0,
    check: Sequence[Sequence[int]] = (),
    tick: Callable[[float], None] | None = None,
) -> list[float]:
    """Train the adapter on the texts, in an order that follows from the seed; the loss of every step.

    Gradients are clipped to norm 1, the rate rising over the first steps and then falling as a cosine. The model is
    in eval mode throughout: it is a fixed function but for the adapter, which has no dropout. With texts to `check` on,
    they are scored at the start and ten times on the way, and the adapter is left as it was when it was best for them.
    """
    weights = list(trained_parameters(pair.model).values())
    optimiser = Relative(weights, lr=learning_rate)
    warmup = math.ceil(WARMUP * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _share(step, steps, warmup))
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    best, teacher = Best(pair, weights, check), Teacher(pair)
    with evaluating(pair.model):
        for numbers, batch in _forever(texts, pair.place, generator):
            if len(losses) == steps:
                break
            loss = divergence(teacher(numbers, batch), pair.bare(batch.ids), pair.positions(batch))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, CLIP)
            optimiser.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise InlayError(
                    f"The divergence is {losses[-1]} at step {len(losses)} with learning_rate={learning_rate:g}. Try "
                    f"{learning_rate / 3:.1g}."
                )
            if len(losses) % math.ceil(steps / CHECKS) == 0 or len(losses) == steps:
                best.look()
            if tick is not None:
                tick(losses[-1])
    best.restore()
    return losses


class Best:
    """The adapter as it was when it came nearest to the prompted model on texts that it is not trained on."""

    def __init__(self, pair: Pair, weights: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> None:
        self.pair, self.weights, self.texts, self.teacher = pair, weights, texts, Teacher(pair)
        self.least = math.inf
        self.kept: list[Tensor] = []
        self.look()

    def look(self) -> None:
        """Score the adapter, and keep it if it is the best so far."""
        if not self.texts:
            return
        found = scores(self.pair, self.texts, self.pair.bare, self.teacher).divergence
        if found < self.least:
            self.least, self.kept = found, [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the best."""
        for weight, kept in zip(self.weights, self.kept, strict=False):
            weight.copy_(kept)


def _share(step: int, steps: int, warmup: int) -> float:
    """The share of the rate after `step` updates: never 0 before the end."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def _forever(
    texts: Sequence[Sequence[int]], place: Placement, generator: torch.Generator
) -> Iterator[tuple[list[int], Batch]]:
    """Batches in an order drawn anew for every epoch, and which texts they are of."""
    while True:
        order = torch.randperm(len(texts), generator=generator).tolist()
        for begin, batch in zip(
            range(0, len(order), place.batch_size), batches([texts[index] for index in order], place), strict=True
        ):
            yield order[begin : begin + place.batch_size], batch
