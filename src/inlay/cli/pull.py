"""`inlay pull`: a repository of the Hub into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import show


def command(
    repository: Annotated[str, typer.Argument(help="owner/name, or owner/name@revision.")],
    out: Annotated[Path | None, typer.Option(help="The new folder to write. Default: its name, here.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Fetch an adapter or a checkpoint from the Hub.

    Only text and safetensors are fetched, no pickle and no code. What its note does not fit is refused, and nothing is
    written. Without a network, what was fetched before is taken from the Hub's cache.

    \b
    inlay pull me/reviews-lora --out reviews-lora
    """
    from inlay.workflow.pull import pull

    show.say(f"written: {pull(repository, out, revision=revision, say=show.say)}")
