"""What a reader must know before comparing numbers: where runs differ in more than the method.

One warning a kind, with the sets that it is about. `result` warnings are about the metric itself, `cost` ones about
time and memory, `notes` about how far the numbers can be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inlay.report.collect import Collected, Result, Row

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
    checks = (*results, _hardware, _trunk, _unvouched)
    told = [warning for check in checks if (warning := check(found)) is not None]
    order: tuple[Level, ...] = ("result", "cost", "note")
    return sorted(told, key=lambda warning: order.index(warning.level))


def _sets(found: Collected) -> list[tuple[str, list[Row]]]:
    rows: list[list[Row]] = [[] for _ in found.sets]
    for row in found.rows:
        rows[row.place].append(row)
    return [(name.label, mine) for name, mine in zip(found.sets, rows, strict=True)]


def _listed(items: Iterable[str]) -> str:
    names = list(dict.fromkeys(items))
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def _counted(values: Iterable[Hashable]) -> str:
    return ", ".join(f"{value} ({count} runs)" for value, count in Counter(values).most_common(SHOWN))


def _results(rows: Sequence[Row]) -> list[Result]:
    return [result for row in rows for result in row.results]


def _differing(found: Collected, of: Callable[[Result], Hashable]) -> list[str]:
    """The sets in which something differs between runs, with what it is."""
    told = []
    for label, rows in _sets(found):
        values = [of(result) for result in _results(rows)]
        if len(set(values)) > 1:
            told.append(f"{label}: {_counted(values)}")
    return told


def _several_sets(found: Collected) -> Warned | None:
    if len(found.sets) < 2:
        return None
    what = [
        f"{len(values)} {name}"
        for name, values in (
            ("tasks", {each.task for each in found.sets}),
            ("models", {each.model for each in found.sets}),
            ("training-set sizes", {each.shots for each in found.sets}),
            ("metrics", {(each.metric, each.split) for each in found.sets}),
            ("protocols, revisions, test files or poolings", {each.more for each in found.sets}),
        )
        if len(values) > 1
    ]
    text = f"The runs are of {', '.join(what)}. Only rows that agree in all of these are put side by side in the plots."
    return Warned("note", f"{len(found.sets)} separate comparisons", text)


def _budgets(found: Collected) -> Warned | None:
    told = []
    for label, rows in _sets(found):
        differing = [name for name in BUDGET if len({getattr(row.spec, name) for row in rows}) > 1]
        told += [
            f"{label}: {name.replace('_', ' ')} {', '.join(sorted({str(getattr(row.spec, name)) for row in rows}))}"
            for name in differing
        ]
    text = f"Rows of one comparison were trained differently. {_listed(told)}."
    return Warned("result", "Not the same training", text) if told else None


def _data(found: Collected) -> Warned | None:
    """The same task, size and seed, but other rows."""
    seen: dict[tuple[Any, ...], set[str]] = {}
    for label, rows in _sets(found):
        for result in _results(rows):
            tasks = result.record.get("tasks") or {"": result.record.get("task") or {}}
            digests = " ".join(str(task.get("digest")) for task in tasks.values())
            seen.setdefault((label, result.spec.seed), set()).add(digests)
    told = [f"{label}, seed {seed}" for (label, seed), digests in seen.items() if len(digests) > 1]
    sizes = _differing(found, lambda result: (result.record.get("examples") or {}).get("test"))
    text = "Runs with the same task and seed saw other rows, or other splits of them. "
    if told:
        return Warned("result", "Not the same data", f"{text}{_listed(told)}.")
    return (
        Warned("result", "Not the same test set", f"Sizes of the test split differ. {_listed(sizes)}.")
        if sizes
        else None
    )


def _weights(found: Collected) -> Warned | None:
    told = _differing(found, lambda result: str((result.record.get("backbone") or {}).get("fingerprint"))[:12])
    text = f"The same name stood for models with other weights. {_listed(told)}."
    return Warned("result", "Not the same frozen weights", text) if told else None


def _splits(found: Collected) -> Warned | None:
    told = [each.label for each in found.sets if each.split != "test"]
    text = (
        f"There is no test split, so the validation split is shown, on which settings were chosen too. {_listed(told)}."
    )
    return Warned("result", "Numbers from the split that was selected on", text) if told else None


def _versions(found: Collected) -> Warned | None:
    told = []
    for package in PACKAGES:
        values = [(result.record.get("versions") or {}).get(package) for result in found.results]
        if len(set(values)) > 1:
            told.append(f"{package}: {_counted(values)}")
    if told:
        return Warned("result", "Not the same versions", f"Results may differ for that reason alone. {_listed(told)}.")
    commits = [short_commit((result.record.get("versions") or {}).get("commit")) for result in found.results]
    text = f"inlay itself was at other commits (+: with edits) for some of the runs: {_counted(commits)}."
    return Warned("note", "Not the same commit", text) if len(set(commits)) > 1 else None


def short_commit(commit: str | None) -> str:
    """A commit as people name it, its mark of edits kept."""
    return "not known" if commit is None else commit[:12] + ("+" if commit.endswith("+") else "")


def _variants(found: Collected) -> Warned | None:
    several = Counter(row.label.partition(" (")[0] + f" on {found.sets[row.place].label}" for row in found.rows)
    told = [f"{name}: {count}" for name, count in several.items() if count > 1]
    text = (
        "Some methods were run with several settings. The best of several test values flatters: the one marked as "
        f"chosen is the best by validation, and only that is compared with other methods. {_listed(told)}."
    )
    return Warned("note", "Several variants of a method", text) if told else None


def _seeds(found: Collected) -> Warned | None:
    single, unequal = [], []
    for label, rows in _sets(found):
        chosen = [row for row in rows if row.chosen]
        single += [f"{row.label} on {label}" for row in chosen if len(row.results) == 1]
        if len({tuple(result.spec.seed for result in row.results) for row in chosen}) > 1:
            unequal.append(label)
    parts = []
    if single:
        parts.append(f"A single seed says nothing of the spread and has no interval. {_listed(single)}.")
    if unequal:
        parts.append(
            "Rows have other seeds than their neighbours: differences are paired over the common ones. "
            f"{_listed(unequal)}."
        )
    return Warned("note", "Seeds", " ".join(parts)) if parts else None


def _lost(found: Collected) -> Warned | None:
    lost = len(found.unfinished) + len(found.damaged)
    text = (
        f"{len(found.unfinished)} without a result and {len(found.damaged)} unreadable. Means are over what finished, "
        "which can flatter a method that fails with some seeds. They are listed below."
    )
    return Warned("result", "Runs are missing", text) if lost else None


def _left_out(found: Collected) -> Warned | None:
    by_reason: dict[str, list[str]] = {}
    for method, why in found.left_out.items():
        by_reason.setdefault(why, []).append(method)
    text = " ".join(f"{', '.join(names)} ({why})." for why, names in by_reason.items())
    return Warned("note", "Methods that were not run", text) if text else None


def _unvouched(found: Collected) -> Warned | None:
    text = (
        "An earlier inlay wrote these runs without digests of their curves and versions: an edit would not show. "
        f"Their records vouch for their results. {_listed(found.unvouched)}."
    )
    return Warned("note", "Nothing vouches for some files", text) if found.unvouched else None


def _hardware(found: Collected) -> Warned | None:
    def machine(result: Result) -> str:
        known, portrait = result.record.get("versions") or {}, result.portrait
        device = known.get("gpu") if str(portrait.get("device", "")).startswith("cuda") else known.get("cpu")
        parts = (device, f"{known.get('threads')} threads", portrait.get("precision"))
        return ", ".join(str(part) for part in parts if part)

    told = _differing(found, machine)
    text = (
        f"Times and memory were taken on unlike machines or precisions: compare them only within one. {_listed(told)}."
    )
    return Warned("cost", "Not the same hardware", text) if told else None


def _trunk(found: Collected) -> Warned | None:
    told = _differing(
        found, lambda result: "cached" if (result.portrait.get("trunk") or {}).get("cached") else "not cached"
    )
    text = (
        "Where the frozen part of the model is computed once and kept, an epoch after the first is shorter: time per "
        f"epoch is not the same thing everywhere. {_listed(told)}."
    )
    return Warned("cost", "Cached and uncached epochs", text) if told else None
