"""`inlay embed`: vectors of texts, and of images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError

STDIN = "-"


def command(
    texts: Annotated[
        str,
        typer.Argument(
            help="A table, a .txt file with a text a line, or - for standard input; of a model that reads images too, "
            "a folder of them or one."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="A .npy, .parquet, .safetensors or .jsonl file. Default: JSON lines."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="A run of kind embedding: its folder, or its name under --out.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model as it is; with --run, where the base model is now, if it has moved.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Column with the text. Default: text, or the only one.")] = None,
    image: Annotated[
        str | None, typer.Option(help="Column with images, of a model that compares them with texts.")
    ] = None,
    id: Annotated[str | None, typer.Option(help="Column that names a row. Default: id, where there is one.")] = None,
    pooling: Annotated[
        str,
        typer.Option(help="With --model alone: mean, first or last of the tokens' states; auto: what it was made for."),
    ] = "auto",
    max_length: Annotated[int | None, typer.Option(min=1, help="With --model alone: longest text, in tokens.")] = None,
    precision: Annotated[str, typer.Option(help="With --model alone: auto, float32, bfloat16 or float16.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are read at a time.")] = 64,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Turn texts, or images, into vectors of length 1, in the order of the input.

    A run of `inlay tune --kind embedding` gives them as it was trained to; --model alone gives those of the model as it
    is, to see what training bought. Ids are written too, but into .npy, which holds the vectors alone.

    \b
    inlay embed texts.csv --run runs/<id> --output vectors.npy

    \b
    inlay embed texts.csv --model embedded:minilm --text body --id key --output vectors.parquet

    \b
    inlay embed photos/ --model ./clip --output images.npy

    \b
    cat texts.txt | inlay embed --run runs/<id> - > vectors.jsonl
    """
    from inlay.workflow import embed as verb

    say = show.nothing if quiet else show.say
    if run is None and model is None:
        raise InlayError("Give --run (of kind embedding), or --model alone; see `inlay embed --help`.")
    given: Any = _lines_of_stdin(text, id) if texts == STDIN else texts
    how: dict[str, Any] = {"pooling": pooling, "max_length": max_length, "precision": precision}
    found = verb.embed(
        given if texts == STDIN else Path(texts),
        output,
        run=run,
        model=model,
        text=text,
        image=image,
        id=id,
        batch_size=batch_size,
        out=out,
        say=say,
        trust_remote_code=trust_remote_code,
        **how,
    )
    if output is None:
        for line in verb.format_vectors(found.vectors, found.ids):
            show.answer(line.rstrip("\n"))
    else:
        say(f"{len(found.vectors):,} vectors of {found.vectors.shape[1]} dimensions in {output}")


def _lines_of_stdin(text: str | None, id: str | None) -> list[str]:
    """The lines of standard input, each a text."""
    if text is not None or id is not None:
        raise InlayError("Standard input has one text a line and no columns: leave --text and --id out.")
    try:
        return sys.stdin.read().splitlines()
    except UnicodeDecodeError as error:
        raise InlayError("Standard input is not text in UTF-8. Convert it first.") from error
