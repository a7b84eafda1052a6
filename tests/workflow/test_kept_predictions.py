"""What a run keeps of its held-out rows: it leads back to the data, and gives the run's own metrics again."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image
from scipy.stats import pearsonr
from test_card_code import DATA, OURS, lay_out, run_of

import inlay
from inlay import InlayError, Spec, tune
from inlay.engines.parcels import finished, unpack
from inlay.records import predictions
from inlay.records.store import Run, Store, load
from inlay.tasks import kept
from inlay.workflow.tasks_file import read

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TESTED, HELD = "test", "validation"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("kept"))


def kept_of(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the file says of itself, and its rows."""
    (path,) = run.predictions.values()
    table = predictions.read(path)
    return json.loads(table.schema.metadata[kept.METADATA]), table.to_pylist()


# Where a row's true answer stands when a column of labels was not named.
ANSWERS = {"sequence-to-sequence": "target", "question-answering": "answer"}
# Nothing is the one true answer of a row: test_embed.py and test_masked_runs.py.
WITHOUT_ANSWERS = ("embedding", "masked-lm")


@pytest.mark.parametrize("kind", [kind for kind in DATA if kind not in OURS])
def test_every_kind_keeps_what_it_says_of_the_rows_it_held_out(place: Path, kind: str) -> None:
    run = run_of(place, kind, "norm")
    about, rows = kept_of(run)
    assert (about["kind"], about["labels"]) == (kind, run.record["task"]["schema"]["label_names"])
    tested, held = ([row for row in rows if row["split"] == split] for split in (TESTED, HELD))
    assert (len(tested), len(held)) == tuple(run.record["examples"][split] for split in (TESTED, HELD))
    assert all(row.get("prediction") is None for row in held)
    known = [(row["file"], row["row"]) for row in rows if row["row"] is not None]
    assert len({*known}) == len(known) >= len(held), "no row is held out twice"
    if kind == "masked-lm":  # of running text, whose rows are no examples
        hidden, right = (sum(row[name] for row in tested) for name in ("masked", "right"))
        loss = sum(row["loss"] * row["masked"] for row in tested) / hidden
        assert np.exp(loss) == pytest.approx(run.metrics["test"]["perplexity"], rel=1e-4)
        assert right / hidden == pytest.approx(run.metrics["test"]["masked-accuracy"])
    else:
        assert len(known) == len(rows)
    if kind in WITHOUT_ANSWERS:
        return
    if kind == "image-classification":
        assert all((place / kind / row["file"]).is_file() for row in rows)
        given: list[Any] = [str(place / kind / row["file"]) for row in tested]
        truth = [row["file"].split("/")[0] for row in tested]
    else:
        lines = [json.loads(line) for line in (place / f"{kind}.jsonl").read_text().splitlines()]
        given = [lines[row["row"] - 1] for row in tested]
        truth = [row[DATA[kind][1].get("label", ANSWERS.get(kind))] for row in given]
    said = inlay.load(run).predict(given)
    names = ("label", "value", "tags", "text", "answer")
    name = next(each for each in names if f"predicted_{each}" in said[0] or each in said[0])
    answers = [each.get(f"predicted_{name}", each.get(name)) for each in said]
    for row, true, answer in zip(tested, truth, answers, strict=True):
        right = row["label"][0] if isinstance(true, str) and isinstance(row["label"], list) else row["label"]
        assert right == true
        assert row["prediction"] == (pytest.approx(answer, rel=1e-5) if isinstance(answer, float) else answer)


