"""Data files of every kind, damaged: a task whose texts are texts, or one clear error; never a traceback."""

from __future__ import annotations

import csv
import io
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import cases, mutate_bytes, mutate_json

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import images, kinds, tables

SEED = 20
# What makes a task of each kind of the rows below.
WAYS: tuple[dict[str, Any], ...] = (
    {"text": ("text",), "label": "label"},
    {"text": ("text", "other"), "label": "label"},
    {"text": ("text",), "label": "number"},
    {"text": ("nested.body",), "label": "nested.about.mood"},
    {"text": ("tokens",), "label": "tags"},
    {"text": ("text",), "label": "label", "kind": kinds.SPANS},
    {"text": ("text",), "kind": kinds.CAUSAL_LM},
    {"text": ("text",), "label": "other", "kind": kinds.CAUSAL_LM},
    {"text": ("text",), "label": "other", "kind": kinds.DATA_TO_TEXT},
)


def rows() -> list[dict[str, Any]]:
    return [
        {
            "text": f"word {i}",
            "other": f"other {i}",
            "label": "ab"[i % 2],
            "number": i / 3,
            "nested": {"body": f"inner {i}", "about": {"mood": "xyz"[i % 3]}},
            "tokens": ["word", str(i)],
            "tags": ["O", "B-X"],
            "start": 0,
            "end": 2,
            "split": ("train", "train", "train", "validation", "test")[i % 5],
        }
        for i in range(25)
    ]


def json_lines(data: Any, rng: random.Random) -> bytes:
    lines = "\n".join(map(json.dumps, data)) if isinstance(data, list) else json.dumps(data)
    return lines.encode(rng.choice(("utf-8", "utf-8-sig", "utf-16")))


def one_json(data: Any, rng: random.Random) -> bytes:
    return json.dumps(data).encode()


def delimited(data: Any, rng: random.Random) -> bytes:
    """The rows that still are some, as a table of texts."""
    found = [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []
    columns = list(dict.fromkeys(key for row in found for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, delimiter=rng.choice(",;\t|"))
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue().encode("utf-8", "surrogatepass")


FORMS: dict[str, Callable[[Any, random.Random], bytes]] = {
    "a.jsonl": json_lines,
    "a.json": one_json,
    "a.csv": delimited,
    "a.tsv": delimited,
}


def check(task: tasks.Task, said: str) -> None:
    """Every field of every row is a text that can be written and that the data have, and so are the notes."""
    "\n".join(task.notes).encode()
    for part in (task.train, task.validation, task.test):
        for row in part:
            for name in task.fields:
                found = row[name] if isinstance(row[name], list) else [row[name]]
                assert all(isinstance(text, str) and text.encode() is not None for text in found)
                assert all(f'"{word}"' in said for word in {"None", "nan", "inf"} & set(found))
                assert not any(text.startswith(("{'", "['", "[{")) for text in found)


def damaged(folder: Path, seed: int, count: int) -> Counter[str]:
    """Damage files, and load what is left of them; how often there was a task, and how often an error."""
    seen: Counter[str] = Counter()
    for number, rng in cases(seed, count):
        name, way = rng.choice(list(FORMS)), rng.choice(WAYS)
        data: Any = rows()
        what = "as it was"
        if rng.random() < 0.8:
            data, what = mutate_json(data, rng)
        raw = FORMS[name](data, rng)
        if rng.random() < 0.3:
            raw, more = mutate_bytes(raw, rng)
            what += f"; {more}"
        (folder / name).write_bytes(raw)
        try:
            task = tasks.load(Spec(model="none", method="none", data=str(folder / name), **way))
            # A table of texts may say "None" and mean it.
            if "json" in name:
                check(task, json.dumps(data))
            seen["task"] += 1
        except InlayError as error:
            message = str(error).encode()
            seen["error" if len(message) < 1500 else f"an error of {len(message):,} bytes: {message[:80]!r}"] += 1
        except Exception as error:
            raise AssertionError(f"case {number} of seed {seed}, {name}, {way}: {what}") from error
    return seen


def test_damaged_data_files(tmp_path: Path) -> None:
    seen = damaged(tmp_path, SEED, 150)
    assert set(seen) == {"task", "error"}, seen
    assert min(seen.values()) > 20, seen


@pytest.mark.slow
def test_damaged_data_files_for_long(tmp_path: Path) -> None:
    seen = damaged(tmp_path, SEED + 1, 4_000)
    assert set(seen) == {"task", "error"}, seen
    assert min(seen.values()) > 500, seen


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InlayError, match="is a pipe or a device, not a file"):
        tables.read_table(tmp_path / name)
    with pytest.raises(InlayError, match="is a pipe or a device, not a file"):
        images.raw_bytes(tmp_path / name)
    (tmp_path / f"link-{name}").symlink_to("/dev/zero")
    with pytest.raises(InlayError, match="is a pipe or a device, not a file"):
        tables.read_table(tmp_path / f"link-{name}")
