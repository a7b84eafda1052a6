"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and data beside the checkout; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip("needs the real models and data in ../shared, which are not here")
    return folder
