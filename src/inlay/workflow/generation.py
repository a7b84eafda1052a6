"""Let a language model continue texts, each row of a batch behind the prompt that its adapter stands for.

Transformers' `generate` runs the model, greedily. What is done row by row hangs on its hooks: a logits processor draws
the next token of the rows that sample, and a stopping criterion hands every token to its row, which tells its text and
knows when it is at its end. So rows may differ in their adapters, lengths, temperatures and seeds.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from inlay.backbones.loading import Backbone
from inlay.errors import InlayError
from inlay.methods.mixing import BASE
from inlay.methods.plain import base_of
from inlay.methods.prompts import context_of
from inlay.methods.protocol import layers_of
from inlay.training.batches import Placement, count_virtual_tokens
from inlay.training.plan import pick_device, pick_dtype
from inlay.workflow.compress import split

END, LENGTH, STOPPED, STOP = "end", "length", "stopped", "stop"
BROKEN = "\ufffd"  # what part of a character is decoded to
KNOWN = (
    8  # tokens of the text before that the first new one is decoded with: they decide whether it begins with a blank
)
HOTTEST = 100.0
SEEDS = 2**63


@dataclass(frozen=True)
class Sampling:
    """How a text is continued: at most so many tokens; with a temperature of 0 always the likeliest one.

    `top_p` leaves out the unlikely tokens that together have less than 1 - top_p. The same `seed` draws the same text;
    None: any. A text ends before the first of the `stop` strings that it would have.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InlayError(f"max_tokens={self.max_new_tokens}: give a whole number from 1.")
        if not 0 <= self.temperature <= HOTTEST:
            raise InlayError(f"temperature={self.temperature}: give a number from 0 (the likeliest) to {HOTTEST:g}.")
        if not 0 < self.top_p <= 1:
            raise InlayError(f"top_p={self.top_p}: give a number above 0 and up to 1 (all tokens).")
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            raise InlayError(f"seed={self.seed}: give a whole number from 0 and below 2**63.")
        if "" in self.stop:
            raise InlayError("stop='': a text would end before it begins. Give a text of one character or more.")


class TooLong(InlayError):
    """A text for which the model has no room."""


