"""The page for users says what the code does."""

from __future__ import annotations

from pathlib import Path

from inlay.tasks import KINDS, files, splits
from inlay.tasks.split_names import SPLIT_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-data.md").read_text(encoding="utf-8")


def test_every_kind_and_every_table_is_on_the_page() -> None:
    for kind in KINDS:
        assert f"`{kind}`" in PAGE
    for ending in files.TABLES:
        assert f"`{ending}`" in PAGE or ending == ".ndjson"


def test_the_shares_are_those_of_the_code() -> None:
    assert f"**test**: {splits.TEST_SHARE:.0%}".replace("%", " %") in PAGE
    assert f"{splits.VALIDATION_SHARE:.0%}, at most {splits.VALIDATION_MOST:,} rows".replace("%", " %") in PAGE
    assert f"{splits.VTAB_TRAIN}\nexamples to train and {splits.VTAB_VALIDATION} to select" in PAGE


def test_every_name_of_a_split_is_on_the_page() -> None:
    for split in ("train", "validation", "test"):
        names = ", ".join(f"`{name}`" for name, of in SPLIT_NAMES.items() if of == split)
        assert f"| {split} | {names} |" in PAGE
