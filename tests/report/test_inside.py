"""What the page says of a run's predictions: against plain code, and of a real run of every kind."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from test_report_data import read

from inlay.records.store import Run
from inlay.report.collect import collect
from inlay.report.html import write_report
from inlay.report.inside import MISTAKES, MOST_CLASSES, SAY, by_class, confusion, look
from inlay.tasks import kept
from inlay.tasks.calibration import bin_scores
from recorded import finished, spec_of

NAMES = ["cat", "dog", "<i>eel</i>"]


@pytest.mark.parametrize("seed", range(5))
def test_the_matrix_and_the_scores_are_those_of_scikit_learn(seed: int) -> None:
    draws = np.random.default_rng(seed)
    true, said = draws.integers(0, 5, 200), draws.integers(0, 4, 200)  # nothing is taken for the last class
    counts = confusion(true, said, 5)
    assert counts.tolist() == confusion_matrix(true, said, labels=range(5)).tolist()
    precision, recall, f1, _ = precision_recall_fscore_support(true, said, labels=range(5), zero_division=np.nan)
    for (a, b, c), mine in zip(zip(precision, recall, f1, strict=True), by_class(counts), strict=True):
        for theirs, own in zip((a, b, c), mine, strict=True):
            assert own is None if np.isnan(theirs) else own == pytest.approx(theirs)
    assert by_class(confusion([0], [0], 2))[1] == (None, None, None)


@pytest.mark.parametrize("seed", range(5))
def test_the_calibration_error_is_its_definition(seed: int) -> None:
    draws = np.random.default_rng(seed)
    score = np.concatenate([draws.random(150), [0.0, 0.1, 1.0]])
    right = draws.random(153) < score
    told, error = bin_scores(score, right)
    wanted = 0.0
    for each in range(15):
        inside = [i for i, s in enumerate(score) if each / 15 <= s < (each + 1) / 15 or (each == 14 and s == 1)]
        if inside:
            gap = sum(right[i] for i in inside) / len(inside) - sum(score[i] for i in inside) / len(inside)
            wanted += len(inside) / len(score) * abs(gap)
    assert error == pytest.approx(wanted, abs=1e-12)
    assert sum(count for count, _, _ in told) == 153
    assert bin_scores(np.ones(4), np.ones(4, bool)) == ([[4, 1.0, 1.0]], 0.0)


def picture(level: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (30, 20), (level, level, level)).save(stream, "PNG")
    return stream.getvalue()


def predictions_of(wrong: set[int], task: str = "digits") -> dict[str, pa.Table]:
    """What a run keeps that is right but for the rows in `wrong`."""
    true = [NAMES[i % 3] for i in range(30)]
    said = [NAMES[(i + (i in wrong)) % 3] for i in range(30)]
    score = [0.5 + i / 100 for i in range(30)]
    table = pa.table(
        {
            "file": ["own.csv"] * 30,
            "row": list(range(1, 31)),
            "split": ["test"] * 30,
            "label": true,
            "prediction": said,
            "score": pa.array(score, pa.float32()),
            "image": pa.array([picture(8 * i) if i in wrong else None for i in range(30)], pa.binary()),
        }
    )
    about = {"format": 1, "task": task, "kind": "image-classification", "predicts": "class", "labels": NAMES}
    return {task: table.replace_schema_metadata({kept.METADATA: json.dumps(about).encode()})}


def with_predictions(folder: Path, method: str, seed: int, wrong: set[int], task: str = "digits") -> Run:
    """A run on record with such predictions."""
    known: dict[str, Any] = {"source": "nowhere", "digest": "d" * 64, "notes": [], "schema": {}}
    known["classes"] = {"train": dict.fromkeys(NAMES, 7)}
    return finished(
        folder, spec_of(method, seed, task=task), 1 - len(wrong) / 30, tables=predictions_of(wrong, task), task=known
    )


def test_seeds_are_counted_together_and_the_surest_mistakes_come_first(tmp_path: Path) -> None:
    for seed, wrong in enumerate(({3, 9}, {9}, {9, 20})):
        with_predictions(tmp_path, "bias", seed, wrong)
    (each,), left = look(collect(tmp_path))
    assert left == 0
    assert (each["seeds"], each["tested"], each["trained"]) == (3, 30, 100)
    # Rows 3 and 9 are of the first class, and taken for the second; 20 is of the last, and taken for the first.
    assert each["matrix"] == [[26, 4, 0], [0, 30, 0], [1, 0, 29]]
    assert each["classes"][0][:3] == [0, 7, 10.0]
    assert [(row["number"], row["wrong"]) for row in each["mistakes"]] == [(10, 3), (21, 1), (4, 1)]
    shown = Image.open(io.BytesIO(base64.b64decode(each["mistakes"][0]["image"].partition(",")[2])))
    assert shown.getpixel((0, 0)) == (72, 72, 72)
    assert each["confused"] == [[0, 1, 4, 30], [2, 0, 1, 30]]


def test_the_best_of_every_comparison_is_looked_into_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("digits", "eurosat"):
        for method, wrong in (("bias", {1, 2, 3}), ("lora", {1}), ("norm", {1, 2})):
            with_predictions(tmp_path, method, 0, wrong, task)
    monkeypatch.setattr("inlay.report.inside.MOST_ROWS", 3)
    found = collect(tmp_path)
    looked, left = look(found)
    assert left == 3
    assert [(found.rows[each["row"]].spec.method, each["task"]) for each in looked][:2] == [
        ("lora", "digits"),
        ("lora", "eurosat"),
    ]
    assert found.rows[looked[2]["row"]].spec.method == "norm"


def test_many_classes_show_what_is_mixed_up_alone() -> None:
    from inlay.report.inside import _of_matrix

    counts = np.eye(MOST_CLASSES + 1, dtype=int) * 5
    counts[3, 7] = 4
    told = _of_matrix(counts, [f"c{i}" for i in range(MOST_CLASSES + 1)], [None] * (MOST_CLASSES + 1), 1)
    assert told["matrix"] is None
    assert told["confused"] == [[3, 7, 4, 9]]


def test_a_file_that_is_damaged_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = with_predictions(tmp_path, "bias", 0, {1})
    with_predictions(tmp_path, "lora", 0, {2})
    run.predictions["digits"].write_bytes(b"PAR1")
    data = read(write_report(tmp_path, tmp_path / "r.html"))
    assert [each["task"] for each in data["inside"]] == ["digits"]
    assert any("damaged: predictions/digits.parquet has 4 bytes" in text for text in data["damaged"])


@pytest.mark.parametrize(
    "columns",
    [
        {"label": ["cat"] * 30},
        {"label": [1] * 30, "prediction": [None] * 30, "score": [0.5] * 30},
        {"label": ["cat"] * 30, "prediction": ["cat"] * 30, "score": ["sure"] * 30},
        {"label": [["cat"]] * 30, "prediction": [["dog"]] * 30, "score": [0.5] * 30},
        {"label": ["cat"] * 30, "prediction": ["dog"] * 30, "score": [float("nan")] * 30},
    ],
)
@pytest.mark.parametrize("predicts", SAY)
def test_a_table_of_another_shape_is_said_and_the_rest_is_shown(
    tmp_path: Path, predicts: str, columns: dict[str, Any]
) -> None:
    """Somebody else's run, with its digests as they should be."""
    about = {"format": 1, "task": "digits", "kind": "?", "predicts": predicts, "labels": NAMES}
    made = pa.table({"file": ["f.csv"] * 30, "row": list(range(1, 31)), "split": ["test"] * 30, **columns})
    made = made.replace_schema_metadata({kept.METADATA: json.dumps(about).encode()})
    finished(tmp_path, spec_of("bias"), 0.9, tables={"digits": made})
    with_predictions(tmp_path, "lora", 0, {2})
    data = read(write_report(tmp_path, tmp_path / "r.html"))
    assert len(data["rows"]) == 2
    assert "lora" in [data["rows"][each["row"]]["method"] for each in data["inside"]]
    assert len(data["inside"]) + len(data["damaged"]) >= 2


