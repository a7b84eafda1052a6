"""Raw runs as Parquet, read back by pandas."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pandas
import pyarrow.parquet as parquet
import pytest

from inlay import Spec
from inlay.errors import InlayError
from inlay.report.collect import collect
from inlay.report.raw_runs import COLUMNS, write_parquet
from recorded import failed, finished, spec_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "runs.md"


@pytest.fixture
def written(tmp_path: Path) -> pandas.DataFrame:
    """Two learning rates of a method, another task with another metric on a model of somebody's disk, a failure."""
    runs = tmp_path / "runs"
    for seed in range(2):
        finished(runs, spec_of("lora", seed, settings={"r": 4}), 0.7, metrics__validation__accuracy=0.8)
        finished(runs, spec_of("lora", seed, learning_rate=0.1), 0.9, metrics__validation__accuracy=0.2)
    metrics = {"test": {"perplexity": 12.5}, "validation": {"perplexity": 13.0}}
    model = "/home/alice/secret/gpt"
    finished(runs, spec_of("bias", task="wikitext2", model=model), metric="perplexity", metrics=metrics)
    failed(runs, spec_of("full"), f"{model} is not there")
    write_parquet(collect(runs), tmp_path / "deep" / "runs.parquet")
    return pandas.read_parquet(tmp_path / "deep" / "runs.parquet")


def test_a_row_a_run_with_all_that_is_known(written: pandas.DataFrame) -> None:
    """Every field of the spec, metrics by their names, cost, versions; what a run has not is empty."""
    assert len(written) == 6
    assert {each.name for each in fields(Spec)} | set(COLUMNS) <= set(written)
    first = written[(written.method == "lora") & (written.seed == 0) & written.chosen.eq(True)].iloc[0]
    assert (first.test, first.validation, first.test_accuracy, first.greater_is_better) == (0.7, 0.8, 0.7, True)
    assert (first.learning_rate, json.loads(first.settings)) == (0.001, {"r": 4})
    assert (first.parameters_trained, first.saved_bytes, first.peak_memory_bytes) == (1000, 4096, 5 * 2**20)
    assert (first.examples_train, first.examples_test, first.steps) == (100, 50, 30)
    assert (first.family, first.task_kind, first.reads) == ("low-rank", "image-classification", "images")
    assert first.version_torch == "2.13.0"
    assert shlex.split(first.command)[:2] == ["inlay", "tune"]
    other = written[written.task == "wikitext2"].iloc[0]
    assert (other.test, other.test_perplexity, other.greater_is_better) == (12.5, 12.5, False)
    assert pandas.isna(other.test_accuracy)
    lost = written[written.status == "failed"].iloc[0]
    assert (lost.method, lost.error, lost.family) == ("full", "gpt is not there", "whole model")
    assert pandas.isna(lost.test)
    assert pandas.isna(lost.chosen)


def test_chosen_is_what_validation_selected(written: pandas.DataFrame) -> None:
    rates = written[written.method == "lora"].groupby("learning_rate").chosen.all().to_dict()
    assert rates == {0.001: True, 0.1: False}


def test_types_do_not_depend_on_the_values(written: pandas.DataFrame, tmp_path: Path) -> None:
    """A column without any value has the type that it would have with some, so that files can be joined."""
    schema = parquet.read_schema(tmp_path / "deep" / "runs.parquet")
    assert {name: str(schema.field(name).type) for name in ("max_steps", "early_stopping", "epochs", "revision")} == {
        "max_steps": "int64",
        "early_stopping": "int64",
        "epochs": "double",
        "revision": "string",
    }
    assert "null" not in {str(each.type) for each in schema}
    assert not written.empty


def test_no_path_of_its_maker(written: pandas.DataFrame, tmp_path: Path) -> None:
    assert set(written[written.task == "wikitext2"].model) == {"gpt"}
    told = written.to_csv()
    assert "secret" not in told
    assert str(tmp_path) not in told


def test_no_path_with_blanks_and_none_in_an_error(tmp_path: Path) -> None:
    """Paths of several tasks' data, a path after a colon, a file's URL; a page on the web is no path."""
    runs = tmp_path / "runs"
    home = "/home/jane doe/secret corp"
    finished(runs, spec_of(task=None, data=f"{home}/x.csv", text=("a",), label="b"))
    known = {"source": "nowhere", "digest": "d" * 64, "notes": [], "metric": "accuracy"}
    fields = {
        "reviews": {"data": "/home/jane doe/deep place/r.csv", "label": "s"},
        "spam": {"data": "/home/jane/secret/s.csv", "label": "s"},
    }
    metrics = {"test": {"average": 0.5}, "validation": {"average": 0.5}}
    spec = spec_of(task=None, tasks=tuple(fields), task_fields=fields)
    finished(runs, spec, metric="average", metrics=metrics, tasks=dict.fromkeys(fields, known))
    error = f"OSError:{home}/z.csv, see file:///home/jane/secret/log, file://{home}/x.csv, OSError:/home/jane/secret/y"
    failed(runs, spec_of("full"), f"{error} and https://example.org/home/page")
    write_parquet(collect(runs), tmp_path / "o.parquet")
    read = pandas.read_parquet(tmp_path / "o.parquet")
    told = read.to_csv()
    assert not [word for word in ("jane", "doe", "secret", "corp", "deep", "place/") if word in told]
    several = read[read.task_fields.fillna("").str.contains("reviews")].iloc[0]
    assert {name: each["data"] for name, each in json.loads(several.task_fields).items()} == {
        "reviews": "r.csv",
        "spam": "s.csv",
    }
    (lost,) = read[read.status == "failed"].error
    assert lost == "OSError:z.csv, see log, x.csv, OSError:y and https://example.org/home/page"


def test_the_columns_are_described(written: pandas.DataFrame, tmp_path: Path) -> None:
    """In the file, all of them; and in the docs."""
    schema = parquet.read_schema(tmp_path / "deep" / "runs.parquet")
    told = json.loads(schema.metadata[b"inlay_columns"])
    assert list(told) == schema.names == list(written)
    page = DOCS.read_text(encoding="utf-8")
    for name, (_, about) in COLUMNS.items():
        assert f"| `{name}` | {about} |" in page


def test_the_command(tmp_path: Path, typed: Callable[..., tuple[int, str, str]]) -> None:
    finished(tmp_path / "runs", spec_of())
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "spec.json").write_text("{")
    status, _, said = typed("runs", "export")
    assert status == 0
    assert "1 run in runs.parquet" in said
    assert "left out: " in said
    assert len(pandas.read_parquet(tmp_path / "runs.parquet")) == 1
    for given, message in (
        (("nowhere",), "'nowhere' is not there"),
        (("--output", "runs.csv"), "'runs.csv' does not end in .parquet: say --output runs.parquet."),
        (("--output", "runs"), "'runs' is a folder: give the name of a file in it, such as runs/runs.parquet."),
    ):
        status, _, said = typed("runs", "export", *given)
        assert (status, message in said) == (2, True), said
    with pytest.raises(InlayError, match=r"does not end in \.parquet"):
        write_parquet(collect(tmp_path / "runs"), tmp_path / "x.txt")
