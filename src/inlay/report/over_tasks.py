"""Methods over the tasks of a folder: a ranking for each model, number of examples, head and split.

Tasks are what a finding should hold for, so only they are observations: the same task on another model, or with other
examples, is no further one. Which methods fit depends on the head (one class, a tag a word, a text), so tasks of
different heads are ranked apart. A method's value on a task is the mean over seeds of its chosen variant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from inlay.report.collect import Collected, ResultRow, Set
from inlay.report.conclusion import is_share
from inlay.report.paths import cutter
from inlay.report.subjects import UNKNOWN, kind
from inlay.tasks import kinds
from inlay.workflow.over_tasks import FEWEST_TASKS, OverTasks, over_tasks, sentences
from inlay.workflow.statistics import FEWEST

Entry = tuple[int, Set, list[ResultRow]]  # a set's place, the set, its chosen rows


@dataclass(frozen=True)
class Ranking:
    """What the tasks say, of which sets, and whether gaps are shares of 1; `notes` say how far it can be read."""

    found: OverTasks
    places: tuple[int, ...]
    share: bool
    notes: tuple[str, ...] = ()


def rankings(found: Collected, fewest: int = FEWEST_TASKS) -> list[Ranking]:
    """One for each group of sets with so many tasks or more, the largest first. Runs that train several tasks together
    have one score for all of them, and are not counted. Of absolute paths only the names are told."""
    cut = cutter(found.specs)
    alone = [
        (place, each, [row for row in rows if row.chosen])
        for place, (each, rows) in enumerate(found.by_set)
        if rows and not any(row.spec.tasks for row in rows)
    ]
    groups: dict[tuple[str, int | None, str, str], list[Entry]] = {}
    for entry in alone:
        groups.setdefault((entry[1].model, entry[1].shots, entry[1].split, _head(entry)), []).append(entry)
    heads = Counter(key[:3] for key in groups)
    made = [
        _rank(part, cut, _head(part[0]) if heads[key[:3]] > 1 else "")
        for key, group in groups.items()
        for part in _apart(group)
        if len(part) >= fewest
    ]
    return sorted(made, key=lambda each: -len(each.places))


def _head(entry: Entry) -> str:
    """What the tasks of an entry's runs ask of a model, in a word."""
    found = kind(entry[2][0].results[0])
    return kinds.get(found).head.probed_as if found in kinds.TABLE else UNKNOWN


def _apart(group: list[Entry]) -> list[list[Entry]]:
    """A group in which no task comes twice: by protocol, test file, pooling and metric where one does."""
    if len({each.task for _, each, _ in group}) == len(group):
        return [group]
    parts: dict[Hashable, list[Entry]] = {}
    for entry in group:
        parts.setdefault((entry[1].more, entry[1].metric), []).append(entry)
    return list(parts.values())


def _rank(group: Sequence[Entry], cut: Callable[[str], str], head: str) -> Ranking:
    first = group[0][1]
    same = {each.more for _, each, _ in group}
    title = ", ".join(
        part
        for part in (
            first.model,
            "all examples" if first.shots is None else f"{first.shots:,} examples",
            head,
            first.more if len(same) == 1 else "",
            "" if first.split == "test" else f"{first.split} split",
        )
        if part
    )
    scores = {
        cut(each.task): {row.spec.method: row.mean if each.greater else -row.mean for row in rows}
        for _, each, rows in group
    }
    bounded = all(each.greater for _, each, _ in group) and all(
        -1 <= value <= 1 for values in scores.values() for value in values.values()
    )
    share = all(is_share(each, rows) for _, each, rows in group)
    found = over_tasks(cut(title), scores, one_unit=bounded)
    return Ranking(found, tuple(place for place, _, _ in group), share, tuple(_notes(group, cut)))


def _notes(group: Sequence[Entry], cut: Callable[[str], str]) -> Iterator[str]:
    """On which tasks an order says little, and over how many seeds the scores are."""
    at_chance = [
        cut(each.task)
        for _, each, rows in group
        if all((above := row.standing.above_chance) is not None and not above for row in rows)
    ]
    if at_chance:
        yield (
            f"On {len(at_chance)} of these tasks no method is above the majority class, and their order there says "
            f"little: {', '.join(at_chance)}."
        )
    seeds = {len(row.results) for _, _, rows in group for row in rows}
    if min(seeds) < FEWEST:
        few = "a single seed" if min(seeds) == 1 else f"{min(seeds)} seeds"
        yield f"Some scores are of {few}: use {FEWEST} or more."


def in_words(ranked: Sequence[Ranking]) -> list[str]:
    """The rankings in sentences; those that were refused come last."""
    told = sorted(ranked, key=lambda each: each.found.refusal is not None)
    return [
        " ".join([line, *(each.notes if each.found.refusal is None else ())])
        for each in told
        for line in sentences(each.found)
    ]
