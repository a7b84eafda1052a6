"""A comparison for machines: comparison.json with everything, comparison.csv with a row for each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlay.records.atomic import write_json, write_text
from inlay.records.tables import csv_text
from inlay.records.versions import versions
from inlay.report.columns import columns_in
from inlay.report.over_tasks import Ranking
from inlay.workflow.comparison import COSTS, Comparison, Difference, against, words

NAME = "comparison"
RESULT = ("model", "data", "shots", "method", "learning_rate", "metric", "seeds", "mean", "interval_95")
TESTS = ("pareto", "baseline", "difference", "difference_low", "difference_high", "p", "verdict")


def keep(
    found: Sequence[Comparison],
    out: Path | str,
    *,
    baseline: str | None = None,
    ranked: Sequence[Ranking] = (),
    command: Sequence[str] = (),
) -> list[Path]:
    """Write both files into `out`; an earlier comparison's are replaced, its runs are not touched."""
    folder = Path(out)
    whole = {
        "what": "comparison",
        "command": list(command),
        "comparisons": [described(each, baseline) for each in found],
        "over_tasks": [asdict(each.found) | {"notes": each.notes} for each in ranked],
        "versions": versions(),
    }
    write_json(folder / f"{NAME}.json", whole)
    costs = [column.titles["csv"].replace(" ", "_") for column in columns_in("csv")]
    rows = [row for each in found for row in lines(each, baseline)]
    write_text(folder / f"{NAME}.csv", csv_text([(*RESULT, *costs, *TESTS), *rows]))
    return [folder / f"{NAME}.json", folder / f"{NAME}.csv"]


def described(found: Comparison, baseline: str | None = None) -> dict[str, Any]:
    """One comparison as plain data."""
    return {
        "title": found.title,
        "spec": None if found.spec is None else found.spec.to_json(),
        "metric": found.rows[0].metric if found.rows else None,
        "greater_is_better": found.greater_is_better if found.rows else None,
        "rows": [asdict(row) | {"mean": row.mean, "interval_95": row.interval} for row in found.rows],
        "costs": COSTS,
        "learning_rates_tried": [asdict(each) for each in found.tried],
        "baseline": baseline,
        "differences": [asdict(each) for each in differences(found, baseline)],
        "words": words(found, baseline),
        "runs": [run.id for run in found.runs],
        "failures": found.failures,
        "unfinished": found.unfinished,
        "left_out": found.left_out,
    }


def lines(found: Comparison, baseline: str | None = None) -> list[tuple[Any, ...]]:
    """The CSV's rows of one comparison."""
    tests = {each.method: each for each in differences(found, baseline)}
    spec = found.spec
    about = (spec.model, spec.subject, spec.shots) if spec else (None, None, None)
    rows = []
    for row in found.rows:
        runs = sorted((run for run in found.runs if run.spec.method == row.method), key=lambda run: run.spec.seed)
        costs = [column.value([run.record for run in runs]) for column in columns_in("csv")]
        test = tests.get(row.method)
        result = (row.method, row.rate, row.metric, len(row.values), row.mean, row.interval)
        tested = (baseline, test.difference, test.low, test.high, test.p, test.verdict) if test else (None,) * 6
        rows.append((*about, *result, *costs, " ".join(row.front), *tested))
    return rows


def differences(found: Comparison, baseline: str | None) -> list[Difference]:
    """From the baseline, where there is one that finished."""
    if baseline is None or all(row.method != baseline for row in found.rows):
        return []
    return against(found, baseline)
