"""`inlay generate`: texts continued by a language model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show, streams
from inlay.errors import InlayError

STDIN = "-"


@o.takes(sampling=o.SAMPLING)
def command(
    sampling: dict[str, Any],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to continue; - reads one from standard input.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="A run's folder, or its name under --out.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="The folder of an adapter.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model by itself; with --run or --adapter, where the base model is now, if it has moved."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="With --run: which of its tasks, where it has several.")] = None,
    input: Annotated[
        Path | None, typer.Option(help="A file of texts: one a line, or a table (JSON lines, CSV, Parquet).")
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="Column of a table that has the text. Default: those of the run; else prompt or text."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File of JSON lines to write. Default: standard output.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="JSON lines for a single text too.")] = False,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template/--plain", help="Each text is a user's message in the chat template, or goes on."),
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Texts that are continued at a time.", min=1)] = 8,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Continue texts with a tuned language model, with an adapter, or with a model alone.

    A single text is printed while it is written. Several, those of a file, and --json give JSON lines: the columns of
    the row (of a text by itself, `prompt`), then `text`, `tokens` and `finish` (end, length or stop). A run puts a text
    into the template that it was trained with.

    \b
    inlay generate --run runs/<id> "Summarise: the meeting was moved to Friday"

    \b
    cat mail.txt | inlay generate --model embedded:smollm2 --chat-template -

    \b
    inlay generate --adapter adapter/ --input questions.jsonl --field question --output answers.jsonl
    """
    from inlay.records.atomic import write_text
    from inlay.workflow import generate
    from inlay.workflow.predict import check_writable, format_lines
    from inlay.workflow.speakers import open_speaker

    if bool(texts) == (input is not None):
        raise InlayError("Give texts (or - for standard input), or --input FILE; see `inlay generate --help`.")
    if field is not None and input is None:
        raise InlayError(f"--field {field} names a column of a table: give it with --input FILE.")
    how = o.sampling(sampling)
    if output is not None:
        check_writable(output)
    given = [_from_stdin() if text == STDIN else text for text in texts or ()]
    say, trust = show.nothing if quiet else show.say, trust_remote_code
    try:
        speaker = open_speaker(run, adapter=adapter, model=model, task=task, out=out, trust_remote_code=trust, say=say)
        prompts = generate.as_prompts(speaker, given) if input is None else generate.read_prompts(speaker, input, field)
        single = len(given) == 1 and output is None and not json_lines
        shown = streams.answers([speaker.title]) if single else None
        tell = None if shown is None else lambda piece: shown.add(0, piece)
        rows = generate.begin(speaker, prompts, how, template=chat_template, tell=tell)
        found = generate.write(speaker, prompts, rows, batch_size)
        if shown is not None:
            list(found)
            shown.close()
        elif output is None:
            for line in format_lines(found):
                show.answer(line.rstrip("\n"))
        else:
            write_text(output, "".join(format_lines(found)))
            say(f"{len(rows):,} texts in {output}")
    except KeyboardInterrupt:
        print()
        raise typer.Exit(o.INTERRUPTED) from None


def _from_stdin() -> str:
    """The whole of standard input; the end of its last line is no part of the text."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InlayError("Standard input is not text in UTF-8. Convert it first.") from error
