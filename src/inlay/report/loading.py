"""The code that loads a run, for the page: by inlay in three lines, and by PEFT and Transformers as its card has it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods.card_example import MARKED, PLACE
from inlay.methods.folder import CARD
from inlay.tasks import TaskSchema
from inlay.tasks.prepare import INPUTS

if TYPE_CHECKING:
    from inlay.report.collect import Collected, Result

CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
HERE = "this/run"  # stands for a run's folder
MOST = 100  # rows of the table whose code is on the page
EXAMPLES: dict[str, Any] = {  # of fields that hold more than a plain text
    "sentence": "<e1>the first</e1> and <e2>the last</e2>",
    "triples": [["the subject", "the relation", "the object"]],
    "span2_index": 0,
}
LONGEST = 20_000  # characters of code


def loads(found: Collected) -> list[dict[str, Any]]:
    """Of the chosen rows: the code of each of its tasks, in which `HERE` stands for the folder of one of its runs."""
    made: list[dict[str, Any]] = []
    for index, row in enumerate(found.rows):
        if row.chosen and len(made) < MOST:
            made += [{"row": index, **each} for each in _of_run(row.results[0])]
    return made


def place_of(folder: Path) -> str:
    """A run's folder as the code names it: as it was given, or by the ends of a path that means nothing elsewhere."""
    return "/".join(folder.parts[-2:]) if folder.is_absolute() else folder.as_posix()


def _of_run(result: Result) -> Iterator[dict[str, Any]]:
    record = result.record
    several = record.get("tasks")
    named = several.items() if several else [(None, record.get("task") or {})]
    for name, task in named:
        try:
            schema = TaskSchema.from_json(task.get("schema") or {})
        except (InlayError, TypeError, KeyError, ValueError):  # of an earlier inlay: nothing is known of its rows
            continue
        yield {"task": name, "short": by_inlay(schema, name), "card": _of_card(result.run.adapter, name)}


def by_inlay(schema: TaskSchema, task: str | None = None) -> str:
    """The lines with which inlay loads a run and asks it something; `task` is one of several."""
    which = "" if task is None else f", task={json.dumps(task)}"
    ask = {
        "vector": "print(model.embed({rows}))",
        "class": "print(model.predict({rows}, probabilities=True))",
    }.get(schema.predicts, "print(model.predict({rows}))")
    lines = ["import inlay", "", f'model = inlay.load("{HERE}"{which})', ask.format(rows=_rows(schema))]
    return "\n".join(lines) + "\n"


def _rows(schema: TaskSchema) -> str:
    """A list with one row to ask about, as Python has it."""
    if schema.modality == "image":
        return '["photo.jpg"]'
    if schema.predicts == "vector":
        return '["a text", "another one"]'
    fields = INPUTS[schema.prepare][-1] if schema.prepare else schema.fields
    row: dict[str, Any] = {schema.columns.get(name, name): EXAMPLES.get(name, f"the {name}") for name in fields}
    if schema.predicts == "tags":
        row = {name: ["a", "few", "words"] for name in row}
    elif schema.predicts == "masked":
        row = dict.fromkeys(row, "a text with <mask>")
    elif {"start", "end"} <= {*fields}:
        row |= dict(zip(("text", "start", "end"), MARKED, strict=True))
    elif len(row) == 1 and not schema.writes_text and schema.prepare is None:
        return '["a text"]'
    return repr([row])


def _of_card(adapter: Path, task: str | None) -> str | None:
    """The code of the card beside an adapter, or beside that of one of several tasks; None where it has none."""
    for folder in (adapter / str(task), adapter) if task is not None else (adapter,):
        try:
            text = (folder / CARD).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if (blocks := CODE.findall(text)) and len(blocks[-1]) < LONGEST:
            inner = "adapter" if folder == adapter else f"adapter/{task}"
            return str(blocks[-1]).replace(PLACE, f"{HERE}/{inner}")
    return None
