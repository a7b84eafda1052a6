"""`--max-eval`: evaluations during training score a fixed part of the validation split, the end scores all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import toys

import inlay
from inlay.errors import InlayError
from inlay.methods.registry import get
from inlay.records import Spec
from inlay.tasks.encode import Encoded
from inlay.training import FitOptions, FitResult, evaluate, fit
from inlay.training.batches import SplitPart, draw_part

SPEC = Spec(model="toy", method="lora", task="toy", epochs=2, batch_size=16, learning_rate=3e-2, seed=3)


def train(folder: Path, spec: Spec = SPEC) -> FitResult:
    return fit(toys.backbone(), toys.text_task(), get(spec.method), spec, folder, FitOptions(progress=False))


def drawn_task(count: int, seed: int) -> toys.ToyTask:
    """The toy task with only the rows that the bound draws."""
    task = toys.text_task()
    rows = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 5]))).permutation(48)[:count]
    task.validation = [task.validation[row] for row in sorted(rows)]
    return task


def test_the_evaluations_are_of_the_part_and_the_end_is_whole(tmp_path: Path) -> None:
    whole, bounded = train(tmp_path / "whole"), train(tmp_path / "part", SPEC.with_(max_eval=10))
    assert bounded.metrics == whole.metrics, "the end does not depend on the bound"
    assert bounded.evaluated_rows == {"toy": 10}
    assert whole.evaluated_rows == {}
    assert [note for note in bounded.notes if "10 of 48 validation rows" in note]
    curves = [[entry["validation"] for entry in each.history if "validation" in entry] for each in (whole, bounded)]
    assert len(curves[0]) == len(curves[1]) == 2
    assert curves[0] != curves[1]
    by_hand, _ = evaluate(bounded.model, drawn_task(10, 3), "validation", None, SPEC)
    assert curves[1][-1] == pytest.approx(by_hand)


def test_early_stopping_goes_by_the_part_and_its_best_is_scored_whole(tmp_path: Path) -> None:
    spec = SPEC.with_(epochs=6, early_stopping=2, learning_rate=0.1, max_eval=12)
    outcome = train(tmp_path, spec)
    values = [entry["validation"]["accuracy"] for entry in outcome.history if "validation" in entry]
    assert outcome.best_step == 6 * (1 + values.index(max(values)))
    part, _ = evaluate(outcome.model, drawn_task(12, 3), "validation", None, spec)
    assert part["accuracy"] == max(values)
    assert outcome.metrics["validation"] == evaluate(outcome.model, toys.text_task(), "validation", None, spec)[0]


def test_a_part_has_what_the_metrics_of_words_need() -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    whole = Encoded({"input_ids": rows}, labels=rows, words=[[0, -1, 1], [0], [0, 1]], sizes=[2, 1, 2], tags=rows)
    part = draw_part(whole, 2, seed=1)
    assert isinstance(part, SplitPart)
    chosen = [rows.index([int(i) for i in part[n]["input_ids"]]) for n in range(2)]
    assert chosen == sorted(chosen)
    assert part.lengths.tolist() == [len(rows[row]) for row in chosen]
    assert part.words == [whole.words[row] for row in chosen]
    assert (part.sizes, part.tags) == ([whole.sizes[row] for row in chosen], [rows[row] for row in chosen])
    assert draw_part(whole, 3, seed=1) is whole
    assert draw_part(whole, None, seed=1) is whole


def test_the_record_has_it_and_old_runs_keep_their_names(
    review_spec: Spec, tmp_path: Path, typed: Callable[..., tuple[int, str, str]]
) -> None:
    assert review_spec.digest() == review_spec.with_(max_eval=None).digest()
    assert review_spec.digest() != review_spec.with_(max_eval=2).digest()
    with pytest.raises(InlayError, match="max_eval=0 must be greater than 0"):
        review_spec.with_(max_eval=0)
    spec = review_spec
    options = ["--model", spec.model, "--data", spec.data, "--text", "body", "--label", "stars", "--method", "bias"]
    status, _, errors = typed("tune", *options, "--max-steps", "2", "--max-eval", "3", "--out", tmp_path / "runs")
    assert status == 0, errors
    assert errors.count("score 3 of 5 validation rows") == 1
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/record.json"))
    assert record["spec"]["max_eval"] == 3
    (rows,) = record["evaluated_rows"].values()
    assert rows == 3
    assert record["examples"]["validation"] == 5
    assert inlay.load(next((tmp_path / "runs").glob("*/record.json")).parent) is not None
