"""How the fields of a row become the text that a model reads.

A template is a string with the fields in braces. `{sep}` divides it into two segments, which the tokenizer joins with
its own separator; `{mask}` is the tokenizer's mask token; `{{` and `}}` are plain braces.

    "{premise}{sep}{hypothesis}"
    "{sentence} It was {mask}."
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inlay.errors import InlayError, unknown

SEPARATOR, MASK = "sep", "mask"


def default(fields: Sequence[str]) -> str:
    """One field as it is; of several, the first against the others."""
    first, *others = fields
    return f"{{{first}}}" + ("{sep}" + " ".join(f"{{{name}}}" for name in others) if others else "")


def _parts(template: str) -> Iterable[tuple[str, str | None]]:
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
    names = [name for _, name in _parts(template) if name is not None]
    allowed = (*fields, SEPARATOR, MASK)
    for name in names:
        if name not in allowed:
            raise unknown(f"placeholder in the template {template!r}", name, allowed)
    if not set(names) & set(fields):
        raise InlayError(f"The template {template!r} uses none of the fields {', '.join(fields)}.")
    if names.count(SEPARATOR) > 1:
        raise InlayError(f"The template {template!r} has more than one {{sep}}: a text has one or two segments.")


def fields_of(template: str) -> list[str]:
    """The fields that the template names, in order."""
    return [name for _, name in _parts(template) if name is not None and name not in (SEPARATOR, MASK)]


def uses_mask(template: str) -> bool:
    """Whether the template asks for the mask token."""
    return any(name == MASK for _, name in _parts(template))


def render(template: str, row: Mapping[str, Any], mask: str | None = None) -> tuple[str, str | None]:
    """The row's text, and the second segment where the template has one."""
    segments = [""]
    for literal, name in _parts(template):
        segments[-1] += literal
        if name == SEPARATOR:
            segments.append("")
        elif name == MASK:
            if mask is None:
                raise InlayError(f"The template {template!r} has a {{mask}}, and this model has no mask token.")
            segments[-1] += mask
        elif name is not None:
            segments[-1] += str(row[name])
    return segments[0], segments[1] if len(segments) > 1 else None
