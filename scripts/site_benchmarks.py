"""The tables of the page Benchmarks: every file of benchmarks/results, whatever it holds.

Each benchmark writes what it wants. Here a list of objects, or an object of objects with the same fields, is a table;
single values make a table of two columns; lists of plain numbers are the rounds behind a median and are left to the
file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ABOUT = ("what", "about", "command", "device", "date", "measured", "machine", "clock", "precision", "commit")
VERSIONS = ("inlay", "python", "torch", "transformers", "peft")
INTRODUCTION = (
    "Every file of `benchmarks/results`, as tables. [What a method costs](../cost.md) and the pages under *Papers* say "
    "what they mean. Each file also has the single rounds behind a figure."
)
LONG = 24  # rows; a longer table is folded
DEEP = 5


def benchmarks_page(folder: Path) -> str:
    """The page, a section a file."""
    lines = [
        "# All measurements",
        "",
        INTRODUCTION,
        "",
    ]
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        lines += [f"## {path.stem}", "", *_about(path, content), *_tables(content, 3)]
    return "\n".join(lines)


def _about(path: Path, content: Mapping[str, Any]) -> Iterator[str]:
    facts = [f"{key} {content[key]}" for key in ABOUT if key not in ("command", "what", "about") and key in content]
    versions = content.get("versions", {})
    facts += [f"{name} {versions[name]}" for name in VERSIONS if name in versions]
    if "what" in content or "about" in content:
        yield from (_text(content.get("what", content.get("about"))), "")
    source = f"[{path.name}](../../benchmarks/results/{path.name})"
    yield from (f"{source}: {_text(', '.join(facts))}" if facts else source, "")
    if isinstance(content.get("command"), str):
        yield from ("~~~bash", content["command"], "~~~", "")


def _tables(content: Mapping[str, Any], level: int) -> Iterator[str]:
    """What an object holds: its single values first, then what is inside of it."""
    inner = {key: value for key, value in content.items() if key not in (*ABOUT, "versions", "made")}
    single = {key: value for key, value in inner.items() if _is_single(value)}
    if single:
        yield from _table([{"": key, "value": value} for key, value in single.items()])
    for key, value in inner.items():
        rows = _rows(value)
        if rows:
            yield from (f"{'#' * min(level, 6)} {_text(key)}", "", *_table(rows))
        elif isinstance(value, dict) and value and level < DEEP and any(map(_is_shown, value.values())):
            yield from (f"{'#' * min(level, 6)} {_text(key)}", "")
            if isinstance(value.get("about"), str):
                yield from (_text(value["about"]), "")
            yield from _tables(value, level + 1)


def _rows(value: Any) -> list[dict[str, Any]]:
    """A list of objects, or an object of objects, as rows; nothing if it is neither."""
    if isinstance(value, dict):
        if len(value) < 2 or not all(isinstance(each, dict) for each in value.values()):
            return []
        rows = [{"": key} | each for key, each in value.items()]
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        rows = value
    else:
        return []
    flat = [
        {key: each for key, each in row.items() if _is_single(each) and key not in ("command", "about")} for row in rows
    ]
    nested = any(isinstance(each, dict) and key not in ("versions",) for row in rows for key, each in row.items())
    return [] if nested or not all(set(row) - {""} for row in flat) else flat


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        "| " + " | ".join(_text(column).replace("_", " ") for column in columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    if len(rows) > LONG:
        lines = [f'??? note "{len(rows)} rows"', "", *(f"    {line}" for line in lines)]
    return [*lines, ""]


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_shown(value: Any) -> bool:
    return _is_single(value) or isinstance(value, dict) or bool(_rows(value))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _number(value)
    return _text(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return "".join(f"\\{mark}" if mark in "<>*_" else mark for mark in text)
