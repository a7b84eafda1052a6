"""`inlay predict`: a finished run answers for new data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
        Path | None, typer.Option(help="A folder of several tasks, as `inlay tune --tasks` makes them.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="With --run: new data, a file like the one it was trained on, or images.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON lines. Default: standard output.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is now, if it has moved.")] = None,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
) -> None:
    """Predict with a run, or with several tasks at once: JSON lines, one a row, in the order of the input.

    \b
    inlay predict --run runs/<id> --input new.csv --output predictions.jsonl

    \b
    inlay predict --adapter runs/<id>/adapter requests.jsonl
    """
    from inlay.errors import InlayError
    from inlay.workflow.predict import lines, predict

    data = requests or input
    if (run is None) == (adapter is None) or data is None or (requests is not None and input is not None):
        raise InlayError("Give --run and --input, or --adapter and a file of requests; see `inlay predict --help`.")
    if adapter is not None:
        from inlay.workflow.answer import answer

        answers = answer(adapter, data, output, model=model, trust_remote_code=trust_remote_code, say=show.say)
    else:
        answers = predict(str(run), data, output, model=model, out=out, trust_remote_code=trust_remote_code)
    if output is None:
        for line in lines(answers):
            show.answer(line.rstrip("\n"))
    else:
        show.say(f"{len(answers):,} predictions in {output}")
