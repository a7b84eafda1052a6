"""What every test may use."""

from __future__ import annotations

import csv
import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# What was skipped is said at the end of every run, and in CI judged.
from skips import (  # noqa: F401
    pytest_deselected,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

if TYPE_CHECKING:
    from inlay import Spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent

# Torch and Transformers are a million objects that stay: nothing looks among them for garbage while the tests are being
# imported, and not afterwards either.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and data beside the checkout; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip("needs the real models and data in ../shared, which are not here")
    return folder


@pytest.fixture
def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Type `inlay ...` in the test's folder; its exit status, output and errors."""
    from inlay import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inlay", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        seen = capsys.readouterr()
        return status, seen.out, seen.err

    return run


@pytest.fixture
def trunks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk is kept however little that saves: of models and splits as small as those of the tests it is not."""
    from inlay.training.trunk import data

    monkeypatch.setattr(data, "FEWEST_READ", 0)
    monkeypatch.setattr(data, "CHECK_SHARE", float("inf"))


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A tiny BERT as a user would have it on disk."""
    import zoo
    from checkpoints import write_tokenizer

    folder = tmp_path / "my-model"
    zoo.tiny("bert", "base")[0].save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def image_model(tmp_path: Path) -> Path:
    """A tiny ViT as a user would have it on disk."""
    import zoo

    folder = tmp_path / "my-vit"
    zoo.tiny("vit", "base")[0].save_pretrained(folder)
    return folder


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Sixty short reviews with one to three stars: the stars are in the words."""
    rng = random.Random(0)
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "body", "stars"])
        for number in range(60):
            stars = 1 + number % 3
            words = [f"w{stars}"] * 3 + [f"w{rng.randrange(6, 20)}" for _ in range(3)]
            rng.shuffle(words)
            writer.writerow([number, " ".join(words), stars])
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of class folders: dark and bright pictures, of several sizes and modes."""
    from PIL import Image

    rng = random.Random(0)
    folder = tmp_path / "photos"
    for name, level in (("bright", 220), ("dark", 30)):
        (folder / name).mkdir(parents=True)
        for number in range(15):
            mode = ("RGB", "L", "RGBA")[number % 3]
            grey = level + rng.randrange(-20, 20)
            colour = grey if mode == "L" else (grey, grey, grey, 255)[: len(mode)]
            Image.new(mode, (20 + number, 30), colour).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def review_spec(text_model: Path, reviews: Path) -> Spec:
    """A quick run on the reviews."""
    from inlay import Spec

    return Spec(
        model=str(text_model),
        data=str(reviews),
        text=("body",),
        label="stars",
        method="bias",
        max_steps=6,
        batch_size=8,
        learning_rate=0.01,
    )
