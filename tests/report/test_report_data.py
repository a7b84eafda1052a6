"""What a report says of a folder of runs: rows, verdicts, warnings, tables for other programs, refusals."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inlay.errors import InlayError
from inlay.records.store import Run, Store
from inlay.report import explanations, exports
from inlay.report.charts import drawing as charts
from inlay.report.collect import collect, curve
from inlay.report.comparable import warnings
from inlay.report.html import write_report
from inlay.workflow.comparison import rows_of, select
from inlay.workflow.statistics import half_width
from recorded import RECORD, failed, finished, spec_of

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def read(page: Path) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def titles(folder: Path) -> dict[str, str]:
    """The warnings about a folder, by title."""
    return {warning.title: warning.text for warning in warnings(collect(folder))}


def test_rows_are_over_seeds_alone(tmp_path: Path) -> None:
    """Runs that differ in more than the seed are never averaged; variants are named by what differs."""
    for seed, value in enumerate((0.5, 0.6, 0.7)):
        finished(tmp_path, spec_of("lora", seed), value)
        finished(tmp_path, spec_of("lora", seed, learning_rate=0.01, settings={"r": 4}), value + 0.1)
    found = collect(tmp_path)
    assert [(row.label, len(row.results)) for row in found.rows] == [
        ("lora (learning rate 0.01, r 4)", 3),
        ("lora (learning rate 0.001, r default)", 3),
    ]
    assert found.rows[1].mean == pytest.approx(0.6)
    assert found.rows[1].interval == pytest.approx(half_width([0.5, 0.6, 0.7]))


def test_variants_are_chosen_by_validation(tmp_path: Path) -> None:
    """The variant with the better validation is the chosen one, though the other is better on test."""
    for seed in range(3):
        finished(tmp_path, spec_of("lora", seed), 0.9, metrics__validation__accuracy=0.1)
        finished(tmp_path, spec_of("lora", seed, learning_rate=0.01), 0.2, metrics__validation__accuracy=0.3)
        finished(tmp_path, spec_of("bias", seed), 0.5 + 0.01 * seed)
    found = collect(tmp_path)
    assert [row.spec.learning_rate for row in found.rows if row.spec.method == "lora" and row.chosen] == [0.01]
    assert [row.spec.method for row in found.rows if row.best] == ["bias"]
    assert "flatters" in titles(tmp_path)["Several variants of a method"]


def test_verdicts(tmp_path: Path) -> None:
    """Beside the best row: clearly worse, not distinguishable, too few seeds."""
    noise = (0.0, 0.01, -0.02, 0.015, -0.005)
    for seed, more in enumerate(noise):
        finished(tmp_path, spec_of("lora", seed), 0.9 + more)
        finished(tmp_path, spec_of("bias", seed), 0.5 - more)
        finished(tmp_path, spec_of("norm", seed), 0.9 - more)
    finished(tmp_path, spec_of("ssf", 0), 0.8)
    found = {row.spec.method: row for row in collect(tmp_path).rows}
    assert found["lora"].best
    assert {name: row.verdict for name, row in found.items()} == {
        "lora": None,
        "bias": "worse",
        "norm": "not distinguishable",
        "ssf": "too few seeds",
    }
    (said,) = read(write_report(tmp_path, tmp_path / "r.html"))["findings"]
    assert "lora has the best test accuracy" in said
    assert "No significant difference from it: norm." in said
    assert "Too few seeds to compare with it: ssf." in said


def test_lower_is_better(tmp_path: Path) -> None:
    """An error is best when it is small."""
    for method, value in (("bias", 0.4), ("lora", 0.2)):
        finished(
            tmp_path, spec_of(method), metric="mse", metrics={"test": {"mse": value}, "validation": {"mse": value}}
        )
    assert [row.spec.method for row in collect(tmp_path).rows] == ["lora", "bias"]


def joint(folder: Path, rate: float, metric: str, value: float, validation: float, **more: Any) -> Run:
    """A run of two tasks that are both scored by this metric; `value` is its average on test."""
    spec = spec_of("multi-lora", task=None, tasks=("one", "two"), learning_rate=rate)
    splits = {"test": value, "validation": validation}
    metrics = {name: {"average": v, f"one/{metric}": v + 1, f"two/{metric}": v - 1} for name, v in splits.items()}
    known = {"source": "nowhere", "digest": "d" * 64, "notes": [], "metric": metric}
    return finished(folder, spec, metric="average", metrics=metrics, tasks=dict.fromkeys(("one", "two"), known), **more)


@pytest.mark.parametrize("recorded", [True, False])  # False: a run from before the direction was on record
@pytest.mark.parametrize(("metric", "up"), [("perplexity", False), ("accuracy", True)])
def test_an_average_over_tasks_improves_as_their_metrics_do(
    tmp_path: Path, metric: str, up: bool, recorded: bool
) -> None:
    """Of two rates the one with the better validation is chosen, and the better test value stands first."""
    more = {"greater_is_better": up} if recorded else {}
    runs = [
        joint(tmp_path, 0.1, metric, 8.0, 9.0, **more),
        joint(tmp_path, 0.2, metric, 6.0, 7.0, **more),
    ]
    found = collect(tmp_path)
    assert [row.mean for row in found.rows] == ([8.0, 6.0] if up else [6.0, 8.0])
    assert [row.spec.learning_rate for row in found.rows if row.chosen] == [0.1 if up else 0.2]
    (page,) = read(write_report(tmp_path, tmp_path / "r.html"))["sets"]
    assert page["greater"] == up
    assert page["metric"] == ("average" if up else "average (less is better)")
    chosen, tried = select([(run.spec, run) for run in runs])
    assert chosen == [runs[0 if up else 1]]
    assert [each.validation for each in tried] == [9.0, 7.0]
    assert rows_of(chosen)[0].greater_is_better == up


def test_written_texts_are_followed_by_their_loss(tmp_path: Path) -> None:
    """A metric that only the test split has: variants are chosen by the smaller validation loss."""
    runs = []
    for rate, loss in ((0.1, 2.0), (0.2, 1.0)):
        metrics = {"test": {"bleu": 10 * loss}, "validation": {"loss": loss}}
        runs.append(finished(tmp_path, spec_of("lora", learning_rate=rate), metric="bleu", metrics=metrics))
    assert [row.spec.learning_rate for row in collect(tmp_path).rows if row.chosen] == [0.2]
    assert select([(run.spec, run) for run in runs])[0] == runs[1:]


def pair(folder: Path, second: int = 1, fields: dict[str, Any] | None = None, **changes: Any) -> None:
    """Two methods with two seeds each; the second method's runs differ in `fields` and `changes`."""
    for seed in (0, 1):
        finished(folder, spec_of("bias", seed))
    for seed in (0, second):
        finished(folder, spec_of("lora", seed, **(fields or {})), **changes)


