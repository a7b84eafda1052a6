"""The commands as a person types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.methods.registry import all_methods
from inlay.records.store import Store

QUICK = ("--max-steps", "4", "--batch-size", "8")


@pytest.fixture
def inlay(typed):
    """Run a command in the test's folder; its exit status, output and errors."""
    return typed


def test_help_teaches_and_imports_nothing_heavy() -> None:
    heavy = ("torch", "peft", "datasets", "pandas")
    code = f"import sys; from inlay.cli.app import app; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    help_ = subprocess.run([sys.executable, "-m", "inlay", "--help"], capture_output=True, text=True, check=True)
    assert "tune" in help_.stdout
    assert "embedded:vit" in help_.stdout


def test_version(inlay) -> None:
    import inlay as package

    assert inlay("--version")[1].strip() == package.__version__


def test_methods_to_a_pipe_are_one_a_line_with_nothing_cut(inlay) -> None:
    status, out, _ = inlay("methods")
    lines = out.splitlines()
    assert status == 0
    assert [line.split("\t")[0] for line in lines[1:]] == list(all_methods())
    assert all(len(line.split("\t")) == len(lines[0].split("\t")) for line in lines)
    assert all(method.summary in out for method in all_methods().values())
    papers = inlay("methods", "--papers")[1]
    assert all(method.paper in papers for method in all_methods().values())


def test_tasks_and_models(inlay) -> None:
    _, out, _ = inlay("tasks", "--kind", "image-classification")
    assert "digits" in out
    assert "rotten-tomatoes" not in out
    assert "rotten-tomatoes" in inlay("tasks")[1]
    assert "embedded:minilm" in inlay("models")[1]
    status, _, err = inlay("tasks", "--kind", "pictures")
    assert status == 2
    assert "image-classification" in err


def test_own_csv_from_tune_to_predict(inlay, text_model: Path, reviews: Path, tmp_path: Path) -> None:
    tune = ("tune", "--model", text_model, "--data", reviews, "--text", "body", "--label", "stars", "--method", "bias")
    status, out, err = inlay(*tune, *QUICK, "--out", "runs")
    assert status == 0, err
    assert "test accuracy" in out
    (run,) = Store(tmp_path / "runs").list()
    assert str(run.folder.name) in err
    status, out, err = inlay("predict", "--run", f"runs/{run.id}", "--input", reviews, "--output", "predictions.jsonl")
    assert status == 0, err
    answers = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert len(answers) == 60
    assert {"body", "label", "score"} <= set(answers[0])
    _, out, _ = inlay("predict", "--run", run.id, "--input", reviews)
    assert [json.loads(line) for line in out.splitlines()] == answers
    _, out, _ = inlay("runs", "list")
    assert run.id in out
    assert "finished" in out
    _, out, _ = inlay("runs", "show", run.id[-10:])
    assert "torch" in out
    assert '"bias"' in out
    assert inlay("runs", "rm", run.id, "--yes")[0] == 0
    assert Store(tmp_path / "runs").list() == []


def test_own_photos_are_compared_and_drawn(inlay, image_model: Path, photos: Path, tmp_path: Path) -> None:
    compare = ("compare", "--model", image_model, "--data", photos, "--methods", "linear-probe, bias", "--seeds", "2")
    status, out, err = inlay(*compare, *QUICK, "--plot", "picture.png")
    assert status == 0, err
    table = [line.split("\t") for line in out.splitlines()]
    assert {row[0] for row in table[1:]} == {"linear-probe", "bias", "(majority class)"}
    measured = [row[1] for row in table[1:] if row[0] != "(majority class)"]
    assert all(re.fullmatch(r"[01]\.\d{4} ± [01]\.\d{4}", score) for score in measured)
    from PIL import Image

    with Image.open("picture.png") as picture:
        assert picture.width > 500
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_folder_of_photos_named_as_people_name_it(inlay, image_model: Path, photos: Path, tmp_path: Path) -> None:
    """Relative to where one stands, from elsewhere, and from within: one and the same run."""
    (photos / "dark" / "readme.txt").write_text("taken at night")
    tune = ("tune", "--model", image_model, "--method", "linear-probe", *QUICK, "--out", tmp_path / "runs", "--data")
    for folder in ("photos/", photos, "./photos"):
        status, _, err = inlay(*tune, folder)
        assert status == 0, err
    (run,) = Store(tmp_path / "runs").list()
    assert any("readme.txt" in note for note in run.record["task"]["notes"])


