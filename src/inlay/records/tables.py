"""Tables as CSV that a spreadsheet shows and does not run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001


def csv_text(rows: Iterable[Iterable[Any]], line_end: str = "\n") -> str:
    """Rows, the header among them, as one text."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=line_end).writerows([[as_cell(value) for value in row] for row in rows])
    return text.getvalue()


def as_cell(value: Any) -> Any:
    """A value for a CSV: nothing for None, and text that a spreadsheet would take for a formula behind a quote sign."""
    if isinstance(value, str) and value.startswith(FORMULAS):
        return f"'{value}"
    return "" if value is None else value