@pytest.mark.parametrize(
    ("title", "differing"),
    [
        (None, {}),
        ("Not the same training", {"fields": {"epochs": 9}}),
        ("Not the same data", {"task__digest": "e" * 64}),
        ("Not the same test set", {"examples__test": 49}),
        ("Not the same frozen weights", {"backbone__fingerprint": "e" * 64}),
        ("Not the same versions", {"versions__torch": "2.12.0"}),
        ("Not the same commit", {"versions__commit": "abc+"}),
        ("Not the same hardware", {"versions__cpu": "another one"}),
        ("Cached and uncached epochs", {"portrait__trunk": {"cached": True, "first_epoch_seconds": 1.0}}),
        ("2 separate comparisons", {"fields": {"shots": 10}}),
        ("Seeds", {"second": 5}),
    ],
)
def test_what_is_not_comparable(tmp_path: Path, title: str | None, differing: dict[str, Any]) -> None:
    """Each difference between two methods' runs is said, and only that one; of like runs nothing is."""
    pair(tmp_path, **differing)
    assert set(titles(tmp_path)) == ({title} if title else set())


def test_no_test_split(tmp_path: Path) -> None:
    """Numbers on the split that was selected on are called that."""
    for seed in (0, 1):
        finished(tmp_path, spec_of("bias", seed), metrics={"validation": {"accuracy": 0.5}})
    assert collect(tmp_path).sets[0].split == "validation"
    assert set(titles(tmp_path)) == {"Numbers from the split that was selected on"}


