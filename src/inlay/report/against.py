"""What changed since an earlier folder of runs: each method beside itself, over the seeds that both folders have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from inlay.report.collect import Collected, ResultRow, Set, settings_of
from inlay.report.conclusion import amount, is_share
from inlay.workflow.statistics import Verdict, half_width, holm, paired, verdict

SHOWN = 6
UNLIKE = ("seed", "trust_remote_code")


@dataclass(frozen=True)
class MethodChange:
    """One method of one comparison, `before` and `now`: means over the seeds that both have.

    `difference` is the gain, greater for better, in words; None where only one folder has the method, or they have no
    seed in common. `differing` are the settings that are not the same, `other_data` whether the rows are not.
    """

    place: str
    method: str
    metric: str
    before: float | None
    now: float | None
    seeds: int
    difference: str | None = None
    verdict: Verdict | None = None
    differing: tuple[str, ...] = ()
    other_data: bool = False


def changes(found: Collected, earlier: Collected) -> list[MethodChange]:
    """The chosen rows of both folders side by side, those of the new one first."""
    new, old = _chosen(found), _chosen(earlier)
    pairs = {key: (row, old[key]) for key, row in new.items() if key in old}
    common = {key: sorted(a[1].values.keys() & b[1].values.keys()) for key, (a, b) in pairs.items()}
    tests = {
        key: paired([a[1].values[seed] for seed in common[key]], [b[1].values[seed] for seed in common[key]])
        for key, (a, b) in pairs.items()
        if common[key]
    }
    raised = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    told = []
    for key, (of, row) in new.items():
        if key not in pairs:
            told.append(MethodChange(of.label, row.label, of.metric, None, row.mean, len(row.values)))
            continue
        before = old[key][1]
        change = _change(of, row, before, common[key])
        if key in tests:
            word = verdict(tests[key], raised[key], greater_is_better=of.greater)
            change = replace(change, verdict=word)
        told.append(change)
    gone = [(of, row) for key, (of, row) in old.items() if key not in new]
    return told + [MethodChange(of.label, row.label, of.metric, row.mean, None, len(row.values)) for of, row in gone]


def describe(told: Sequence[MethodChange], name: str) -> str:
    """The changes in one sentence or two."""
    by_word: dict[str, list[str]] = {}
    for each in told:
        word, said = _in_words(each)
        by_word.setdefault(word, []).append(said)
    parts = [f"{word}: {_listed(by_word[word])}" for word in _ORDER if word in by_word]
    return f"Against {name}: {'; '.join(parts)}."


_ORDER = ("better", "worse", "no significant difference", "too few common seeds to tell", "new here", "only there")


def _in_words(change: MethodChange) -> tuple[str, str]:
    if change.before is None:
        return "new here", change.method
    if change.now is None:
        return "only there", change.method
    said = f"{change.method}" if change.difference is None else f"{change.method} ({change.difference})"
    words: Mapping[str | None, str] = {
        "better": "better",
        "worse": "worse",
        "not distinguishable": "no significant difference",
    }
    return words.get(change.verdict, "too few common seeds to tell"), said


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _chosen(found: Collected) -> dict[tuple[object, ...], tuple[Set, ResultRow]]:
    """The chosen rows by what they are compared by: paths of a disk count by their last name."""
    return {
        (_last(of.task), _last(of.model), of.shots, of.metric, of.split, of.more, row.spec.method): (of, row)
        for of, rows in found.by_set
        for row in rows
        if row.chosen
    }


def _last(text: str) -> str:
    return PurePath(text).name if text.startswith(("/", ".", "~")) else text


def _change(of: Set, row: ResultRow, before: ResultRow, seeds: Sequence[int]) -> MethodChange:
    sign = 1 if of.greater else -1
    gaps = [sign * (row.values[seed] - before.values[seed]) for seed in seeds]
    now, then = ([each.values[seed] for seed in seeds] or list(each.values.values()) for each in (row, before))
    difference = None
    if gaps:
        gain = sum(gaps) / len(gaps)
        difference = ("+" if gain > 0 else "") + amount(gain, half_width(gaps), is_share(of, [row, before]))
    mine, theirs = settings_of(row.spec), settings_of(before.spec)
    names = [name for name in {**mine, **theirs} if name not in UNLIKE and mine.get(name) != theirs.get(name)]
    return MethodChange(
        place=of.label,
        method=row.label,
        metric=of.metric,
        before=sum(then) / len(then),
        now=sum(now) / len(now),
        seeds=len(seeds),
        difference=difference,
        differing=tuple(name.replace("_", " ") for name in names),
        other_data=_data_of(row, seeds) != _data_of(before, seeds),
    )


def _data_of(row: ResultRow, seeds: Sequence[int]) -> list[object]:
    """A digest of the rows of each seed, as the records have it."""
    found = []
    for result in row.results:
        if result.spec.seed in seeds:
            tasks = result.record.get("tasks") or {"": result.record.get("task") or {}}
            found.append([task.get("digest") for task in tasks.values()])
    return list(found)
