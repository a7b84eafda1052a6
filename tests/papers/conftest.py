"""The generators of the pages, which are no part of the package: tests of them import them from scripts/."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of scripts/, by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module
