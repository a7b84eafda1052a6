"""What the site adds to the pages: the reference and the tables of measurements are complete.

The site itself is built with `make site`, which fails on a broken link.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

import inlay
from inlay.methods.registry import all_methods

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def test_every_measurement_is_on_the_page(tmp_path: Path) -> None:
    from site_benchmarks import benchmarks_page

    folder = ROOT / "benchmarks" / "results"
    page = benchmarks_page(folder)
    for path in folder.glob("*.json"):
        _, _, rest = page.partition(f"\n## {path.stem}\n")
        section, _, _ = rest.partition("\n## ")
        assert f"benchmarks/results/{path.name})" in section
        assert "| --- |" in section, f"{path.name} has no table"
    (tmp_path / "some.json").write_text(
        json.dumps(
            {
                "command": "python some.py",
                "rows": [{"a|b": 0.00012345, "rounds": [1, 2]}, {"a|b": 1234567, "met": True}],
                "of": {"x_y": {"ms": 1.23456}, "z": {"ms": None}},
                "deep": {"plots": {"one": {"two": {"ms": 3}, "three": {"ms": 4}}}},
            }
        )
    )
    page = benchmarks_page(tmp_path)
    assert "~~~bash\npython some.py\n~~~" in page
    assert "| a\\|b | met |\n| --- | --- |\n| 0.000123 |  |\n| 1,234,567 | yes |" in page
    assert "|  | ms |\n| --- | --- |\n| x\\_y | 1.235 |\n| z |  |" in page
    assert "##### one\n\n|  | ms |\n| --- | --- |\n| two | 3 |\n| three | 4 |" in page


def test_every_public_name_and_every_command_is_in_the_reference() -> None:
    from site_reference import api_page, cli_page

    from inlay.cli.app import app

    names = {line.removeprefix("### inlay.") for line in api_page().splitlines() if line.startswith("### inlay.")}
    own = {method.config.partition(":")[2] for method in all_methods().values() if method.config and method.tuner}
    assert names == set(inlay.PUBLIC) | own
    page = cli_page()
    for name, command in typer.main.get_command(app).commands.items():
        assert f"\n## inlay {name}\n" in page
        for below, inner in getattr(command, "commands", {}).items():
            assert f"\n### inlay {name} {below}\n" in page
            assert all(parameter.opts[0] in page for parameter in inner.params)
    assert "| `--learning-rates <" in page
    assert "\x08" not in page
