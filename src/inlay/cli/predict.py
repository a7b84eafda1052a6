"""`inlay predict`: a finished run answers for new data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    requests: Annotated[
        Path | None, typer.Argument(help="With --adapter: JSON lines, each with its task and that task's fields.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="A run's folder, or its name under --out (see `inlay runs list`).")
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Several tasks: a run of `inlay tune --tasks`, or runs joined by `inlay export --to tasks`."),
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="With --run: new data, a file like the one it was trained on, or images.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON lines. Default: standard output.")] = None,
    task: Annotated[str | None, typer.Option(help="With --run: which of its tasks, where it has several.")] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="The probabilities of all classes too, by name.")
    ] = False,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="With --run: the so many likeliest classes, the likeliest first."),
    ] = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option("--skip-unreadable", help="With --run: leave out what cannot be read, and list it at the end."),
    ] = False,
    labels: o.Classes = None,
    template: o.Captions = None,
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
) -> None:
    """Predict with a finished run, or with several tasks.

    The result is JSON lines, one for each row, in the order of the input. A line has all columns of its row (an `id`
    comes back), then what is predicted: `label` and `score` of a class, `labels` and `scores` of a set, `value` of a
    regression, `values` of several, `tags` of words, `text` that was written. Where the input has a column of such a
    name, it keeps it, and what is predicted is called `predicted_label` and so on. To score labelled rows: `inlay
    evaluate`. A score is the softmax of the outputs, often too sure of itself; `inlay tune --calibrate` mends that.

    \b
    inlay predict --run runs/<id> --input new.csv --output predictions.jsonl

    \b
    inlay predict --run runs/<id> --input new.csv --probabilities

    \b
    inlay predict --run runs/<id> --input photos/ --top-k 3 --skip-unreadable

    \b
    inlay predict --run runs/<id> --input photos/ --labels cat,dog --template "a photo of a {label}"

    \b
    inlay predict --adapter runs/<id> requests.jsonl
    """
    from inlay.errors import InlayError
    from inlay.workflow.predict import format_lines, predict

    data = requests or input
    if (run is None) == (adapter is None) or data is None or (requests is not None and input is not None):
        raise InlayError("Give --run and --input, or --adapter and a file of requests; see `inlay predict --help`.")
    how: dict[str, Any] = {"model": model, "trust_remote_code": trust_remote_code, "say": show.say}
    how["probabilities"] = probabilities
    if adapter is not None:
        from inlay.workflow.answer import answer

        if top_k is not None or skip_unreadable or labels is not None or template is not None:
            raise InlayError(
                "--top-k, --skip-unreadable, --labels and --template go with --run, and --task of several tasks."
            )
        answers = answer(adapter, data, output, **how)
    else:
        how |= {"top_k": top_k, "skip_unreadable": skip_unreadable, "template": template}
        how |= {"labels": None if labels is None else o.names_in(labels)}
        answers = predict(str(run), data, output, task=task, out=out, **how)
    for line in format_lines(answers) if output is None else ():
        show.answer(line.rstrip("\n"))
    if output is not None:
        show.say(f"{len(answers):,} predictions in {output}")
