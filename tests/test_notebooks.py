"""The notebooks are well formed, and the site shows all of them, with what they gave when they were run.

`make notebooks` runs them; CI does so with INLAY_NOTEBOOKS=small.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
ids = [source.stem for source in SOURCES]
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The module that makes the pages; nothing has been run."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.delitem(sys.modules, "site_notebooks", raising=False)
    import site_notebooks

    monkeypatch.setattr(site_notebooks, "EXECUTED", tmp_path)
    return site_notebooks


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_a_notebook_asks_answers_and_says_what_to_try(source: Path) -> None:
    notebook = jupytext.read(source, fmt="py:percent")
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert re.match(r"# \w[^\n]+\n\n\*\*The question\.\*\* .+\n\n\*\*The answer\.\*\* ", texts[0], flags=re.DOTALL)
    assert texts[-1].startswith("## What to try next\n\n- ")
    for cell in code:
        ast.parse(cell)
    assert any("plt.savefig(" in cell or "display(" in cell for cell in code), "it shows neither a picture nor a table"
    assert any("INLAY_NOTEBOOKS" in cell for cell in code), "it has no small size"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "\n".join(texts)):
        assert (source.parent / target).exists(), target


def test_every_notebook_is_listed(site) -> None:
    assert len(SOURCES) == 6
    overview = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    config = re.sub(r"!!python\S+ \{[^\n]*\}", "null", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    sections = {name: pages for entry in yaml.safe_load(config)["nav"] for name, pages in entry.items()}
    assert list(sections) == ["Start", "Tutorials", "How-to", "Methods", "Papers", "Reference", "Benchmarks"]
    assert sorted(sections["Tutorials"]) == sorted(f"tutorials/{name}.md" for name in ("index", *ids))
    for source in SOURCES:
        assert f"]({source.name})" in overview


def test_a_page_without_results_says_so(site) -> None:
    pages = site.pages()
    for source in SOURCES:
        page = pages[f"tutorials/{source.stem}.md"]
        assert page.startswith(jupytext.read(source, fmt="py:percent").cells[0].source.partition("\n")[0] + "\n")
        assert "This page was built without its results" in page
        assert "import inlay" in page
        given = nbformat.reads(pages[f"tutorials/{source.stem}/{source.stem}.ipynb"], as_version=4)
        assert given.cells[0].cell_type == "markdown"


def test_a_page_shows_what_the_code_gave(site, tmp_path: Path) -> None:
    source = SOURCES[0]
    run = site.read(source)
    run.metadata["inlay"] = {"small": False}
    cell = next(cell for cell in run.cells if cell.cell_type == "code")
    table = (
        '<div>\n<style scoped>\n td {}\n</style>\n<table border="1" class="dataframe">\n\n<tr><td>1</td></tr>\n</table>'
    )
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="three rows\n"),
        nbformat.v4.new_output("stream", name="stderr", text="half done\n"),
        nbformat.v4.new_output("display_data", {"image/png": PICTURE, "text/plain": "<Figure>"}),
        nbformat.v4.new_output("display_data", {"text/html": table, "text/plain": "1"}),
        nbformat.v4.new_output("display_data", {"text/html": '<iframe src="report.html"></iframe>'}),
        nbformat.v4.new_output("execute_result", {"text/plain": "4711"}),
    ]
    (tmp_path / source.stem).mkdir()
    (tmp_path / source.stem / "report.html").write_text("<p>the report")
    nbformat.write(run, tmp_path / f"{source.stem}.ipynb")
    pages = site.pages()
    page = pages[f"tutorials/{source.stem}.md"]
    assert "~~~~~~ { .text .output }\nthree rows\n~~~~~~" in page
    assert "half done" not in page
    assert "4711" not in page
    assert "<div>\n<table>\n<tr><td>1</td></tr>\n</table>" in page
    assert f'<iframe src="{source.stem}/report.html">' in page
    assert pages[f"tutorials/{source.stem}/report.html"] == b"<p>the report"
    picture = re.search(r"!\[.+\]\((.+\.png)\)", page)
    assert picture is not None
    assert pages[f"tutorials/{picture[1]}"].startswith(b"\x89PNG")
    assert "without its results" not in page

    cell.source += "\nprint('changed')"
    nbformat.write(run, tmp_path / f"{source.stem}.ipynb")
    assert "three rows" not in site.pages()[f"tutorials/{source.stem}.md"], "results of another text are not shown"
