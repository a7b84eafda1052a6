"""`inlay gather`: LoRAs from many places, as one folder that a model serves together."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    sources: Annotated[
        list[str],
        typer.Argument(help="Folders of LoRAs, single ones, or hub ids (owner/name); each may be NAME=SOURCE."),
    ],
    out: Annotated[str, typer.Option(help="The new folder to write.")],
    model: o.MovedModel = None,
) -> None:
    """Gather LoRAs of one base model into a folder.

    Each is checked: a plain LoRA that can be mixed with others in one pass, of the same base model, that fits it, with
    whole and finite weights in safetensors. What does not pass is left out and listed with the reason; the exit status
    is then 1. The folder has one subfolder per adapter in PEFT's format. Nothing is downloaded but the adapters.

    \b
    inlay gather loras/ --out set/

    \b
    inlay gather mood=runs/<id> rte=my-name/rte-lora --out set/
    """
    from inlay.workflow.gather import gather, lines

    found = gather(sources, out, model=model, say=show.say)
    for line in lines(found):
        show.say(line)
    if found.refused:
        raise typer.Exit(o.SOME_FAILED)
