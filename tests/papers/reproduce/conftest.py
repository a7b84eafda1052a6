"""The scripts that fill the pages' tables are no part of the package: tests of them need a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the scripts, from where they can be imported now."""
    if not SCRIPTS.is_dir():
        pytest.skip("no checkout: the scripts of the tables are not installed")
    monkeypatch.syspath_prepend(SCRIPTS)
    return SCRIPTS
