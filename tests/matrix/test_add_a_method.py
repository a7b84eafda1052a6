"""The method that docs/add-a-method.md adds, taken from the page, registered on the fly and put through the matrix."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import properties
import pytest
from properties import Case

import inlay
import inlay.methods
from inlay.methods import registry
from inlay.methods.capabilities import capabilities
from inlay.methods.register import register
from inlay.methods.registry import Method
from probing import probe
from zoo import tiny

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = ("bert", "llama", "swin")


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The generator of the methods' pages."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import document_methods

    return document_methods


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


def test_it_is_tried_where_no_file_knows_it(scale: Method) -> None:
    assert scale.name not in capabilities()["methods"]
    assert all(Case(scale, family).works() for family in FAMILIES)
    assert not Case(scale, "resnet").works()


def test_the_matrix_runs_it_and_the_documentation_asks_for_a_probe(scale: Method, document: Any, capsys) -> None:
    folder = Path(inlay.methods.__path__[-1])
    code = (
        f"import sys, inlay.methods; inlay.methods.__path__.append({str(folder)!r}); import pytest; "
        "sys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    arguments = [str(ROOT / "tests/matrix/test_matrix.py"), "-k", "starts_as_the_base and scale-bert"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr  # pytest exits with 5 where no test was selected
    assert document.main(["--check"]) == 1
    assert "knows nothing of scale: run make probe" in capsys.readouterr().out


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


def test_its_page_begins_by_itself(scale: Method, document: Any) -> None:
    pages = document.pages()
    page = pages[ROOT / "docs/methods/scale.md"]
    assert scale.summary in page
    assert all(f"## {section}" in page for section in document.SECTIONS)
    assert "[`scale`](scale.md)" in pages[ROOT / "docs/methods/README.md"]


def test_it_works_from_another_package(tmp_path: Path) -> None:
    """Its config may be what imports PEFT first."""
    folder = tmp_path / "my_package" / "scale"
    folder.mkdir(parents=True)
    page = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", page, flags=re.DOTALL):
        (folder / name).write_text(text.replace("inlay.methods.scale", "my_package.scale"), encoding="utf-8")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[inlay.methods]\nscale = my_package.scale\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import inlay; from inlay.methods.registry import get; "
        "found = get('scale').config_class(); from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as known; "
        "print(found is inlay.ScaleConfig is known[found().peft_type])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
