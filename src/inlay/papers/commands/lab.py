"""`inlay lab`: the theory behind a method, computed and drawn."""

from __future__ import annotations

import typer

from inlay.papers.activation_prompts import command as activation_prompts
from inlay.papers.icl import command as icl
from inlay.papers.infoprompt import command as infoprompt
from inlay.papers.multi_lora import command as multi_lora
from inlay.papers.ntk_attention import command as ntk_attention

app = typer.Typer(
    help="Compute what a paper proves, and say beside each claim what was measured. Each experiment draws a figure "
    "(PNG and SVG) and keeps its numbers (CSV) and circumstances (JSON) beside it.",
    no_args_is_help=True,
)


@app.callback()
def root() -> None:
    """Options of every experiment."""


app.command("icl")(icl.command)
app.command("decomposable")(multi_lora.command)
app.command("softmax-regression")(infoprompt.command)
app.command("activation-prompts")(activation_prompts.command)
app.command("prefix")(ntk_attention.command)
