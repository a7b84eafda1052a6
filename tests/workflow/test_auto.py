"""`--method auto`: tried on held-out rows within a budget, picked with a reason, found again, recorded in the run."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from scipy import stats
from test_chat_runs import chats, checkpoint

import inlay
from inlay import InlayError, Spec
from inlay.methods import registry
from inlay.records.sealed import write_sealed
from inlay.records.store import Store
from inlay.tasks import kinds
from inlay.tasks.encode import Encoded
from inlay.tasks.row_scores import WORDS, score_rows
from inlay.tasks.schema import TaskSchema
from inlay.workflow import auto
from inlay.workflow.auto import (
    CHOICE,
    MethodChoice,
    MethodTrial,
    choose,
    complete,
    judge,
    read,
    reason,
    seeds,
    tune_auto,
)
from inlay.workflow.settle import settle

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SEEDS", 1)


@pytest.fixture
def spec(text_model: Path, reviews: Path) -> Spec:
    how: dict[str, Any] = {"max_steps": 6, "batch_size": 8}
    return Spec(model=str(text_model), data=str(reviews), text=("body",), label="stars", method="auto", **how)


def test_a_pick_is_made_recorded_and_found_again(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SEEDS", 2)
    said: list[str] = []
    run = tune_auto(spec, tmp_path / "runs", progress=False, say=said.append)
    found = read(run.folder / CHOICE)
    assert found is not None
    assert [trial.method for trial in found.trials] == ["linear-probe", "bias", "lora"]
    assert run.spec.method == found.method
    assert found.seeds == (0, 1)  # so few rows are held out by each
    assert found.rows == 2 * run.record["examples"]["validation"]
    assert any(line == f"method: {found.method}: {found.why}" for line in said)
    assert any(trial.run == run.id for trial in found.trials)  # so few examples that the trial is the run
    made = Store(tmp_path / "runs").list()
    assert len(made) == 6
    for trial in found.trials:
        tried = Store(tmp_path / "runs").get(trial.run)
        scores = [each.metrics["validation"]["accuracy"] for each in made if each.spec.method == trial.method]
        assert trial.mean == pytest.approx(sum(scores) / 2)
        assert trial.seconds == pytest.approx(sum(r.record["seconds"] for r in made if r.spec.method == trial.method))
        assert trial.trained == tried.portrait["parameters"]["trained"]
    # A tie goes to the cheaper one, and only to one that ties.
    ties = [trial for trial in found.trials if trial.ties]
    assert found.method == min(ties, key=lambda trial: trial.trained).method
    said.clear()
    again = tune_auto(spec, tmp_path / "runs", progress=False, say=said.append)
    assert (again.id, said[0].startswith("chosen before: ")) == (run.id, True)
    assert inlay.tune(spec, tmp_path / "runs", progress=False).id == run.id  # by its door in Python too


def test_a_choice_that_was_edited_is_made_anew(spec: Spec, tmp_path: Path) -> None:
    first = choose(spec, tmp_path / "runs", progress=False)
    (path,) = (tmp_path / "runs").glob("auto-*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"method": "full"}))
    assert read(path) is None
    assert choose(spec, tmp_path / "runs", progress=False) == first
    write_sealed(path, {"format": 1})
    assert read(path) is None


def test_what_the_budget_does_not_reach_is_said_and_gone_on_with(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InlayError, match=r"No candidate finished within 0.0001 minutes .*--auto-budget"):
        choose(spec, tmp_path / "runs", minutes=0.0001, progress=False)
    with pytest.raises(InlayError, match="minutes=0 must be greater than 0"):
        choose(spec, tmp_path / "other", minutes=0, progress=False)
    # One is there already: it is found in no time, and the others are not begun.
    inlay.tune(spec.with_(method="linear-probe"), tmp_path / "runs", progress=False)
    found = choose(spec, tmp_path / "runs", minutes=0.0001, progress=False)
    assert (found.method, found.why) == ("linear-probe", "the only one that was tried to the end")
    assert set(found.unfinished) == {"bias", "lora"}
    whole = choose(spec, tmp_path / "runs", progress=False)
    assert not whole.unfinished
    assert len(whole.trials) == 3


def test_many_examples_are_tried_on_some_and_the_pick_is_trained_on_all(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "MOST", 12)
    run = tune_auto(spec, tmp_path / "runs", progress=False)
    found = read(run.folder / CHOICE)
    assert found is not None
    assert found.examples == 12
    assert run.spec.shots is None
    assert {Store(tmp_path / "runs").get(trial.run).record["examples"]["train"] for trial in found.trials} == {12}
    assert run.id not in {trial.run for trial in found.trials}
    held = {Store(tmp_path / "runs").get(trial.run).record["examples"]["validation"] for trial in found.trials}
    assert held == {found.rows}


def test_pictures(image_model: Path, photos: Path, tmp_path: Path) -> None:
    spec = Spec(model=str(image_model), data=str(photos), method="auto", max_steps=4, batch_size=4)
    found = choose(spec, tmp_path / "runs", progress=False)
    assert [trial.method for trial in found.trials] == ["linear-probe", "bias", "lora"]


def test_a_language_model_that_writes(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    chats(tmp_path / "chats.jsonl")
    how: dict[str, Any] = {"max_steps": 12, "batch_size": 8, "max_length": 128}
    spec = Spec(model=str(tmp_path / "model"), data=str(tmp_path / "chats.jsonl"), method="auto", **how)
    found = choose(spec, tmp_path / "runs", progress=False)
    assert {trial.method for trial in found.trials} == {"norm", "ia3", "lora"}
    assert found.measure == "loss per token, less is better"
    for trial in found.trials:
        assert -trial.mean == pytest.approx(
            Store(tmp_path / "runs").get(trial.run).metrics["validation"]["loss"], rel=1e-3
        )


def test_the_command(typed: Typed, text_model: Path, reviews: Path, tmp_path: Path) -> None:
    given = ("--model", text_model, "--data", reviews, "--text", "body", "--label", "stars", "--max-steps", "4")
    status, out, err = typed("tune", *given, "--method", "auto", "--auto-budget", "30")
    assert status == 0, err
    assert "method\tshare of rows that are right\tbehind the best (95 % CI)\ttrained\ttime\tverdict" in out
    assert "One start each: the intervals are over rows, not over starts." in err
    (picked,) = [line.split("\t")[0] for line in out.splitlines() if line.endswith("\tpicked")]
    run = next(run for run in Store(tmp_path / "runs").list() if (run.folder / CHOICE).exists())
    assert run.spec.method == picked
    status, out, _ = typed("runs", "show", run.id)
    assert "\tpicked" in out
    for more, message in (
        (("--method", "bias", "--auto-budget", "3"), "--auto-budget is for --method auto, and the method is 'bias'"),
        (("--method", "auto", "--print-config"), "--method auto has yet to pick its method"),
        (("--method", "auto", "--auto-budget", "0"), "minutes=0.0 must be greater than 0"),
    ):
        status, _, err = typed("tune", *given, *more)
        assert status == 2
        assert message in err
    status, _, err = typed("tune", "--model", text_model, "--tasks", "rte,sst2", "--method", "auto")
    assert (status, "picks a method for one task" in err) == (2, True)


# ---- by plain arithmetic


def of(method: str, behind: float, low: float | None, high: float | None, trained: int) -> MethodTrial:
    return MethodTrial(method, "-", 1 - behind, behind, low, high, trained, 1.0)


def test_reasons() -> None:
    best, tied, worse = of("a", 0, 0, 0, 100), of("b", 0.1, -0.1, 0.3, 10), of("c", 0.5, 0.2, 0.8, 1)
    assert [trial.ties for trial in (best, tied, worse)] == [True, True, False]
    assert reason([best], best, best, 9) == "the only one that was tried to the end"
    assert reason([best, worse], best, best, 9) == "better than the others on 9 held-out rows"
    assert reason([best, tied, worse], best, tied, 9) == (
        "not distinguishable from a, the best on 9 held-out rows, and the fewest trained parameters (10; a, 0.1 better "
        "here: 100)"
    )
    cheap = of("d", 0, 0, 0, 1)
    assert (
        reason([cheap, best], cheap, cheap, 9)
        == "the best on 9 held-out rows, and with fewer trained parameters than a"
    )


def test_only_whole_rounds_count() -> None:
    def run(method: str, seed: int) -> Any:
        return type("", (), {"spec": Spec("m", method, task="rte", seed=seed)})

    made = [run("a", 3), run("b", 3), run("a", 4), run("b", 4), run("a", 5)]
    assert complete(made, 3) == [made[:2], made[2:4]]
    assert complete(made[:1] + made[2:4], 3) == [made[:1], made[2:3]]  # b failed with the first seed
    assert complete(made[2:], 3) == []


def test_seeds_are_added_only_where_they_draw_other_rows(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "SEEDS", 5)
    assert seeds(settle(spec.with_(method="bias", seed=7))) == [7, 8, 9, 10, 11]
    monkeypatch.setattr(auto, "ENOUGH", 7)
    assert len(seeds(settle(spec.with_(method="bias")))) == 2  # 5 rows of 60 are held out
    monkeypatch.setattr(auto, "ENOUGH", 5)
    assert len(seeds(settle(spec.with_(method="bias")))) == 1
    monkeypatch.setattr(auto, "ENOUGH", 200)
    own = tmp_path / "own.csv"  # a division of the user's own: the same for every seed
    lines = Path(str(spec.data)).read_text().splitlines()
    parts = ["split", *(["train"] * 40 + ["validation"] * 10 + ["test"] * 10)]
    own.write_text("\n".join(f"{line},{part}" for line, part in zip(lines, parts, strict=True)))
    assert seeds(settle(spec.with_(method="bias", data=str(own)))) == [0]


def test_the_interval_is_the_paired_t_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    good, bad = (draws.random(200) < share for share in (0.9, 0.6))

    class Tried:
        def __init__(self, method: str, trained: int, seed: int) -> None:
            self.spec, self.id = Spec("m", method, task="rte", seed=seed), method
            self.portrait, self.record = {"parameters": {"trained": trained}}, {"seconds": 2.0}

    rows = {"lora": good, "bias": bad, "norm": good}

    def score(run: Any, task: Any) -> list[float]:
        half = slice(0, 80) if run.spec.seed == 0 else slice(80, 200)  # rows of two splits
        return rows[run.id][half].astype(float).tolist()

    monkeypatch.setattr(auto, "score", score)
    task = type("", (), {"schema": type("", (), {"predicts": "class"})})
    monkeypatch.setattr(auto, "settle", lambda spec: type("", (), {"first": task}))
    runs: Any = [[Tried(name, many, seed) for name, many in (("lora", 9), ("bias", 3), ("norm", 5))] for seed in (0, 1)]
    found = judge(runs, minutes=1)
    assert (found.rows, found.seeds, found.trials[0].seconds) == (200, (0, 1), 4.0)
    by_name = {trial.method: trial for trial in found.trials}
    expected = stats.ttest_rel(good.astype(float), bad.astype(float)).confidence_interval(0.95)
    assert (by_name["bias"].low, by_name["bias"].high) == pytest.approx((expected.low, expected.high))
    assert found.method == "norm"  # as good as lora to the row, with fewer parameters
    assert MethodChoice.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("schema", "rows", "outputs", "expected"),
    [
        (
            TaskSchema("t", "classification", ("x",), ("accuracy",), label_names=("a", "b")),
            {"label": [0, 1, 1]},
            np.array([[2.0, 1], [0, 3], [4, 1]]),
            [1.0, 1.0, 0.0],
        ),
        (
            TaskSchema("t", "multi-label", ("x",), ("micro-f1",), label_names=("a", "b", "c", "d")),
            {"label": [[0, 1], [2]]},
            np.array([[3.0, -2, -2, -2], [-3, -2, 2, -1]]),
            [0.75, 1.0],
        ),
        (
            TaskSchema("t", "soft-labels", ("x",), ("kl",), label_names=("a", "b")),
            {"label": [[0.5, 0.5], [1.0, 0.0]]},
            np.array([[0.0, 0.0], [np.log(3), 0.0]]),
            [0.0, -0.125],
        ),
        (
            TaskSchema("t", "ordinal", ("x",), ("rank-mae",), label_names=("a", "b", "c")),
            {"label": [0, 0, 2]},
            np.array([[-3.0, 0], [3, 3], [3, 3]]),
            [0.0, -2.0, 0.0],
        ),
        (
            TaskSchema("t", "multi-regression", ("x",), ("r2",), ("a", "b"), means=(1.0, 0.0), deviations=(10.0, 2.0)),
            {"label": [[1.0, 0.0], [11.0, 2.0]]},
            np.array([[1.0, 0.0], [1.0, 3.0]]),
            [-0.5, -2.0],
        ),
        (
            TaskSchema("t", "regression", ("x",), ("mse",), mean=10.0, deviation=2.0),
            {"label": [10.0, 14.0]},
            np.array([[0.5], [1.0]]),
            [-1.0, -4.0],
        ),
        (
            TaskSchema("t", "causal-lm", ("x",), ("perplexity",), answers=True),
            {"target": ["p", "q"]},
            np.array([[6.0, 3.0, 0.0], [2.0, 1.0, 1.0]]),
            [-3.0, -1.0],
        ),
        (
            TaskSchema("t", "masked-lm", ("x",), ("perplexity",)),
            {"text": ["p", "q"]},
            np.array([[6.0, 3.0, 2.0], [2.0, 1.0, 0.0]]),
            [-3.0, -1.0],
        ),
    ],
    ids=["class", "labels", "shares", "rank", "values", "value", "text", "masked"],
)
def test_scores_of_rows(schema: TaskSchema, rows: dict[str, Any], outputs: np.ndarray, expected: list[float]) -> None:
    assert score_rows(schema, Dataset.from_dict(rows), None, outputs) == pytest.approx(expected)
    if schema.predicts in ("text", "masked"):  # the mean over rows is the loss per token
        assert -np.mean(expected) == pytest.approx(outputs[:, 0].sum() / outputs[:, 1].sum())


def test_scores_of_tags() -> None:
    schema = TaskSchema("t", "token-classification", ("x",), ("accuracy",), label_names=("O", "B"))
    encoded = Encoded({"input_ids": [[5, 6], [5, 7]]}, words=[[0, 1], [0, 1]], sizes=[2, 2])
    outputs = np.array([[[1.0, 0], [1, 0]], [[0, 1], [1, 0]]])
    rows = Dataset.from_dict({"label": [[0, 1], [1, 0]]})
    assert score_rows(schema, rows, encoded, outputs) == [0.5, 1.0]


def test_every_kind_of_prediction_has_a_score_in_words() -> None:
    """Vectors are scored in test_image_text.py, spans in test_question_runs.py, the others above."""
    assert set(WORDS) == {kind.predicts for kind in kinds.TABLE.values()}


def test_every_candidate_is_one_that_can_be_probed() -> None:
    for what in ("text", "image", "writing"):
        assert len(registry.names_where(lambda method, what=what: what in method.auto)) == 3


def test_a_worse_method_is_not_picked_however_cheap(text_model: Path, tmp_path: Path) -> None:
    """A probe on words it never saw together cannot do what training inside can: it is worse, and not picked."""
    rng, path = random.Random(1), tmp_path / "x.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "kind"])
        for _ in range(400):
            kind = rng.randrange(2)
            writer.writerow(
                [" ".join([f"w{1 + kind}"] * 4 + [f"w{rng.randrange(6, 20)}" for _ in range(2)]), "ab"[kind]]
            )
    spec = Spec(str(text_model), "auto", data=str(path), text=("body",), label="kind", max_steps=60, batch_size=16)
    found = choose(spec, tmp_path / "runs", progress=False)
    best = max(found.trials, key=lambda trial: trial.mean)
    assert best.mean > 0.9
    for trial in found.trials:
        assert trial.behind == pytest.approx(best.mean - trial.mean)
    assert next(trial for trial in found.trials if trial.method == found.method).ties
