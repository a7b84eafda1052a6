"""The page for users says what the code does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from inlay import tasks
from inlay.records.spec import Spec
from inlay.tasks import KINDS, splits, tables
from inlay.tasks.folders import SPLIT_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-data.md").read_text(encoding="utf-8")


def test_every_kind_and_every_table_is_on_the_page() -> None:
    for kind in KINDS:
        assert f"`{kind}`" in PAGE
    for ending in tables.TABLES:
        assert f"`{ending}`" in PAGE or ending == ".ndjson"


def test_the_shares_are_those_of_the_code() -> None:
    assert f"**test**: {splits.TEST_SHARE:.0%}".replace("%", " %") in PAGE
    assert f"{splits.VALIDATION_SHARE:.0%}, at most {splits.VALIDATION_MOST:,} rows".replace("%", " %") in PAGE
    words = " ".join(PAGE.split())
    assert f"uses {splits.VTAB_TRAIN} training and {splits.VTAB_VALIDATION} validation examples" in words


def test_the_lines_that_convert_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Callable[..., Spec]
) -> None:
    (code,) = re.findall(r"## Chats.*?```python\n(.*?)```", PAGE, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    turns = [("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    Path("chats.jsonl").write_text(json.dumps(chat) + "\n" + json.dumps(chat).replace("one", "eins") + "\n")
    exec(compile(code, "docs/your-own-data.md", "exec"), {})  # what a reader would run
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert rows[:2] == [
        {"prompt": "user: one?\nassistant:", "answer": "1"},
        {"prompt": "user: one?\nassistant: 1\nuser: two?\nassistant:", "answer": "2"},
    ]
    task = tasks.load(spec(data="answers.jsonl", kind="causal-lm", text=("prompt",), label="answer"))
    assert len(task.train) + len(task.validation) + len(task.test) == len(rows) == 4


def test_every_name_of_a_split_is_on_the_page() -> None:
    for split in ("train", "validation", "test"):
        names = ", ".join(f"`{name}`" for name, of in SPLIT_NAMES.items() if of == split)
        assert f"| {split} | {names} |" in PAGE
