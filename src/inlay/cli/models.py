"""`inlay models`: the backbones that need no hub."""

from __future__ import annotations

from inlay.cli import show


def command() -> None:
    """List the embedded models.

    Any hub id and any local folder of a Transformers model works as well.
    """
    from inlay.backbones import EMBEDDED

    show.table(("model", "what it is"), [(f"embedded:{name}", summary) for name, summary in EMBEDDED.items()])
