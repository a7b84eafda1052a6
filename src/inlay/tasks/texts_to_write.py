"""Whether a column of labels holds texts to write: in data of the user's own, for a model that writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inlay.records.spec import Spec
from inlay.tasks import cells, kinds, labels
from inlay.tasks.tables import Table

# Options that say that the labels are classes, with the values that say nothing.
_OF_CLASSES: Mapping[str, Any] = {
    "kind": None,
    "class_weights": None,
    "classes": (),
    "label_separator": None,
    "calibrate": False,
    "pooling": "auto",
    "shots": None,
}


def why_written(tables: Sequence[Table], spec: Spec, texts: tuple[str, ...], label: str) -> str | None:
    """Why the labels are texts to write, in words; None where they are classes, amounts, tags or several labels a row,
    and where the spec says that they are classes.

    All `tables` count, the first of which was read for the columns: few rows to learn from may have a class each. Rows
    that are the same count once.
    """
    said = any(getattr(spec, name) != nothing for name, nothing in _OF_CLASSES.items())
    spans = {"start", "end"} <= set(tables[0].columns)
    if said or spans or len(texts) != 1 or tables[0].class_names is not None:
        return None
    found, count = set(), 0
    for table in tables:
        for number, row in table.numbered:
            value = row.get(label)
            if labels.is_absent(value, table.untyped):
                continue
            if isinstance(value, list | Mapping):
                return None
            name = cells.as_text(value, label, f"{table.path.name}, row {number}").strip()
            found.add((str(row.get(texts[0])), name))
            count += 1
    names = [name for _, name in found]
    if not labels.are_texts(names):
        return None
    return f"{label!r} holds {len(set(names)):,} different texts in {count:,} rows, and the model writes texts"


def as_written(texts: tuple[str, ...], label: str) -> dict[str, Any]:
    """The fields of a spec that say so."""
    return {"kind": kinds.CAUSAL_LM, "text": texts, "label": label}
