"""A finished run, asked from the command line and from Python: rows in many forms, probabilities, scores, notes."""

from __future__ import annotations

import csv
import datetime
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec
from inlay.records.store import Run
from inlay.workflow.notes import silent
from inlay.workflow.predict import format_lines

Typed = Callable[..., tuple[int, str, str]]
SPLITS = ["train"] * 8 + ["validation"] * 2 + ["test"] * 2
TEXTS = ["w1 w1 w8", "w2 w2 w9", "w3 w3 w7"]


def written(path: Path, columns: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded")
    zoo.tiny("bert", "base")[0].save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    rng = random.Random(0)
    rows = []
    for number in range(60):
        stars = 1 + number % 3
        words = [f"w{stars}"] * 3 + [f"w{rng.randrange(6, 20)}" for _ in range(3)]
        rows.append([number, " ".join(words), stars, ("train", "train", "validation", "test")[number % 4]])
    written(folder / "reviews.csv", ["id", "body", "stars", "split"], rows)
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> Spec:
    how: dict[str, Any] = {"max_steps": 6, "batch_size": 8, "learning_rate": 0.01}
    data = str(folder / "reviews.csv")
    return Spec(model=str(folder / "model"), data=data, text=("body",), label="stars", method="bias", **how)


@pytest.fixture(scope="module")
def run(spec: Spec, folder: Path) -> Run:
    return inlay.tune(spec, folder / "runs", progress=False, say=silent)


@pytest.fixture(scope="module")
def loaded(run: Run) -> Any:
    return inlay.load(run)


def test_all_columns_come_back_and_probabilities_on_request(run: Run, typed: Typed, tmp_path: Path) -> None:
    rows = [["a7", "x", TEXTS[0], "bad"], ["a8", "y", TEXTS[1], ""]]
    written(tmp_path / "new.csv", ["id", "why", "body", "label"], rows)
    status, out, err = typed("predict", "--run", run.folder, "--input", "new.csv", "--probabilities")
    assert status == 0, err
    first, second = (json.loads(line) for line in out.splitlines())
    assert list(first) == ["id", "why", "body", "label", "predicted_label", "score", "probabilities"]
    assert (first["id"], first["why"], first["label"], second["id"]) == ("a7", "x", "bad", "a8")
    assert list(first["probabilities"]) == ["1", "2", "3"]
    assert sum(first["probabilities"].values()) == pytest.approx(1)
    assert first["probabilities"][first["predicted_label"]] == first["score"] == max(first["probabilities"].values())
    _, plain, _ = typed("predict", "--run", run.folder, "--input", "new.csv")
    assert "probabilities" not in json.loads(plain.splitlines()[0])


class Frame:
    """What is used of a DataFrame of pandas."""

    columns = ("id", "body")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"id": np.int64(number), "body": text} for number, text in enumerate(TEXTS)]


class Polar:
    def to_dicts(self) -> list[dict[str, Any]]:
        return Frame().to_dict("records")


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": number, "body": text} for number, text in enumerate(TEXTS)],
        {"id": range(3), "body": TEXTS},
        {"id": np.arange(3), "body": np.array(TEXTS)},
        Frame(),
        Polar(),
        ({"id": number, "body": text} for number, text in enumerate(TEXTS)),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_rows_of_python_in_every_form_have_one_answer(loaded: Any, rows: Any) -> None:
    found = loaded.predict(rows)
    assert [row["id"] for row in found] == [0, 1, 2]
    assert [row["body"] for row in found] == TEXTS
    assert [(row["label"], row["score"]) for row in found] == [
        (row["label"], row["score"]) for row in loaded.predict(TEXTS)
    ]
    assert [json.loads(line)["id"] for line in format_lines(found)] == [0, 1, 2], "and it can be written down"


def test_pandas_itself(loaded: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"body": TEXTS, "id": [1.5, None, 2.5], "stars": ["1", "2", "3"]})
    assert [row["label"] for row in loaded.predict(frame)] == [row["label"] for row in loaded.predict(TEXTS)]
    assert loaded.predict(frame["body"]) == loaded.predict(TEXTS)
    assert loaded.evaluate(frame).examples == 3


