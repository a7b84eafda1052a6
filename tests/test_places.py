"""The drawings of where methods act show what the methods do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay.methods.registry import of_form

ROOT = Path(__file__).parents[1]


def test_every_method_is_drawn_where_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import document_places

    assert document_places.main(["--check"]) == 0
    found = json.loads(document_places.DATA.read_text())
    assert {name for names in found["transformer"].values() for name in names} == set(of_form("peft"))
    where = {
        name: [place for place, names in found["transformer"].items() if name in names] for name in of_form("peft")
    }
    assert where["lora"] == ["query", "value"]
    assert where["ia3"] == ["key", "value", "down"]
    assert where["vpt-shallow"] == where["prompt"] == where["infoprompt"] == ["the first tokens"]
    assert where["vpt-deep"] == where["activation-prompt"] == ["what enters a block"]
    assert where["prefix"] == where["ntk-attention"] == ["attention"]
    assert where["visual-prompt"] == ["the pixels"]
    assert where["adapter"] == ["output", "down"]
    assert found["resnet"]["convolution 3"] == ["multi-lora", "ssf", "ia3", "lora"]

    stale = tmp_path / "places.json"
    stale.write_text(json.dumps(found | {"resnet": {}}))
    monkeypatch.setattr(document_places, "DATA", stale)
    monkeypatch.setattr(document_places, "IMAGES", tmp_path / "images")
    assert document_places.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert document_places.main(["--write"]) == 0
    assert json.loads(stale.read_text()) == found
    drawn = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert drawn == sorted(path.name for path in (ROOT / "docs" / "images" / "methods").iterdir())
    assert len(drawn) == 4
