"""Kinds of labels beside one class and one value, from a file to a run, its predictions, its scores and a service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from PIL import Image

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec
from inlay.records.store import Run
from inlay.training import Interrupted
from inlay.workflow.answer import Tasks
from inlay.workflow.export import export
from inlay.workflow.notes import silent

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = ["cat", "dog"]
SPLITS = ["train"] * 7 + ["validation"] * 2 + ["test"] * 2

# What a row has beside its text or image, the options, and the names of what is predicted.
KINDS: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any], set[str]]] = {
    "multi-label": (
        lambda i: {"label": [name for k, name in enumerate(NAMES) if (i >> k) & 1]},
        {"label": "label"},
        {"labels", "scores"},
    ),
    "soft-labels": (
        lambda i: {"cat": 0.1 * (i % 11), "dog": 1 - 0.1 * (i % 11)},
        {"label": "cat,dog"},
        {"label", "score"},
    ),
    "ordinal": (
        lambda i: {"label": ("low", "mid", "high", "top")[i % 4]},
        {"label": "label", "classes": ("low", "mid", "high", "top")},
        {"label", "score"},
    ),
    "multi-regression": (
        lambda i: {"price": 10.0 + i % 9, "size": 0.5 * (i % 7)},
        {"label": "price,size"},
        {"values"},
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    zoo.tiny("bert", "base")[0].save_pretrained(folder / "text-model")
    write_tokenizer(folder / "text-model")
    zoo.tiny("vit", "base")[0].save_pretrained(folder / "image-model")
    for i in range(66):
        Image.new("RGB", (40, 50), (60 * (i % 4), 9 * (i % 20), 40)).save(folder / f"{i}.png")
    inputs: dict[str, Callable[[int], dict[str, Any]]] = {
        "text": lambda i: {"body": f"w{6 + i % 4} w{8 + i % 20}"},
        "image": lambda i: {"image": f"{i}.png"},
    }
    for kind, (row, _, _) in KINDS.items():
        for of, given in inputs.items():
            rows = [{"split": SPLITS[i % 11], **given(i), **row(i)} for i in range(66)]
            (folder / f"{kind}-{of}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def spec_of(place: Path, kind: str, of: str, **changes: Any) -> Spec:
    how: dict[str, Any] = {"max_steps": 8, "batch_size": 8, "learning_rate": 0.02, "method": "lora", "kind": kind}
    columns = {"text": ("body",)} if of == "text" else {"image": "image"}
    data = str(place / f"{kind}-{of}.jsonl")
    return Spec(model=str(place / f"{of}-model"), data=data, **columns, **{**how, **KINDS[kind][1], **changes})


def run_of(place: Path, kind: str, of: str, **changes: Any) -> Run:
    return inlay.tune(spec_of(place, kind, of, **changes), place / "runs", progress=False, say=silent)


@pytest.mark.parametrize("of", ["text", "image"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_trained_found_asked_and_scored(place: Path, kind: str, of: str) -> None:
    run = run_of(place, kind, of)
    assert run.record["metrics"]["test"].keys() > {"loss", run.record["metric"]}
    assert run_of(place, kind, of).id == run.id, "found, not repeated"
    loaded = inlay.load(run)
    again = loaded.evaluate(spec_of(place, kind, of).data)
    assert again.examples == 12
    assert again.metrics == pytest.approx(run.record["metrics"]["test"], abs=1e-6)
    asked: list[Any] = [{"body": "w6 w9"}, {"body": "w7 w8 w9"}]
    if of == "image":
        asked = [{"image": str(place / f"{i}.png")} for i in (1, 2)]
    answers = loaded.predict(asked)
    assert [set(answer) - set(asked[0]) for answer in answers] == [KINDS[kind][2]] * 2
    assert json.loads(json.dumps(answers)) == answers


@pytest.mark.parametrize("of", ["text", "image"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_tested_rows_is_what_the_run_says_of_them(place: Path, kind: str, of: str) -> None:
    run = run_of(place, kind, of)
    (path,) = run.predictions.values()
    tested = [row for row in parquet.read_table(path).to_pylist() if row["split"] == "test"]
    assert len(tested) == 12
    lines = [json.loads(line) for line in (place / f"{kind}-{of}.jsonl").read_text().splitlines()]
    asked = [lines[row["row"] - 1] for row in tested]
    several = {"soft-labels": ("cat", "dog"), "multi-regression": ("price", "size")}.get(kind)
    truth = [[row[name] for name in several] if several else row["label"] for row in asked]
    assert [row["label"] for row in tested] == truth
    given = [{"image": str(place / row["image"])} for row in asked] if of == "image" else [row["body"] for row in asked]
    loaded = inlay.load(run)
    if kind == "multi-regression":
        with pytest.raises(InlayError, match="probabilities are those of a row's classes"):
            loaded.predict(given, probabilities=True)
        for row, answer in zip(tested, loaded.predict(given), strict=True):
            assert row["prediction"] == pytest.approx(list(answer["values"].values()), abs=1e-4)
        return
    for row, answer in zip(tested, loaded.predict(given, probabilities=True), strict=True):
        assert row["prediction"] == (answer["labels"] if kind == "multi-label" else answer["label"])
        assert row["probabilities"] == pytest.approx(list(answer["probabilities"].values()), abs=1e-5)
        if kind != "soft-labels":
            assert (row.get(of) is not None) == (sorted(row["label"]) != sorted(row["prediction"]))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_another_run_answers_beside_it(place: Path, kind: str) -> None:
    """Runs of one method are joined and served together, and answer as each by itself."""
    one, other = run_of(place, kind, "text"), run_of(place, "multi-label", "text", seed=1)
    names = [f"{kind.replace('-', '_')}_text=one", "multi_label_text=other"]
    joined = export([one.folder, other.folder], names, place / f"joined-{kind}", to="tasks", say=silent)
    tasks = Tasks(joined)
    asked = [{"task": name, "body": text} for text in ("w6 w9", "w7 w8 w9") for name in ("one", "other")]
    found = tasks.answer([tasks.request(each) for each in asked])
    for run, name in ((one, "one"), (other, "other")):
        own = inlay.load(run).predict(["w6 w9", "w7 w8 w9"])
        mine = [answer for answer in found if answer["task"] == name]
        for answer, wanted in zip(mine, own, strict=True):
            for key in KINDS[kind if name == "one" else "multi-label"][2]:
                assert answer[key] == pytest.approx(wanted[key], abs=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "classes" not in KINDS[kind][1]])
def test_tasks_of_these_kinds_are_trained_alone(place: Path, kind: str) -> None:
    entry = {"data": str(place / f"{kind}-text.jsonl"), "text": ["body"], "kind": kind, **KINDS[kind][1]}
    spec = Spec(model=str(place / "text-model"), method="lora", tasks=("a", "b"), task_fields={"a": entry, "b": entry})
    with pytest.raises(InlayError, match=r"trained each in a run of its own: a \("):
        inlay.tune(spec, place / "none", progress=False, say=silent)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(place: Path, kind: str) -> None:
    whole, asked = run_of(place, kind, "text"), [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] > 5

    spec = spec_of(place, kind, "text")
    with pytest.raises(Interrupted):
        inlay.tune(spec, place / "cut", progress=False, say=silent, stop=stop)
    resumed = inlay.tune(spec, place / "cut", progress=False, say=silent)
    assert resumed.record["resumed_from"] is not None
    assert resumed.record["metrics"] == whole.record["metrics"]
    assert resumed.record["task"]["schema"] == whole.record["task"]["schema"]


def test_thresholds_are_kept_with_the_run(place: Path) -> None:
    run = run_of(place, "multi-label", "text")
    thresholds = run.record["task"]["schema"]["thresholds"]
    assert len(thresholds) == 2
    assert any(
        note.startswith("thresholds, chosen on 12 validation rows: cat ") for note in run.record["task"]["notes"]
    )
    assert inlay.load(run).schema.thresholds == tuple(thresholds)
    (answer,) = inlay.load(run).predict(["w6 w9"], probabilities=True, top_k=1)
    chosen = {n for n, at in zip(NAMES, thresholds, strict=True) if answer["probabilities"][n] >= at}
    assert set(answer["labels"]) == chosen
    assert answer["top_k"][0]["score"] == max(answer["probabilities"].values())
