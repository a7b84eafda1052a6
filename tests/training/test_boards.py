"""Metrics in TensorBoard, W&B, MLflow and trackio, each without a network: what is there, and what must not be."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inlay import Spec
from inlay.errors import InlayError
from inlay.records.store import Store
from inlay.training import boards

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": "trackio", "MLFLOW_ALLOW_FILE_STORE": "true"}


@pytest.mark.parametrize("name", boards.BOARDS)
def test_metrics_are_there_and_paths_are_not(name: str, review_spec: Spec, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}, which is not installed")
    words = ["--model", review_spec.model, "--data", str(review_spec.data), "--text", "body", "--label", "stars"]
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    secret = {"HF_TOKEN": "hf_secretsecretsecret"}
    done = subprocess.run(
        [sys.executable, "-m", "inlay", "tune", *words, "--method", "bias", "--max-steps", "2", "--log-to", name, "-q"],
        cwd=tmp_path, env=os.environ | OFFLINE | store | secret, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = Store(tmp_path / "runs").list()
    places = {"tensorboard": run.folder / name, "wandb": run.folder / name, "trackio": tmp_path / name}
    place = places.get(name, tmp_path / "mlflow.db")
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    kept = b"".join(path.read_bytes() for path in files)
    assert b"learning_rate" in kept
    assert b"loss" in kept
    assert b"hf_secret" not in kept
    assert str(review_spec.data).encode() not in kept
    assert str(Path(review_spec.model)).encode() not in kept


def test_what_is_not_there_is_one_error(typed, review_spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InlayError, match="Did you mean 'tensorboard'"):
        boards.check(["tensorbord"])
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    words = ("--model", review_spec.model, "--data", review_spec.data, "--method", "bias", "--log-to", "wandb")
    status, _, err = typed("tune", *words)
    assert status == 2
    assert "wandb is not installed: `pip install wandb`" in err
    assert not Path("runs").exists()


def test_what_is_told_of_a_run(tmp_path: Path) -> None:
    spec = Spec(model=str(tmp_path), data="/home/me/x.csv", method="lora", settings={"r": 4})
    told = boards.facts_of(spec)
    assert told["model"] == tmp_path.name
    assert "/" not in str(told)
    assert told["settings"] == {"r": 4}
