"""What NTK-Attention cannot do, on the command line: one clear error each, and nothing else on the screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import zoo
from checkpoints import write_tokenizer
from inlay.records.store import Store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def inlay(typed: Command) -> Command:
    """Run a command; its exit status and errors."""
    return lambda *arguments: typed(*arguments)[::2]


@pytest.fixture
def tune(inlay: Command, reviews: Path) -> Command:
    """A short run of ntk-attention on the reviews."""
    given = ("--data", reviews, "--text", "body", "--label", "stars", "--max-steps", "2", "--batch-size", "8")

    def run(model: Path, *more: str) -> tuple[int, str]:
        return inlay("tune", "--model", model, "--method", "ntk-attention", *given, *more)

    return run


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rank=9", "rank=9 is larger than the model's head size, 8"),
        ("feature_map=relu", "Unknown feature_map 'relu'"),
        ("rank=0", "rank=0 must be a whole number of at least 1"),
    ],
)
def test_settings_that_make_no_sense(tune: Command, text_model: Path, setting: str, message: str) -> None:
    status, err = tune(text_model, "--set", setting)
    assert (status, err.count("Error")) == (2, 1), err
    assert message in " ".join(err.split())


def test_a_model_beside_the_attention_interface(tune: Command, tmp_path: Path) -> None:
    folder = tmp_path / "deberta"
    zoo.tiny("deberta-v2", "base")[0].save_pretrained(folder)
    write_tokenizer(folder)
    status, err = tune(folder)
    assert status == 2
    assert "ntk-attention does not work on DebertaV2ForSequenceClassification" in " ".join(err.split())
    assert "These work on it: " in " ".join(err.split())


def test_an_adapter_that_does_not_fit_or_is_spoilt(
    inlay: Command, tune: Command, text_model: Path, reviews: Path, tmp_path: Path
) -> None:
    assert tune(text_model)[0] == 0
    (run,) = Store(tmp_path / "runs").list()
    predict = ("predict", "--run", run.folder, "--input", reviews, "--output", "answers.jsonl")
    assert inlay(*predict)[0] == 0
    other = tmp_path / "other"
    other.mkdir()
    for file in text_model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    status, err = inlay(*predict, "--model", other)
    assert status == 2
    assert "has shape (2, 8, 4), the model needs (4, 4, 2)" in " ".join(err.split())
    (file,) = run.adapter.glob("*.safetensors")
    tensors = load_file(file)
    next(value for name, value in tensors.items() if "kappa" in name)[0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    status, err = inlay(*predict)
    assert status == 2
    assert "adapter_model.safetensors was changed after it was written" in " ".join(err.split())
