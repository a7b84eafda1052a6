"""`inlay lab icl`: in-context learning with representations, computed and drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError, unknown
from inlay.papers.lab import LAB, Out, parse_sizes, print_claims

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
    "section-3-3": ("section-3-3",),
    "language": ("language",),
}
# What `all` makes, and in which order. `language` needs a model that is fetched, and is asked for by name; the page
# shows it, and a run of one's own, where they are there already.
ALL = ("theorem-1", "theorem-2", "proposition-1", "section-3-3", "2a", "2b", "3", "4", "5")
THIS, HOW = "The problem", "The training"
# The options that not every figure reads.
SETTINGS = (
    *("N", "K", "d", "m", "tau", "unit", "features", "task", "data_dir", "model", "tasks"),
    *("heads", "steps", "seconds", "batch", "rate", "optimiser", "seed", "device"),
)

Figure = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(FIGURES)} or all. Left out: one training with the settings below. Options that "
        "a figure does not read are refused."
    ),
]
N_ = Annotated[int, typer.Option("--N", help="Examples in a prompt.", rich_help_panel=THIS)]
K_ = Annotated[int, typer.Option("--K", help="Tokens in the dictionary.", rich_help_panel=THIS)]
D_ = Annotated[int, typer.Option("--d", help="Size of a token.", rich_help_panel=THIS)]
M_ = Annotated[
    int | None, typer.Option("--m", help="Size of the representation f; 20, and 100 in figure 3.", rich_help_panel=THIS)
]
Tau = Annotated[float, typer.Option("--tau", help="Noise level.", rich_help_panel=THIS)]
Unit = Annotated[
    bool,
    typer.Option(
        "--unit", help="Tokens of norm 1 (section 2) in place of Gaussian ones (section 4).", rich_help_panel=THIS
    ),
]
Features = Annotated[
    str | None,
    typer.Option(help="A model whose features of real images or texts are f, e.g. embedded:vit.", rich_help_panel=THIS),
]
Task = Annotated[
    str, typer.Option(help="Whose training examples are the tokens (with --features).", rich_help_panel=THIS)
]
DataDir = Annotated[
    str | None, typer.Option(help="Folder with local copies of named tasks (with --features).", rich_help_panel=THIS)
]
Model = Annotated[
    str, typer.Option(help="Figure language: the causal language model that answers.", rich_help_panel=THIS)
]
Tasks = Annotated[int, typer.Option(min=2, help="Figure language: tasks of each kind.", rich_help_panel=THIS)]
Heads = Annotated[
    str | None, typer.Option(help="Heads H, or several separated by commas in figures 4 and 5.", rich_help_panel=HOW)
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps; the figure's own, or 2000.", rich_help_panel=HOW)]
Seconds = Annotated[
    float | None, typer.Option(help="Wall-clock time that each training with Adam may take.", rich_help_panel=HOW)
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Prompts in a batch. One layer: left out, the closed form is used.", rich_help_panel=HOW),
]
Rate = Annotated[float, typer.Option(help="Adam's learning rate.", rich_help_panel=HOW)]
Optimiser = Annotated[
    str, typer.Option(help="adam, or gd: gradient descent with step sizes of its own.", rich_help_panel=HOW)
]
Seed = Annotated[int, typer.Option(help="Of the tokens, the tasks and the start.", rich_help_panel=HOW)]
Device = Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=HOW)]
Redraw = Annotated[
    bool,
    typer.Option(
        "--redraw",
        help="Train nothing: draw what --out has, and read its claims, again from the kept numbers.",
        rich_help_panel=o.OUTPUT,
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Draw the losses of trainings in the terminal as they fall.")]


def command(
    given: typer.Context,
    figure: Figure = None,
    N: N_ = 30,
    K: K_ = 200,
    d: D_ = 100,
    m: M_ = None,
    tau: Tau = 0.01,
    unit: Unit = False,
    features: Features = None,
    task: Task = "digits",
    data_dir: DataDir = None,
    model: Model = "embedded:smollm2",
    tasks: Tasks = 40,
    heads: Heads = None,
    steps: Steps = None,
    seconds: Seconds = None,
    batch: Batch = None,
    rate: Rate = 1e-4,
    optimiser: Optimiser = "adam",
    seed: Seed = 0,
    device: Device = "cpu",
    redraw: Redraw = False,
    watch: Watch = False,
    out: Out = LAB,
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
    counts = None if heads is None else parse_sizes(heads, "--heads", "64 or 1,5,10", least=1)
    if counts is not None and len(counts) > 1 and not {"4", "5"} & {*names}:
        raise InlayError(f"--heads {heads}: figures 4 and 5 compare several, everything else takes one.")
    from inlay.papers.icl import experiments
    from inlay.papers.icl.theory import lab

    sources = {name.replace("_", "-"): given.get_parameter_source(name) for name in SETTINGS}
    options = [name for name, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]
    if redraw and options:
        raise InlayError(f"--redraw trains nothing: leave out {', '.join(f'--{name}' for name in options)}.")
    if not redraw:
        lab.check_given(names or ("run",), optimiser, options)
    setting = lab.InContextSetting(N, K, d, m, tau, counts, steps, seconds, batch, rate, seed, unit, device, optimiser)
    folders = {name: out / experiments.folder_name(name) for name in names or ("run",)}
    if redraw:
        for found, folder in experiments.redraw_all(list(folders.values())):
            print_claims(found, folder, quiet)
        return
    own = experiments.Models(features, task, data_dir, model, tasks)
    made = experiments.make_all(folders, setting, own, watch=watch, quiet=quiet)
    for found, folder in made:
        print_claims(found, folder, quiet)
    if figure == "all":
        page = experiments.write_page(out, made)
        if not quiet:
            show.say(f"all on one page: {page}")
