"""docs/cost.md is what scripts/document_cost.py makes of the kept results, and says what was missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = {"commit": "0123456789abcdef", "torch": "2.11", "transformers": "5", "peft": "0.21", "gpu": "GPU"}


def line(work: str, ratio: float | None, goal: float | None) -> dict[str, Any]:
    met = None if goal is None else ratio is not None and ratio <= goal
    measured = {"ratio": ratio, "ours_value": 10 * (ratio or 0), "peer_value": 10.0, "spread": [0.5, 0.9]}
    return {"work": work, "goal": goal, "keep": False, "met": met, "unit": "ms"} | (measured if ratio else {})


def test_the_page_of_costs_is_current() -> None:
    import document_cost

    assert document_cost.main(["--check"]) == 0


def test_the_page_tells_what_was_measured_and_what_was_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import document_cost

    page = tmp_path / "cost.md"
    page.write_text(document_cost.PAGE.read_text())
    for name, value in {"PAGE": page, "RESULTS": tmp_path, "IMAGES": tmp_path / "images"}.items():
        monkeypatch.setattr(document_cost, name, value)
    document_cost.main(["--write"])  # of no results at all
    assert page.read_text().count(document_cost.NONE[0]) == 9
    lines = [line("good", 0.75, 0.8), line("bad", 1.25, 1.1), line("broken", None, 1.0), line("told", 2.0, None)]
    other = VERSIONS | {"commit": "fedcba9876543210+"}
    rows = {"first": {"lines": lines[:2], "versions": VERSIONS}, "second": {"lines": lines[2:], "versions": other}}
    rows["vit-compiled"] = {
        "lines": [line("compiled", 0.5, None)],
        "versions": VERSIONS,
        "measured": {"peer, compiled": {"note": "with graph breaks"}},
    }
    (tmp_path / "own-loop-cuda.json").write_text(json.dumps({"device": "GPU", "rows": rows}))
    curves = {"ntk-attention": [[1, 2.0, 2**20], [64, 8.0, 2**22]], "SDPA": [[1, 1.0, 2**20]]}
    plot = {"about": "A layer", "x": "length L", "curves": curves, "failed": ["SDPA at 64: full"], "versions": VERSIONS}
    (tmp_path / "growth-cuda.json").write_text(json.dumps({"device": "GPU", "plots": {"length": plot}}))
    assert document_cost.main(["--check"]) == 1
    assert document_cost.main(["--draw"]) == 0
    assert document_cost.main(["--check"]) == 0
    text = page.read_text()
    assert "On GPU 1 of 3 goals is met." in text
    assert "- bad: 1.25, goal 1.10" in text
    assert "- broken: not measured, goal 1.00" in text
    assert "- good" not in text
    assert "| good | 7.50 ms | 10.0 ms | 0.75 | 0.50 to 0.90 | <= 0.80 | yes |" in text
    assert "GPU, commit 0123456789ab, torch 2.11, Transformers 5, PEFT 0.21 (1 row); GPU, commit fedcba987654+," in text
    assert "- peer, compiled: with graph breaks" in text
    assert "| A layer: length L | ntk-attention | 1 | 64 | 2.00 to 8.00 | 4.0 | 1 to 4 | 4.0 |" in text
    assert "- SDPA at 64: full" in text
    assert "images/cost/length.png" in text
    assert (tmp_path / "images" / "length.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("device", "count", "told"),
    [
        ("cpu, 2 threads", 1, "On a CPU with 2 threads the one goal is met."),
        ("GPU", 2, "On GPU all 2 goals are met."),
    ],
)
def test_goals_that_are_all_met(device: str, count: int, told: str) -> None:
    import document_cost

    rows = {"row": {"lines": [line(f"work {number}", 0.5, 0.8) for number in range(count)]}}
    assert document_cost.goals({"device": device, "rows": rows}) == [told]


def test_a_quick_run_of_the_benchmark_has_no_goals_to_miss() -> None:
    import own_loop

    for gpu in (True, False):
        table, _ = own_loop.rows_of(gpu)
        assert any(one.goal is not None for row in table for one in row.lines)
        assert all(one.goal is None for row in table for one in own_loop.without_goals(row).lines)


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("scripts", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)