def test_the_metrics_come_out_again(place: Path) -> None:
    run = run_of(place, "classification", "norm")
    about, rows = kept_of(run)
    tested = [row for row in rows if row["split"] == TESTED]
    assert np.mean([row["label"] == row["prediction"] for row in tested]) == run.metrics["test"]["accuracy"]
    of_truth = [row["probabilities"][about["labels"].index(row["label"])] for row in tested]
    assert -np.mean(np.log(of_truth)) == pytest.approx(run.metrics["test"]["loss"], rel=1e-5)
    for row in tested:
        assert sum(row["probabilities"]) == pytest.approx(1, rel=1e-5)
        assert row["score"] == max(row["probabilities"])
        assert about["labels"][int(np.argmax(row["probabilities"]))] == row["prediction"]
    wrong = [row for row in tested if row["label"] != row["prediction"]]
    assert wrong, "the test needs a model that is not perfect"
    assert all((row["text"] is not None) == (row in wrong) for row in tested), "texts of mistakes alone are kept"

    run = run_of(place, "regression", "norm")
    tested = [row for row in kept_of(run)[1] if row["split"] == TESTED]
    found = pearsonr([row["prediction"] for row in tested], [row["label"] for row in tested]).statistic
    assert found == pytest.approx(run.metrics["test"]["pearson"], abs=1e-5)

    run = run_of(place, "causal-lm", "norm")
    tested = [row for row in kept_of(run)[1] if row["split"] == TESTED]
    mean = sum(row["loss"] * row["tokens"] for row in tested) / sum(row["tokens"] for row in tested)
    assert np.exp(mean) == pytest.approx(run.metrics["test"]["perplexity"], rel=1e-4)


def test_pictures_that_were_got_wrong_are_there_in_small(place: Path) -> None:
    tested = [row for row in kept_of(run_of(place, "image-classification", "norm"))[1] if row["split"] == TESTED]
    wrong = [row for row in tested if row["label"] != row["prediction"]]
    assert wrong
    for row in tested:
        assert (row["image"] is not None) == (row in wrong)
    for row in wrong:
        small = Image.open(io.BytesIO(row["image"])).convert("RGB")
        whole = Image.open(place / "image-classification" / row["file"])
        assert small.size == whole.size
        assert np.abs(np.asarray(small, float) - np.asarray(whole, float)).max() < 12, "JPEG is not exact"


def test_several_tasks_have_a_file_each(place: Path) -> None:
    names = {"mood": "classification", "price": "regression"}
    fields = {name: dict(DATA[kind][1]) for name, kind in names.items()}
    fields["mood"].pop("template")
    given = {name: each | {"data": str(place / f"{names[name]}.jsonl")} for name, each in fields.items()}
    (place / "tasks.yaml").write_text(json.dumps(given))
    how: dict[str, Any] = {"max_steps": 3, "batch_size": 8, "evaluations": 1, "learning_rate": 0.05}
    spec = Spec(model=str(place / "encoder"), method="lora", **read(place / "tasks.yaml"), **how)
    run = tune(spec, place / "several", progress=False)
    assert set(run.predictions) == set(names)
    mood = [row for row in predictions.read(run.predictions["mood"]).to_pylist() if row["split"] == TESTED]
    assert np.mean([row["label"] == row["prediction"] for row in mood]) == run.metrics["test"]["mood/accuracy"]
    price = [row for row in predictions.read(run.predictions["price"]).to_pylist() if row["split"] == TESTED]
    mse = np.mean([(row["label"] - row["prediction"]) ** 2 for row in price])
    assert mse == pytest.approx(run.metrics["test"]["price/mse"], rel=1e-5)


def test_a_split_of_ones_own_and_dropped_rows_keep_their_numbers(place: Path, tmp_path: Path) -> None:
    lines = ["body,mood,split"]
    for i in range(60):
        mood = "" if i % 7 == 0 else ["good", "bad"][i % 2]
        lines.append(f"w{6 + i % 2} w{8 + i % 30},{mood},{('train', 'train', 'test', 'validation')[i % 4]}")
    (tmp_path / "own.csv").write_text("\n".join(lines) + "\n")
    how: dict[str, Any] = {"text": ("body",), "label": "mood", "max_steps": 2, "batch_size": 8}
    spec = Spec(model=str(place / "encoder"), data=str(tmp_path / "own.csv"), method="bias", **how)
    run = tune(spec, tmp_path / "runs", progress=False)
    _, rows = kept_of(run)
    for row in rows:
        body, mood, split = lines[row["row"]].split(",")
        assert (row["file"], row["split"]) == ("own.csv", split)
        assert row["label"] in (mood, None)
        assert body
    assert sorted(row["row"] for row in rows) == [i + 1 for i in range(60) if i % 4 > 1 and i % 7]


