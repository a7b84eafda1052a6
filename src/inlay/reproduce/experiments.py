"""Experiments of `inlay lab` as parts of a recipe: the same functions, their numbers as a table, their own verdicts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.reproduce import kept
from inlay.reproduce.results import Results, from_finding

if TYPE_CHECKING:
    from inlay.reproduce.bench import Bench


def performed(
    bench: Bench,
    room: str,
    name: str,
    setting: Mapping[str, Any],
    *more: Any,
    options: Mapping[str, Any] | None = None,
    **table: Any,
) -> Results:
    """One experiment of `inlay.theory.<room>.lab`; `setting` are the fields of its `Setting`, `table` says what of it
    to show (see `from_finding`). `more` and `options` go to the experiment after its setting."""

    def work() -> Results:
        lab = importlib.import_module(f"inlay.theory.{room}.lab")
        found = lab.EXPERIMENTS[name](lab.Setting(**setting), bench.say, *more, **dict(options or {}))
        return from_finding(found, **table)

    # How it is shown is part of what is kept.
    return bench.once(f"{room}/{name}", {"setting": setting, "options": options, "table": table}, work)


def from_lab(name: str, **table: Any) -> Results | None:
    """The same from what the documentation keeps of an experiment; None where there is none."""
    found = kept.experiment(name)
    return None if found is None else replace(from_finding(found[0], **table), notes=(found[1],))
