"""Methods over the tasks of a folder: a ranking for each model, number of examples, head and split.

Tasks are what a finding should hold for, so only they are observations: the same task on another model, or with other
examples, is no further one. Which methods fit depends on the head (one class, a tag a word, a text), so tasks of
different heads are ranked apart. A method's value on a task is the mean of its chosen variant over the seeds that all
methods there have. A task on which every run failed has no set: the runs without a result tell of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from inlay.records.spec import Spec
from inlay.report.collect import Collected, ResultRow, Set, more_of
from inlay.report.conclusion import is_share
from inlay.report.paths import cutter
from inlay.report.subjects import UNKNOWN, kind, kind_of
from inlay.tasks import kinds
from inlay.workflow.over_tasks import FEWEST_TASKS, OverTasks, over_tasks, sentences
from inlay.workflow.statistics import FEWEST

Entry = tuple[int, Set, list[ResultRow]]  # a set's place, the set, its chosen rows
Lost = tuple[Spec, str]  # a run on a task without any result, and the head of that task


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
    lost = list(_lost(found, alone))
    groups: dict[tuple[str, int | None, str, str], list[Entry]] = {}
    for entry in alone:
        groups.setdefault((entry[1].model, entry[1].shots, entry[1].split, _head(entry)), []).append(entry)
    heads = Counter(key[:3] for key in groups)
    made = []
    for key, group in groups.items():
        model, shots, _, head = key
        several = heads[key[:3]] > 1
        near = [
            each for each in lost if (each[0].model, each[0].shots) == (model, shots) and each[1] in (head, UNKNOWN)
        ]
        # With several heads it is not known to which one a task of an unknown head belongs.
        placed = [each for each in near if each[1] == head or not several]
        parts = [(part, _without_result(part, placed)) for part in _apart(group)]
        large = [each for each in parts if len(each[0]) + len(each[1]) >= fewest]
        beside = list(_beside(parts, large, near, cut))
        for part, missing in large:
            notes = beside if part is max(large, key=lambda each: len(each[0]))[0] else []
            made.append(_rank(part, missing, cut, head if several else "", notes))
    return sorted(made, key=lambda each: -len(each.places))


def _head(entry: Entry) -> str:
    """What the tasks of an entry's runs ask of a model, in a word."""
    return _head_of(kind(entry[2][0].results[0]))


def _head_of(found: str) -> str:
    return kinds.get(found).head.probed_as if found in kinds.TABLE else UNKNOWN


def _lost(found: Collected, alone: Sequence[Entry]) -> Iterator[Lost]:
    """The runs without a result on tasks on which no run of the same model and size has one."""
    there = {(each.model, each.shots, each.task, each.more) for _, each, _ in alone}
    heads = {entry[1].task: _head(entry) for entry in alone}
    for spec in (run.spec for run in found.unfinished):
        if not spec.tasks and (spec.model, spec.shots, spec.subject, more_of(spec)) not in there:
            own = kind_of(spec.task, {"kind": spec.kind} if spec.kind else {})
            yield spec, heads.get(spec.subject, _head_of(own))


def _without_result(part: Sequence[Entry], lost: Sequence[Lost]) -> list[str]:
    """The tasks that belong to a ranking by their runs, none of which has a result."""
    mores = {each.more for _, each, _ in part}
    methods = {row.spec.method for _, _, rows in part for row in rows}
    there = {each.task for _, each, _ in part}
    found = [spec.subject for spec, _ in lost if more_of(spec) in mores and spec.method in methods]
    return [task for task in dict.fromkeys(found) if task not in there]


def _apart(group: list[Entry]) -> list[list[Entry]]:
    """A group in which no task comes twice: parted by protocol, test file and pooling where one does, then by metric
    where one still does. A task that comes once stays with the most."""
    return [each for part in _split(group, lambda of: of.more) for each in _split(part, lambda of: of.metric)]


