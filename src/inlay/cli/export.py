"""`inlay export`: a trained task in a form that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import show


def command(
    adapter: Annotated[Path, typer.Option(help="A folder of several tasks: a run's, or its adapter folder.")],
    task: Annotated[str, typer.Option(help="The task to export.")],
    to: Annotated[str, typer.Option(help="The form: lora, PEFT's own adapter.")] = "lora",
    output: Annotated[Path | None, typer.Option(help="The new folder to write. Default: <task>-<form>, here.")] = None,
) -> None:
    """Export one task of Multi-LoRA as a plain LoRA adapter, for PEFT, vLLM, TGI, LoRAX and whatever reads those.

    The model is not needed: the shared factor is drawn again from the seed and written down beside the task's own.

    \b
    inlay export --adapter runs/<id>/adapter --task rte --to lora
    """
    from inlay.workflow.export import export

    show.say(f"{task} as a LoRA adapter: {export(adapter, task, output, to=to)}")