def test_a_damaged_file_is_said_and_an_old_run_has_none(place: Path, tmp_path: Path) -> None:
    run = load(Path(shutil.copytree(run_of(place, "classification", "norm").folder, tmp_path / "copy")))
    (path,) = run.predictions.values()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InlayError, match=r"damaged: predictions/classification\.parquet has"):
        inlay.load(run)
    with pytest.raises(InlayError, match="Cannot read"):
        predictions.read(path)
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(InlayError, match="no column 'split'"):
        predictions.read(path)
    old = Store(Path(__file__).parents[1] / "fixtures" / "old_project" / "finished").list()
    assert old
    assert all(run.predictions == {} for run in old)


def test_they_are_written_whole_or_not_at_all(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the file is written: nothing of it is left, and the same command ends the run."""
    write: Callable[..., None] = parquet.write_table

    def refuse(table: pa.Table, path: Path, **how: Any) -> None:
        path.write_bytes(b"PAR1 half")
        raise OSError(28, os.strerror(28), str(path))

    spec = run_of(place, "classification", "norm").spec
    monkeypatch.setattr(parquet, "write_table", refuse)
    with pytest.raises(InlayError, match="No room to write"):
        tune(spec, tmp_path / "runs", progress=False)
    (run,) = Store(tmp_path / "runs").list()
    assert (run.status, run.predictions) == ("interrupted", {})
    monkeypatch.setattr(parquet, "write_table", write)
    done = tune(spec, tmp_path / "runs", progress=False)
    assert done.id == run.id
    assert len(kept_of(done)[1]) == sum(done.record["examples"][split] for split in (TESTED, HELD))


def test_a_run_that_comes_home_from_elsewhere_brings_them(place: Path, tmp_path: Path) -> None:
    run = run_of(place, "classification", "norm")
    home = tmp_path / run.id
    home.mkdir()
    unpack(finished(run.folder), home)
    load(home).verify()
    assert kept_of(load(home)) == kept_of(run)


def test_a_kind_that_nobody_described_is_kept_as_json(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay import tasks
    from inlay.tasks.schema import TaskSchema

    task = tasks.load(run_of(place, "classification", "norm").spec)
    outputs = np.eye(3)[np.asarray(task.test["label"])]
    monkeypatch.delitem(kept.OF, "class")
    monkeypatch.setattr(TaskSchema, "decode", lambda schema, outputs, inputs: [{"both": [1, "ä"]} for _ in outputs])
    table = kept.keep(task, None, outputs)
    assert table is not None
    (first, *_) = table.to_pylist()
    assert json.loads(first["prediction"]) == {"both": [1, "ä"]}
    assert json.loads(first["label"]) == task.test["label"][0]


def test_many_classes_keep_the_probability_of_the_prediction_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay import tasks

    task = tasks.load(run_of(place, "classification", "norm").spec)
    monkeypatch.setattr(kept, "MOST_SHARES", 3 * len(task.test) - 1)
    table = kept.keep(task, None, np.eye(3)[np.asarray(task.test["label"])])
    assert table is not None
    assert "probabilities" not in table.column_names
    assert set(table.column_names) >= {"file", "row", "split", "label", "prediction", "score"}


def test_conversations_that_a_template_refuses_shift_no_other_row(tmp_path: Path) -> None:
    """Gemma's template has no system message: such a row is left out, and the others keep their texts and numbers."""
    from chat_templates import FAMILIES
    from inlay import tasks

    rows = []
    for i in range(20):
        talk = [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "Paris"}]
        rows.append({"messages": [{"role": "system", "content": "be kind"}, *talk] if i % 3 == 1 else talk})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tasks.load(
        Spec(model="m", data=str(tmp_path / "chats.jsonl"), method="lora", test_data=str(tmp_path / "chats.jsonl"))
    )
    encoded = task.encode("test", FAMILIES["gemma"](), 256)
    assert len(encoded) < len(task.test)
    outputs = np.asarray([[float(i), 2.0, 0.0] for i in range(len(encoded))])
    table = kept.keep(task, encoded, outputs)
    assert table is not None
    tested = [row for row in table.to_pylist() if row["split"] == TESTED]
    assert [row["row"] for row in tested] == [i + 1 for i in range(20) if i % 3 != 1]
    assert [row["text"] for row in tested] == [f"what is {i}?" for i in range(20) if i % 3 != 1]
    assert [row["loss"] for row in tested] == [i / 2 for i in range(len(encoded))]
