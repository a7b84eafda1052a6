"""The made-up data behind the smallest scale of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay.papers.reproduce import standins
from inlay.tasks import catalogue


@pytest.mark.parametrize(("name", "labels"), [("stsb", {0, 1, 2, 3, 4, 5}), ("sst2", {0, 1}), ("cb", {0, 1, 2})])
def test_labels_differ_from_row_to_row(name: str, labels: set[int], tmp_path: Path) -> None:
    """Values too: a correlation with what is always the same is not defined."""
    standins.data(name, tmp_path)
    card = catalogue.describe(name)
    for split in ("train", "test"):
        text = (tmp_path / "text" / card.folder / f"{split}.jsonl").read_text()
        assert {json.loads(line)[card.label[0]] for line in text.splitlines()} == labels
