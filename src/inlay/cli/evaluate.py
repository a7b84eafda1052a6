"""`inlay evaluate`: a finished run is scored on labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    run: Annotated[str, typer.Option(help="A run's folder, or its name under --out (see `inlay runs list`).")],
    data: Annotated[
        Path, typer.Option(help="Labelled rows: a file like the one it was trained on, or a folder of class folders.")
    ],
    task: Annotated[str | None, typer.Option(help="Which of the run's tasks, where it has several.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the label. Default: the one of training, or the only likely one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the result as JSON, too.")] = None,
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
) -> None:
    """Score a finished run on new labelled rows.

    Prints the run's metrics on these rows, beside those of its test split.
    All rows that have a label are scored. Of data that are divided (a column `split`, folders train and test) it is the
    test rows alone. A label that the run has not learnt is an error that names it.

    \b
    inlay evaluate --run runs/<id> --data labelled.csv

    \b
    inlay evaluate --run runs/<id> --data labelled.csv --label stars --output scores.json
    """
    from inlay.workflow.loaded import evaluate

    how: dict[str, Any] = {"model": model, "trust_remote_code": trust_remote_code, "out": out}
    found = evaluate(run, data, output, task=task, label=label, say=show.say, **how)
    show.evaluation(found)
