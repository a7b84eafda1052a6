"""The report's table for other programs: a line a run as CSV; the rows over seeds as LaTeX and Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inlay.records.atomic import write_text, writing
from inlay.records.tables import csv_text
from inlay.report.collect import Collected, ResultRow
from inlay.report.columns import columns_in
from inlay.report.html import check_out
from inlay.report.paths import cutter


def write_csv(found: Collected, out: Path) -> Path:
    """One line a run: what its spec says, its metrics on every split, what it cost, its command; then those without."""
    results = [
        {
            "run": result.run.id,
            "status": "finished",
            **_flatten(result.spec.to_json()),
            **{f"{split} {name}": value for split, each in result.run.metrics.items() for name, value in each.items()},
            **{column.titles["csv"]: column.value([result.record]) for column in columns_in("csv")},
            "command": result.command,
        }
        for result in found.results
    ]
    others = [
        {
            "run": run.id,
            "status": run.status,
            **_flatten(run.spec.to_json()),
            "error": run.error,
            "command": run.command,
        }
        for run in found.unfinished
    ]
    lines = [*results, *others]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    rows = [[line.get(name) for name in columns] for line in lines]
    return _write(out, csv_text([columns, *rows]), (".csv",))


def _flatten(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in spec.items()}


def write_markdown(found: Collected, out: Path) -> Path:
    """A table a comparison, the chosen variants marked. The best row is bold
    where another is significantly worse."""
    parts, cut, heads = [], cutter(found.specs), _heads()
    for name, rows in found.by_set:
        parts += [f"### {_escape_markdown(cut(name.label))}: {name.split} {name.metric}", ""]
        parts += [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
        parts += [f"| {' | '.join(_cells(row, _escape_markdown, '**{}**', _has_variants(found)))} |" for row in rows]
        parts.append("")
    return _write(out, "\n".join(parts), (".md", ".markdown"))


def write_latex(found: Collected, out: Path) -> Path:
    """A `tabular` a comparison, for `\\\\usepackage{booktabs}`, the chosen variants marked. The best row is bold
    where another is significantly worse."""
    parts, cut, heads = [], cutter(found.specs), _heads()
    for name, rows in found.by_set:
        parts += [
            f"% {cut(name.label)}: {name.split} {name.metric}".replace("\n", " "),
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            " & ".join(heads) + r" \\",
            r"\midrule",
            *(" & ".join(_cells(row, _escape_latex, r"\textbf{{{}}}", _has_variants(found))) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    return _write(out, "\n".join(parts), (".tex",))


def _heads() -> list[str]:
    return ["method", "result", "seeds", *(column.titles["table"] for column in columns_in("table"))]


def _has_variants(found: Collected) -> bool:
    """Whether some variants were chosen before others; then the page marks them, and so do the tables."""
    return any(not row.chosen for row in found.rows)


def _cells(row: ResultRow, escape: Callable[[str], str], bold: str, marks: bool) -> list[str]:
    plus_minus = r"$\pm$" if escape is _escape_latex else "±"
    result = f"{row.mean:.4f}" + ("" if row.interval is None else f" {plus_minus} {row.interval:.4f}")
    return [
        escape(row.label + ", chosen" * (marks and row.chosen and bool(row.variant))),
        bold.format(result) if row.badge else result,
        str(len(row.results)),
        *(column.exact(row.records) for column in columns_in("table")),
    ]


def _escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _escape_latex(text: str) -> str:
    """A text that LaTeX shows as it is."""
    words = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
    return re.sub(r"[\\~^<>&%$#_{}]", lambda sign: words.get(sign[0], "\\" + sign[0]), " ".join(text.split()))


def _write(out: Path, text: str, endings: tuple[str, ...]) -> Path:
    check_out(out, endings)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    return out
