"""`inlay explain information` and `inlay explain landscape`: what prompts carry, and where they were trained."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.cli.explain.commands import Folder, carry_out

if TYPE_CHECKING:
    from inlay.papers.infoprompt.explain.information import Information
    from inlay.papers.infoprompt.explain.landscape import Landscape
    from inlay.records.spec import Spec
    from inlay.workflow.notes import Say

Store = Annotated[Path, typer.Option(help="Folder of runs.", rich_help_panel=o.OUTPUT)]


def information(
    runs: Annotated[
        list[str], typer.Option(help="Finished runs of prompt methods: names or folders, repeated or parted by commas.")
    ],
    words: Annotated[
        list[str] | None, typer.Option(help="A prompt by hand, such as 'it is equivalent to'. May be repeated.")
    ] = None,
    examples: Annotated[int, typer.Option(min=8, help="Texts to fit the critic to, and as many to measure on.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the critic.")] = 300,
    negatives: Annotated[
        int | None,
        typer.Option(min=2, help="K of the bound, the same for all. Default: num_negatives of the first run."),
    ] = None,
    store: Store = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """How much information prompts carry about the state they lead to, given the text (InfoPrompt, figure 1).

    For each source of prompts (finished runs, phrases, random words) a critic is fitted to validation texts with
    the prompts frozen, and the bound on I(P; Z | X) drawn as a distribution over test texts. All runs must be of one
    model, task, data and seed: they see the same texts and have the same K. Phrases and random words stand in the
    first run's template, a token a place: cut, or begun again, where they have more or fewer than it has places.

    \b
    inlay explain information --runs mrpc-...-infoprompt-s0-...,mrpc-...-warp-s0-... --words "it is equivalent to"
    """
    from inlay.papers.infoprompt.explain import charts
    from inlay.papers.infoprompt.explain.information import information, prompted
    from inlay.records.store import Store as Runs

    names = [name for given in runs for name in o.names_in(given)]
    spec = prompted(Runs(store).get(names[0])).spec

    def work(spec: Spec, *, progress: bool, say: Say | None) -> Information:
        return information(
            names,
            words=words or (),
            examples=examples,
            steps=steps,
            negatives=negatives,
            store=store,
            progress=progress,
        )

    carry_out("information", work, spec, out, quiet, picture=charts.information, table=information_table)


def landscape(
    run: Annotated[str, typer.Option(help="A finished run of infoprompt, warp or idpg: its name or folder.")],
    examples: Annotated[int, typer.Option(min=1, help="Training texts to average the losses over.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="How many steps of training to follow.")] = 500,
    grid: Annotated[int, typer.Option(min=3, help="Points along each side of the surface.")] = 21,
    trust_remote_code: o.Trust = False,
    store: Store = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """The losses over two principal components of the word embeddings, with the path taken (InfoPrompt, figure 2).

    The run is trained again with one prompt token for its first steps, with and (where it has one) without the head
    loss, and watched. The surfaces are those of the class vectors and the critic that it ends with.

    \b
    inlay explain landscape --run mrpc-minilm-l6-mlm-infoprompt-s0-1a2b3c4d5e
    """
    from inlay.papers.infoprompt.explain import charts
    from inlay.papers.infoprompt.explain.information import prompted
    from inlay.papers.infoprompt.explain.landscape import landscape, spec_of
    from inlay.records.store import Store as Runs

    found = prompted(Runs(store).get(run))
    spec = spec_of(found, trust_remote_code=trust_remote_code)

    def work(spec: Spec, *, progress: bool, say: Say | None) -> Landscape:
        return landscape(spec, examples=examples, steps=steps, grid=grid, progress=progress)

    carry_out("landscape", work, spec, out, quiet, picture=charts.landscape, table=landscape_table)


def information_table(found: Any) -> None:
    """Mean, spread and range of each source."""
    rows = [
        (
            source.name,
            f"{fmean(source.values):.4f}",
            f"{stdev(source.values):.4f}",
            f"{min(source.values):.4f}",
            f"{max(source.values):.4f}",
        )
        for source in found.sources
    ]
    show.table(("prompts", "mean, nats", "deviation", "least", "most"), rows, right=range(1, 5))


def landscape_table(found: Any) -> None:
    """How far each path went, and down."""
    rows = [
        (path.name, str(path.steps[-1]), f"{path.task[0]:.4f}", f"{path.task[-1]:.4f}", f"{min(path.task):.4f}")
        for path in found.paths
    ]
    show.table(("path", "steps", "task loss, first", "last", "least"), rows, right=range(1, 5))
