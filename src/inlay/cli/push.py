"""`inlay push`: an adapter or a checkpoint, with its card, as a repository of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import show


def command(
    to: Annotated[
        str | None, typer.Option(help="The repository, owner/name. It is made where there is none.", show_default=False)
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="A run's folder, or its name under runs/ (`inlay runs list`).")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="An adapter's folder, or one that `inlay merge` wrote.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which task, where there are several.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The Hub's name of the base model, where the adapter was trained on a folder of yours."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository that only you can see.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Write over files of a repository that is there.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Push nothing: write what would be pushed into this new folder.")
    ] = None,
) -> None:
    """Share an adapter on the Hugging Face Hub.

    Pushes the weights (safetensors), settings, tokenizer or image processor, and a card: method and paper, base model,
    metrics with intervals, data, command, cost, and code that loads it. No path of this machine is in it. You are who
    `hf auth login` or HF_TOKEN says; no token is printed or written.

    \b
    inlay push --run runs/<id> --to me/reviews-lora --private

    \b
    inlay push --run runs/<id> --to me/reviews-lora --out look/     # look first, push nothing

    \b
    inlay push --adapter merged/ --to me/reviews-bert
    """
    from inlay.errors import InlayError
    from inlay.workflow.push import push

    given = [each for each in (run, adapter) if each is not None]
    if len(given) != 1:
        raise InlayError("Give --run or --adapter, one of them; see `inlay push --help`.")
    how = {"task": task, "base": base, "private": private, "update": update}
    found = push(given[0], to, folder=out, say=show.say, **how)  # type: ignore[arg-type]
    show.say(f"written, not pushed: {found}" if out is not None else f"pushed: {found}")