def test_a_loaded_run_answers_as_the_verb_does_and_loads_once(
    run: Run, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "new.csv", ["body"], [[text] for text in TEXTS])
    model = loaded.model
    with monkeypatch.context() as patched:
        patched.setattr("inlay.backbones.load_for", None)  # whoever loads again fails
        assert loaded.predict(path) == loaded.predict(str(path)) == loaded.predict(TEXTS)
        loaded.evaluate([{"body": TEXTS[0], "stars": 1}])
    assert loaded.model is model
    assert inlay.predict(run, path) == inlay.predict(run, TEXTS) == loaded.predict(TEXTS)
    assert loaded.predict([]) == []
    assert loaded.label_names == ("1", "2", "3")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([5], "Row 1 is a int: give a mapping with 'body' (or just its text)"),
        ([{"text": "w1"}], "lacks the column 'body' that the model was trained on (columns: text)"),
        ({"body": "w1"}, "'body' holds a str. Give a list for each column"),
        ({"body": ["w1"], "id": [1, 2]}, "not equally long (body: 1, id: 2)"),
        (5, "a int holds no rows"),
        (None, "a None holds no rows"),
        ("nowhere.csv", "nowhere.csv"),
    ],
)
def test_what_is_no_row_is_said(loaded: Any, rows: Any, message: str) -> None:
    with pytest.raises(InlayError) as refused:
        loaded.predict(rows)
    assert message.replace("a None", "None") in str(refused.value)


def test_what_json_has_no_form_for_is_written_all_the_same(loaded: Any) -> None:
    odd = {"when": datetime.date(2024, 5, 1), "part": float("nan"), "many": {1, 2}, "half": "\ud800", "raw": b"abc"}
    (answer,) = loaded.predict([{"body": "w1", **odd}])
    (line,) = format_lines([answer])
    line.encode()
    said = json.loads(line)
    assert (said["when"], said["part"], sorted(said["many"]), said["half"]) == ("2024-05-01", None, [1, 2], "\ud800")
    assert "raw" not in said


def test_evaluating_the_rows_of_the_test_split_gives_its_metrics_again(
    run: Run, folder: Path, typed: Typed, tmp_path: Path
) -> None:
    """The file of training is divided: only its test rows are scored, in the same bits."""
    status, out, err = typed("evaluate", "--run", run.folder, "--data", folder / "reviews.csv", "--output", "a/b.json")
    assert status == 0, err
    assert "only its test rows are scored" in err
    kept = json.loads((tmp_path / "a" / "b.json").read_text())
    assert kept["metrics"] == run.metrics["test"] == kept["test"]
    assert kept["examples"] == kept["test_examples"] == 15
    assert (kept["run"], kept["metric"]) == (run.id, "accuracy")
    head, *body = (line.split("\t") for line in out.splitlines())
    assert head == ["metric", "these rows (n = 15)", "the run's test split (n = 15)"]
    assert [row[0] for row in body] == list(run.metrics["test"])
    assert body[0][1] == f"{run.metrics['test']['accuracy']:.4f}"


def test_rows_without_a_label_are_counted_and_others_scored(loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"body": "w1 w1", "stars": 1}, {"body": "w2", "stars": None}, {"body": "w3", "stars": "3.0"}]
    found = loaded.evaluate(rows)
    assert found.examples == 2
    assert found.notes == [
        "rows: 1 of 3 rows have no 'stars' and are left out",
        "rows: the class '2' has no row; the scores say nothing about it",
    ]
    assert found.notes[0] in caplog.messages, "and it is not silent in Python"
    assert loaded.evaluate([{"body": "w1", "rating": 1}], label="rating").examples == 1


