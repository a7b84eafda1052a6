"""Misspelt names: of models, folders, files, runs, and of the values of options. Each gets the one that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorded
from inlay.errors import InlayError
from inlay.records.store import Store

OWN = ("--data", "reviews.csv", "--text", "body", "--label", "stars")
DIGITS = ("--model", "embedded:vit", "--task", "digits")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("tune", "--model", "embeded:minilm", *OWN, "--method", "bias"), "embedded:minilm"),
        (("tune", "--model", "Embedded:vit", *OWN, "--method", "bias"), "embedded:vit"),
        (("tune", "--model", "embedded-resnet", *OWN, "--method", "bias"), "embedded:resnet"),
        (("tune", "--model", "minilm", *OWN, "--method", "bias"), "embedded:minilm"),
        (("tune", "--model", "smolm2", *OWN, "--method", "bias"), "embedded:smollm2"),
        (("tune", "--model", "embedded:minlm", *OWN, "--method", "bias"), "minilm"),
        (("tune", "--model", "my-modle", *OWN, "--method", "bias"), "my-model"),
        (("tune", "--model", "./my-modle", *OWN, "--method", "bias"), "my-model"),
        (("tune", "--model", "my-model", "--data", "revews.csv", "--method", "bias"), "reviews.csv"),
        (("compare", *DIGITS, "--methods", "lora", "--learning-rates", "gird"), "grid"),
        (("compare", *DIGITS, "--methods", "lora", "--shots", "64,ful"), "full"),
        (("compare", *DIGITS, "--methods", "lora,bais"), "bias"),
        (("compare", *DIGITS, "--methods", "lora", "--engine", "loacl"), "local"),
        (("tune", *DIGITS, "--method", "lora", "--augment", "flipp"), "flip"),
        (("lab", "icl", "--device", "cudda"), "cuda"),
        (("report", "rnus"), "runs"),
        (("sweep", "swepe.yaml"), "sweep.yaml"),
        (("compress", "--model", "embeded:smollm2", "--prompt", "prompt.txt", "--out", "x"), "embedded:smollm2"),
        (("compress", "--model", "my-model", "--prompt", "promt.txt", "--out", "x"), "prompt.txt"),
        (("tuen",), "tune"),
    ],
)
def test_the_nearest_name_is_offered(
    words: tuple[str, ...], meant: str, typed, text_model: Path, reviews: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("sweep.yaml", "prompt.txt"):
        (tmp_path / name).write_text("w1 w2")
    status, _, errors = typed(*words)
    assert status == 2
    assert errors.count("Error: ") == 1
    assert f"Did you mean '{meant}'" in errors


def test_nothing_is_offered_where_nothing_comes_near(typed, tmp_path: Path) -> None:
    _, _, errors = typed("tune", "--model", "embedded:vit", "--data", "zzzzzz", "--method", "bias")
    assert "There is no file or folder 'zzzzzz'. Check the path." in errors


def test_any_unambiguous_part_of_a_name_is_a_run(tmp_path: Path, typed) -> None:
    specs = [recorded.spec_of(method, seed) for method in ("bias", "lora") for seed in (0, 1)]
    runs = [recorded.finished(tmp_path / "runs", spec) for spec in specs]
    store = Store(tmp_path / "runs")
    first = runs[0].id
    for part in (first, first[:-3], first[-7:], first[3:-3], "vit-bias-s0", f"runs/{first}", f"runs/{first[:-3]}"):
        assert store.get(part).id == first, part
    with pytest.raises(InlayError, match="could be any of") as raised:
        store.get("vit-bias")
    assert all((run.id in str(raised.value)) == (run.spec.method == "bias") for run in runs)
    for words in (("runs", "show", "bias"), ("runs", "rm", "-y", "bias"), ("predict", "--run", "bias", "--input", "x")):
        status, _, errors = typed(*words)
        assert status == 2
        assert runs[0].id in errors
        assert runs[1].id in errors
    assert typed("runs", "show", "vit-lora-s1")[0] == 0
