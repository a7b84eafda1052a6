"""The page for users says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from inlay.tasks import KINDS, cells, chat_template, conversations, encode, splits, tables
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


def test_what_is_said_of_conversations_is_so() -> None:
    section = PAGE.partition("## Conversations\n")[2].partition("\n## ")[0]
    for column in (*conversations.USUAL, "prompt", "completion", "instruction", "input", "output"):
        assert f"`{column}`" in section
    assert f"always {chat_template.DAY:%d %b %Y}" in section
    assert f"`--max-length` ({encode.DEFAULT_LENGTH} unless given)" in section
    anchor = re.search(r"your-own-data\.md#([a-z-]+)", cells.CHATS)
    assert anchor is not None
    assert f"## {anchor[1].capitalize()}\n" in PAGE


def test_every_name_of_a_split_is_on_the_page() -> None:
    for split in ("train", "validation", "test"):
        names = ", ".join(f"`{name}`" for name, of in SPLIT_NAMES.items() if of == split)
        assert f"| {split} | {names} |" in PAGE
