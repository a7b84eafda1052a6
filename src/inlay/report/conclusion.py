"""What a comparison comes to, in words for whoever decides: which method is best and by how much, which others do as
well within the noise, and which of these is smaller."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from inlay.report.collect import Collected, ResultRow, Set
from inlay.report.columns import count, figure
from inlay.workflow.chance import sentences
from inlay.workflow.statistics import FEWEST, half_width

WORTH_SAYING = 1.2  # times fewer parameters


def findings(found: Collected) -> list[str]:
    """The conclusion of every comparison, with its name before it where there are several."""
    told = []
    for of, listed in found.by_set:
        rows = [row for row in listed if row.chosen]
        beside = sentences([row.standing for row in rows])
        # The first of these only says what the majority class scores, which the table does too.
        parts = [*([beside] if len(beside) > 1 else []), [*conclude(of, rows), *_rates(rows, listed)]]
        told += [f"{of.label}: {' '.join(said)}" if len(found.sets) > 1 else " ".join(said) for said in parts]
    return told


def conclude(of: Set, rows: Sequence[ResultRow]) -> list[str]:
    """Sentences about the chosen rows of a comparison."""
    best = next(row for row in rows if row.best)
    value = _value(of, best)
    if len(rows) == 1:
        seeds = f"{len(best.results)} seed{'s' * (len(best.results) != 1)}"
        return [f"{best.label} has {of.split} {of.metric} {value} ({seeds})."]
    ties, few, worse = (
        [row for row in rows if row.verdict == word] for word in ("not distinguishable", "too few seeds", "worse")
    )
    what = f"{of.split} {of.metric}, {value}"
    if not worse:
        told = [f"No method is significantly better than another. {best.label} has the highest mean {what}."]
    elif not ties and not few:
        told = [f"{best.label} has the best {what}{_lead(of, best, worse)}. All others are worse."]
    else:
        told = [f"{best.label} has the best {what}{_lead(of, best, worse)}."]
    if ties:
        told += [f"No significant difference from it: {_names(ties)}.", *_smaller(best, ties)]
    if few:
        told.append(f"Too few seeds to compare with it: {_names(few)}. Use {FEWEST} at least.")
    return told


def difference(of: Set, one: ResultRow, other: ResultRow) -> str | None:
    """How much better a row is than another over the seeds that both have, with its 95 % interval; None without any."""
    sign = 1 if of.greater else -1
    gaps = [sign * (one.values[seed] - other.values[seed]) for seed in sorted(one.values.keys() & other.values.keys())]
    return amount(fmean(gaps), half_width(gaps), is_share(of, [one, other])) if gaps else None


def amount(mean: float, half: float | None, share: bool) -> str:
    """A difference in points where the metric is a share of 1, and as it is otherwise."""
    if share:
        return f"{100 * mean:.1f}" + ("" if half is None else f" ± {100 * half:.1f}") + " points"
    return figure(mean) + ("" if half is None else f" ± {figure(half, 2)}")


def is_share(of: Set, rows: Sequence[ResultRow]) -> bool:
    """Whether a metric is a share of 1, so that a hundredth of it is a point."""
    return of.greater and all(0 <= value <= 1 for row in rows for value in row.values.values())


def _value(of: Set, row: ResultRow) -> str:
    return f"{row.mean:.3f}" + ("" if row.interval is None else f" ± {row.interval:.3f}")


def _lead(of: Set, best: ResultRow, worse: Sequence[ResultRow]) -> str:
    """How far ahead the best row is of the best of those that are worse."""
    following = max(worse, key=lambda row: row.mean if of.greater else -row.mean)
    ahead = difference(of, best, following)
    return "" if ahead is None else f": {ahead} better than {following.label}"


def _smaller(best: ResultRow, ties: Sequence[ResultRow]) -> list[str]:
    """Which row that does as well trains the fewest parameters, where they are clearly fewer."""
    sizes = {id(row): fmean(record["portrait"]["parameters"]["trained"] for record in row.records) for row in ties}
    own = fmean(record["portrait"]["parameters"]["trained"] for record in best.records)
    least = min(ties, key=lambda row: sizes[id(row)])
    size = sizes[id(least)]
    if not size or own / size < WORTH_SAYING:
        return []
    times = own / size
    factor = f"{times:,.0f}" if times >= 10 else f"{times:.1f}"
    return [f"{least.label} is within the noise and trains {factor} times fewer parameters ({count(size)})."]


def _rates(rows: Sequence[ResultRow], listed: Sequence[ResultRow]) -> list[str]:
    """Which learning rate each method got, where some method has tried several."""
    tried = {
        row.spec.method: {each.spec.learning_rate for each in listed if each.spec.method == row.spec.method}
        for row in rows
    }
    if all(len(rates) < 2 for rates in tried.values()):
        return []
    each = [
        f"{row.spec.method} {row.spec.learning_rate:g}"
        + (f" (of {many} tried, by validation)" if (many := len(tried[row.spec.method])) > 1 else "")
        for row in rows
        if row.spec.learning_rate is not None
    ]
    return [f"Learning rates: {', '.join(each)}."]


def _names(rows: Sequence[ResultRow]) -> str:
    return ", ".join(row.spec.method for row in rows)
