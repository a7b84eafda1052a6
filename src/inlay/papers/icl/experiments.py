"""The experiments of `inlay lab icl`: made one after the other and watched, drawn again, and shown on one page."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from inlay.errors import InlayError
from inlay.papers.experiment_files import read, redraw, write
from inlay.papers.findings import Finding, Tick
from inlay.papers.icl import models, page
from inlay.papers.icl.charts.training import DRAWN
from inlay.papers.icl.live import LiveCurves
from inlay.papers.icl.theory import lab, language
from inlay.papers.icl.theory.descent import Trace
from inlay.papers.icl.theory.setting import Show
from inlay.papers.lab import tick_of
from inlay.report.charts import drawing as charts
from inlay.workflow.progress import Bar

Made = list[tuple[Finding, Path]]  # what was found, and the folder that it lies in


@dataclass(frozen=True)
class Models:
    """What enters besides the setting: a model with the task whose features are f; the language model and its tasks."""

    features: str | None
    task: str
    data_dir: str | None
    language: str
    language_tasks: int


def folder_name(name: str) -> str:
    """The folder of an experiment."""
    return f"icl-{'figure-' if name[0].isdigit() else ''}{name}"


def make_all(
    folders: Mapping[str, Path], setting: lab.InContextSetting, own: Models, *, watch: bool = False, quiet: bool = False
) -> Made:
    """Make the experiments, each in its folder; with `watch` their losses are drawn in the terminal as they fall."""
    for name, folder in folders.items():
        lab.check(name, setting)
        charts.check_folder(folder, folder.name)
    made: Made = []
    # Curves take the place of the bar, for those that have some; without --watch one bar is over everything.
    for part in [{name: folder} for name, folder in folders.items()] if watch else [folders]:
        total = sum(lab.beginnings(name, setting) for name in part)
        live = LiveCurves("") if watch and not quiet and {*part} <= {*lab.WATCHED} else None
        with Bar(total, "lab", "steps", show=not quiet and live is None, lines=True) as bar, live or nullcontext():
            for name, folder in part.items():
                found = make(name, setting, own, tick_of(bar), _show_on(live))
                write(found, folder, ["inlay", *sys.argv[1:]], DRAWN)
                made.append((found, folder))
    return made


def make(name: str, setting: lab.InContextSetting, own: Models, tick: Tick, show: Show) -> Finding:
    """Make one experiment."""
    if name == "language":
        answers = models.language_model(own.language, device=setting.device)
        return language.in_context(answers, own.language, tick, count=own.language_tasks, seed=setting.seed)
    if name != "run":
        return lab.EXPERIMENTS[name](setting, tick, show)
    if own.features is None:
        return lab.free(setting.problem(), setting, tick, show)
    problem = models.real_problem(own.features, own.task, setting, own.data_dir)
    return lab.free(problem, setting, tick, show, f"{own.features} on {own.task}")


def _show_on(live: LiveCurves | None) -> Show:
    """Shows a training's curves, where there is a place for them."""

    def show(name: str, trace: Trace) -> None:
        if live is not None:
            live.title = name
            live.update({label: (trace.steps, values) for label, values in trace.curves.items()})

    return show


def redraw_all(folders: Sequence[Path]) -> Iterator[tuple[Finding, Path]]:
    """Draw those that are there again from their numbers, with their claims read again, one after the other."""
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        names = ", ".join(folder.name for folder in folders)
        raise InlayError(f"{folders[0].parent} has none of {names} to draw again.")
    for folder in there:
        yield redraw(folder, DRAWN, lab.CLAIMS), folder


def write_page(out: Path, made: Made) -> Path:
    """One page with what was made, and with a run of one's own and the language model's where `out` has them."""
    beside = [folder for name in ("language", "run") if (folder := out / folder_name(name)).is_dir()]
    shown = [*made, *((read(folder)[0], folder) for folder in beside)]
    path = out / "icl.html"
    page.write(path, "In-context learning with representations", ["inlay", *sys.argv[1:]], shown)
    return path
