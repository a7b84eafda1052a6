"""`inlay methods`: what there is, where it applies, what it costs."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import show


def command(papers: Annotated[bool, typer.Option("--papers", help="Show where each comes from.")] = False) -> None:
    """List the methods: what each does, where it works, what it trains."""
    from inlay.methods.capabilities import share, trained_count
    from inlay.methods.registry import all_methods

    methods = all_methods().values()
    if papers:
        show.table(("method", "paper"), [(method.name, method.paper) for method in methods])
        return
    columns = ("method", "text", "images", "trained", "rate", "what it does")
    rows = [
        (
            method.name,
            share(method, "text"),
            share(method, "image"),
            "-" if share(method, "text") == "-" else trained_count(method),
            f"{method.learning_rate:g}",
            method.summary,
        )
        for method in methods
    ]
    show.table(columns, rows, right=(3, 4))
    show.say(
        "text, images: on how many of the architectures that were tried it works. trained: of BERT-base, beside a new "
        "head. rate: the default learning rate. More: inlay methods --papers, and docs/methods/."
    )
