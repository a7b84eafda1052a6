"""A run of several tasks of which one failed: what a report, a comparison and a table of a paper make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inlay import Spec
from inlay.papers.multi_lora.recipes.tables import measure
from inlay.papers.reproduce.bench import Bench
from inlay.papers.reproduce.results import Key
from inlay.records.store import Run
from inlay.report.collect import collect
from inlay.report.html import page_data
from inlay.workflow.comparison import select
from recorded import finished, spec_of

WHY = "the loss is not a finite number at step 3; its parameters are those from before that"


def joint(folder: Path, rate: float, average: float, seed: int = 0, **more: Any) -> Run:
    spec = spec_of("multi-lora", seed, task=None, tasks=("rte", "cb"), learning_rate=rate)
    own = {"average": average, "rte/accuracy": average, "cb/accuracy": 0.1}
    known = {"source": "nowhere", "digest": "d" * 64, "notes": [], "metric": "accuracy"}
    tasks = dict.fromkeys(("rte", "cb"), known)
    return finished(folder, spec, metric="average", metrics={"validation": own, "test": own}, tasks=tasks, **more)


def test_it_is_said_and_the_rate_at_which_it_failed_is_not_chosen(tmp_path: Path) -> None:
    """Its average is over fewer tasks: that it is higher says nothing. A run from before has no such field."""
    whole, part = joint(tmp_path, 0.1, 0.5), joint(tmp_path, 0.2, 0.9, failed={"cb": WHY})
    assert (whole.failed_tasks, part.failed_tasks) == ({}, {"cb": WHY})
    found = collect(tmp_path)
    assert [row.spec.learning_rate for row in found.rows if row.chosen] == [0.1]
    (said,) = [line for line in page_data(found)["findings"] if part.id in line]
    assert f"cb: {WHY}" in said
    assert whole.id not in "".join(found.said)
    assert select([(run.spec, run) for run in (whole, part)])[0] == [whole]


def test_its_cell_is_left_out_of_a_table(tmp_path: Path) -> None:
    class Known(Bench):
        """Has all runs of one spec, and of others none."""

        def runs(self, specs: dict[Key, Spec], seeds: int) -> tuple[dict[Key, list[Run]], dict[str, str]]:  # type: ignore[override]
            failed = [{}, {"cb": WHY}]
            made = [joint(tmp_path, 0.1, 0.5, seed, failed=failed[seed]) for seed in range(seeds)]
            return {key: made for key, spec in specs.items() if spec.tasks}, {}

    settings = {"model": "m", "tasks": {"RTE": "rte", "CB": "cb"}, "seeds": 2, "each": 1, "rows": (), "training": {}}
    found = measure(Known(tmp_path), {**settings, "lora": {}, "size": 100.0})
    assert {key: cell.values for key, cell in found.cells.items()} == {("", "Multi-LoRA", "RTE"): (50.0, 50.0)}
    assert found.failures == {"Multi-LoRA, CB, seed 1": WHY}
