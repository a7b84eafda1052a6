"""`inlay export`: trained tasks in a form that other programs read, or in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    adapter: Annotated[
        list[Path],
        typer.Option(help="A run, an adapter's folder or one of tasks. As tasks it may be repeated: they are joined."),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="The task to export; as tasks several, as in rte,sst2=new_name. Default: all. Given once for each "
            "--adapter, each has its own."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="The form: lora (the default), PEFT's own adapter; tasks, a folder to predict with and to serve; "
            "vllm, a LoRA that vLLM reads; onnx, a whole model for onnxruntime."
        ),
    ] = None,
    model: o.MovedModel = None,
    output: Annotated[Path | None, typer.Option(help="The new folder to write. Default: <task>-<form>, here.")] = None,
) -> None:
    """Export trained tasks: as PEFT adapters, joined, or as ONNX.

    As lora, what is a low-rank product becomes a plain LoRA adapter of PEFT's, exactly: a task of Multi-LoRA, a VeRA,
    a LoRA (a copy). Of the model no more than its config is read. As tasks, runs on your own data and on named tasks
    are joined, under new names where they are given; where any are named, the others are left out. They must have been
    trained on one base model, with the same settings of the shared factor (r, seed) and the same --max-length. The
    folders they come from stay as they are. As onnx, a classifier or regression of texts or images becomes one file
    with its adapter folded in, for any batch and length, checked by onnxruntime to 1e-4; with labels and tokenizer or
    image processor beside it. It needs the extra `onnx`.

    \b
    inlay export --adapter runs/<id> --to lora --output rte-lora

    \b
    inlay export --adapter runs/<reviews> --adapter runs/<mails> --to tasks --output mine
    inlay predict --adapter mine requests.jsonl

    \b
    inlay export --adapter runs/<id> --task rte,sst2=mood --to tasks --output some

    \b
    inlay export --adapter runs/<id> --to onnx --output reviews-onnx
    """
    from inlay.workflow.export import export

    found = export(adapter, task, output, model=model, **({} if to is None else {"to": to}), say=show.say)
    named = ",".join(task) if task else ", ".join(map(str, adapter))
    show.say(f"exported {named}: {found}")
