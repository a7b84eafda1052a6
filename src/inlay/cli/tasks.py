"""`inlay tasks`: the data sets that have names."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import show


def command(kind: Annotated[str | None, typer.Option(help="Only tasks of this kind.")] = None) -> None:
    """List the named tasks: kind, metric, where the data comes from."""
    from inlay import tasks
    from inlay.tasks.kinds import check_kind

    if kind is not None:
        check_kind(kind)
    cards = [tasks.describe(name) for name in tasks.names()]
    rows = [
        (
            card.name,
            card.kind,
            ", ".join(card.metrics),
            card.summary,
            "; ".join(card.sources) or "a local copy (--data-dir)",
        )
        for card in cards
        if kind in (None, card.kind)
    ]
    show.table(("task", "kind", "metrics", "what it is", "data from"), rows)
