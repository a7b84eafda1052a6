"""What every fuzzer may use."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def built_once() -> Any:
    """The command line as it is put together, which takes longer than most commands do."""
    import typer.main

    from inlay.cli.app import app

    return typer.main.get_command(app)


@pytest.fixture(autouse=True)
def quick(built_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inlay ...` in a test does not put the command line together each time."""
    monkeypatch.setattr("inlay.cli.app.app", built_once)
