"""The table of rooms in docs/architecture.md is the one of docs/layers.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_table_of_rooms_is_current_and_a_stale_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import document_rooms

    assert document_rooms.main(["--check"]) == 0
    page = tmp_path / "architecture.md"
    page.write_text(document_rooms.PAGE.read_text().replace("| `cli` |", "| `clip` |"))
    monkeypatch.setattr(document_rooms, "PAGE", page)
    assert document_rooms.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert document_rooms.main(["--write"]) == 0
    assert page.read_text() == (ROOT / "docs" / "architecture.md").read_text()
    rooms = {folder.parent.name for folder in (ROOT / "src" / "inlay").glob("*/__init__.py")}
    assert all(f"| `{room}` |" in page.read_text() for room in rooms)
