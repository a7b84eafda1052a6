"""compare: choices, budgets, failures, resuming, bad input; and several processes on one folder."""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import together

from inlay import InlayError, Spec, compare, tune
from inlay.cli.show import conclusions
from inlay.engines.job import Job, JobOutcome, work
from inlay.records.sealed import checksum
from inlay.records.store import Store
from inlay.report.collect import collect_comparisons
from inlay.report.comparison_files import keep
from inlay.workflow.comparison import against, select, words
from inlay.workflow.planning import plan


def together_(scenario: str, folder: Path, spec: Spec) -> dict:
    """What several processes on one folder, or a killed one, came to."""
    arguments = [sys.executable, together.__file__, folder, spec.model, str(spec.data), scenario]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_processes_share_a_folder_without_repeating_anything(review_spec: Spec, tmp_path: Path) -> None:
    two = together_("two", tmp_path, review_spec)
    assert two["statuses"] == [0, 0]
    assert two["states"] == ["finished"] * 4
    assert set(two["begun"].values()) == {1}, "each run was taken up once, by one of the two"
    assert two["tables"][0] == two["tables"][1]


@pytest.mark.slow
def test_a_killed_comparison_repeats_at_most_the_run_in_flight(review_spec: Spec, tmp_path: Path) -> None:
    killed = together_("killed", tmp_path, review_spec)
    assert killed["statuses"] == [-9, 0]
    assert 10 <= killed["finished"] < 20
    assert killed["after"] == 20
    assert killed["touched"] == [], "what was finished is left alone"
    assert sum(killed["begun"].values()) <= 21, "one run was taken up twice, the one in flight"


def test_the_rate_is_chosen_on_validation_and_reported_on_test(review_spec: Spec, tmp_path: Path) -> None:
    spec = review_spec.with_(learning_rate=None)
    rates = [1e-6, 0.03]
    found = compare(spec, ["bias"], 2, tmp_path / "runs", rates=rates, progress=False)
    runs = Store(tmp_path / "runs").list()
    assert len(runs) == 4
    for row in found.rows:
        mine = [run for run in runs if run.spec.method == row.method]
        by_rate = {
            rate: sum(run.metrics["validation"]["accuracy"] for run in mine if run.spec.learning_rate == rate) / 2
            for rate in rates
        }
        assert by_rate[row.rate] == max(by_rate.values())
        assert {each.rate: each.validation for each in found.tried if each.method == row.method} == by_rate
        chosen = sorted((run for run in mine if run.spec.learning_rate == row.rate), key=lambda run: run.spec.seed)
        assert row.values == tuple(run.metrics["test"]["accuracy"] for run in chosen)
        assert row.seeds == (0, 1)
    assert {run.id for run in found.runs} | {run.id for run in found.others} == {run.id for run in runs}
    assert len(collect_comparisons([found]).rows) == 2, "the rate that was not chosen is on the page"


class Fake:
    """A finished run's numbers, for the choice alone."""

    def __init__(self, method: str, rate: float, seed: int, validation: float, test: float, metric: str) -> None:
        self.spec = Spec(model="m", task="t", method=method, learning_rate=rate, seed=seed)
        self.metrics = {"validation": {metric: validation}, "test": {metric: test}}
        self.record = {"metric": metric}
        self.id = f"{method}-{rate}-{seed}"


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 0.1), ("perplexity", 0.2)])
def test_the_choice_looks_at_validation_only_and_at_seeds_that_all_rates_have(metric: str, best: float) -> None:
    """The rate with the better test numbers loses, and a lucky seed that the other rate has not finished counts for
    nothing."""
    runs = [
        Fake("lora", 0.1, 0, validation=0.9, test=0.1, metric=metric),
        Fake("lora", 0.2, 0, validation=0.5, test=0.9, metric=metric),
        Fake("lora", 0.2, 1, validation=99.0 if metric == "accuracy" else -99.0, test=0.9, metric=metric),
    ]
    chosen, tried = select([(run.spec, run) for run in runs])  # type: ignore[misc]
    assert {run.spec.learning_rate for run in chosen} == {best}
    assert {each.rate: each.validation for each in tried} == {0.1: 0.9, 0.2: 0.5}
    assert [each.rate for each in tried if each.chosen] == [best]