def test_resumed_and_long_curves() -> None:
    """A step that was made twice counts once, the later entry; long curves are thinned, their ends kept."""
    twice = [
        {"epoch": 1, "loss": 9.0},
        {"epoch": 2, "loss": 5.0},
        {"epoch": 1, "loss": 3.0},
        {"epoch": 3, "loss": float("nan")},
    ]
    assert curve(twice, "accuracy") == {"loss": [[1.0, 2.0], [3.0, 5.0]]}
    xs, ys = curve([{"epoch": step, "loss": 1 / (step + 1)} for step in range(1000)], "accuracy")["loss"]
    assert len(xs) == len(ys) <= 42
    assert (xs[0], xs[-1]) == (0, 999)


def test_damaged_and_failed_runs_are_shown(tmp_path: Path) -> None:
    """A record that was edited, one that is cut short, one of a newer inlay and a failed run: all said, no crash."""
    for seed in range(5):
        finished(tmp_path, spec_of("bias", seed))
    edited, short, newer, *_ = (run.folder for run in Store(tmp_path).list())
    (edited / "record.json").write_text((edited / "record.json").read_text().replace("0.7", "0.9"))
    (short / "record.json").write_text((short / "record.json").read_text()[:200])
    (newer / "spec.json").write_text((newer / "spec.json").read_text().replace('"format": 1', '"format": 99'))
    hollow = {name: value for name, value in RECORD.items() if name != "portrait"}
    spec = spec_of("norm")
    with Store(tmp_path).open(spec, spec.digest()) as run:
        run.finish(hollow)
    failed(tmp_path, spec_of("lora"), NASTY)
    data = read(write_report(tmp_path, tmp_path / "out" / "r.html"))
    assert len(data["runs"]) == 2
    assert [(run["status"], run["error"]) for run in data["unfinished"]] == [("failed", NASTY)]
    told = " ".join(data["damaged"])
    assert len(data["damaged"]) == 4
    for what in ("was changed after", "not JSON", "newer inlay", "lacks what a result has"):
        assert what in told
    assert "1 without a result and 4 unreadable" in titles(tmp_path)["Runs are missing"]