def test_runs_of_every_other_kind(tmp_path: Path) -> None:
    """Values, tags and texts, from tables as runs leave them."""
    rng = random.Random(0)
    true = [rng.uniform(0, 9) for _ in range(40)]
    tables: dict[str, tuple[str, dict[str, Any]]] = {
        "price": ("value", {"label": true, "prediction": [v + 0.5 for v in true], "text": ["a text"] * 40}),
        "names": (
            "tags",
            {
                "label": [["B-per", "I-per", "O"]] * 40,
                "prediction": [["B-per", "I-per", "O"]] * 30 + [["B-per", "O", "O"]] * 10,
                "text": [None] * 30 + ["Ada Lovelace wrote"] * 10,
            },
        ),
        "topics": (
            "labels",
            {
                "label": [["a", "b"]] * 40,
                "prediction": [["b", "a"]] * 20 + [["a", "c"]] * 20,
                "text": [None] * 20 + ["about"] * 20,
            },
        ),
        "asked": (
            "span",
            {
                "label": [["Paris"]] * 20 + [[]] * 20,
                "prediction": ["Paris"] * 10 + [""] * 20 + ["Rome"] * 10,
                "f1": [1.0] * 10 + [0.0] * 10 + [1.0] * 10 + [0.0] * 10,
                "score": [0.5] * 40,
                "text": [None] * 30 + ["Where? | Here"] * 10,
            },
        ),
        "mix": (
            "shares",
            {
                "label": [[0.75, 0.25, 0.0]] * 40,
                "prediction": ["cat"] * 40,
                "score": [0.5] * 40,
                "probabilities": [[0.5, 0.25, 0.25]] * 39 + [[0.0, 0.0, 1.0]],
                "text": ["a mix"] * 40,
            },
        ),
        "stars": ("rank", {"label": ["cat"] * 40, "prediction": ["dog"] * 40, "score": [0.5] * 40, "text": ["x"] * 40}),
        "sizes": (
            "values",
            {
                "label": [[v, 2 * v] for v in true],
                "prediction": [[v + 1, 2 * v] for v in true],
                "text": ["a size"] * 40,
            },
        ),
        "search": ("vector", {"cosine": [0.5] * 40, "rank": [1] * 20 + [3] * 10 + [40] * 10, "text": ["q"] * 40}),
        "photos": (
            "vector",
            {
                "rank": [1] * 40,
                "rank_of_image": [1] * 20 + [7] * 20,
                "text": ["a cat"] * 40,
                "image": [b"\x89PNG"] * 40,
            },
        ),
        "pairs": ("vector", {"cosine": true, "label": true, "prediction": true, "text": ["q"] * 40}),
        "domain": (
            "masked",
            {"loss": [*true[:39], 0.0], "masked": [4] * 39 + [0], "right": [3] * 39 + [0]},
        ),
        "talk": ("text", {"loss": true, "tokens": [3] * 40, "text": ["a question"] * 40}),
    }
    for name, (predicts, columns) in tables.items():
        about = {"format": 1, "task": name, "kind": "?", "predicts": predicts, "labels": None}
        about |= {"labels": NAMES} if predicts in ("shares", "rank") else {}
        made = pa.table({"file": ["f.csv"] * 40, "row": list(range(1, 41)), "split": ["test"] * 40, **columns})
        made = made.replace_schema_metadata({kept.METADATA: json.dumps(about).encode()})
        finished(tmp_path, spec_of("bias", task=name), 0.5, tables={name: made})
    found = {each["task"]: each for each in look(collect(tmp_path))[0]}
    errors = found["price"]["errors"]
    assert errors["mean"] == pytest.approx(0.5)
    assert errors["most"] == pytest.approx(0.5)
    assert errors["explained"] == pytest.approx(1 - 0.25 / float(np.var(true)))
    assert found["names"]["found"] == [["per", 40.0, 0.75, 0.75, 0.75]]
    assert found["names"]["mistakes"][0]["prediction"] == "B-per O O"
    assert found["topics"]["found"] == [["a", 40.0, 1, 1, 1], ["b", 40.0, 1, 0.5, 2 / 3], ["c", 0.0, 0, None, 0]]
    assert (found["topics"]["mistakes"][0]["prediction"], found["topics"]["mistakes"][0]["weight"]) == ("a c", 2)
    assert found["mix"]["apart"] == pytest.approx((39 * 0.25 + 1) / 40)
    assert found["mix"]["matrix"] == [[39, 0, 1], [0, 0, 0], [0, 0, 0]]
    first = found["mix"]["mistakes"][0]
    assert (first["number"], first["label"], first["weight"]) == (40, "cat 75%, dog 25%", 1.0)
    assert found["stars"]["confused"] == [[0, 1, 40, 40]]
    assert [row[:3] for row in found["sizes"]["each"]] == [["1", pytest.approx(1), pytest.approx(1)], ["2", 0.0, 0.0]]
    assert found["sizes"]["each"][0][3] == pytest.approx(1 - 1 / float(np.var(true)))
    assert (found["search"]["ranks"], found["search"]["median"]) == ([0.5, 0.75, 0.75], 2.0)
    assert found["search"]["mistakes"][0]["weight"] == 40
    assert (found["photos"]["ranks"], found["photos"]["median"]) == ([0.75, 0.75, 1.0], 1.0)
    first = found["photos"]["mistakes"][0]
    assert (first["weight"], first["text"], first["image"] is None) == (7, "a cat", False)
    assert (found["pairs"]["predicts"], found["pairs"]["errors"]["mean"]) == ("value", 0.0)
    assert found["asked"]["answered"] == [["has an answer", 20.0, 0.5, 0.5], ["has no answer", 20.0, 0.5, 0.5]]
    assert found["asked"]["mistakes"][0]["label"] == "no answer"
    assert found["domain"]["masks"] == [156, 0.75]
    assert found["domain"]["losses"][0] == pytest.approx(min(true[:39]))  # not 0, of a row without a mask
    assert found["talk"]["losses"][2] == pytest.approx(float(np.median(true)))
    assert found["talk"]["mistakes"][0]["weight"] == pytest.approx(max(true))
    assert all(len(each["mistakes"]) <= MISTAKES for each in found.values())


def test_a_real_run_counts_its_classes(review_spec: Any, tmp_path: Path) -> None:
    from inlay.workflow.tune import tune

    run = tune(review_spec, tmp_path / "runs", progress=False)
    data = read(write_report(tmp_path / "runs", tmp_path / "r.html"))
    (each,) = data["inside"]
    assert each["names"] == ["1", "2", "3"]
    assert np.trace(each["matrix"]) / np.sum(each["matrix"]) == run.metrics["test"]["accuracy"]
    assert sum(trained for _, trained, *_ in each["classes"]) == run.record["examples"]["train"] == each["trained"]
    assert data["runs"][0]["whole"] == run.record["seconds"]
    assert data["rows"][0]["rate"] == run.spec.learning_rate
