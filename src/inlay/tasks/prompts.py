"""Places for prompt tokens in a text: from `{soft_prompt}` in a template to negative ids among a text's tokens.

The k-th prompt token of a text, counted from 0, is encoded as the id -1 - k. The method that trains the prompts swaps
their vectors in; no such id ever reaches the embeddings. A place may hold several prompt tokens, or none: with n_p of
them, the first goes to the place before the mask (without a mask: the last place), the others to the other places in
order, and round again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.errors import InlayError
from inlay.tasks import templates
from inlay.tasks.cells import as_text
from inlay.tasks.templates import MARK, MASK, PROMPT, SEPARATOR, parts


def with_places(template: str) -> str:
    """The template with places for prompts, where it has none: at both ends, and before and after the mask."""
    if any(name == PROMPT for _, name in parts(template)):
        return template
    around = template.replace(f"{{{MASK}}}", f"{{{PROMPT}}} {{{MASK}}} {{{PROMPT}}}")
    return f"{{{PROMPT}}} {around} {{{PROMPT}}}"


def without_mask(template: str) -> str:
    """The template without its mask: for models that have none, or whose class is read elsewhere."""
    return _without(template, (MASK,))


def _without(template: str, left_out: Sequence[str]) -> str:
    return _joined(
        [(literal, None if name in left_out else _braced(name), name in left_out) for literal, name in parts(template)]
    )


def left_to_right(template: str, cue: str) -> str:
    """The template for a model that reads from left to right, and whose class is read at the last token.

    One with a mask is for models that have it. Here all its prompts stand before the text, and the mask is left out,
    with words after it where no field follows: the words before it are what the class is read from. One without places
    gets one before the text as well. Where a text would end in a field, or in a prompt, `cue` follows; but one that has
    places and no mask, and ends in a field, is taken as it is.
    """
    items = list(parts(template))
    names = [name for _, name in items]
    if MASK not in names and PROMPT in names:
        return template.rstrip(" ") + (f" {cue}" if cue and ends_in_a_place(template) else "")
    if MASK in names and not any(name not in (None, PROMPT) for name in names[names.index(MASK) + 1 :]):
        items = items[: names.index(MASK) + 1]
    body, words = _divided(_without(_written(items), (MASK, PROMPT)).strip(" "))
    cue = words or (f" {cue}" if cue else "")
    return f"{{{PROMPT}}} {body}{cue}".rstrip(" ")


def ends_in_a_place(template: str) -> bool:
    """Whether the last that a template has, but for spaces, is a place for prompts."""
    body, words = _divided(template)
    return body.endswith(f"{{{PROMPT}}}") and not words


def _divided(template: str) -> tuple[str, str]:
    """The template up to its last field or place, and the words after it."""
    items = list(parts(template))
    end = len(items)
    while end and items[end - 1][1] is None:
        end -= 1
    words = _written(items[end:])
    return _written(items[:end]), words if words.strip() else ""


def expand(template: str, count: int) -> str:
    """The template with `count` marks in its places, as `PromptTokenizer` reads them."""
    names = [name for _, name in parts(template)]
    places = [i for i, name in enumerate(names) if name == PROMPT]
    if not places:
        raise InlayError(f"The template {template!r} has no {{{PROMPT}}}: there is no place for prompt tokens.")
    mask = names.index(MASK) if MASK in names else len(names)
    leading = max((place for place in places if place < mask), default=places[0])
    order = [leading, *(place for place in places if place != leading)]
    marks = [sum(order[i % len(order)] == place for i in range(count)) for place in range(len(names))]
    made = []
    for (literal, name), number in zip(parts(template), marks, strict=True):
        stands_for = MARK * number if name == PROMPT else _braced(name)
        made.append((literal, stands_for, name == PROMPT and not number))
    return _joined(made)


def encode(rows: Sequence[Mapping[str, Any]], tokenizer: Any, config: Any, max_length: int | None = None) -> Any:
    """A batch of tensors from rows with the template's fields, for a model with prompts that `inlay tune` trained:

        model = PeftModel.from_pretrained(model, folder)
        model(**encode([{"sentence": "..."}], tokenizer, model.active_peft_config))

    `config` is the adapter's, an `InfoPromptConfig`, and has the template. Spans, which need their marks, are read by
    `inlay predict` alone.
    """
    from inlay.tasks import encode as encoding

    if not config.template or not config.placeholders:
        raise InlayError("This adapter has no template: give the model what the tokenizer makes of a text.")
    wanted = templates.fields_of(config.template)
    texts = []
    for number, row in enumerate(rows):
        if lacking := [name for name in wanted if name not in row]:
            raise InlayError(f"Row {number} lacks {', '.join(lacking)} of the template {config.template!r}.")
        texts.append({name: as_text(row[name], name, f"Row {number}") for name in wanted})
    limit = max_length or min(encoding.length_limit(tokenizer) or encoding.DEFAULT_LENGTH, encoding.DEFAULT_LENGTH)
    template = expand(config.template, config.num_prompt_tokens)
    columns, _ = encoding.encode_texts(texts, template, PromptTokenizer(tokenizer), limit)
    made = encoding.Encoded(columns)
    return encoding.TextCollator(tokenizer)([made[i] for i in range(len(made))])


def _braced(name: str | None) -> str | None:
    return None if name is None else f"{{{name}}}"


def _written(items: Sequence[tuple[str, str | None]]) -> str:
    """The template of which these are the parts."""
    return "".join(_plain(literal) + (_braced(name) or "") for literal, name in items)


def _plain(literal: str) -> str:
    """Literal text as a template has it."""
    return literal.replace("{", "{{").replace("}", "}}")


def _joined(pieces: Sequence[tuple[str, str | None, bool]]) -> str:
    """A template of literal texts, what follows each, and whether that was left out: then no second space stays."""
    made = ""
    left_out = False
    for literal, following, dropped in pieces:
        literal = _plain(literal)
        if left_out and (not made or made.endswith((" ", f"{{{SEPARATOR}}}"))):
            literal = literal.lstrip(" ")
        if left_out and not literal and following == f"{{{SEPARATOR}}}":
            made = made.rstrip(" ")
        made += literal + (following or "")
        left_out = dropped
    return made.rstrip(" ") if left_out else made


class PromptTokenizer:
    """A tokenizer that reads marks as negative ids; all else is the tokenizer's own.

    The mark is one more special token of a copy: the tokenizer itself stays as it is, and no word of a text is
    taken for a mark.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers import AddedToken

        self._own = tokenizer
        self._marked = copy.deepcopy(tokenizer)
        self._marked.add_tokens([AddedToken(MARK, lstrip=True, normalized=False, special=True)], special_tokens=True)
        self._mark = self._marked.convert_tokens_to_ids(MARK)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoded = self._marked(*args, **kwargs)
        encoded["input_ids"] = [self._numbered(row) for row in encoded["input_ids"]]
        return encoded

    def _numbered(self, ids: Sequence[int]) -> list[int]:
        found = iter(range(-1, -len(ids) - 1, -1))
        return [next(found) if each == self._mark else each for each in ids]
