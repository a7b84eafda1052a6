"""What a reader must know before comparing numbers: where runs differ in more than the method.

One warning a kind, with the sets that it is about. `result` warnings are about the metric itself, `cost` ones about
time and memory, `note` ones about how far the numbers can be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from inlay.report.collect import Collected, Result
from inlay.workflow.over_tasks import FEWEST_TASKS

Level = Literal["result", "cost", "note"]
SHOWN = 4
# Fields of a spec that are a choice of the comparison, not of the method.
BUDGET = ("epochs", "max_steps", "batch_size", "early_stopping", "schedule", "augment", "precision", "max_length")
PACKAGES = ("inlay", "torch", "transformers", "peft", "accelerate", "numpy")


@dataclass(frozen=True)
class Warned:
    """One thing that is not comparable."""

    level: Level
    title: str
    text: str


def warnings(found: Collected) -> list[Warned]:
    """Everything that stands between these numbers and a fair comparison, the gravest first."""
    results = (_several_sets, _budgets, _data, _weights, _splits, _versions, _variants, _seeds, _lost, _left_out)
    told = [warning for check in (*results, _hardware, _trunk, _unvouched) for warning in check(found)]
    order: tuple[Level, ...] = ("result", "cost", "note")
    return sorted(told, key=lambda warning: order.index(warning.level))


def short_commit(commit: str | None) -> str:
    """A commit as people name it, its mark of edits kept."""
    return "not known" if commit is None else commit[:12] + ("+" if commit.endswith("+") else "")


def _listed(items: Iterable[str]) -> str:
    names = list(dict.fromkeys(items))
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def _counted(values: Iterable[Hashable]) -> str:
    return ", ".join(
        f"{value} ({count} run{'s' * (count != 1)})" for value, count in Counter(values).most_common(SHOWN)
    )


def _differing(found: Collected, of: Callable[[Result], Hashable]) -> list[str]:
    """The sets in which something differs between runs, with what it is."""
    values = [(each.label, [of(result) for row in rows for result in row.results]) for each, rows in found.by_set]
    return [f"{label}: {_counted(mine)}" for label, mine in values if len(set(mine)) > 1]


def _several_sets(found: Collected) -> Iterator[Warned]:
    kinds: dict[str, set[Any]] = {
        "tasks": {each.task for each in found.sets},
        "models": {each.model for each in found.sets},
        "training-set sizes": {each.shots for each in found.sets},
        "metrics": {(each.metric, each.split) for each in found.sets},
        "protocols, revisions, test files or poolings": {each.more for each in found.sets},
    }
    if len(found.sets) > 1:
        what = ", ".join(f"{len(values)} {name}" for name, values in kinds.items() if len(values) > 1)
        text = (
            f"The runs are of {what}. Only rows that agree in all of these are compared in the plots. Methods are "
            f"ranked over tasks where a model has {FEWEST_TASKS} tasks or more with the same number of examples."
        )
        yield Warned("note", f"{len(found.sets)} separate comparisons", text)


def _budgets(found: Collected) -> Iterator[Warned]:
    told = [
        f"{each.label}: {name.replace('_', ' ')} {', '.join(sorted(map(str, values)))}"
        for each, rows in found.by_set
        for name in BUDGET
        if len(values := {getattr(row.spec, name) for row in rows}) > 1
    ]
    if told:
        text = f"Rows of one comparison were trained differently. {_listed(told)}."
        yield Warned("result", "Not the same training", text)


def _data(found: Collected) -> Iterator[Warned]:
    """The same task, size and seed, but other rows."""
    seen: dict[tuple[str, int], set[str]] = {}
    for result in found.results:
        tasks: dict[str, Any] = result.record.get("tasks") or {"": result.record.get("task") or {}}
        digests = " ".join(str(task.get("digest")) for task in tasks.values())
        seen.setdefault((result.of.label, result.spec.seed), set()).add(digests)
    told = [f"{label}, seed {seed}" for (label, seed), digests in seen.items() if len(digests) > 1]
    sizes = _differing(found, lambda result: (result.record.get("examples") or {}).get("test"))
    if told:
        text = f"Runs with the same task and seed saw other rows, or other splits of them. {_listed(told)}."
        yield Warned("result", "Not the same data", text)
    elif sizes:
        yield Warned("result", "Not the same test set", f"Sizes of the test split differ. {_listed(sizes)}.")


def _weights(found: Collected) -> Iterator[Warned]:
    told = _differing(found, lambda result: str((result.record.get("backbone") or {}).get("fingerprint"))[:12])
    if told:
        text = f"The same name stood for models with other weights. {_listed(told)}."
        yield Warned("result", "Not the same frozen weights", text)


def _splits(found: Collected) -> Iterator[Warned]:
    if told := [each.label for each in found.sets if each.split != "test"]:
        text = "There is no test split, so the validation split is shown, on which settings were selected too."
        yield Warned("result", "Numbers from the split that was selected on", f"{text} {_listed(told)}.")


def _versions(found: Collected) -> Iterator[Warned]:
    versions = [result.record.get("versions") or {} for result in found.results]
    told = [
        f"{package}: {_counted(values)}"
        for package in PACKAGES
        if len(set(values := [each.get(package) for each in versions])) > 1
    ]
    commits = [short_commit(each.get("commit")) for each in versions]
    if told:
        yield Warned("result", "Not the same versions", f"Results may differ for that reason alone. {_listed(told)}.")
    elif len(set(commits)) > 1:
        text = f"inlay itself was at other commits (+: with edits) for some of the runs: {_counted(commits)}."
        yield Warned("note", "Not the same commit", text)


def _variants(found: Collected) -> Iterator[Warned]:
    several = Counter(f"{row.spec.method} on {found.sets[row.place].label}" for row in found.rows)
    if told := [f"{name}: {count}" for name, count in several.items() if count > 1]:
        text = (
            "Some methods were run with several settings. The best of several test values flatters: the one marked as "
            f"chosen is the best on validation, and only that is compared with other methods. {_listed(told)}."
        )
        yield Warned("note", "Several variants of a method", text)


def _seeds(found: Collected) -> Iterator[Warned]:
    chosen = [(each.label, [row for row in rows if row.chosen]) for each, rows in found.by_set]
    single = [f"{row.label} on {label}" for label, rows in chosen for row in rows if len(row.results) == 1]
    unequal = [label for label, rows in chosen if len({tuple(row.values) for row in rows}) > 1]
    parts = []
    if single:
        parts.append(f"A single seed says nothing of the spread and has no interval. {_listed(single)}.")
    if unequal:
        text = (
            "Rows have other seeds than their neighbours: means in the table are over each row's own, differences and "
            "ranks over tasks over the common ones."
        )
        parts.append(f"{text} {_listed(unequal)}.")
    if parts:
        yield Warned("note", "Seeds", " ".join(parts))


def _lost(found: Collected) -> Iterator[Warned]:
    if found.unfinished or found.damaged:
        text = (
            f"{len(found.unfinished)} without a result and {len(found.damaged)} unreadable. Means are over what "
            "finished, which can flatter a method that fails with some seeds. They are listed below."
        )
        yield Warned("result", "Runs are missing", text)


def _left_out(found: Collected) -> Iterator[Warned]:
    by_reason: dict[str, list[str]] = {}
    for method, why in found.left_out.items():
        by_reason.setdefault(why, []).append(method)
    if by_reason:
        text = " ".join(f"{', '.join(names)} ({why})." for why, names in by_reason.items())
        yield Warned("note", "Methods that were not run", text)


def _unvouched(found: Collected) -> Iterator[Warned]:
    if found.unvouched:
        text = (
            "An earlier inlay wrote these runs without digests of their curves and versions: an edit would not show. "
            f"Their records vouch for their results. {_listed(found.unvouched)}."
        )
        yield Warned("note", "Nothing vouches for some files", text)


def _hardware(found: Collected) -> Iterator[Warned]:
    def machine(result: Result) -> str:
        known, portrait = result.record.get("versions") or {}, result.run.portrait
        device = known.get("gpu") if str(portrait.get("device", "")).startswith("cuda") else known.get("cpu")
        parts = (device, f"{known.get('threads')} threads", portrait.get("precision"))
        return ", ".join(str(part) for part in parts if part)

    if told := _differing(found, machine):
        text = "Times and memory were measured on unlike machines or precisions: compare them only within one."
        yield Warned("cost", "Not the same hardware", f"{text} {_listed(told)}.")


def _trunk(found: Collected) -> Iterator[Warned]:
    def cached(result: Result) -> str:
        return "cached" if (result.run.portrait.get("trunk") or {}).get("cached") else "not cached"

    if told := _differing(found, cached):
        text = (
            "Where the frozen part of the model is computed once and kept, an epoch after the first is shorter: time "
            f"per epoch is not the same thing everywhere. {_listed(told)}."
        )
        yield Warned("cost", "Cached and uncached epochs", text)
