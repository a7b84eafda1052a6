"""What every source of data hands on: normalised rows by split, not yet divided, labels still by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


@dataclass
class Draft:
    """A task before its rows are divided.

    `splits` maps "train", "validation", "test" to rows, or "all" to rows that have no division yet. Rows have the
    normalised columns of their kind; a class in "label" is its name, a value is a float, tags are a list of names.
    `doubts` are those of the notes that may be why the rows cannot be divided.
    For pictures `splits` may hold a `datasets.Dataset` whose labels are numbers already.
    """

    name: str
    kind: str
    fields: tuple[str, ...]
    splits: dict[str, Any]
    source: str
    metrics: tuple[str, ...]
    label_names: tuple[str, ...] | None = None
    target: str | None = None
    template: str | None = None
    prompt_template: str | None = None
    cue: str | None = None
    words: tuple[str, ...] | None = None
    prepare: str | None = None
    group: str | None = None
    lm: str | None = None
    max_new_tokens: int | None = None
    resplit: tuple[float, float, float] | None = None
    standardise: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
