"""The latest results of the recipes at `here`, which ship with their papers, and what they say of each claim."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inlay.papers.reproduce import kept
from inlay.papers.reproduce.perform import read_of, with_own_means
from inlay.papers.reproduce.recipe import KINDS, Kind, Recipe, Verdict
from inlay.papers.reproduce.results import Results


def path_of(name: str) -> Path:
    """Where a recipe's latest result is kept."""
    paper, _, item = name.partition("/")
    return kept.path(paper.replace("-", "_"), f"reproduce/{item}.json")


def latest(name: str) -> dict[str, Any] | None:
    """A recipe's latest result; None where it was not run yet."""
    path = path_of(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def last_verdicts(recipe: Recipe) -> list[Verdict] | None:
    """What the latest result says of each claim; None where it was not run yet."""
    found = latest(recipe.name)
    if found is None:
        return None
    results = with_own_means(recipe.printed_results(), Results.from_json(found["ours"]))
    return recipe.judged(results, "here", read=bool(read_of(results)))


def count_verdicts(verdicts: Iterable[Verdict]) -> dict[Kind, int]:
    """How many claims hold, do not, are not significant, were not tested."""
    count = Counter(verdict.kind for verdict in verdicts)
    return {kind: count[kind] for kind in KINDS}
