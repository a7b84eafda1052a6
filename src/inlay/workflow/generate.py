"""Texts continued by a language model: one while it is written, or many in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.tasks import tables
from inlay.tasks.cells import as_text
from inlay.tasks.new_rows import read
from inlay.tasks.rows import columns_read
from inlay.workflow.generation import SEEDS, Continuation, Sampling, TooLong
from inlay.workflow.predict import join
from inlay.workflow.speakers import Speaker

BATCH = 8
USUAL = ("prompt", "text")  # columns that are taken for the text where none is named


@dataclass(frozen=True)
class Given:
    """A text to be continued, and the row that it came with."""

    text: str
    given: Mapping[str, Any]


def as_prompts(speaker: Speaker, texts: Sequence[str]) -> list[Given]:
    """Texts as prompts. A run puts each into its template, as in training."""
    if speaker.schema is None:
        return [Given(text, {"prompt": text}) for text in texts]
    columns = columns_read(speaker.schema)
    if len(columns) > 1:
        raise InlayError(
            f"The run reads the columns {', '.join(columns)}, and a text by itself is one: give `inlay generate` a "
            "table that has them, with --input FILE."
        )
    inputs = read(speaker.schema, list(texts))
    return [Given(text, given) for text, given in zip(speaker.fill(inputs.rows), inputs.given, strict=True)]


def read_prompts(speaker: Speaker, path: Path, field: str | None = None) -> list[Given]:
    """The prompts in a file: a text a line, or a table with a column of texts, which `field` names.

    Without it a run reads the columns that it was trained on; one on conversations also a usual column of texts, where
    there are no conversations.
    """
    schema = speaker.schema
    if tables.suffix(path) not in tables.TABLES:
        if field is not None:
            raise InlayError(
                f"--field {field} names a column, and {str(path)!r} is no table ({', '.join(tables.TABLES)})."
            )
        lines = tables.read_lines(path, "prompt").rows
        return as_prompts(speaker, [row["prompt"] for row in lines if row["prompt"].strip()])
    if field is None and schema is not None and schema.chat:
        field = _instead_of_chats(tables.read_table(path), columns_read(schema))
    if field is None and schema is not None:
        inputs = read(schema, path)
        return [Given(text, given) for text, given in zip(speaker.fill(inputs.rows), inputs.given, strict=True)]
    table = tables.read_table(path)
    table.add_paths(filter(None, [field]))
    name = field or next((name for name in USUAL if name in table.columns), None)
    if name is None:
        raise InlayError(
            f"{str(path)!r} has no column {' or '.join(map(repr, USUAL))}: name one with --field "
            f"({', '.join(map(repr, table.columns))})."
        )
    if name not in table.columns:
        raise unknown(f"field of {str(path)!r}", name, table.columns)
    texts = [as_text(row.get(name), name, f"{path.name!r}, row {number}") for number, row in table.numbered]
    return [Given(made.text, row) for made, row in zip(as_prompts(speaker, texts), table.rows, strict=True)]


def _instead_of_chats(table: tables.Table, columns: Sequence[str]) -> str | None:
    """A usual column of texts in a table without the column of conversations."""
    table.add_paths(columns)
    return None if set(columns) & set(table.columns) else next((name for name in USUAL if name in table.columns), None)


def begin(
    speaker: Speaker,
    prompts: Sequence[Given],
    sampling: Sampling,
    *,
    template: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[Continuation]:
    """The prompts ready to be continued; an error that names the text where one has no room.

    With `template` each is a user's message in the chat template, as it is for a run on conversations. Each text draws
    with a seed of its own: the given one and its number, so that it does not matter what else is in a batch.
    """
    if template:
        speaker.check_template("leave --chat-template out")
    template = template and not speaker.learnt_chats  # whose prompts are in theirs already
    whole = template or speaker.learnt_chats
    rows = []
    for number, prompt in enumerate(prompts):
        own = sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + number) % SEEDS)
        text = speaker.write_chat([{"role": "user", "content": prompt.text}]) if template else prompt.text
        before: list[int] | None = [] if whole else None  # a template has its own tokens of beginning
        try:
            rows.append(speaker.writer.begin(text, own, prompt=speaker.adapter, before=before, tell=tell))
        except TooLong as error:
            raise TooLong(str(error) if len(prompts) == 1 else f"Text {number + 1}: {error}") from None
    return rows


def write(
    speaker: Speaker, prompts: Sequence[Given], rows: Sequence[Continuation], batch_size: int = BATCH
) -> Iterator[dict[str, Any]]:
    """What is written for each prompt, in order, batch by batch: the row it came with, the text, how many tokens it
    has, and whether it ended by itself (`end`), at its `length`, or at a `stop` string."""
    if batch_size < 1:
        raise InlayError(f"batch_size={batch_size}: give a whole number from 1.")
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        speaker.writer.write(rows[part])
        for prompt, row in zip(prompts[part], rows[part], strict=True):
            yield join(prompt.given, {"text": row.text, "tokens": len(row.written), "finish": row.finish})