@pytest.mark.parametrize(
    ("columns", "rows", "arguments", "message"),
    [
        (["body", "stars"], [["w1", 1], ["w2", 9], ["w2", 9]], (), "'9' (2 rows). Known: 1, 2, 3"),
        (["body", "rating"], [["w1", 1]], (), "Unknown column of 'new.csv' 'stars'"),
        (["body", "rating"], [["w1", 1]], ("--label", "ratings"), "Did you mean 'rating'"),
        (["text", "stars"], [["w1", 1]], (), "lacks the column 'body'"),
        (["body", "stars"], [["w1", ""]], (), "no row with a label"),
    ],
)
def test_what_cannot_be_scored_is_one_clear_error(
    run: Run, typed: Typed, tmp_path: Path, columns: list[str], rows: list[list[Any]], arguments: Any, message: str
) -> None:
    written(tmp_path / "new.csv", columns, rows)
    status, out, err = typed("evaluate", "--run", run.folder, "--data", "new.csv", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_notes_reach_a_python_user_unless_told_otherwise(
    spec: Spec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = spec.with_(shots=6, max_steps=1)
    caplog.set_level(logging.INFO, "inlay")
    run = inlay.tune(few, tmp_path / "runs", progress=False)
    notes = {record.message: record.levelno for record in caplog.records if record.name == "inlay.notes"}
    assert set(run.record["task"]["notes"]) <= set(notes)
    assert all(notes[note] == logging.WARNING for note in run.record["task"]["notes"]), "which Python shows"
    assert notes[f"data: your file {few.data}"] == logging.INFO, "which it does not, unless asked"
    caplog.clear()
    heard: list[str] = []
    inlay.tune(few.with_(seed=1), tmp_path / "runs", progress=False, say=heard.append)
    inlay.tune(few.with_(seed=2), tmp_path / "runs", progress=False, say=silent)
    assert caplog.messages == []
    assert heard


def test_a_text_that_is_cut_is_said(loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    loaded.predict(["w1 " * 600, "w2"])
    assert [message for message in caplog.messages if "1 of 2 texts are longer than" in message]


def test_a_regression_has_a_value_no_probabilities_and_its_own_scores(spec: Spec, folder: Path) -> None:
    made = inlay.load(inlay.tune(spec.with_(kind="regression"), folder / "runs", progress=False, say=silent))
    (answer,) = made.predict(["w1 w1 w1"])
    assert set(answer) == {"body", "value"}
    with pytest.raises(InlayError, match=r"'regression'\. Leave"):
        made.predict(["w1"], probabilities=True)
    assert made.evaluate(folder / "reviews.csv").metrics == made.run.metrics["test"]
    with pytest.raises(InlayError, match=r"rows, row 1: the value 'much' of 'stars' is not a number"):
        made.evaluate([{"body": "w1", "stars": "much"}])


def test_pictures_from_folders_paths_and_memory(image_model: Path, photos: Path, tmp_path: Path) -> None:
    from PIL import Image

    spec = Spec(model=str(image_model), data=str(photos), method="linear-probe", max_steps=2, batch_size=8)
    made = inlay.load(inlay.tune(spec, tmp_path / "runs", progress=False, say=silent))
    path = photos / "dark" / "0.png"
    with Image.open(path) as opened:
        forms = [str(path), path, {"image": str(path), "id": 7}, {"image": opened.copy()}, path.read_bytes()]
    answers = made.predict(forms)
    assert len({(row["label"], row["score"]) for row in answers}) == 1
    assert [set(row) - {"label", "score"} for row in answers] == [{"image"}, {"image"}, {"image", "id"}, set(), set()]
    whole = made.evaluate(photos)
    assert whole.examples == 30
    table = written(photos / "list.csv", ["file", "kind"], [["dark/0.png", "dark"], ["bright/1.png", "bright"]])
    assert made.evaluate(table, label="kind").examples == 2
    whole = (photos / "list.csv").read_text()
    (photos / "list.csv").write_text(whole.replace(".png", ""))
    with pytest.raises(InlayError, match=r"lacks the column 'image', and of its columns \('file', 'kind'\)"):
        made.evaluate(table, label="kind")
    (photos / "list.csv").write_text(whole.replace("file", "image"))
    assert made.evaluate(table, label="kind").examples == 2
    (photos / "blue").mkdir()
    (photos / "dark" / "1.png").rename(photos / "blue" / "1.png")
    with pytest.raises(InlayError, match=r"'blue' \(1 rows\)\. Known: bright, dark"):
        made.evaluate(photos)


def test_tags_are_scored_as_in_training(spec: Spec, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tags.jsonl"
    rows = [{"words": ["w1", "w2", f"w{n}"], "tags": ["O", "B-X", "I-X"], "split": s} for n, s in enumerate(SPLITS, 6)]
    path.write_text("\n".join(map(json.dumps, rows)))
    own = spec.with_(data=str(path), text=("words",), label="tags", max_steps=2)
    made = inlay.load(inlay.tune(own, folder / "runs", progress=False, say=silent))
    assert made.evaluate(path).metrics == made.run.metrics["test"]
    assert len(made.predict([{"words": ["w1", "w2"]}])[0]["tags"]) == 2
    with pytest.raises(InlayError, match="3 words and 1 labels"):
        made.evaluate([{"words": ["w1", "w2", "w3"], "tags": ["O"]}])


def test_what_a_pattern_of_stars_has_trained_is_loaded(spec: Spec, folder: Path) -> None:
    settings = {"target_modules": ".*layer.*attention.*(query|key|value).*", "lora_alpha": 10_000}
    made = inlay.tune(
        spec.with_(method="lora", settings=settings, max_steps=1), folder / "stars", progress=False, say=silent
    )
    assert len(inlay.load(made.folder).predict(TEXTS)) == len(TEXTS)
