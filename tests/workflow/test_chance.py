"""Methods that are not above chance are not ranked, and one class for every example is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score
from typer.testing import CliRunner

from inlay import Spec, tasks
from inlay.cli.app import app
from inlay.report import exports
from inlay.report.collect import collect
from inlay.report.conclusion import findings
from inlay.report.html import page_data
from inlay.tasks.metrics import majority
from inlay.workflow.chance import Standing, sentences, standing
from inlay.workflow.comparison import Comparison, rows_of, words
from recorded import finished, spec_of

CHANCE = {"answer": "neg", "examples": 80, "metrics": {"accuracy": 0.525, "macro-f1": 0.344}}


def runs(folder: Path, scores: dict[str, tuple[float, ...]], **changes: Any) -> Comparison:
    """Finished runs with these test accuracies, a value a seed."""
    made = [
        finished(folder, spec_of(method, seed), value, **{"chance": CHANCE, "classes_predicted": 2} | changes)
        for method, values in scores.items()
        for seed, value in enumerate(values)
    ]
    return Comparison(rows_of(made), made, spec=made[0].spec)


@pytest.mark.parametrize("train", [[0, 1, 1, 1], [0, 0, 1]])
def test_the_majority_class_is_scikit_learns(train: list[int], tmp_path: Path) -> None:
    test = [0, 1, 0, 0, 1]
    lines = [
        f"text {i},{'ab'[label]},{split}"
        for split, rows in (("train", train), ("test", test))
        for i, label in enumerate(rows)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["text,label,split", *lines]))
    task = tasks.load(
        Spec(model="embedded:minilm", method="bias", data=str(tmp_path / "a.csv"), text="text", label="label")
    )
    dummy = DummyClassifier(strategy="most_frequent").fit(np.zeros((len(task.train), 1)), task.train["label"])
    guess, true = dummy.predict(np.zeros((len(test), 1))), task.test["label"]
    found = majority(task)
    assert found is not None
    assert found["metrics"]["accuracy"] == pytest.approx(accuracy_score(true, guess))
    assert found["metrics"]["macro-f1"] == pytest.approx(f1_score(true, guess, average="macro", zero_division=0.0))
    assert (found["answer"], found["examples"]) == (task.label_names[guess[0]], len(test))  # type: ignore[index]


def test_what_is_no_choice_of_one_class_has_no_majority(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,score\n" + "".join(f"text {i},{i / 7}\n" for i in range(40)))
    task = tasks.load(Spec(model="embedded:minilm", method="bias", data=str(tmp_path / "a.csv"), kind="regression"))
    assert majority(task) is None


@given(st.floats(0.3, 0.7), st.integers(10, 10_000), st.booleans())
def test_above_chance_is_beyond_the_sampling_error(chance: float, examples: int, above: bool) -> None:
    half = 1.96 * float(np.sqrt(chance * (1 - chance) / examples))
    value = chance + half * (1.01 if above else 0.99)
    assert Standing("bias", "accuracy", (value,), (chance,), "neg", examples).above_chance is above


@pytest.mark.parametrize(("value", "better"), [(0.4, True), (1.9, False), (2.0, False)])
def test_where_lower_is_better_the_majority_class_is_an_upper_bound(value: float, better: bool) -> None:
    each = Standing("bias", "mse", (value,), (1.9,), "12", 40)
    assert each.above_chance is better
    assert any("below that: do not rank" in line for line in sentences([each])) is not better


def test_nothing_at_chance_is_ranked(tmp_path: Path) -> None:
    """Three methods at 0.52 to 0.54 on 80 balanced rows: no best, no bold, and the majority class is shown."""
    found = runs(tmp_path, {"bias": (0.525, 0.525, 0.525), "lora": (0.54, 0.53, 0.55), "norm": (0.51, 0.55, 0.54)})
    told = words(found)
    assert (
        told[0]
        == "Always answering 'neg', the most frequent class in training, has accuracy 0.5250 on 80 test examples."
    )
    assert told[1] == "No method is above that, within the sampling error of 80 examples: do not rank them."
    assert {row.front for row in found.rows} == {("parameters", "memory", "time")}, "all cost the same here"
    page = collect(tmp_path)
    assert not any(row.leads for row in page.rows)
    said = findings(page)
    assert "do not rank them" in said[0]
    assert "No method is significantly better than another. lora has the highest mean test accuracy" in said[1]
    assert page_data(page)["references"] == [{"set": 0, "name": "majority class (neg)", "mean": 0.525}]
    assert "**" not in exports.write_markdown(page, tmp_path / "t.md").read_text()
    assert "textbf" not in exports.write_latex(page, tmp_path / "t.tex").read_text()


def test_a_wide_interval_has_no_badge(tmp_path: Path) -> None:
    """The same differences at every seed, so that one is significantly worse; but what seeds do is far larger."""
    wide = {"bias": (0.90, 0.55, 0.75), "lora": (0.80, 0.449, 0.651)}
    runs(tmp_path, wide)
    (best,) = [row for row in collect(tmp_path).rows if row.best]
    assert best.spec.method == "bias"
    assert best.leads
    assert not best.badge
    assert not any(row["best"] for row in page_data(collect(tmp_path))["rows"])


def test_two_seeds_have_no_best(tmp_path: Path) -> None:
    runs(tmp_path, {"bias": (0.6, 0.61), "lora": (0.9, 0.91)})
    page = collect(tmp_path)
    assert not any(row["best"] for row in page_data(page)["rows"])
    assert "**" not in exports.write_markdown(page, tmp_path / "t.md").read_text()


def test_a_clear_lead_is_still_one(tmp_path: Path) -> None:
    noise = (0.0, 0.011, -0.02, 0.015, -0.005)
    found = runs(tmp_path, {"bias": tuple(0.7 - x for x in noise), "lora": tuple(0.9 + x / 2 for x in noise)})
    assert not any("do not rank" in line or "Not above" in line for line in words(found))
    page = collect(tmp_path)
    assert [row["best"] for row in page_data(page)["rows"]] == [True, False]
    assert page_data(page)["rows"][0]["beats"] == [1]
    assert "lora has the best test accuracy" in findings(page)[-1]
    assert "**" in exports.write_markdown(page, tmp_path / "t.md").read_text()


def test_one_class_throughout_is_said() -> None:
    one = Standing("bias", "accuracy", (0.475, 0.475), (0.525, 0.525), "neg", 80, constant=(0, 1))
    other = Standing("lora", "accuracy", (0.9, 0.5), (0.525, 0.525), "neg", 80, constant=(1,))
    told = sentences([one, other])
    assert "Not above that, within the sampling error of 80 examples: bias." in told
    assert "bias gave all test examples the same class (every seed)." in told
    assert "lora gave all test examples the same class (seed 1)." in told


def test_runs_from_before_are_compared_without_it(tmp_path: Path) -> None:
    made = [finished(tmp_path, spec_of(method, seed), 0.7) for method in ("bias", "lora") for seed in range(2)]
    assert not any("Always answering" in line for line in words(Comparison(rows_of(made), made)))
    assert page_data(collect(tmp_path))["references"] == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(-2, 2),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["answer", "examples", "metrics", "accuracy"]), inner, max_size=4)
        ),
    )
)
def test_a_record_that_holds_anything_is_no_error(entry: object) -> None:
    found = standing("bias", "accuracy", [0.5], [(0, {"chance": entry, "classes_predicted": entry})])
    assert found.above_chance in (True, False, None)
    assert sentences([found]) is not None


def test_a_run_that_learns_nothing_says_so(tmp_path: Path) -> None:
    """Labels that have nothing to do with the digits, and a rate that leaves one class: both notes, and the record."""
    rng = np.random.default_rng(0)
    lines = [f"word {rng.integers(1000)},{'ab'[int(rng.integers(2))]}" for _ in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]))
    asked = ["compare", "--model", "embedded:minilm", "--data", str(tmp_path / "a.csv"), "--methods", "bias,norm"]
    asked += ["--seeds", "1", "--max-steps", "1", "--learning-rates", "1e-9", "--out", str(tmp_path / "runs")]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "(majority class)" in shown.output
    assert "Always answering" in shown.output
    assert "worth their cost" not in shown.output.lower()
