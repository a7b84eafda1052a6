"""`inlay report`: runs to one web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    runs: Annotated[
        Path, typer.Argument(help="Folder of runs, as `inlay tune` and `inlay compare` make it; or of such folders.")
    ],
    out: Annotated[Path, typer.Option(help="The page.", rich_help_panel=o.OUTPUT)] = Path("report.html"),
    csv: Annotated[
        Path | None, typer.Option(help="Also a CSV file with a line a run.", rich_help_panel=o.OUTPUT)
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Also the table for LaTeX (booktabs).", rich_help_panel=o.OUTPUT)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also the table for Markdown.", rich_help_panel=o.OUTPUT)
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Only these methods, separated by commas. Name them before you look at the results."),
    ] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(
            help="Also the critical-difference diagram (.png, .svg or .pdf): mean ranks over 5 tasks or more, a file "
            "for each model and number of examples.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier folder of runs: what changed since, method by method, over the common seeds."),
    ] = None,
    explain: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of explanations to show; may be repeated. Default: those among the runs, and those of the "
            "same tasks in `explain` beside them."
        ),
    ] = None,
) -> None:
    """Make one web page of a folder of runs.

    It has the conclusion in words, tables, plots, what each method gets wrong, and the command of every run. The page
    is a single file that needs no network: open it in any browser, or send it.

    \b
    inlay report runs/ --out report.html

    \b
    inlay report runs/ --out report.html --csv runs.csv --latex table.tex --markdown table.md

    \b
    inlay report runs/ --against old-runs/
    """
    from inlay.report import exports, html
    from inlay.report.charts import critical_difference, drawing
    from inlay.report.over_tasks import rankings

    html.check_out(out)
    if ranks is not None:
        drawing.check_format(ranks)
    only = o.names_in(methods or "")
    found = html.collect(runs, but=against, methods=only)
    earlier = None if against is None else html.collect(against)
    tables = ((csv, exports.write_csv), (latex, exports.write_latex), (markdown, exports.write_markdown))
    written = [write(found, path) for path, write in tables if path is not None]
    drawn = [] if ranks is None else critical_difference.write([each.found for each in rankings(found, 2)], ranks)
    html.write_report(runs, out, explain, found=found, earlier=earlier)
    lost = len(found.unfinished) + len(found.damaged)
    aside = f"; {lost} without a result are listed at its end" if lost else ""
    show.say(
        f"{len(found.results)} run{'s' * (len(found.results) != 1)} in {out} ({out.stat().st_size / 1e6:.1f} MB){aside}"
    )
    for path in written:
        show.say(f"table in {path}")
    for path in drawn:
        show.say(f"ranks in {path}")
