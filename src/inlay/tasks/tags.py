"""Entities in BIO tags."""

from __future__ import annotations

from collections.abc import Sequence

Entity = tuple[str, int, int]


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities (type, first word, word after the last) that a sequence of BIO tags names.

    As in the CoNLL scorer, an I- that continues nothing of its type begins an entity.
    """
    found: list[Entity] = []
    open_type, start = None, 0
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if open_type is not None and not (prefix == "I" and kind == open_type):
            found.append((open_type, start, i))
            open_type = None
        if prefix in ("B", "I") and open_type is None:
            open_type, start = kind, i
    return found
