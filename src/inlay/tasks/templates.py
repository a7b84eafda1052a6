"""How the fields of a row become the text that a model reads.

A template is a string with the fields in braces. `{sep}` divides it into two segments, which the tokenizer joins with
its own separator (many a decoder's has none: there they stand side by side); `{mask}` is the tokenizer's mask token;
`{soft_prompt}` is a place for prompt tokens, for methods that have them (tasks/prompts.py), and nothing to the others;
`{{` and `}}` are plain braces.

    "{premise}{sep}{hypothesis}"
    "{sentence} It was {mask}."
    "{soft_prompt} {sentence} {soft_prompt} {mask} {soft_prompt}"
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.tasks.cells import as_text

SEPARATOR, MASK, PROMPT = "sep", "mask", "soft_prompt"
RESERVED = (SEPARATOR, MASK, PROMPT)
MARK = "<|inlay prompt|>"  # what stands for a prompt token between a template and the tokens


def default(fields: Sequence[str]) -> str:
    """One field as it is; of several, the first against the others."""
    first, *others = fields
    return f"{{{first}}}" + ("{sep}" + " ".join(f"{{{name}}}" for name in others) if others else "")


def parts(template: str) -> Iterable[tuple[str, str | None]]:
    """Literal text and the placeholder that follows it, in order."""
    try:
        for literal, name, form, conversion in string.Formatter().parse(template):
            if form or conversion or name == "":
                raise ValueError("a placeholder is a plain name in braces")
            yield literal, name
    except ValueError as error:
        raise InlayError(
            f"The template {template!r} cannot be read: {error}. Write a plain brace as {{{{ or }}}}."
        ) from None


def check(template: str, fields: Sequence[str]) -> None:
    """Refuse a template that names what is not there, names nothing, or has more than two segments."""
    names = [name for _, name in parts(template) if name is not None]
    allowed = (*fields, *RESERVED)
    for name in names:
        if name not in allowed:
            raise unknown(f"placeholder in the template {template!r}", name, allowed)
    if not set(names) & set(fields):
        raise InlayError(f"The template {template!r} uses none of the fields {', '.join(fields)}.")
    if names.count(MASK) > 1:
        raise InlayError(f"The template {template!r} has more than one {{mask}}: a text has one, where it is read.")
    if names.count(SEPARATOR) > 1:
        raise InlayError(f"The template {template!r} has more than one {{sep}}: a text has one or two segments.")


def fields_of(template: str) -> list[str]:
    """The fields that the template names, in order."""
    return [name for _, name in parts(template) if name is not None and name not in RESERVED]


def uses_mask(template: str) -> bool:
    """Whether the template asks for the mask token."""
    return any(name == MASK for _, name in parts(template))


def is_kept_whole(template: str) -> bool:
    """Whether a text must not be cut at its end, where something that is needed may stand: the mask, or a prompt."""
    return MARK in template or uses_mask(template)


def render(template: str, row: Mapping[str, Any], mask: str | None = None) -> tuple[str, str | None]:
    """The row's text, and the second segment where the template has one.

    Where the template has a mask it is the only one: those that a field's own text spells out are left out of it, and
    so are marks of prompts.
    """
    segments = [""]
    masked = mask is not None and uses_mask(template)
    for literal, name in parts(template):
        segments[-1] += literal
        if name == SEPARATOR:
            segments.append("")
        elif name == MASK:
            if mask is None:
                raise InlayError(f"The template {template!r} has a {{mask}}, and this model has no mask token.")
            segments[-1] += mask
        elif name == PROMPT:
            pass
        elif name is not None:
            text = as_text(row[name], name).replace(MARK, "")
            segments[-1] += text.replace(mask or "", "") if masked else text
    if f"{{{PROMPT}}}" in template:
        segments = [segment.strip() for segment in segments]
    return segments[0], segments[1] if len(segments) > 1 else None
