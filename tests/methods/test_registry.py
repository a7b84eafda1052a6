"""The registry: folders are methods, and every entry is complete."""

from __future__ import annotations

import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from inlay.errors import InlayError
from inlay.methods import protocol
from inlay.methods.registry import Method, all_methods, get


@pytest.mark.parametrize("method", all_methods().values(), ids=lambda method: method.name)
def test_entries_are_complete(method) -> None:
    assert method.summary.endswith(".")
    assert "http" in method.paper
    assert method.family in typing.get_args(protocol.Family)
    assert method.family != "other"
    assert method.learning_rate in method.grid or min(method.grid) < method.learning_rate < max(method.grid)
    assert list(method.grid) == sorted(method.grid)
    if method.form == "peft":
        assert method.config_class().__name__.endswith("Config")
    else:
        with pytest.raises(InlayError, match="no config"):
            method.config_class()
    if method.tuner is not None:
        assert method.tuner_class().prefix == method.parameter_prefix
        assert method.peft_type.startswith("INLAY_")
    else:
        with pytest.raises(InlayError, match="no tuner"):
            method.tuner_class()


def test_names_that_are_not_methods_are_refused_with_the_nearest() -> None:
    with pytest.raises(InlayError, match=r"Did you mean 'lora'"):
        get("lorra")


def package(folder: Path, name: str, method: str) -> None:
    """An installed package that declares a method through the entry-point group."""
    (folder / f"{name}.py").write_text(
        "from inlay.methods.registry import Method\n"
        f"METHODS = (Method(name={method!r}, summary='One.', paper='none', form='full'),)\n"
    )
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[inlay.methods]\n{method} = {name}\n")


@pytest.fixture
def fresh_registry():
    all_methods.cache_clear()
    yield
    all_methods.cache_clear()


@pytest.mark.usefixtures("fresh_registry")
def test_other_packages_add_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "of_theirs", "theirs")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert get("theirs").summary == "One."
    assert get("bias").tuner is not None


@pytest.mark.usefixtures("fresh_registry")
def test_two_methods_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "of_others", "bias")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InlayError, match="Two methods are called 'bias'; rename the one in of_others"):
        all_methods()


def test_the_page_describes_every_fact_and_hook() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/add-a-method.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page[page.index("## What a method may declare") :]))
    hooks = {
        name
        for kind in (protocol.ConfigHooks, protocol.LayerHooks, protocol.TunerHooks)
        for name in (*vars(kind), *kind.__annotations__)
        if not name.startswith("_") and name != "model"
    }
    assert hooks | {entry.name for entry in fields(Method)} <= named
