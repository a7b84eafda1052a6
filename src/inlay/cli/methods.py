"""`inlay methods`: what there is, where it applies, what it costs."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import show


def command(papers: Annotated[bool, typer.Option("--papers", help="Show where each comes from.")] = False) -> None:
    """List the methods: where they work, what they train."""
    from inlay.methods.capabilities import quantised_share, share, trained_count
    from inlay.methods.registry import all_methods

    methods = all_methods().values()
    if papers:
        show.table(("method", "paper"), [(method.name, method.paper) for method in methods])
        return
    columns = ("method", "text", "images", "quantised", "trained", "learning rate", "what it does")
    rows = [
        (
            method.name,
            share(method, "text"),
            share(method, "image"),
            quantised_share(method),
            "-" if share(method, "text") == "-" else trained_count(method),
            f"{method.learning_rate:g}",
            method.summary,
        )
        for method in methods
    ]
    show.table(columns, rows, right=(4, 5))
    show.say(
        "text, images: how many of the tested architectures it supports. quantised: on which "
        "--quantize it works. trained: parameters in BERT-base, without the "
        "new head. learning rate: its default. More: inlay methods --papers, and docs/methods/."
    )
