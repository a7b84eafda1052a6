"""`inlay explain` as a person types it: folders, tables, sentences, and one clear line where it cannot be done."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest

QUICK = ("--max-steps", "2", "--batch-size", "8", "--quiet")


@pytest.fixture
def explain(typed):
    """Run `inlay explain ...` in the test's folder; its exit status, output and errors."""
    return partial(typed, "explain")


def numbers(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("command", ["layers", "samples", "prompt-norm", "cka", "attention-distance"])
def test_help_teaches_by_an_example(explain, command: str) -> None:
    status, out, _ = explain(command, "--help")
    assert status == 0
    assert f"inlay explain {command} --model embedded:" in out
    assert "--task" in out
    assert ("--epochs" in out) is (command in ("layers", "samples", "prompt-norm"))


def test_layers(explain, image_model: Path, photos: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--data", photos, "--method", "activation-prompt", "--layers", "1,3", *QUICK)
    status, out, err = explain("layers", *given, "--seeds", "1")
    assert status == 0, err
    folder = tmp_path / "explain" / "layers-photos-my-vit-activation-prompt"
    assert "explain/layers-photos-my-vit-activation-prompt/" in err
    lines = out.splitlines()
    assert lines[0].split("\t") == ["method", "layer", "test accuracy", "validation", "trained", "norm per position"]
    assert [line.split("\t")[:2] for line in lines[1:4]] == [
        ["activation-prompt", "1"],
        ["activation-prompt", "3"],
        ["linear-probe", "-"],
    ]
    assert lines[4].startswith("Layer ")
    rows = numbers(folder, "layers")
    assert [row["layer"] for row in rows] == ["1", "3", ""]
    assert float(rows[0]["prompt_norm"]) > 0
    about = json.loads((folder / "layers.json").read_text())
    assert about["command"][:3] == ["inlay", "explain", "layers"]
    assert len(about["points"][0]["runs"]) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 3
    assert "Every layer ran with the same learning rate (" in lines[4]


def test_layers_with_a_choice_of_rates(explain, image_model: Path, photos: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--data", photos, "--method", "norm", "--layers", "2", *QUICK, "--seeds", "1")
    status, out, err = explain("layers", *given, "--rates", "0.001,0.5", "--baselines", "")
    assert status == 0, err
    head, line, told = (text.split("\t") for text in out.splitlines())
    assert head == ["method", "layer", "learning rate", "test accuracy", "validation", "trained"]
    folder = tmp_path / "explain" / "layers-photos-my-vit-norm"
    assert [float(row["learning_rate"]) for row in numbers(folder, "layers")] == [float(line[2])]
    assert told[0].endswith(f"selected for each layer on validation of seed 0: {line[2]} at layer 2.")
    about = json.loads((folder / "layers.json").read_text())
    assert [(point["layer"], point["rate"]) for point in about["rates_tried"]] == [(2, 0.001), (2, 0.5)]


def test_samples_and_prompt_norm(explain, image_model: Path, photos: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--data", photos, *QUICK, "--seeds", "1", "--out", "pictures")
    status, out, err = explain("samples", *given, "--methods", "activation-prompt", "--layers", "2", "--sizes", "4,8")
    assert status == 0, err
    rows = numbers(tmp_path / "pictures" / "samples-photos-my-vit-activation-prompt", "samples")
    assert [(row["layer"], row["training_examples"]) for row in rows] == [("2", "4"), ("2", "8")]
    status, out, err = explain("prompt-norm", *given, "--method", "activation-prompt", "--rates", "0.01")
    assert status == 0, err
    assert out.splitlines()[0].split("\t") == [
        "method",
        "learning rate",
        "test accuracy",
        "validation",
        "norm per position",
    ]
    assert (tmp_path / "pictures" / "prompt-norm-photos-my-vit-activation-prompt" / "prompt-norm.svg").is_file()


def test_cka_and_attention_distance(explain, image_model: Path, photos: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--data", photos, "--split", "train", "--batch-size", "8")
    status, out, err = explain("cka", *given, "--examples", "16")
    assert status == 0, err
    rows = numbers(tmp_path / "explain" / "cka-photos-my-vit", "cka")
    assert len(rows) == 16
    assert float(rows[0]["cka"]) == pytest.approx(1)
    assert "Neighbouring layers of my-vit" in out
    status, out, err = explain("attention-distance", *given, "--examples", "6")
    assert status == 0, err
    assert len(numbers(tmp_path / "explain" / "attention-distance-photos-my-vit", "attention-distance")) == 6
    assert "Heads reach farthest in block" in out


def test_mistakes_are_one_line(explain, image_model: Path, photos: Path, text_model: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--data", photos)
    for arguments, complaint in (
        (("layers", *given, "--method", "norm", "--layers", "7"), "no layer 7"),
        (("layers", *given, "--method", "linear-probe"), "cannot be put at a single layer"),
        (("layers", *given, "--method", "norm", "--rates", "0.1", "--lr", "1"), "give one of the two"),
        (("layers", *given, "--method", "norm", "--rates", "high"), "--rates takes numbers"),
        (("samples", *given, "--methods", "norm", "--sizes", "ten"), "--sizes takes whole numbers"),
        (("samples", *given, "--methods", "norm", "--sizes", "4", "--shots", "9"), "give --sizes"),
        (("samples", *given, "--methods", "norm", "--sizes", "4000"), "more examples than"),
        (("prompt-norm", *given, "--method", "norm"), "trains no prompt"),
        (("prompt-norm", *given, "--method", "activation-prompt", "--lr", "1"), "give --rates"),
        (("cka", *given, "--other", text_model), "reads images and"),
        (("cka", *given, "--examples", "2"), "examples=2 is too few"),
        (("attention-distance", *given, "--adapter", "nothing"), "nothing"),
    ):
        status, _, err = explain(*arguments)
        assert status == 2, (arguments, err)
        assert complaint in err
        assert err.splitlines()[-1].startswith("Error: ")
        assert "Traceback" not in err
    assert not list((tmp_path / "explain").iterdir())


def test_a_model_beside_itself_is_told_of_its_other_layers(explain, image_model: Path, photos: Path) -> None:
    given = ("--model", image_model, "--data", photos, "--split", "train", "--examples", "8", "--batch-size", "8")
    status, out, err = explain("cka", *given)
    assert status == 0, err
    for line in out.splitlines()[1:5]:
        layer, most_like, *_ = line.split("\t")
        assert most_like != layer