def test_failed_runs_stay_failed_until_asked_for(
    review_spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = review_spec.with_(settings={"target_modules": ["LayerNorm"]})  # which LoRA cannot adapt
    out = tmp_path / "runs"
    first = compare(spec, ["bias", "lora"], 1, out, progress=False)
    (failed,) = (run for run in Store(out).list() if run.status == "failed")
    assert "LayerNorm" in str(failed.error), "the reason is on disk"
    assert [run.id for run in first.others] == [failed.id]
    stamp = (failed.folder / "state.json").read_text()
    second = compare(spec, ["bias", "lora"], 1, out, progress=False)
    assert (failed.folder / "state.json").read_text() == stamp
    assert "not tried again" in second.failures["lora, seed 0"]
    conclusions(second)
    assert "--retry-failed does" in capsys.readouterr().err
    assert first.rows[0].values == second.rows[0].values
    page = collect_comparisons([second])
    assert [(each.id, each.status) for each in page.unfinished] == [(failed.id, "failed")], "the page tells of it too"
    compare(spec, ["bias", "lora"], 1, out, retry_failed=True, progress=False)
    assert (failed.folder / "state.json").read_text() != stamp


def test_a_run_that_cannot_be_read_is_not_to_be_tried_again(
    review_spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one that a newer version has written, no option makes a result."""
    out = tmp_path / "runs"
    run = tune(review_spec.with_(method="bias"), out, progress=False)
    path = run.folder / "spec.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    found = compare(review_spec, ["bias", "lora"], 1, out, progress=False)
    conclusions(found)
    said = " ".join(capsys.readouterr().err.split())
    assert "failed: bias, seed 0" in said
    assert "newer inlay" in said
    assert "--retry-failed" not in said


def test_time_that_is_up_stops_cleanly_and_the_same_goes_on(review_spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    long = review_spec.with_(max_steps=100_000)
    tune(review_spec, out, progress=False)
    with pytest.raises(InlayError, match=r"No run finished within 0\.02 minutes.*the same command"):
        compare(long, ["bias"], 2, out, minutes=0.02, progress=False)
    (cut,) = (run for run in Store(out).list() if run.spec.max_steps == 100_000)
    assert cut.status == "interrupted"
    assert list((cut.folder / "checkpoints").glob("step-*")), "what was done is kept"


def test_what_the_clock_left_out_is_said(review_spec: Spec, tmp_path: Path) -> None:
    outcomes: list[JobOutcome] = []

    class Once:
        """An engine that has time for one run."""

        def run(self, jobs: list[Job], listener: object, deadline: float | None = None) -> list[JobOutcome]:
            outcomes.append(work(jobs[0], lambda done, total: None, lambda line: None, lambda: False))
            return [outcomes[0], *[JobOutcome("not begun")] * (len(jobs) - 1)]

    found = compare(review_spec, ["bias", "lora"], 1, tmp_path / "runs", engine=Once(), progress=False)  # type: ignore[arg-type]
    assert [row.method for row in found.rows] == ["bias"]
    assert found.unfinished == {"lora, seed 0": "not begun"}


def test_the_files_say_what_the_table_says(review_spec: Spec, tmp_path: Path) -> None:
    found = compare(review_spec, ["bias", "linear-probe"], 1, tmp_path / "runs", progress=False)
    keep([found], tmp_path / "runs", baseline="bias", command=["inlay", "compare"])
    data = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    (written,) = data["comparisons"]
    assert [row["method"] for row in written["rows"]] == [row.method for row in found.rows]
    assert written["runs"] == [run.id for run in found.runs]
    lines = list(csv.DictReader((tmp_path / "runs" / "comparison.csv").open()))
    for line, row in zip(lines, found.rows, strict=True):
        assert (line["method"], float(line["mean"]), int(line["trained_parameters"])) == (
            row.method,
            row.mean,
            row.trained,
        )
    told = {each.method: each for each in against(found, "bias")}
    assert {line["method"]: line["verdict"] for line in lines} == {
        name: each.verdict or "" for name, each in told.items()
    }
    assert "parameters" in next(row for row in found.rows if row.method == "linear-probe").front, "it trains the least"
    sentences = " ".join(words(found, "bias"))
    assert "Too few seeds to tell from the baseline bias: linear-probe" in sentences
    assert written["words"] == words(found, "bias")
    assert collect_comparisons([found], "bias").said == [f"{found.title}: {line}" for line in words(found, "bias")]
    assert not collect_comparisons([found]).said
    assert words(found, "lora")[0].startswith("The baseline lora has no finished run here")
    keep([found], tmp_path / "runs", baseline="lora")


# ------------------------------------------------------------------------------------------------------- bad input


def test_contradictions_are_refused_before_anything_is_made(review_spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: compare(review_spec, ["bias"], 1, out, rates="grid"), "contradict each other"),
        (lambda: compare(review_spec.with_(learning_rate=None), ["bias"], 1, out, rates="best"), "give default, grid"),
        (lambda: compare(review_spec.with_(learning_rate=None), ["bias"], 1, out, rates=[0.0]), "greater than 0"),
        (lambda: compare(review_spec, ["all", "bias"], 1, out), "`all` is all of them"),
        (lambda: compare(review_spec, [], 1, out), "Nothing to compare"),
        (lambda: compare(review_spec, ["bias"], [], out), "Nothing to compare"),
        (lambda: compare(review_spec, ["bias"], 1, out, minutes=0), "must be greater than 0"),
        (lambda: compare(review_spec, ["vpt-deep"], 1, out), "None of vpt-deep fits"),
        (lambda: plan(review_spec, ["bias"], settings={"lora": {"r": 2}}), "settings for 'lora'"),
    ]
    for attempt, message in wrong:
        with pytest.raises(InlayError, match=message):
            attempt()
    assert not out.exists()


def test_a_damaged_record_is_one_failure_and_is_left_as_it_is(review_spec: Spec, tmp_path: Path) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    path = run.folder / "record.json"
    whole = path.read_text()
    for damaged, message in (
        (whole[: len(whole) // 2], "is damaged"),
        (whole.replace('"accuracy"', '"accurary"'), "was changed after"),
        (_edited(whole, format=99), "newer inlay"),
    ):
        path.write_text(damaged)
        found = compare(review_spec, ["bias", "linear-probe"], 1, tmp_path / "runs", progress=False)
        assert [row.method for row in found.rows] == ["linear-probe"]
        assert message in found.failures["bias, seed 0"]
        assert [spec.method for spec, _ in found.lost] == ["bias"]
        assert path.read_text() == damaged


def _edited(record: str, **changes: object) -> str:
    data = json.loads(record) | changes
    return json.dumps(data | {"checksum": checksum(data)})


def test_a_full_disk_is_one_error_and_nothing_half_written_is_taken_for_whole(
    review_spec: Spec, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    done = tune(review_spec, out, progress=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, before[1]))
    try:
        with pytest.raises(InlayError, match="No room to write"):
            compare(review_spec, ["bias", "linear-probe"], 1, out, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    states = {run.id: run.status for run in Store(out).list()}
    assert states.pop(done.id) == "finished"
    assert set(states.values()) <= {"interrupted"}, "nothing is wrong with these runs: the disk was full"
    found = compare(review_spec, ["bias", "linear-probe"], 1, out, progress=False)
    assert not found.failures
    assert len(found.runs) == 2


def test_a_folder_that_cannot_be_written_is_one_error(review_spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    out.write_text("a file")
    with pytest.raises(InlayError, match=r"Cannot write|No permission"):
        compare(review_spec, ["bias", "lora"], 2, out, progress=False)
    out.unlink()
    if os.geteuid() == 0:
        if (
            shutil.which("mount") is None
            or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", _made(out)]).returncode
        ):
            pytest.skip("root may write anywhere, and cannot mount a file system that is read-only here")
    else:
        out.mkdir(mode=0o555)
    try:
        with pytest.raises(InlayError, match="No permission to write"):
            compare(review_spec, ["bias", "lora"], 2, out, progress=False)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(out)], check=True)


def _made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)
