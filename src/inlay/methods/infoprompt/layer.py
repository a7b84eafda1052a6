"""InfoPrompt in a model (Wu et al. 2023, sections 2.1 and 3.3), by hooks on four of its modules.

The model as a whole: before it runs the prompts are made and room is made for them; after it the class vectors say
what the class is, and the losses are added up. The word embeddings: the prompts come in. The encoder: its last states
are noted. Between these hooks one `Pass` is open; nothing of it is left when the model has run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput

from inlay.backbones.losses import installed
from inlay.backbones.pooled import paused
from inlay.errors import InlayError
from inlay.methods.infoprompt import losses, traced
from inlay.methods.infoprompt.phi import Batch, encoded
from inlay.methods.infoprompt.pieces import Pieces, Site
from inlay.methods.infoprompt.slots import (
    Slots,
    assert_right,
    check,
    first_masks,
    read,
    real_tokens,
    texts_in,
    usual_places,
    waits,
    with_room,
    within,
)
from inlay.methods.tuner import ChildLayer

IGNORED = -100


@dataclass
class Pass:
    """What the hooks of one forward pass hand on to each other."""

    pieces: Pieces
    slots: Slots
    prompts: Tensor
    real: Tensor | None  # B x S: the slots of which Z is read; None where it is read at the mask
    usable: Tensor | None  # B x S: those that may be negatives
    masks: Tensor | None  # B: the slots of the masks
    labels: Tensor | None
    items: Any  # over how many labels a Trainer wants the mean, where it is not this batch's alone
    as_tuple: bool
    without: Tensor | None  # Z', the state of the text without prompts
    embedded: Tensor | None = None
    states: Tensor | None = None


@dataclass(frozen=True)
class Spread:
    """Means and deviations of the distributions of Z and of Z', of which the representation loss draws."""

    z: tuple[Tensor, Tensor]
    without: tuple[Tensor, Tensor]


@dataclass
class Observed:
    """What forward passes came to, a row a text: the prompts P, the state Z, and Z' without prompts.

    `instead` (n_p x D), where it is set, stands in place of the adapter's own prompts.
    """

    instead: Tensor | None = None
    prompts: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    without: list[Tensor] = field(default_factory=list)


