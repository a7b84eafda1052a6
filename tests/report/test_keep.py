"""Results of other settings do not replace each other."""

from __future__ import annotations

import json
from pathlib import Path

from inlay.report.charts import drawing as charts


def kept(folder: Path, command: list[str], value: float) -> None:
    charts.keep(folder, "cka", charts.blank(), ("value",), [(value,)], {"command": command})


def test_the_same_command_replaces_its_result(tmp_path: Path) -> None:
    folder = tmp_path / "cka-digits"
    kept(folder, ["inlay", "explain", "cka"], 1.0)
    kept(folder, ["inlay", "explain", "cka"], 2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["cka-digits"]
    assert (folder / "cka.csv").read_text().split() == ["value", "2.0"]


def test_another_command_puts_the_earlier_result_aside(tmp_path: Path) -> None:
    folder = tmp_path / "cka-digits"
    for examples in ("64", "32", "16"):
        kept(folder, ["inlay", "explain", "cka", "--examples", examples], float(examples))
    found = {path.name: json.loads((path / "cka.json").read_text())["command"][-1] for path in tmp_path.iterdir()}
    assert found == {"cka-digits": "16", "cka-digits-1": "64", "cka-digits-2": "32"}
