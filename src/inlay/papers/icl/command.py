"""`inlay lab icl`: in-context learning with representations, computed and drawn."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError, unknown
from inlay.papers.commands import lab_show

if TYPE_CHECKING:
    from inlay.papers.findings import Finding
    from inlay.papers.icl.theory.descent import Trace

FIGURES = {
    "2": ("2a", "2b"),
    "2a": ("2a",),
    "2b": ("2b",),
    "3": ("3",),
    "4": ("4",),
    "5": ("5",),
    "theorem-1": ("theorem-1",),
    "theorem-2": ("theorem-2",),
    "proposition-1": ("proposition-1",),
    "language": ("language",),
}
# What `all` makes, and in which order. `language` needs a model that is fetched, and is asked for by name; the page
# shows it, and a run of one's own, where they are there already.
ALL = ("theorem-1", "theorem-2", "proposition-1", "2a", "2b", "3", "4", "5")
THIS, HOW = "The problem", "The training"
# The options that not every figure reads.
SETTINGS = (
    *("N", "K", "d", "m", "tau", "unit", "features", "task", "data_dir", "model", "tasks"),
    *("heads", "steps", "seconds", "batch", "rate", "optimiser", "seed", "device"),
)


def command(
    given: typer.Context,
    figure: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(FIGURES)} or all. Left out: one training with the settings below. Options that "
            "a figure does not read are refused."
        ),
    ] = None,
    N: Annotated[int, typer.Option("--N", help="Examples in a prompt.", rich_help_panel=THIS)] = 30,
    K: Annotated[int, typer.Option("--K", help="Tokens in the dictionary.", rich_help_panel=THIS)] = 200,
    d: Annotated[int, typer.Option("--d", help="Size of a token.", rich_help_panel=THIS)] = 100,
    m: Annotated[
        int | None,
        typer.Option("--m", help="Size of the representation f; 20, and 100 in figure 3.", rich_help_panel=THIS),
    ] = None,
    tau: Annotated[float, typer.Option("--tau", help="Noise level.", rich_help_panel=THIS)] = 0.01,
    unit: Annotated[
        bool,
        typer.Option(
            "--unit", help="Tokens of norm 1 (section 2) in place of Gaussian ones (section 4).", rich_help_panel=THIS
        ),
    ] = False,
    features: Annotated[
        str | None,
        typer.Option(
            help="A model whose features of real pictures or texts are f, e.g. embedded:vit.", rich_help_panel=THIS
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(help="Whose training examples are the tokens (with --features).", rich_help_panel=THIS)
    ] = "digits",
    data_dir: Annotated[
        str | None,
        typer.Option(help="Folder with local copies of named tasks (with --features).", rich_help_panel=THIS),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Figure language: the causal language model that answers.", rich_help_panel=THIS)
    ] = "embedded:smollm2",
    tasks: Annotated[int, typer.Option(min=2, help="Figure language: tasks of each kind.", rich_help_panel=THIS)] = 40,
    heads: Annotated[
        str | None, typer.Option(help="Heads H, or several parted by commas in figures 4 and 5.", rich_help_panel=HOW)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; the figure's own, or 2000.", rich_help_panel=HOW)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Wall-clock time that each training with Adam may take.", rich_help_panel=HOW),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts in a batch. One layer: left out, the closed form is used.", rich_help_panel=HOW
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="Adam's learning rate.", rich_help_panel=HOW)] = 1e-4,
    optimiser: Annotated[
        str, typer.Option(help="adam, or gd: gradient descent with step sizes of its own.", rich_help_panel=HOW)
    ] = "adam",
    seed: Annotated[int, typer.Option(help="Of the tokens, the tasks and the start.", rich_help_panel=HOW)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=HOW)] = "cpu",
    redraw: Annotated[
        bool,
        typer.Option(
            "--redraw",
            help="Train nothing: draw what --out has, and read its claims, again from the numbers kept.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Draw the losses of trainings in the terminal as they fall.")
    ] = False,
    out: lab_show.Out = lab_show.LAB,
    quiet: o.Quiet = False,
) -> None:
    """A one-layer transformer that becomes ridge regression: the paper's figures and theorems, or a run of your own.

    Figure 2a takes four minutes of one core, figure 3 seconds, figure 4 a quarter of an hour; 2b and 5 (four layers)
    run for a fixed time on a CPU, and as printed on cuda. --figure all also writes one page with everything, icl.html.
    --seconds ends each training early, and what it found is kept and drawn all the same.

    \b
    inlay lab icl --figure 2
    inlay lab icl --figure all --device cuda --out lab
    inlay lab icl --N 30 --K 200 --d 100 --m 20 --heads 64 --tau 0.01 --steps 2000 --watch
    inlay lab icl --figure language
    inlay lab icl --features embedded:vit --task digits --N 30 --K 200 --unit --steps 4000
    inlay lab icl --figure all --redraw
    """
    if figure is not None and figure not in (*FIGURES, "all"):
        raise unknown("figure", figure, (*FIGURES, "all"))
    names = () if figure is None else ALL if figure == "all" else FIGURES[figure]
    counts = None if heads is None else lab_show.sizes(heads, "--heads", "64 or 1,5,10", least=1)
    if counts is not None and len(counts) > 1 and not {"4", "5"} & {*names}:
        raise InlayError(f"--heads {heads}: figures 4 and 5 compare several, everything else takes one.")
    from inlay.papers import page
    from inlay.papers.activation_prompts import charts as charts_theory
    from inlay.papers.icl import models as icl
    from inlay.papers.icl.charts import training as charts_icl
    from inlay.papers.icl.live import LiveCurves
    from inlay.papers.icl.theory import lab, language
    from inlay.papers.redraw import again, read
    from inlay.report.charts import drawing as charts
    from inlay.workflow.progress import Bar

    sources = {name.replace("_", "-"): given.get_parameter_source(name) for name in SETTINGS}
    options = [name for name, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]
    if redraw and options:
        raise InlayError(f"--redraw trains nothing: leave out {', '.join(f'--{name}' for name in options)}.")
    if not redraw:
        lab.check_given(names or ("run",), optimiser, options)
    setting = lab.Setting(N, K, d, m, tau, counts, steps, seconds, batch, rate, seed, unit, device, optimiser)
    folders = {name: out / f"icl-{'figure-' if name[0].isdigit() else ''}{name}" for name in names} or {
        "run": out / "icl-run"
    }
    made: list[tuple[Finding, Path]] = []
    if redraw:
        kept = [folder for folder in folders.values() if folder.is_dir()]
        if not kept:
            raise InlayError(
                f"{out} has none of {', '.join(folder.name for folder in folders.values())} to draw again."
            )
        for folder in kept:
            lab_show.tell(again(folder, charts_icl.DRAWN, lab.CLAIMS), folder, quiet)
        return
    for name, folder in folders.items():
        lab.check(name, setting)
        charts.check_folder(folder, folder.name)
    told = ["inlay", *sys.argv[1:]]
    # Curves take the place of the bar, for those that have some; without --watch one bar is over everything.
    for part in [{name: folder} for name, folder in folders.items()] if watch else [folders]:
        total = sum(lab.beginnings(name, setting) for name in part)
        live = LiveCurves("") if watch and not quiet and {*part} <= {*lab.WATCHED} else None
        with Bar(total, "lab", "steps", show=not quiet and live is None, lines=True) as bar, live or nullcontext():

            def tick(what: str, bar: Bar = bar) -> None:
                bar.begin(what)
                bar.advance()

            def look(name: str, trace: Trace, live: LiveCurves | None = live) -> None:
                if live is not None:
                    live.title = name
                    live.update({label: (trace.steps, values) for label, values in trace.curves.items()})

            for name, folder in part.items():
                if name == "language":
                    answers = icl.language_model(model, device=device)
                    found = language.in_context(answers, model, tick, count=tasks, seed=seed)
                elif name == "run":
                    if features is None:
                        found = lab.free(setting.problem(), setting, tick, look)
                    else:
                        problem = icl.real_problem(features, task, setting, data_dir)
                        found = lab.free(problem, setting, tick, look, f"{features} on {task}")
                else:
                    found = lab.EXPERIMENTS[name](setting, tick, look)
                charts_theory.write(found, folder, told, charts_icl.DRAWN)
                made.append((found, folder))
    for found, folder in made:
        lab_show.tell(found, folder, quiet)
    if figure == "all":
        beside = [folder for name in ("language", "run") if (folder := out / f"icl-{name}").is_dir()]
        made += [(read(folder)[0], folder) for folder in beside]
        page.write(out / "icl.html", "In-context learning with representations", told, made)
        if not quiet:
            show.say(f"all on one page: {out / 'icl.html'}")