class InfoPromptLayer(ChildLayer):
    """Prompts in the text and class vectors on its state (section 2.1, with `h_theta` of class vectors):

        Z = Phi(P, X),      logits = Z theta^T

    and in training mode the objective of section 3.3, each information by its InfoNCE bound:

        L = L_pred - beta I(P; Z | X) - gamma I(P; theta | X)

    `loss_parts` are the parts of the last loss by name, for whoever wants to log them.
    """

    adapter_layer_names = ("inlay_infoprompt_pieces",)

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self.loss_parts: dict[str, Tensor] = {}
        self._pass: Pass | None = None
        self._observed: Observed | None = None
        self._handles: list[RemovableHandle] = []
        self._arguments: list[str] = []
        self._takes: set[str] = set()
        self._number = traced.numbered(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a number of its own."""
        super().__setstate__(state)
        self._number = traced.numbered(self)

    def attach(self) -> None:
        """The hooks are put on with the first adapter: only then is it known which model this is an encoder of."""

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def update_layer(self, adapter_name: str, site: Site) -> None:
        self.pieces[adapter_name] = Pieces(site)
        if not self._handles:
            self._arguments = list(inspect.signature(site.root.forward).parameters)
            self._takes = set(inspect.signature(self.host.forward).parameters)
            self._handles = [
                site.root.register_forward_pre_hook(self.make_room, with_kwargs=True),
                site.embeddings.register_forward_hook(self.enter),
                # Before the states become what another head reads.
                self.host.register_forward_hook(self.note_states, prepend=True),
                site.root.register_forward_hook(self.conclude),
            ]

    @contextmanager
    def observing(self) -> Iterator[Observed]:
        """Inside, P, Z and Z' of every forward pass are noted, also where a method has no need of Z'."""
        self._observed = Observed()
        try:
            yield self._observed
        finally:
            self._observed = None

    def clear_cache(self) -> None:
        """Forget every text's Phi(X): needed after writes to the encoder that nobody can see, as those by `.data`."""
        for pieces in self.pieces.values():
            pieces.cache.clear()

    @property
    def recalled(self) -> tuple[int, int]:
        """Of how many texts Phi(X) was taken from memory so far, and of how many it was computed to be kept."""
        caches = [pieces.cache for pieces in self.pieces.values()]
        return sum(cache.recalled for cache in caches), sum(cache.computed for cache in caches)

    # ---- before the model runs

    def make_room(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the prompts of these texts, and room for them in the ids, masks, token types and positions."""
        self._pass = None
        names = self.running()
        if len(names) > 1:
            raise InlayError(f"Prompts of one adapter at a time, not of {', '.join(names)}: call set_adapter.")
        if not names:
            return None
        pieces: Pieces = self.pieces[names[0]]
        site = pieces.site
        kwargs = dict(zip(self._arguments, args, strict=False)) | kwargs
        batch = texts_in(kwargs, root)
        given = None if self._looked_at(pieces, batch["input_ids"]) else batch["input_ids"]
        count = site.config.num_prompt_tokens
        slots = None
        if site.config.placeholders:
            slots = Slots.of(batch["input_ids"] < 0, count)
            batch = {name: slots.without(value) for name, value in batch.items()}
        real, masks = real_tokens(site, batch), first_masks(site, batch)
        if slots is None:
            seen = masks if site.state == "mask" else None
            where = usual_places(real, seen, count, causal=site.causal)
            slots = Slots.inserted(where, real.shape[1])
        if site.longest is not None and slots.shape[1] > site.longest:
            raise InlayError(
                f"{real.shape[1]} tokens and {count} prompts are more than the {site.longest} positions of "
                f"{type(root).__name__}: tokenise with truncation=True, max_length={site.longest - count}."
            )
        observed = self._observed
        informed = site.config.informed or observed is not None
        if informed:
            if torch.compiler.is_compiling():
                like = site.hidden_size, pieces.dtype
                context = traced.context(self._number, names[0], batch, real, given, like)
            else:
                context = self._context(pieces, batch, real, given)
        else:
            context = None
            if given is not None:
                assert_right(site, given)
        with exactly(real.device):
            prompts = pieces.prompts(None if context is None else context[:, 0].to(pieces.dtype), len(real))
        if observed is not None and observed.instead is not None:
            prompts = observed.instead.expand_as(prompts)
        self._pass = Pass(
            pieces=pieces,
            slots=slots,
            prompts=prompts,
            real=None if site.state == "mask" else slots.spread(real, site.state == "last"),
            usable=self._usable(pieces, slots, batch["input_ids"], real),
            masks=None if masks is None else slots.of_tokens(masks),
            labels=kwargs.pop("labels", None),
            items=kwargs.pop("num_items_in_batch", None),
            as_tuple=kwargs.get("return_dict") is False,
            without=None if context is None else context[:, 1],
        )
        return (), kwargs | with_room(batch, slots, pieces.filler) | {"return_dict": True}

    def _looked_at(self, pieces: Pieces, ids: Tensor) -> bool:
        """Whether the rows' masks and places were looked at here.

        On a CPU always. To look at them on another device makes the host wait: there in evaluation, and in the first
        pass of all. In training texts that are not in the cache are looked at when they are encoded; without a cache,
        and in what is compiled, the device asserts by itself that they are right.
        """
        if torch.compiler.is_compiling():
            return False
        if waits(ids.device) and self.training and pieces.looked:
            return False
        check(pieces.site, ids)
        pieces.looked = True
        return True

    def _usable(self, pieces: Pieces, slots: Slots, ids: Tensor, real: Tensor) -> Tensor | None:
        """The slots of tokens that the head loss may draw: real ones that are not special. None: it draws none."""
        if not self.training or pieces.w1 is None:
            return None
        usable = real & (ids.unsqueeze(-1) != pieces.special(ids.device)).all(-1)
        if pieces.ends_are_special:
            usable = usable & within(real)
        return slots.spread(usable, False)

    # ---- Phi(X)

    @torch.compiler.disable
    def _context(self, pieces: Pieces, batch: Batch, real: Tensor, given: Tensor | None) -> Tensor:
        """`Phi(X)`, of which prompts are made, and `Z'`, as Z is read but without prompts: B x 2 x H.

        `given` are the ids as they came, where nobody has looked at them yet.

        Never compiled (traced.py): what is kept is looked up in a dictionary, and on a CPU must be the same every time.
        """
        site = pieces.site

        def compute(rows: Batch) -> Tensor:
            return self._encoded(site, rows)

        def compute_new(rows: Batch) -> Tensor:
            if given is not None:
                check(site, given)
            return self._encoded(site, rows)

        now = pieces.cache.circumstances(self.host, self)
        if now is not None and site.config.cache:
            return pieces.cache.get(batch, real, compute_new, now)
        if given is not None:
            assert_right(site, given)
        if now is None:
            pieces.cache.clear()  # what comes after may have been changed in ways that cannot be seen
            return compute(batch)
        return encoded(batch, real, range(len(real)), compute)

    def encode_now(self, adapter: str, batch: Batch, real: Tensor, given: Tensor | None) -> Tensor:
        """The same inside what is compiled, where hooks have run that have not been carried out yet."""
        before, self._pass = self._pass, None
        try:
            return self._context(self.pieces[adapter], batch, real, given)
        finally:
            self._pass = before

    @torch.no_grad()
    def _encoded(self, site: Site, batch: Batch) -> Tensor:
        extra = {"use_cache": False} if "use_cache" in self._takes else {}
        with paused(self.host):
            states = self.host(**batch, **extra)[0]
        real, masks = real_tokens(site, batch), first_masks(site, batch)
        return torch.stack([read(states, real, how, masks) for how in (site.phi, site.state)], dim=1)

    # ---- while it runs

    def enter(self, embeddings: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """The prompts in their slots; the tokens' own embeddings are noted."""
        now = self._pass
        if now is None or now.embedded is not None:
            return None
        now.embedded = output.detach()
        return now.slots.put(now.prompts, output)

    def note_states(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The encoder's last states."""
        if self._pass is not None:
            self._pass.states = output[0]

    # ---- after it has run

    def conclude(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Logits by the class vectors; in training mode the losses of section 3.3."""
        now, self._pass = self._pass, None
        if now is None:
            return None
        assert now.states is not None
        with exactly(now.states.device):
            loss, logits = self._concluded(now, root)
        made = type(output)(**(dict(output) | {"loss": loss, "logits": logits.to(now.states.dtype)}))
        return made.to_tuple() if now.as_tuple and isinstance(made, ModelOutput) else made

    def _concluded(self, now: Pass, root: nn.Module) -> tuple[Tensor | None, Tensor]:
        site, theta = now.pieces.site, now.pieces.theta()
        assert now.states is not None
        states = now.states.to(theta.dtype)
        z = seen = read(states, now.real, site.state, now.masks)
        if self._observed is not None and now.without is not None:
            self._observed.prompts.append(now.prompts.detach())
            self._observed.z.append(z.detach())
            self._observed.without.append(now.without.to(z.dtype))
        spread, critic = None, now.pieces.critic
        if self.training and critic is not None:
            spread = self._spread(now, z)
        if site.config.predict_from_sample and critic is not None:
            # What the class vectors were trained to read: samples have f_mu(Z) as their mean, not Z.
            seen = critic.mean(z) if spread is None else losses.sample(*spread.z)
        logits = (now.slots.without(states) if site.per_token else seen) @ theta.T
        if now.labels is None:
            return None, logits
        own = installed(root)
        loss = task_loss(logits, now.labels, root.config) if own is None else own(logits, now.labels)
        if self.training:
            loss = self._informed(now, loss, theta, spread)
        if now.items is not None:
            loss = loss * ((now.labels != IGNORED).sum() / now.items)
        return loss, logits

    def _spread(self, now: Pass, z: Tensor) -> Spread:
        """The distributions of Z and of Z', by one pass of both through the critic."""
        assert now.pieces.critic is not None
        assert now.without is not None
        means, deviations = losses.gaussian(*now.pieces.critic(torch.cat((z, now.without.to(z.dtype)))))
        return Spread(*zip(means.chunk(2), deviations.chunk(2), strict=True))

    def _informed(self, now: Pass, loss: Tensor, theta: Tensor, spread: Spread | None) -> Tensor:
        """The task's loss and what the information losses add to it."""
        config = now.pieces.site.config
        self.loss_parts = {"task": loss.detach()}
        if now.pieces.w1 is None and spread is None:
            return loss
        prompt = now.prompts.to(theta.dtype).mean(1)
        if now.pieces.w1 is not None:
            assert now.embedded is not None
            assert now.usable is not None
            embedded = now.embedded.to(theta.dtype)
            tokens, valid = losses.sample_context(embedded, now.usable, config.num_negatives - 1)
            head = losses.nce_loss(losses.head_scores(prompt, theta, tokens, valid, now.pieces.w1()))
            self.loss_parts["head"] = head.detach()
            loss = torch.add(loss, head, alpha=config.gamma)
        if spread is not None:
            critic = now.pieces.critic
            assert critic is not None
            scores = losses.representation_scores(
                prompt.detach() if config.detach_prompts else prompt,
                losses.sample(*spread.z),
                losses.sample(*spread.without, config.num_negatives - 1),
                critic.w2(),
            )
            representation = losses.nce_loss(scores)
            self.loss_parts["representation"] = representation.detach()
            loss = torch.add(loss, representation, alpha=config.beta)
            if config.kl_weight:
                kl = losses.standard_kl(*spread.z).mean()
                self.loss_parts["kl"] = kl.detach()
                loss = torch.add(loss, kl, alpha=config.kl_weight)
        return loss


def task_loss(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """`L_pred`, as Transformers' own heads compute it: by the problem, or by the labels where it is not said."""
    if config.problem_type == "regression" or (config.problem_type is None and logits.shape[-1] == 1):
        wanted = logits.squeeze(-1)
        return mse_loss(wanted, labels.view(wanted.shape).to(logits.dtype))
    if config.problem_type == "multi_label_classification" or labels.is_floating_point():
        return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def exactly(device: torch.device) -> torch.autocast:
    """What is trained computes in its own precision, whatever autocast does to the rest."""
    return torch.autocast(device.type, enabled=False)
