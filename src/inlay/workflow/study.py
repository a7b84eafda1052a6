"""Texts that may stand behind a prompt, for an adapter to be fitted to and trained on.

- `own`: how the prompted model itself goes on.
- `prompt`: pieces of the prompt, repeated behind it.
- `questions`: self-study, as in Cartridges (Eyuboglu et al. 2025). The prompted model is asked about the prompt by a
  few instructions, and answers; instruction and answer are the text.
- `mixed`: equal parts of these.
- `auto`: `mixed`, or `own` where the prompt has no words to ask about or the texts no room for questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, unknown

if TYPE_CHECKING:
    from inlay.training.distil import Pair

OWN, PIECES, QUESTIONS = PARTS = ("own", "prompt", "questions")
MIXED, AUTO = "mixed", "auto"
KINDS = (AUTO, *PARTS, MIXED)
INSTRUCTIONS = (
    "Ask a question about a detail of the text above, then answer it.",
    "Which names, numbers and dates does the text above have?",
    "Say this part of the text above in other words: {passage}",
    "List three facts from the text above.",
    "Continue this part of the text above: {passage}",
    "What does the text above say about this: {passage}",
)
PASSAGE = 10
"""Tokens of the prompt that an instruction names: each then asks for something else."""
ANSWER = 16
"""Tokens that every answer must have room for."""
EARLIER = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]


def texts_for(
    pair: Pair,
    tokenizer: Any,
    kind: str,
    count: int,
    length: int,
    seed: int,
    tick: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """`count` texts behind the prompt of a pair, as token ids, at most `length` of each; the same for the same seed.
    `kind` is one of `KINDS`; what `auto` stands for, `settle` says.

    `tick` is told of `count * length` tokens in all, of each stretch as it is done.
    """
    if kind not in KINDS:
        raise unknown("kind of texts", kind, KINDS, "Or give a file of your own.")
    kind = settle(kind, pair, tokenizer, count, length, seed)
    if kind != OWN and len(_words(pair)) < 2:
        raise InlayError(
            f"texts={kind!r} are made of the prompt's own words, and there are {len(_words(pair))} tokens of them: a "
            "trained prefix has none. Give texts of your own, or a longer prompt."
        )
    if kind == OWN:
        return pair.sample(count, length, seed, tick)
    if kind == PIECES:
        found = _pieces(_words(pair), count, length, random.Random(seed))
        if tick is not None:
            tick(count * length)
        return found
    if kind == QUESTIONS:
        return _answered(pair, tokenizer, count, length, seed, tick)
    share, over = divmod(count, len(PARTS))
    parts = [
        texts_for(pair, tokenizer, part, share + (number < over), length, seed, tick)
        for number, part in enumerate(PARTS)
    ]
    # In turn, so that what is held out has some of each.
    return [text for texts in zip_longest(*parts) for text in texts if text is not None]


def settle(kind: str, pair: Pair, tokenizer: Any, count: int, length: int, seed: int) -> str:
    """The kind of texts that `auto` stands for; another kind is itself."""
    if kind != AUTO:
        return kind
    if len(_words(pair)) < 2:
        return OWN
    # Of a mixture's questions, not of so many: fewer are about other passages.
    longest = max(map(len, _questions(pair, tokenizer, count // len(PARTS), seed)), default=0)
    return MIXED if longest + ANSWER <= length else OWN


def _words(pair: Pair) -> tuple[int, ...]:
    """The prompt's tokens, without what the tokenizer puts before every text."""
    return pair.prompt.ids[len(pair.lead) :]


def _pieces(ids: Sequence[int], count: int, length: int, chance: random.Random) -> list[list[int]]:
    """Windows of the prompt, spread evenly over it, at a place by chance in each part, in an order by chance."""
    size = min(length, len(ids))
    begins = [int((number + chance.random()) / count * (len(ids) - size + 1)) for number in range(count)]
    chance.shuffle(begins)
    return [list(ids[begin : begin + size]) for begin in begins]


def _answered(
    pair: Pair, tokenizer: Any, count: int, length: int, seed: int, tick: Callable[[int], None] | None
) -> list[list[int]]:
    """Instructions in turn, each with the prompted model's answer, up to its end."""
    starts = _questions(pair, tokenizer, count, seed)
    longest = max(map(len, starts), default=0)
    if longest + ANSWER > length:
        raise InlayError(
            f"length={length} (--length) has no room for questions, which have up to {longest} tokens, and {ANSWER} of "
            f"an answer. Give {longest + ANSWER} or more, or texts of another kind."
        )
    ends = _ends(pair.model, tokenizer)
    written = pair.write(starts, length, seed, tick)
    return [_until(text, len(start), ends) for text, start in zip(written, starts, strict=True)]


def _questions(pair: Pair, tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Instructions in turn, each about another passage."""
    passages = _pieces(_words(pair), count, PASSAGE, random.Random(seed))
    return [
        _asked(tokenizer, INSTRUCTIONS[number % len(INSTRUCTIONS)], passage) for number, passage in enumerate(passages)
    ]


def _asked(tokenizer: Any, instruction: str, passage: Sequence[int]) -> list[int]:
    """An instruction about the prompt as the user's turn of a chat, where the tokenizer knows chats."""
    text = instruction.format(passage=" ".join(tokenizer.decode(passage, skip_special_tokens=True).split()))
    ids: list[int] = tokenizer(_turn(tokenizer, text), add_special_tokens=False).input_ids
    return ids


def _turn(tokenizer: Any, text: str) -> str:
    """What a further turn of the user adds to a chat: a first one may bring a token of beginning and a system prompt,
    which have no place behind the prompt."""
    if getattr(tokenizer, "chat_template", None):
        before = tokenizer.apply_chat_template(EARLIER, tokenize=False)
        turn = [*EARLIER, {"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        if whole.startswith(before):
            return str(whole[len(before) :])
    return f"\n\n{text}\n\n"


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(found if isinstance(found, list) else [found])}
    return {end for end in ends if end is not None}


def _until(text: list[int], given: int, ends: set[int]) -> list[int]:
    """A text up to the first end of an answer, which it keeps; what is given has ends of its own."""
    at = next((at for at in range(given, len(text)) if text[at] in ends), len(text))
    return text[: at + 1]
