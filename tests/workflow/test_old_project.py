"""A user's folder as commit e3ccaf5 left it: its runs, of one task and of two, are read, answer and go on as they did.

`fixtures/old_project` holds a model, data, finished runs, the same runs interrupted at step 8 of 14, and the run of two
tasks exported with one of them renamed; `expected.json` has what that commit answered and reached.
"""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import inlay

OLD = Path(__file__).parents[1] / "fixtures" / "old_project"
EXPECTED = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))
RENAMED = {"cola": "acceptable"}  # in the exported folder
EVERY = pytest.mark.parametrize("kind", EXPECTED)
Typed = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, to work in: the specs name model and data relative to it."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec_of(folder: Path) -> inlay.Spec:
    return inlay.Spec.from_json(json.loads((folder / "spec.json").read_text(encoding="utf-8"))["spec"])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors below a folder, by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()}


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def assert_answers(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same fields in the same order, the same labels, and numbers to the fifth digit."""
    assert [list(answer) for answer in found] == [list(answer) for answer in wanted]
    for mine, old in zip(found, wanted, strict=True):
        for field, value in old.items():
            close = isinstance(value, float | dict)
            assert mine[field] == (pytest.approx(value, abs=1e-5) if close else value), (field, old)


def assert_metrics(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for split, metrics in wanted.items():
        assert found[split] == pytest.approx(metrics, rel=1e-5, abs=1e-5), split


def without_dates(line: str) -> str:
    """A line of `runs list` without when it was made, the learning rate and the number of examples."""
    cells = line.split("\t")
    assert len(cells[2]) == len("2026-01-01 00:00")
    return "\t".join([*cells[:2], *cells[5:]])


def test_they_are_listed(typed: Typed) -> None:
    results = {"single": "accuracy 0.6667\t491", "joint": "average 0.8263\t435"}
    status, out, _ = typed("runs", "list", "--out", "finished")
    assert status == 0
    assert sorted(map(without_dates, out.splitlines()[1:])) == sorted(
        f"{EXPECTED[k]['run']}\tfinished\t{results[k]}" for k in EXPECTED
    )
    status, out, _ = typed("runs", "list", "--out", "interrupted")
    assert status == 0
    assert sorted(map(without_dates, out.splitlines()[1:])) == sorted(
        f"{EXPECTED[k]['run']}\tinterrupted\t-\t-" for k in EXPECTED
    )


@EVERY
def test_they_are_shown(kind: str, typed: Typed) -> None:
    wanted = EXPECTED[kind]
    status, out, _ = typed("runs", "show", "--out", "finished", wanted["run"])
    assert status == 0
    shown = dict(line.split("\t", 1) for line in out.splitlines() if "\t" in line)
    assert shown["seed"] == "7"
    for split, metrics in wanted["metrics"].items():
        for name, value in metrics.items():
            assert shown[f"{split} {name}"] == f"{value:.4f}"
    assert shown["commit"] == "e3ccaf53859073d6c19c09f6448cb3ba33936812"
    status, out, err = typed("runs", "show", "--out", "interrupted", wanted["run"])
    assert status == 0
    assert "interrupted" in out + err


def test_they_are_reported(typed: Typed) -> None:
    status, _, _ = typed("report", "finished", "--out", "report.html", "--csv", "runs.csv")
    assert status == 0
    page = Path("report.html").read_text(encoding="utf-8")
    with Path("runs.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {wanted["run"] for wanted in EXPECTED.values()}
    for wanted in EXPECTED.values():
        row = rows[wanted["run"]]
        assert wanted["run"] in page
        assert row["status"] == "finished"
        for split, metrics in wanted["metrics"].items():
            assert {name: float(row[f"{split} {name}"]) for name in metrics} == metrics


def test_one_task_is_predicted_as_it_was(typed: Typed) -> None:
    wanted = EXPECTED["single"]
    folder = Path("finished", wanted["run"])
    for run in (folder, wanted["run"]):
        assert_answers(inlay.predict(run, "new.csv", out="finished", probabilities=True), wanted["answers"])
    assert_answers(inlay.load(folder).predict("new.csv", probabilities=True), wanted["answers"])
    status, out, _ = typed("predict", "--run", folder, "--input", "new.csv", "--probabilities")
    assert status == 0
    assert_answers(answers(out), wanted["answers"])


@pytest.mark.parametrize("folder", ["run", "adapter", "exported"])
def test_several_tasks_are_predicted_as_they_were(folder: str, typed: Typed) -> None:
    wanted = EXPECTED["joint"]["answers"]
    place = Path("finished", EXPECTED["joint"]["run"])
    if folder == "exported":
        place = Path("exported")
        wanted = [answer | {"task": RENAMED.get(answer["task"], answer["task"])} for answer in wanted]
        names = (answer["task"] for answer in wanted)
        requests = [request | {"task": next(names)} for request in answers(Path("requests.jsonl").read_text())]
        Path("requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    elif folder == "adapter":
        place /= "adapter"
    status, out, _ = typed("predict", "--adapter", place, "requests.jsonl")
    assert status == 0
    assert_answers(answers(out), wanted)


def test_several_tasks_are_exported_as_they_were(typed: Typed) -> None:
    run = Path("finished", EXPECTED["joint"]["run"])
    names = ("--task", "cola=acceptable,stsb")
    status, _, _ = typed("export", "--adapter", run, *names, "--to", "tasks", "--output", "again")
    assert status == 0
    files = {file.relative_to("exported") for file in Path("exported").rglob("*") if file.is_file()}
    assert {file.relative_to("again") for file in Path("again").rglob("*") if file.is_file()} == files
    for name, tensor in tensors(Path("exported")).items():
        assert torch.equal(tensors(Path("again"))[name], tensor), name
    for file in files:
        if file.suffix == ".json":
            assert json.loads(Path("again", file).read_text()) == json.loads(Path("exported", file).read_text()), file


@EVERY
def test_a_finished_one_is_found_and_not_made_again(kind: str) -> None:
    said: list[str] = []
    folder = Path("finished", EXPECTED[kind]["run"])
    found = inlay.tune(spec_of(folder), "finished", progress=False, say=said.append)
    assert found.id == EXPECTED[kind]["run"]
    assert said == [f"already done: {found.id}"]
    assert found.metrics == EXPECTED[kind]["metrics"]


@EVERY
def test_one_that_was_interrupted_goes_on_to_the_same_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = EXPECTED[kind]
    folder, whole = Path("interrupted", wanted["run"]), Path("finished", wanted["run"])
    passes = count_backward_passes(monkeypatch)
    done = inlay.tune(spec_of(folder), "interrupted", progress=False)
    assert (done.id, done.status, len(passes)) == (
        wanted["run"],
        "finished",
        wanted["steps"] - wanted["interrupted_at"],
    )
    for name in ("steps", "best_step", "stopped_early"):
        assert done.record[name] == wanted[name], name
    assert_metrics(done.metrics, wanted["metrics"])
    reached, before = tensors(done.adapter), tensors(whole / "adapter")
    assert reached.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(reached[name], tensor, atol=5e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    assert not (folder / "checkpoints").exists()


def nearly(value: Any) -> Any:
    """The value, within what another processor's rounding may change."""
    if isinstance(value, dict):
        return {name: nearly(each) for name, each in value.items()}
    return pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value


@EVERY
def test_its_metrics_are_those_of_a_run_that_was_not_interrupted(kind: str) -> None:
    """What was logged before is kept, and every step and every evaluation is there once."""
    folder, whole = (Path(place, EXPECTED[kind]["run"]) for place in ("interrupted", "finished"))
    inlay.tune(spec_of(folder), "interrupted", progress=False)
    mine, old = (answers((place / "metrics.jsonl").read_text()) for place in (folder, whole))
    assert len(mine) == len(old)
    for found, wanted in zip(mine, old, strict=True):
        assert found.keys() == wanted.keys()
        assert {name: found[name] for name in found if not is_speed(name)} == {
            name: nearly(value) for name, value in wanted.items() if not is_speed(name)
        }


@EVERY
def test_the_command_of_the_report_goes_on_with_it(kind: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    run = EXPECTED[kind]["run"]
    typed("report", "finished", "--out", "report.html", "--csv", "runs.csv")
    with Path("runs.csv").open(newline="", encoding="utf-8") as file:
        (command,) = [row["command"] for row in csv.DictReader(file) if row["run"] == run]
    program, *arguments = shlex.split(command)
    assert program == "inlay"
    assert arguments[-2:] == ["--out", "finished"]
    passes = count_backward_passes(monkeypatch)
    status, _, _ = typed(*arguments[:-1], "interrupted")
    assert (status, len(passes)) == (0, EXPECTED[kind]["steps"] - EXPECTED[kind]["interrupted_at"])
    assert_metrics(
        json.loads(Path("interrupted", run, "record.json").read_text())["metrics"], EXPECTED[kind]["metrics"]
    )


def is_speed(name: str) -> bool:
    return "second" in name or "memory" in name


def count_backward_passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The losses that are derived from now on: one a step, so that steps done again are seen."""
    backward, passes = torch.Tensor.backward, []

    def counted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        passes.append(loss.detach())
        backward(loss, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    return passes
