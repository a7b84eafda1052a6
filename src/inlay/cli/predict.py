"""`inlay predict`: a finished run answers for new data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    run: Annotated[str, typer.Option(help="A run's folder, or its name under --out (see `inlay runs list`).")],
    input: Annotated[Path, typer.Option(help="New data: a file like the one it was trained on, or images.")],
    output: Annotated[Path | None, typer.Option(help="Where to write JSON lines. Default: standard output.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is now, if it has moved.")] = None,
    out: o.Out = Path("runs"),
) -> None:
    """Predict with a run: JSON lines, one a row, in the order of the input.

    \b
    inlay predict --run runs/<id> --input new.csv --output predictions.jsonl
    """
    from inlay.workflow.predict import lines, predict

    answers = predict(run, input, output, model=model, out=out)
    if output is None:
        for line in lines(answers):
            typer.echo(line, nl=False)
    else:
        show.say(f"{len(answers):,} predictions in {output}")
