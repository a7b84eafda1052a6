"""The generated documentation is current, cheap to check, and every page's example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel

from inlay.errors import InlayError
from inlay.methods.attach import trained_parameters
from inlay.methods.capabilities import FILE, capabilities, trained_count
from inlay.methods.registry import all_methods
from zoo import tiny

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
METHODS = list(all_methods().values())


@pytest.fixture
def document(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import document_methods

    return document_methods


def test_everything_is_current_and_checked_without_torch() -> None:
    code = "import sys; from document_methods import main; print(main(['--check']), 'torch' in sys.modules)"
    place = ROOT / "scripts"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=place)
    assert done.stdout.splitlines()[-1:] == ["0 False"], done.stdout + done.stderr


def test_what_is_out_of_date_is_named_and_mended(document, tmp_path, monkeypatch, capsys) -> None:
    for path, text in document.pages().items():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    monkeypatch.setattr(document, "ROOT", tmp_path)
    assert document.main(["--check"]) == 0
    page = tmp_path / "docs/methods/bias.md"
    page.write_text(page.read_text().replace("0.001", "0.002"))
    (tmp_path / "docs/methods/norm.md").unlink()
    assert document.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "docs/methods/bias.md" in printed
    assert "docs/methods/norm.md" in printed
    assert document.main(["--write"]) == 0
    assert document.main(["--check"]) == 0
    (tmp_path / "docs/methods/ssf.md").write_text("nothing here")
    with pytest.raises(InlayError, match="generated:begin"):
        document.main(["--check"])


def test_the_capabilities_file_is_what_the_script_writes(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import probe_methods

    import quantised_zoo

    known = capabilities()
    assert (ROOT / "src/inlay/methods" / FILE).read_text(encoding="utf-8") == probe_methods.compact(known)
    methods, families = ["linear-probe", "bias"], ["bert", "llama", "resnet"]
    found = probe_methods.probe_all([all_methods()[name] for name in methods], families)
    assert found.pop("methods") == {m: {f: t for f, t in known["methods"][m].items() if f in families} for m in methods}
    assert found.pop("trained") == {name: known["trained"][name] for name in methods}
    # What cannot be tried here is taken over whole.
    tried = [kind for kind in quantised_zoo.KINDS if quantised_zoo.missing(kind) is None]
    assert found.pop("quantised") == {
        name: {
            kind: [family for family in works if family in families or kind not in tried]
            for kind, works in known["quantised"][name].items()
        }
        for name in methods
    }
    assert found == {key: {family: known[key][family] for family in families} for key in found}


def test_a_few_parameters_are_not_called_0k(monkeypatch) -> None:
    known = {"trained": {"bias": 12, "norm": 38_400, "lora": 1_250_000}}
    monkeypatch.setattr("inlay.methods.capabilities.capabilities", lambda: known)
    assert [trained_count(all_methods()[name]) for name in known["trained"]] == ["12", "38k", "1.2M"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_page_is_written(method, document) -> None:
    text = (ROOT / "docs/methods" / f"{method.name}.md").read_text(encoding="utf-8")
    for section in document.SECTIONS:
        body = re.search(rf"## {section}\n\n(.+?)(\n## |\Z)", text, flags=re.DOTALL)
        assert body, section
        assert len(body.group(1)) > 20, section


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_example_runs(method) -> None:
    text = (ROOT / "docs/methods" / f"{method.name}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    works = capabilities()["methods"].get(method.name, ())
    scope = {"model": tiny("bert" if "bert" in works else "vit")[0]}
    exec(code, scope)
    assert trained_parameters(scope["model"])
    assert isinstance(scope["model"], PeftModel) == (method.form == "peft")
