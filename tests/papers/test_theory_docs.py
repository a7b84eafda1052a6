"""docs/fidelity.md names checks that exist, and the theory pages show the pictures they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_check_that_is_named_exists() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    cells = [line.split("|")[-2] for line in page.splitlines() if line.startswith("|")]
    named = 0
    for cell in cells:
        # `test_a.py::test_b`, and after it `test_c` for another test of the same file.
        file = ""
        for name, test in re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", cell):
            file = name or file
            if not (name or test):
                continue
            named += 1
            assert not name or name in files, name
            found = [files[file]] if file else list(files.values())
            assert not test or any(f"def {test}(" in text for text in found), f"{file}::{test}"
    assert named > 20


@pytest.mark.parametrize("name", ["activation-prompts", "decomposable", "prefix", "softmax-regression"])
def test_pictures_and_links_of_the_theory_pages_lead_somewhere(name: str) -> None:
    folder = ROOT / "docs" / "theory"
    page = (folder / f"{name}.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", page)
    assert len(links) >= 4
    for link in links:
        assert (folder / link).exists(), link
