"""The tables of InfoPrompt choose a rate from like runs only, and as its `run` does."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from inlay.papers.infoprompt import table
from inlay.papers.tables import NAMES

PAGE = Path(__file__).parents[3] / "docs" / "infoprompt-measured.md"


@pytest.fixture
def page(script: Any) -> Any:
    """What writes the tables into their page."""
    return script("document_infoprompt")


def chosen_from(line: str = "infoprompt") -> list[dict[str, Any]]:
    """SST-2 near 70, SemEval near 15; the middle rate is a little better on both."""
    return [
        {
            "group": "mlm-64",
            "line": line,
            "task": task,
            "rate": rate,
            "seed": seed,
            "validation": {"accuracy": (0.7 if task == "sst2" else 0.15) + (0.02 if rate == 0.1 else 0.0)},
        }
        for rate, task, seed in itertools.product(table.PROMPTS, table.CHOOSING, table.CHOOSING_SEEDS)
    ]


def test_a_rate_that_lacks_a_run_is_not_chosen_and_shows_no_mean(page: Any) -> None:
    runs, line = chosen_from(), table.LINES[0]
    assert table.choice(runs, "mlm-64", line) == (0.1, 2)
    missing = [r for r in runs if (r["rate"], r["task"]) != (1.0, "semeval2010")]
    assert table.choice(missing, "mlm-64", line) is None
    told = page.rates_table(missing)[-1]
    assert "**" not in told
    assert "1: -" in told
    one = [r for r in runs if (r["rate"], r["task"], r["seed"]) != (1.0, "semeval2010", 101)]
    assert table.choice(one, "mlm-64", line) == (0.1, 1), "by the first seed, which all rates have"
    shown = page.rates_table(one)[-1]
    assert "| 1: 42.5 |" in shown, "the mean of both tasks, not of what there is"
    assert "**0.1: 44.5**" in shown


def test_seeds_that_the_clock_cut_off_for_some_lines_are_in_no_table() -> None:
    named = {"group": "mlm-64", "task": "sst2", "rate": 0.1, "test": {"accuracy": 0.8}}
    both = [named | {"line": line, "seed": seed} for line, seed in itertools.product(("infoprompt", "warp"), (0, 1))]
    cut_off = named | {"line": "infoprompt", "seed": 2}
    elsewhere = named | {"line": "infoprompt", "seed": 2, "task": "rte"}
    choosing = chosen_from()
    assert table.whole([*choosing, *both, cut_off, elsewhere]) == [*choosing, *both, elsewhere]


def test_the_tables_choose_the_rate_that_was_run(page: Any, tmp_path: Path) -> None:
    """A run that failed counts as none right, in the tables as in `run`; its line does not vanish."""
    runs = chosen_from()
    for run in runs:
        if (run["rate"], run["task"], run["seed"]) == (0.1, "sst2", 100):
            del run["validation"]
            run["error"] = "out of memory"
    tested = {
        "test": {"accuracy": 0.8, "semeval-f1": 0.7},
        "metric": "accuracy",
        "trained": 10,
        "steps": 240,
        "curve": [],
        "losses": [],
    }
    named = {"group": "mlm-64", "line": "infoprompt"}
    args = argparse.Namespace(models_dir="", data_dir="", steps=None, choosing_seeds=2, seeds=1, groups=["mlm-64"])
    known = {tuple(run[name] for name in NAMES): run for run in runs}
    (rate,) = {w.rate for w in table.wanted(known, args) if w.line == "infoprompt" and not w.chooses}
    assert rate == 0.01
    runs += [named | {"task": task, "rate": rate, "seed": 0} | tested for task in table.TASKS]
    results, copy = tmp_path / "runs.json", tmp_path / "page.md"
    results.write_text(json.dumps({"runs": runs}))
    copy.write_text(PAGE.read_text())
    page.write(argparse.Namespace(results=str(results), page=str(copy)))
    assert "| infoprompt | 10 | 0.01 | 80.0" in copy.read_text()


def test_the_tables_of_all_models_pair_what_they_compare(page: Any) -> None:
    """Three seeds of WARP, two of InfoPrompt: what is compared are the two that both have."""
    scores = {"infoprompt": (0.6, 0.8), "warp": (0.5, 0.6, 0.1), "without both": (0.6, 0.7)}
    runs = []
    for line, by_seed in scores.items():
        runs += chosen_from(line)
        for task, (seed, score) in itertools.product(table.TASKS, enumerate(by_seed)):
            named = {"group": "mlm-64", "line": line, "task": task, "rate": 0.1, "seed": seed, "metric": "accuracy"}
            curve = [[8 * epoch, score / 2] for epoch in table.EPOCHS]
            runs.append(named | {"test": {"accuracy": score}, "curve": curve})
    told = page.summary_table(runs, ["mlm-64", "minilm-64"])
    assert told[2].startswith("| infoprompt minus warp | +15.0 ± 63.5 | - |")
    (early,) = page.early_table(runs, ["mlm-64"])[2:]
    assert early.startswith("| minilm_l6_mlm, N = 64 | +7.5 ± 31.8 |")
    assert early.endswith("| 7.1 | 13.2 | - |"), "deviations of 30 and 40; of 25, 30 and 5; IDPG has none"


def test_a_tie_between_rates_is_not_broken_by_the_loss() -> None:
    """Of equal accuracies the smallest rate counts, though the loss, which has the losses on information in it, is
    far lower at another."""
    group = table.GROUPS["mlm-64"]
    line = group.line("infoprompt")
    entries = [
        {
            "group": "mlm-64",
            "line": "infoprompt",
            "task": task,
            "seed": seed,
            "rate": rate,
            "validation": {"accuracy": 0.5, "loss": -1199.0 if rate == max(table.RATES[line.method]) else 1.0},
        }
        for task in table.CHOOSING
        for seed in table.CHOOSING_SEEDS
        for rate in table.RATES[line.method]
    ]
    assert table.best_rate(entries, "mlm-64", line) == min(table.RATES[line.method])
