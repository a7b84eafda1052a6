"""`inlay evaluate`: a finished run is scored on labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    run: Annotated[
        str | None,
        typer.Option(help="A run's folder, or its name under --out (see `inlay runs list`).", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Labelled rows: a file like the one it was trained on, or a folder of class folders.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which of the run's tasks, where it has several.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the label. Default: the one of training, or the only likely one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the result as JSON, too.")] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness in place of --data, for a language model: names or YAML files, as in "
            "arc_easy,mine.yaml. Needs inlay[harness].",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="With --harness: an adapter's folder in place of a run.", show_default=False)
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="With --harness: examples before each question. Default: as the task has.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --harness: questions of each task. Default: all.")
    ] = None,
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
) -> None:
    """Score a finished run on new labelled rows, or on a benchmark.

    Prints the run's metrics on these rows, beside those of its test split.
    All rows that have a label are scored. Of data that are divided (a column `split`, folders train and test) it is the
    test rows alone. A label that the run has not learnt is an error that names it. With --harness a language model (a
    run, an adapter, or --model by itself) is scored by lm-evaluation-harness.

    \b
    inlay evaluate --run runs/<id> --data labelled.csv

    \b
    inlay evaluate --run runs/<id> --data labelled.csv --label stars --output scores.json

    \b
    inlay evaluate --run runs/<id> --harness arc_easy,hellaswag --limit 200
    """
    from inlay.errors import InlayError

    if (data is None) == (harness is None):
        raise InlayError("Give --data, labelled rows, or --harness, tasks of lm-evaluation-harness: one of them.")
    if harness is not None:
        from inlay.workflow.harness import evaluate_harness
        from inlay.workflow.speakers import open_speaker

        who: dict[str, Any] = {"model": model, "task": task, "out": out, "trust_remote_code": trust_remote_code}
        speaker = open_speaker(run, adapter=adapter, say=show.say, **who)
        given: dict[str, Any] = {"shots": shots, "limit": limit, "trust": trust_remote_code, "output": output}
        show.harness(evaluate_harness(speaker, o.names_in(harness), **given, say=show.say))
        return
    if run is None or (adapter, shots, limit) != (None, None, None):
        raise InlayError("--data scores a run: give --run, and leave out --adapter, --shots and --limit.")
    from inlay.workflow.loaded import evaluate

    how: dict[str, Any] = {"model": model, "trust_remote_code": trust_remote_code, "out": out}
    found = evaluate(run, data, output, task=task, label=label, say=show.say, **how)
    show.evaluation(found)
