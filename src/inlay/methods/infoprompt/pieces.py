"""What InfoPrompt trains (Wu et al. 2023, sections 3 and 4.2): prompts or their encoder, class vectors, two critics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from inlay.methods.channels import like
from inlay.methods.infoprompt.config import InfoPromptConfig
from inlay.methods.infoprompt.phi import PhiCache

SPECIAL = ("pad", "bos", "eos", "cls", "sep", "unk", "mask")
SMALL = 0.02  # the deviation of class vectors that no word starts
FIRST_LOG_DEVIATION = -1.0  # of samples of Z, whose entries are of size 1


@dataclass(frozen=True)
class Site:
    """Where one adapter acts: the model, its word embeddings, sizes, and the settings with what the model says."""

    config: InfoPromptConfig
    root: Any
    embeddings: nn.Module
    hidden_size: int
    labels: int
    causal: bool
    state: str
    phi: str
    per_token: bool  # whether every token has a class
    longest: int | None = None  # how many positions the model has a table for

    @property
    def table(self) -> Tensor:
        """The word embeddings, V x D, as they are kept: some models scale them on the way in."""
        return self.embeddings.weight

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Of an entry of the word embeddings, of `Phi(X)` and of Z."""
        word, phi, state = self.config.sizes or (1.0, 1.0, 1.0)
        return word, phi, state

    def named_tokens(self) -> list[int]:
        """The special tokens that the model's config names, and the mask."""
        named = (getattr(self.root.config, f"{name}_token_id", None) for name in SPECIAL)
        return sorted({token for token in (*named, self.config.mask_token_id) if isinstance(token, int)})

    def trained(self, weight: Tensor, times: float = 1.0) -> ScaledParameter:
        """A parameter that starts so, where the embeddings are; in its unit, unless plain numbers are asked for."""
        return ScaledParameter(like(self.table, weight), times if self.config.units else 1.0)


class ScaledParameter(nn.Module):
    """One parameter, kept as `times` itself: Adam, which moves every entry by about the learning rate, moves it by a
    `times`-th of that.

    So each is trained in a unit of its own, and one rate serves all of them, on models whose embeddings and states are
    of any size. A step at the rate r moves a prompt by up to r times the size of word embeddings, whether it is trained
    itself or made by matrices: these add up n numbers, and are kept n times larger for it, as the critics' are. Class
    vectors are kept sqrt(n) times larger only, in the unit of states: what reads the states has to be ahead of what
    changes them.
    """

    def __init__(self, weight: Tensor, times: float = 1.0) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(weight * times)

    def forward(self) -> Tensor:
        return self.weight if self.times == 1 else self.weight / self.times


class StaticPrompts(ScaledParameter):
    """WARP: `P` itself, n_p x D, the same for every text."""

    def forward(self, phi: Tensor | None, rows: int) -> Tensor:  # type: ignore[override]
        return super().forward().expand(rows, -1, -1)


class PromptEncoder(nn.Module):
    """Prompts made of `Phi(X)`, B x H -> B x n_p x D (section 4.2):

        p_i = W_i^up a(W_i^down Phi(X))        a the identity, one pair a token            InfoPrompt
        p_i = W_i^up GELU(W^down Phi(X))       one W^down for all                          IDPG, with biases

    They start as large as word embeddings are.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        config = site.config
        shared = config.encoder == "shared-bottleneck"
        self.nonlinear = (config.activation or ("gelu" if shared else "none")) == "gelu"
        tokens, width, size = config.num_prompt_tokens, config.bottleneck, site.table.shape[1]
        sets = 1 if shared else tokens
        word, phi, _ = site.sizes
        down = torch.randn(sets, width, site.hidden_size, device="cpu") / (phi * math.sqrt(site.hidden_size))
        up = torch.randn(tokens, size, width, device="cpu") * word / math.sqrt(width)
        self.down = site.trained(down, site.hidden_size * phi)
        self.up = site.trained(up, width / word)
        self.down_bias = site.trained(torch.zeros(sets, width, device="cpu")) if shared else None
        zeros = torch.zeros(tokens, size, device="cpu")
        self.up_bias = site.trained(zeros, 1 / word) if shared else None

    def forward(self, phi: Tensor, rows: int) -> Tensor:
        # Nothing between the two matrices: both units come off phi, which is small and needs no gradient.
        bare = self.down_bias is None and not self.nonlinear
        up, times = (self.up.weight, self.down.times * self.up.times) if bare else (self.up(), self.down.times)
        down = self.down.weight
        inner = linear(phi if times == 1 else phi / times, down.flatten(0, 1)).unflatten(1, down.shape[:2])
        inner = inner if self.down_bias is None else inner + self.down_bias()
        inner = gelu(inner) if self.nonlinear else inner
        inner = inner.expand(-1, len(up), -1)
        prompts = torch.bmm(up, inner.permute(1, 2, 0)).permute(2, 0, 1)
        return prompts if self.up_bias is None else prompts + self.up_bias()


class Layer(nn.Module):
    """A fully connected layer of states, whose entries are of size `unit`: begun as `diagonal` times them in that
    unit, plus `offset`."""

    def __init__(self, site: Site, unit: float, diagonal: float, offset: float = 0.0) -> None:
        super().__init__()
        size = site.hidden_size
        matrix = torch.eye(size, device="cpu") * (diagonal / unit)
        self.matrix = site.trained(matrix, size * unit)
        self.bias = site.trained(torch.full((size,), offset, device="cpu"), math.sqrt(size))

    def forward(self, z: Tensor) -> Tensor:
        units = {"beta": 1 / self.bias.times, "alpha": 1 / self.matrix.times}  # which take no operation of their own
        return torch.addmm(self.bias.weight, z, self.matrix.weight.T, **units)


class RepresentationCritic(nn.Module):
    """`f_mu`, `f_sigma` and `W_2` of the representation loss (section 3.2).

    They start and learn in the units of prompts and states, so that scores are of size 1: `f_mu` divides by the size of
    states, `W_2` by that of prompts. As they come (`units=False`) these numbers are small; all scores are then alike,
    the loss stays at log K, and what it says to the prompts is lost beside the task's.
    """

    def __init__(self, site: Site, prompt_unit: float, state_unit: float) -> None:
        super().__init__()
        size = site.hidden_size
        self.mean = Layer(site, state_unit, 1.0)
        self.log_deviation = Layer(site, state_unit, 0.0, FIRST_LOG_DEVIATION)
        w2 = torch.eye(site.table.shape[1], size, device="cpu") / prompt_unit
        self.w2 = site.trained(w2, size * prompt_unit)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the logarithm of the deviation of z's distribution, B x H each."""
        return self.mean(z), self.log_deviation(z)


