"""`inlay methods`: what there is, where it applies, what it costs."""

from __future__ import annotations

from inlay.cli import show


def command() -> None:
    """List the methods: what each does, where it works, what it trains."""
    from inlay.methods import document
    from inlay.methods.registry import all_methods

    columns = ("method", "what it does", "text", "images", "trained of BERT-base", "learning rate", "paper")
    rows = [
        (
            method.name,
            method.summary,
            document.share(method, "text"),
            document.share(method, "image"),
            document.trained_count(method),
            f"{method.learning_rate:g}",
            method.paper,
        )
        for method in all_methods().values()
    ]
    show.table(columns, rows, right=(4, 5))