def test_nothing_a_spec_says_becomes_markup(tmp_path: Path) -> None:
    """The only script elements are the page's own; the data hold the words as they are."""
    finished(tmp_path / "runs", spec_of("bias", task=NASTY))
    page = write_report(tmp_path / "runs", tmp_path / "r.html")
    text = page.read_text()
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert NASTY not in text
    assert read(page)["sets"][0]["task"] == NASTY


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    """No address of anything outside, and a policy that would refuse it."""
    finished(tmp_path, spec_of())
    text = write_report(tmp_path, tmp_path / "r.html").read_text()
    assert "default-src 'none'" in text
    assert "unsafe" not in text
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:script|img|iframe)[^>]+src=|@import|url\(", text)


def test_given_runs_and_their_order(tmp_path: Path) -> None:
    """Runs may be given in place of a folder, as `compare` does; the commands name a folder that is not the default."""
    runs = [finished(tmp_path, spec_of("bias", seed)) for seed in (1, 0)]
    data = read(write_report(runs, tmp_path / "r.html"))
    assert [data["runs"][number]["seed"] for number in data["rows"][0]["runs"]] == [0, 1]
    assert data["runs"][0]["command"].startswith("inlay tune --model embedded:vit --task digits --method bias --seed 1")


def test_explanations(tmp_path: Path) -> None:
    """Those among the runs and, of the same task, those beside; a damaged one is said."""
    runs = tmp_path / "runs"
    finished(runs, spec_of())
    facts = {"what": "layers", "sentence": "Layer 3 is best.", "command": ["inlay", "explain", "layers"]}

    def explain(folder: Path, task: str) -> None:
        charts.keep(
            folder,
            "layers",
            charts.blank(),
            ("layer", "test"),
            [(1, 0.5), (3, None)],
            facts | {"spec": spec_of(task=task).to_json()},
        )

    explain(runs / "inside", "digits")
    explain(tmp_path / "explain" / "beside", "digits")
    explain(tmp_path / "explain" / "other", "rte")
    explain(tmp_path / "explain" / "broken", "digits")
    (tmp_path / "explain" / "broken" / "layers.csv").unlink()
    data = read(write_report(runs, tmp_path / "r.html"))
    assert [each["sentence"] for each in data["explanations"]] == ["Layer 3 is best."] * 2
    assert data["explanations"][0]["rows"] == [["1", "0.5"], ["3", ""]]
    assert data["explanations"][0]["picture"].startswith("data:image/")
    assert ["broken" in text for text in data["damaged"]] == [True]
    data = read(write_report(runs, tmp_path / "r.html", [tmp_path / "explain" / "other"]))
    assert [each["subject"] for each in data["explanations"]] == ["rte · embedded:vit · bias"]
    with pytest.raises(InlayError, match="nowhere"):
        explanations.read([tmp_path / "nowhere"])


def test_tables_for_other_programs(tmp_path: Path) -> None:
    """CSV has a line a run, failed ones too; Markdown and LaTeX a row over seeds, with whatever is in names escaped."""
    for seed, value in enumerate((0.25, 0.75)):
        finished(tmp_path / "runs", spec_of("bias", seed, data="a|b_%.csv", task=None), value)
    failed(tmp_path / "runs", spec_of("lora", data="a|b_%.csv", task=None), "two\nlines")
    found = collect(tmp_path / "runs")
    lines = list(csv.DictReader(exports.write_csv(found, tmp_path / "t.csv").open(newline="")))
    assert [(line["run"][:4], line["status"], line["test accuracy"]) for line in lines] == [
        ("a-b-", "finished", "0.25"),
        ("a-b-", "finished", "0.75"),
        ("a-b-", "failed", ""),
    ]
    assert lines[2]["error"] == "two\nlines"
    marked = exports.write_markdown(found, tmp_path / "t.md").read_text()
    assert marked.startswith(r"### a\|b\_%.csv")
    assert "| bias | 0.5000 ± 3.1766 | 2 | 1,000 | 5 | 10 |" in marked
    latex = exports.write_latex(found, tmp_path / "t.tex").read_text()
    assert r"bias & 0.5000 $\pm$ 3.1766 & 2 & 1,000 & 5 & 10 \\" in latex
    assert exports._escape_latex(r"a_b & 5 % \x") == r"a\_b \& 5 \% \textbackslash{}x"


def test_tables_for_other_programs_mark_the_chosen_variant(tmp_path: Path) -> None:
    """As the page does: of two rates the one that validation prefers, though the other is better on the test."""
    for rate, value, validation in ((0.1, 0.9, 0.2), (0.2, 0.5, 0.8)):
        finished(
            tmp_path / "runs", spec_of("lora", learning_rate=rate), value, metrics__validation__accuracy=validation
        )
    finished(tmp_path / "runs", spec_of("bias"), 0.4)
    found = collect(tmp_path / "runs")
    for table in (exports.write_markdown(found, tmp_path / "t.md"), exports.write_latex(found, tmp_path / "t.tex")):
        text = table.read_text()
        assert text.count("chosen") == 1
        assert "lora (learning rate 0.2), chosen" in text


def test_text_that_a_spreadsheet_would_run_is_quoted(tmp_path: Path) -> None:
    finished(tmp_path / "runs", spec_of("bias", label="=1+1", data="a.csv", task=None), -0.5)
    (line,) = csv.DictReader(exports.write_csv(collect(tmp_path / "runs"), tmp_path / "t.csv").open(newline=""))
    assert line["label"] == "'=1+1"
    assert line["test accuracy"] == "-0.5", "a number stays one"


def test_paths_are_cut_to_what_tells_them_apart(tmp_path: Path) -> None:
    """Two models of the same name in other folders stay two; no folder of their maker is told, in no field."""
    secret = "/home/alice/secret plans"
    for place in ("old", "new"):
        for seed in range(2):
            spec = spec_of("bias", seed, model=f"{secret}/{place}/model", data=f"{secret}/rows.csv", task=None)
            finished(tmp_path, spec, backbone__source=f"{secret}/{place}/model")
    failed(tmp_path, spec.with_(method="lora"), f"No room to write {tmp_path}/runs/x and https://a.b/c/d or and/or.")
    page = write_report(tmp_path, tmp_path / "r.html")
    data = read(page)
    assert [each["label"] for each in data["sets"]] == [
        f"rows.csv · {place}/model · all examples" for place in ("old", "new")
    ]
    assert "--model 'new/model'" in data["runs"][2]["command"]
    assert data["unfinished"][0]["error"] == "No room to write x and https://a.b/c/d or and/or."
    assert data["cut"]
    for hidden in ("alice", "secret", str(tmp_path)):
        assert hidden not in page.read_text()
    assert "secret" not in exports.write_markdown(collect(tmp_path), tmp_path / "t.md").read_text()


def test_a_variant_that_fails_is_not_chosen(tmp_path: Path) -> None:
    """However well its other seeds did: the page and `inlay compare` choose alike."""
    for seed in range(2):
        finished(tmp_path, spec_of("lora", seed), metrics__validation__accuracy=0.5)
    finished(tmp_path, spec_of("lora", 0, learning_rate=0.1), metrics__validation__accuracy=0.9)
    failed(tmp_path, spec_of("lora", 1, learning_rate=0.1), "the loss is not finite")
    assert [row.spec.learning_rate for row in collect(tmp_path).rows if row.chosen] == [0.001]


# ------------------------------------------------------------------------------------------------------ at the terminal


def test_the_command(tmp_path: Path, typed: Callable[..., tuple[int, str, str]]) -> None:
    """`inlay report` writes all that is asked for and says so."""
    finished(tmp_path / "runs", spec_of())
    failed(tmp_path / "runs", spec_of("lora"), "no")
    status, _, said = typed("report", "runs", "--csv", "a.csv", "--latex", "a.tex", "--markdown", "a.md")
    assert status == 0, said
    assert "1 run in report.html" in said
    assert "1 without a result" in said
    assert all((tmp_path / name).stat().st_size for name in ("report.html", "a.csv", "a.tex", "a.md"))
    assert [line["command"] for line in read(tmp_path / "report.html")["unfinished"]] == [
        "inlay tune --model embedded:vit --task digits --method lora --seed 0 --learning-rate 0.001"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is not there: give a folder of runs"),
        (["empty"], "No runs in 'empty'. `inlay tune`"),
        (["good", "--against", "empty"], "No runs in 'empty'. `inlay tune`"),
        (["unfinished"], "No finished run in 'unfinished'"),
        (["good", "--out", "empty"], "'empty' is a folder: give the name of a file in it, such as empty/report.html."),
        (["good", "--out", "page.txt"], "'page.txt' does not end in .html or .htm"),
        (["good", "--csv", "empty"], "'empty' is a folder"),
        (["good", "--latex", "table.doc"], "does not end in .tex"),
        (["good", "--explain", "nowhere"], "'nowhere' is no folder: --explain"),
        (["good", "--out", "/sys/report.html"], "No permission to write /sys/report.html. Choose a folder of your own"),
        (["good", "--out", "file/report.html"], "Cannot write file/report.html"),
    ],
)
def test_refusals(
    tmp_path: Path, typed: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    """One line that says what is wrong and what to do; and nothing is left half-written."""
    finished(tmp_path / "good", spec_of())
    failed(tmp_path / "unfinished", spec_of(), "the disk was full")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(path.name for path in tmp_path.iterdir())
    status, _, said = typed("report", *arguments)
    assert status == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_real_run(review_spec: Any, tmp_path: Path) -> None:
    """A record that `tune` wrote has what the report reads, and no less than the records of these tests."""
    from inlay.workflow.tune import tune

    run = tune(review_spec, tmp_path / "runs", progress=False)
    assert RECORD.keys() <= run.record.keys()
    assert RECORD["portrait"].keys() <= run.portrait.keys()
    data = read(write_report(tmp_path / "runs", tmp_path / "r.html"))
    assert data["rows"][0]["mean"] == run.metrics["test"][run.record["metric"]]
    assert data["rows"][0]["trained"] == run.portrait["parameters"]["trained"]
    assert data["runs"][0]["curve"]["loss"]
    assert not data["damaged"]
