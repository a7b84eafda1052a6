"""`inlay export`: trained tasks in a form that other programs read, or in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import show


def command(
    adapter: Annotated[Path, typer.Option(help="A folder of several tasks: a run's, or its adapter folder.")],
    task: Annotated[str, typer.Option(help="The task to export; as tasks, several, as in rte,sst2=new_name.")],
    to: Annotated[
        str, typer.Option(help="The form: lora, PEFT's own adapter; tasks, an adapter folder again.")
    ] = "lora",
    output: Annotated[Path | None, typer.Option(help="The new folder to write. Default: <task>-<form>, here.")] = None,
) -> None:
    """Export one task of Multi-LoRA as a plain LoRA adapter of PEFT's, for whatever reads those.

    The model is not needed: the shared factor is drawn again from the seed and written down beside the task's own.

    As tasks, the named ones go into a new adapter folder, under new names where they are given: what is not named is
    left out. The folder they come from stays as it is.

    \b
    inlay export --adapter runs/<id>/adapter --task rte --to lora

    \b
    inlay export --adapter runs/<id> --task rte,sst2=mood --to tasks --output mine
    """
    from inlay.workflow.export import export

    found = export(adapter, task, output, to=to, say=show.say)
    show.say(f"{task} as {'a LoRA adapter' if to == 'lora' else to}: {found}")