def test_settings_are_passed_and_checked(inlay, text_model: Path, reviews: Path, tmp_path: Path) -> None:
    tune = ("tune", "--model", text_model, "--data", reviews, "--text", "body", "--label", "stars", "--method", "lora")
    status, _, err = inlay(*tune, *QUICK, "--set", "r=2", "--set", "lora_alpha=4")
    assert status == 0, err
    (run,) = Store(tmp_path / "runs").list()
    assert json.loads((run.adapter / "adapter_config.json").read_text())["r"] == 2
    status, _, err = inlay(*tune, *QUICK, "--set", "rank=2")
    assert status == 2
    assert "rank" in err
    status, _, err = inlay(*tune, *QUICK, "--set", "r")
    assert status == 2
    assert "key=value" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "embedded:vitt", "--task", "digits", "--method", "lora"), "Did you mean 'vit'"),
        (("--model", "embedded:vit", "--task", "digit", "--method", "lora"), "Did you mean 'digits'"),
        (("--model", "embedded:vit", "--task", "digits", "--method", "lorra"), "Did you mean 'lora'"),
        (("--model", "embedded:vit", "--method", "lora"), "either a task by name or data of your own"),
        (("--model", "embedded:vit", "--data", "nowhere/", "--method", "lora"), "nowhere"),
        (("--model", "./nowhere", "--task", "digits", "--method", "lora"), "nowhere"),
        (("--model", "embedded:vit", "--task", "digits", "--method", "lora", "--epochs", "0"), "greater than 0"),
        (("--model", "embedded:vit", "--task", "digits", "--method", "lora", "--schedule", "cosin"), "cosine"),
        (("--model", "embedded:vit", "--task", "digits", "--method", "prefix"), "These work on it: linear-probe"),
    ],
)
def test_mistakes_get_one_line_and_status_2(inlay, arguments: tuple[str, ...], said: str) -> None:
    status, out, err = inlay("tune", *arguments)
    assert status == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert said in last
    assert "Traceback" not in err


def test_folder_that_cannot_be_written(inlay, text_model: Path, reviews: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the runs should go")
    arguments = ("--model", text_model, "--data", reviews, "--text", "body", "--label", "stars", "--method", "bias")
    status, _, err = inlay("tune", *arguments, *QUICK, "--out", tmp_path / "taken")
    assert status == 2
    assert "taken" in err.strip().splitlines()[-1]


def test_picture_of_an_unknown_kind_is_refused_before_the_work(inlay, tmp_path: Path) -> None:
    compare = ("compare", "--model", "embedded:vit", "--task", "digits", "--methods", "bias", "--plot", "p.docx")
    status, _, err = inlay(*compare)
    assert status == 2
    assert ".png" in err
    assert not (tmp_path / "runs").exists()


def test_no_network_is_one_clear_error(tmp_path: Path) -> None:
    """A hub model in a process that cannot reach the hub: no traceback, and a way on."""
    command = [
        sys.executable,
        "-m",
        "inlay",
        "tune",
        "--model",
        "nobody/nothing",
        "--task",
        "digits",
        "--method",
        "lora",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "nobody/nothing" in found.stderr
    assert "embedded:" in found.stderr


def test_only_what_was_named_is_removed(inlay, review_spec, tmp_path: Path) -> None:
    """A copy elsewhere, an empty name and a damaged run: none takes another run along."""
    from inlay import tune

    run = tune(review_spec, tmp_path / "runs", progress=False)
    shutil.copytree(run.folder, tmp_path / "backup" / run.id)
    status, _, err = inlay("runs", "rm", f"backup/{run.id}", "--yes")
    assert status == 2
    assert "backup" in err
    assert inlay("runs", "rm", "", "--yes")[0] == 2
    assert run.folder.is_dir()
    (run.folder / "spec.json").write_text("{")
    assert inlay("runs", "rm", f"runs/{run.id}", "--yes")[0] == 0
    assert not run.folder.exists()
    assert (tmp_path / "backup" / run.id).is_dir()


def test_comparison_with_a_failure_says_so_by_its_status(inlay, image_model: Path, photos: Path) -> None:
    compare = ("compare", "--model", image_model, "--data", photos, "--methods", "linear-probe,prompt", "--seeds", "1")
    status, out, err = inlay(*compare, *QUICK)
    assert status == 1
    assert "linear-probe" in out
    assert "left out (does not work on vit models" in err
    assert [run.spec.method for run in Store(Path("runs")).list()] == ["linear-probe"], "no folder for what is refused"
