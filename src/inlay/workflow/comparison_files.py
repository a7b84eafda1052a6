"""A comparison for machines: comparison.json with all there is to know, comparison.csv with a line a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlay.records.atomic import write_json, write_text
from inlay.records.tables import csv_text
from inlay.records.versions import versions
from inlay.workflow.comparison import COSTS, Comparison, Difference, Measurement, against, words
from inlay.workflow.explain.explanation import Value

NAME = "comparison"
COLUMNS = (
    *("model", "data", "shots", "method", "learning_rate", "metric", "seeds", "mean", "interval_95"),
    *("trained_parameters", "saved_bytes", "peak_memory_bytes", "seconds_per_epoch", "train_examples_per_second"),
    *("inference_examples_per_second", "pareto"),
    *("baseline", "difference", "difference_low", "difference_high", "p", "verdict"),
)


def keep(
    found: Sequence[Comparison], out: Path | str, *, baseline: str | None = None, command: Sequence[str] = ()
) -> list[Path]:
    """Write both files into `out`; an earlier comparison's are replaced, its runs are not touched."""
    folder = Path(out)
    whole = {
        "what": "comparison",
        "command": list(command),
        "comparisons": [described(each, baseline) for each in found],
        "versions": versions(),
    }
    write_json(folder / f"{NAME}.json", whole)
    rows = [row for each in found for row in lines(each, baseline)]
    write_text(folder / f"{NAME}.csv", csv_text([COLUMNS, *rows]))
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


def lines(found: Comparison, baseline: str | None = None) -> list[tuple[Value, ...]]:
    """The CSV's rows of one comparison."""
    beside = {each.method: each for each in differences(found, baseline)}
    spec = found.spec
    rows: list[tuple[Value, ...]] = []
    for row in found.rows:
        each = beside.get(row.method)
        rows.append(
            (
                *((spec.model, spec.subject, spec.shots) if spec else (None, None, None)),
                *(row.method, row.rate, row.metric, len(row.values), row.mean, row.interval),
                *(row.trained, row.saved_bytes, row.peak_memory, _mean(row.seconds_per_epoch)),
                *(_mean(row.train_rate), _mean(row.inference_rate), " ".join(row.front)),
                *((baseline, each.difference, each.low, each.high, each.p, each.verdict) if each else (None,) * 6),
            )
        )
    return rows


def differences(found: Comparison, baseline: str | None) -> list[Difference]:
    """From the baseline, where there is one that finished."""
    if baseline is None or all(row.method != baseline for row in found.rows):
        return []
    return against(found, baseline)


def _mean(entry: Measurement | None) -> float | None:
    return None if entry is None else entry.mean