def _split(group: list[Entry], key: Callable[[Set], str]) -> list[list[Entry]]:
    times = Counter(each.task for _, each, _ in group)
    parts: dict[str, list[Entry]] = {key(each): [] for _, each, _ in group if times[each.task] > 1}
    if not parts:
        return [group]
    sizes = Counter(key(each) for _, each, _ in group)
    largest = max(parts, key=lambda name: sizes[name])
    for entry in group:
        parts[name if (name := key(entry[1])) in parts else largest].append(entry)
    return list(parts.values())


def _beside(
    parts: Sequence[tuple[list[Entry], list[str]]],
    large: Sequence[tuple[list[Entry], list[str]]],
    near: Sequence[Lost],
    cut: Callable[[str], str],
) -> Iterator[str]:
    """What is in no ranking: results with too few of their like, tasks without any result."""
    ranked = {id(part) for part, _ in large}
    few = [each for part, _ in parts if id(part) not in ranked for _, each, _ in part]
    if few:
        told = ", ".join(f"{cut(each.task)} ({cut(each.more) or each.metric})" for each in few)
        yield f"Left out, as too few tasks have such results: {told}."
    methods = {row.spec.method for part, _ in large for _, _, rows in part for row in rows}
    there = {task for part, missing in large for task in (*missing, *(each.task for _, each, _ in part))}
    gone = dict.fromkeys(spec.subject for spec, _ in near if spec.method in methods and spec.subject not in there)
    if gone:
        yield f"Left out, as no run has a result: {', '.join(map(cut, gone))}."


def _rank(
    group: Sequence[Entry], missing: Sequence[str], cut: Callable[[str], str], head: str, beside: Sequence[str]
) -> Ranking:
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
    scores = {cut(each.task): _over_common_seeds(each, rows) for _, each, rows in group}
    bounded = all(each.greater for _, each, _ in group) and all(
        -1 <= value <= 1 for values in scores.values() for value in values.values()
    )
    share = all(is_share(each, rows) for _, each, rows in group)
    found = over_tasks(cut(title), scores | {cut(task): {} for task in missing}, one_unit=bounded)
    notes = (*beside, *_seeds(group, cut), *(_notes(group, cut) if found.refusal is None else ()))
    return Ranking(found, tuple(place for place, _, _ in group), share, notes)


def _common(rows: Sequence[ResultRow]) -> tuple[int, ...]:
    """The seeds that all rows have; without any, the first one of those that the most have."""
    times = Counter(seed for row in rows for seed in row.values)
    most = max(times.values())
    found = sorted(seed for seed, count in times.items() if count == most)
    return tuple(found if most == len(rows) else found[:1])


def _over_common_seeds(of: Set, rows: Sequence[ResultRow]) -> dict[str, float]:
    """Each method's mean over the seeds that all have, greater for better; one without these seeds has none."""
    seeds = _common(rows)
    sign = 1 if of.greater else -1
    return {
        row.spec.method: sign * fmean(row.values[seed] for seed in seeds)
        for row in rows
        if row.values.keys() >= set(seeds)
    }


def _seeds(group: Sequence[Entry], cut: Callable[[str], str]) -> Iterator[str]:
    """Where seeds do not count, as not all methods have them."""
    unequal = [(cut(each.task), rows) for _, each, rows in group if len({frozenset(row.values) for row in rows}) > 1]
    none = [task for task, rows in unequal if not frozenset.intersection(*(frozenset(row.values) for row in rows))]
    if none:
        yield f"The methods have no seed in common on {', '.join(none)}."
    if some := [task for task, _ in unequal if task not in none]:
        yield f"Only seeds that all methods have on a task count; others are left out on {', '.join(some)}."


def _notes(group: Sequence[Entry], cut: Callable[[str], str]) -> Iterator[str]:
    """On which tasks an order says little, and whether the scores are of few seeds."""
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
    fewest = min(len(_common(rows)) for _, _, rows in group)
    if fewest < FEWEST:
        few = "a single seed" if fewest == 1 else f"{fewest} seeds"
        yield f"Some scores are of {few}: use {FEWEST} or more."


def in_words(ranked: Sequence[Ranking]) -> list[str]:
    """The rankings in sentences; those that were refused come last."""
    told = sorted(ranked, key=lambda each: each.found.refusal is not None)
    return [" ".join([line, *each.notes]) for each in told for line in sentences(each.found)]
