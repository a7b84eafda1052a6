"""The method that docs/add-a-method.md adds, taken from the page, registered on the fly and put through the matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import properties
import pytest
from properties import Case

import inlay
import inlay.methods
from inlay.methods import document, registry
from inlay.methods.probe import probe
from inlay.methods.register import register
from inlay.methods.registry import Method
from zoo import tiny

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = ("bert", "llama", "swin")


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Method]:
    room = tmp_path_factory.mktemp("methods")
    folder = room / "scale"
    folder.mkdir()
    page = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
    files = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8")
    inlay.methods.__path__.append(str(room))
    registry.all_methods.cache_clear()
    try:
        register()
        yield registry.get("scale")
    finally:
        inlay.methods.__path__.remove(str(room))
        registry.all_methods.cache_clear()


def test_a_folder_is_a_method(scale: Method) -> None:
    assert scale.config_class() is inlay.ScaleConfig
    assert "ScaleConfig" in dir(inlay)
    assert scale.name in registry.all_methods()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_works_where_it_says(scale: Method, family: str) -> None:
    assert probe(scale, lambda: tiny(family)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_it_holds_what_every_method_holds(scale: Method, family: str, tmp_path: Path) -> None:
    case = Case(scale, family)
    properties.starts_as_the_base(case)
    properties.trains_only_its_own(case)
    properties.reloads_to_the_bit(case, tmp_path / "reloads")
    properties.two_adapters_live_together(case, tmp_path / "two")
    properties.disabling_restores_the_base(case)
    properties.has_train_and_eval_modes(case)
    properties.runs_in_bfloat16(case, tmp_path / "bfloat16")
    properties.checkpoints_gradients(case)
    properties.compiles(case, "eager")
    for lora_first in (True, False):
        properties.stacks_with_lora(case, tmp_path / f"stack{lora_first}", lora_first)


def test_it_refuses_what_it_cannot_adapt(scale: Method) -> None:
    fault = probe(scale, lambda: tiny("resnet"))
    assert fault is not None
    assert "none" in fault
    properties.is_refused_clearly(Case(scale, "resnet"))


def test_its_page_begins_by_itself(scale: Method) -> None:
    pages = document.pages()
    page = pages[ROOT / "docs/methods/scale.md"]
    assert scale.summary in page
    assert all(f"## {section}" in page for section in document.SECTIONS)
    assert "[`scale`](scale.md)" in pages[ROOT / "docs/methods/README.md"]