class Pieces(nn.Module):
    """All that one adapter trains: prompts, class vectors `theta` (C x H), and the critics of the losses that count."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site  # no module: the model would otherwise contain itself
        self.cache = PhiCache()
        self.looked = False  # whether the host has looked at a batch's ids, on a device that it waits for
        config = site.config
        word, _, state = site.sizes
        if not config.units:
            word, state = 1.0, 1.0
        static = config.encoder == "static"
        self.prompts = StaticPrompts(initial_prompts(site), 1 / word) if static else PromptEncoder(site)
        self.theta = site.trained(initial_theta(site), math.sqrt(site.hidden_size) * state)
        eye = torch.eye(site.table.shape[1], site.hidden_size, device="cpu")
        self.w1 = site.trained(eye, site.hidden_size) if config.gamma else None
        self.critic = RepresentationCritic(site, word, state) if config.beta else None
        padding = {config.pad_token_id, getattr(site.root.config, "pad_token_id", None)}
        self.filler = next(token for token in range(3) if token not in padding)  # its embedding is never read
        # Configs seldom name [CLS] and [SEP]: where nobody has, the ends of a text are left out as well.
        self.ends_are_special = config.special_token_ids is None and not site.causal
        special = site.named_tokens() if config.special_token_ids is None else config.special_token_ids
        self._special = torch.tensor(special, dtype=torch.long, device="cpu")

    def special(self, device: torch.device) -> Tensor:
        """The tokens that are never negatives, on a device: brought there once, as that makes it wait."""
        if self._special.device != device:
            self._special = self._special.to(device)
        return self._special

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which it computes."""
        return self.theta.weight.dtype


@torch.no_grad()
def embedded(embeddings: nn.Module, ids: Sequence[int] | Tensor) -> Tensor:
    """Tokens as they come out of the word embeddings, where prompts go in: Gemma's are sqrt(D) times its table."""
    return embeddings(torch.as_tensor(ids, device=embeddings.weight.device))


def initial_prompts(site: Site) -> Tensor:
    """How static prompts start: words that are given, words drawn at random, or random numbers of the same size."""
    config, table = site.config, site.table
    count = config.num_prompt_tokens
    if table.is_meta or config.initial == "uniform":
        bound = math.sqrt(3) * site.sizes[0]
        return like(table, torch.empty(count, table.shape[1], device="cpu").uniform_(-bound, bound))
    if config.initial == "words":
        given = config.initial_ids or []
        ids = [given[i % len(given)] for i in range(count)]
    else:
        ids = torch.randint(table.shape[0], (count,), device="cpu").tolist()
    return like(table, embedded(site.embeddings, ids))


def initial_theta(site: Site) -> Tensor:
    """Class vectors: the embeddings of the classes' words, where these are as long as states; else small numbers.

    As they are kept, not as they go in: so a language model's head reads its states.
    """
    words, table = site.config.label_ids, site.table
    if words is None or table.is_meta or table.shape[1] != site.hidden_size:
        return like(table, torch.randn(site.labels, site.hidden_size, device="cpu") * SMALL)
    return like(table, torch.stack([table.detach()[ids].float().mean(0) for ids in words]))