class TextPieces:
    """Tokens as text, by and by: a piece is told when it is whole characters, with the blank that belongs before it."""

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before[-KNOWN:])
        self._begin, self._told = 0, len(self._ids)

    def add(self, token: int) -> str:
        """The text that one more token completes; empty while a character is not whole."""
        self._ids.append(token)
        return self._more(whole=True)

    def rest(self) -> str:
        """What was held back."""
        return self._more(whole=False)

    def _more(self, whole: bool) -> str:
        before, now = self._decode(self._ids[self._begin : self._told]), self._decode(self._ids[self._begin :])
        if len(now) <= len(before) or (whole and now.endswith(BROKEN)):
            return ""
        # Only the tokens since the last piece are decoded again, however long the text.
        self._begin, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        # Not cleaned up: that would take back blanks that were told.
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Continuation:
    """A text that is continued. `Writer.begin` makes one.

    `prompt` is the name of the adapter, None for the model alone. `tell` receives the text by and by, in the thread
    that runs the model.
    """

    def __init__(
        self,
        given: Sequence[int],
        sampling: Sampling,
        pieces: Callable[[], TextPieces],
        ends: frozenset[int],
        *,
        prompt: str | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.given, self.sampling, self.prompt = list(given), sampling, prompt
        self._pieces, self._ends, self._tell = pieces, ends, tell
        self._seed = secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed
        self._asked_to_stop = False
        self._told = ""  # over all attempts
        self.again()

    def again(self) -> None:
        """Begin again, as after a batch that was too large. What was told already is not told twice."""
        self.written: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._decoder = self._pieces()
        self._generator: torch.Generator | None = None

    @property
    def ids(self) -> list[int]:
        """All tokens, the given and the written."""
        return self.given + self.written

    @property
    def done(self) -> bool:
        """Whether it is at its end."""
        return self.finish is not None

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return 0 if self.done else self.sampling.max_new_tokens - len(self.written)

    def stop(self) -> None:
        """Nobody wants more of it: it ends with the next token. To be called from any thread."""
        self._asked_to_stop = True

    def take(self, token: int) -> None:
        """One more token; nothing happens where it is at its end."""
        if self.done:
            return
        self.written.append(token)
        if token in self._ends:
            self.finish = END
        else:
            self._say(self._decoder.add(token))
            if self.done:  # at a stop string
                return
            if self._asked_to_stop:
                self.finish = STOPPED
            elif len(self.written) >= self.sampling.max_new_tokens:
                self.finish = LENGTH
        if self.done:
            self._say(self._decoder.rest(), last=True)
            if len(self.text) < len(self._told):
                raise _differently()

    def generator(self, device: torch.device) -> torch.Generator:
        """Its own source of chance: who else is in the batch changes nothing."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def _say(self, piece: str, last: bool = False) -> None:
        self.text += piece
        whole = len(self.text)
        if (found := self._find_stop(len(piece))) is not None:
            self.text, self.finish = self.text[:found], STOP
            whole = found
        elif not last:
            whole -= self._held_back()
        if not self.text.startswith(self._told[: len(self.text)]):
            raise _differently()
        new = self.text[len(self._told) : whole]
        if new:
            self._told += new
            if self._tell is not None:
                self._tell(new)

    def _find_stop(self, new: int) -> int | None:
        """Where the first stop string begins; one that ends before the newest characters was found before."""
        stops = self.sampling.stop
        places = [self.text.find(each, max(0, len(self.text) - new - len(each) + 1)) for each in stops]
        return min((place for place in places if place >= 0), default=None)

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a stop string: they are not told yet."""
        stops = self.sampling.stop
        longest = max(map(len, stops), default=1) - 1
        sizes = range(min(longest, len(self.text)), 0, -1)
        return next((size for size in sizes if any(each.startswith(self.text[-size:]) for each in stops)), 0)


def _differently() -> RuntimeError:
    return RuntimeError("a text came out differently the second time, and its beginning had been told")


class Writer:
    """A language model that continues texts, with the adapters that are in `model`.

    One with an encoder and a decoder reads a text whole, as its tokenizer makes it, and writes one of its own.
    """

    def __init__(self, backbone: Backbone, precision: str = "auto") -> None:
        device = pick_device()
        self.model: Any = backbone.model.to(device).eval()
        self.tokenizer, self.name, self.fingerprint = backbone.processor, backbone.name, backbone.fingerprint
        self.place = Placement(device, pick_dtype(precision, device, strict=False), 1)
        base = self.base
        self.two_parts = bool(getattr(base.config, "is_encoder_decoder", False))
        self.lead = [] if self.two_parts else split(self.tokenizer, "a")[0]
        self.context = context_of(base)
        own = getattr(base.generation_config, "eos_token_id", None)
        ends = [*(own if isinstance(own, list | tuple) else [own]), self.tokenizer.eos_token_id]
        self.ends = frozenset(end for end in ends if end is not None)

    @property
    def base(self) -> Any:
        """The model without its adapters."""
        return base_of(self.model)

    @property
    def mixes(self) -> bool:
        """Whether rows of one batch may have different adapters."""
        layers = list(layers_of(self.model))
        return bool(layers) and all(layer.mixes for layer in layers)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that follows another: none of beginning or end are added."""
        # Not verbose: Transformers would warn of what is beyond the context, and `begin` says so itself.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def begin(
        self,
        text: str,
        sampling: Sampling | None = None,
        *,
        prompt: str | None = None,
        before: Sequence[int] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Continuation:
        """A text to be continued. `before` are the tokens that it follows, by default those that the tokenizer puts
        before every text. Fewer tokens are written than `sampling` allows where the context has no room for them."""
        sampling = sampling or Sampling()
        if self.two_parts:
            return self._begin_apart(text, sampling, prompt, tell)
        given = [*(self.lead if before is None else before), *self.encode(text)]
        if not given:
            raise InlayError("The text is empty, and this model needs a first token to go on from: give one or more.")
        taken = 0 if prompt is None else count_virtual_tokens(self.model)
        room = math.inf if self.context is None else self.context - taken - len(given)
        if room < 1:
            raise TooLong(
                f"The text has {len(given):,} tokens, and {self.name} reads {self.context:,} in all, the answer "
                "included: shorten it."
            )
        if sampling.max_new_tokens > room:
            sampling = replace(sampling, max_new_tokens=int(room))
        decoder = lambda: TextPieces(self.tokenizer, given)  # noqa: E731
        return Continuation(given, sampling, decoder, self.ends, prompt=prompt, tell=tell)

    def _begin_apart(
        self, text: str, sampling: Sampling, prompt: str | None, tell: Callable[[str], None] | None
    ) -> Continuation:
        """A text that the encoder reads. What is written has the decoder's positions to itself."""
        given = list(self.tokenizer(text, verbose=False).input_ids)
        if self.context is not None:
            taken = 0 if prompt is None else count_virtual_tokens(self.model)
            if len(given) > self.context - taken:
                raise TooLong(
                    f"The text has {len(given):,} tokens, and {self.name} reads {self.context - taken:,}: shorten it."
                )
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.context - 1))
        return Continuation(
            given, sampling, lambda: TextPieces(self.tokenizer, ()), self.ends, prompt=prompt, tell=tell
        )

    def write(self, rows: Sequence[Continuation]) -> None:
        """Continue texts to their ends: in one pass where rows may have different adapters, otherwise in one pass with
        the adapter and one without."""
        if self.mixes:
            parts = [list(rows)]
        else:
            parts = [[row for row in rows if (row.prompt is None) is bare] for bare in (False, True)]
        for part in parts:
            if part:
                self._run(part, max(row.left for row in part))

    def go_on(self, row: Continuation, most: int, cache: Any = None) -> Any:
        """Continue one text by at most so many tokens, from the cache of its beginning; its cache then."""
        return self._run([row], min(most, row.left), cache=cache, keep=True)

    def remember(self, ids: Sequence[int]) -> Any:
        """The model's cache of a beginning, read without adapters: to be copied, and given to `go_on`."""
        row = Continuation(ids, Sampling(1), lambda: TextPieces(self.tokenizer, ()), self.ends)
        return self._run([row], 1, keep=True)

    def _run(self, rows: Sequence[Continuation], most: int, *, cache: Any = None, keep: bool = False) -> Any:
        ids, mask = self._padded([row.given if self.two_parts else row.ids for row in rows])
        pad = self._pad
        how: dict[str, Any] = {
            # Whatever sampling the checkpoint asks for: the rows say how they are continued.
            "do_sample": False,
            "num_beams": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 50,
            "use_cache": True,
            "max_new_tokens": most,
            "pad_token_id": pad,
            "eos_token_id": sorted(self.ends) or None,
            "logits_processor": LogitsProcessorList([_RowSampling(rows)]),
            "stopping_criteria": StoppingCriteriaList([_RowEnds(rows)]),
        }
        if cache is not None:
            how["past_key_values"] = cache
        if keep:
            how["return_dict_in_generate"] = True
        around: AbstractContextManager[Any] = nullcontext()
        if self.mixes:
            how["adapter_names"] = [row.prompt or BASE for row in rows]
        elif rows[0].prompt is None and self.model is not self.base:
            around = self.model.disable_adapter()
        with torch.no_grad(), self.place.autocast(), around:
            found = self.model.generate(input_ids=ids, attention_mask=mask, **how)
        return found.past_key_values if keep else None

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else min(self.ends, default=0)

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Rows of unlike lengths as one tensor, filled up on the left where they are gone on with, and which of it is
        text."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            at = slice(0, len(row)) if self.two_parts else slice(width - len(row), width)
            ids[number, at] = torch.tensor(row)
            mask[number, at] = 1
        return ids.to(self.place.device), mask.to(self.place.device)


class _RowEnds(StoppingCriteria):
    """Hands every new token to its row, and knows which rows are at their ends."""

    def __init__(self, rows: Sequence[Continuation]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            row.take(token)
        return torch.tensor([row.done for row in self.rows], device=input_ids.device)


class _RowSampling(LogitsProcessor):
    """Draws the next token of each row that samples, and leaves it as the only one that is possible."""

    def __init__(self, rows: Sequence[Continuation]) -> None:
        self.rows = rows
        self.alike: dict[tuple[float, float], list[int]] = {}
        for place, row in enumerate(rows):
            if row.sampling.temperature:
                self.alike.setdefault((row.sampling.temperature, row.sampling.top_p), []).append(place)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.alike:
            return scores
        scores = scores.clone()
        for (temperature, top_p), places in self.alike.items():
            part = TemperatureLogitsWarper(float(temperature))(input_ids[places], scores[places])
            if top_p < 1:
                part = TopPLogitsWarper(top_p)(input_ids[places], part)
            for place, chances in zip(places, part.softmax(-1), strict=True):
                drawn = torch.multinomial(chances, 1, generator=self.rows[place].generator(chances.device))
                scores[place] = -torch.inf
                scores[place, drawn] = 0.0
        return scores
