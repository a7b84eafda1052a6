"""The notebooks as pages of the site: their texts and code, and what the code gave where `make notebooks` has run them.

Outputs are not committed: they change with every run, and a stale one would be a lie. A page built without them shows
the code and says so.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "notebooks"
EXECUTED = ROOT / "build" / "notebooks"
FOLDER = "tutorials"
FENCE = "~" * 6
STYLE = re.compile(r"<style scoped>.*?</style>", re.DOTALL)
LOCAL = re.compile(r'src="([\w.-]+)"')


def sources() -> list[Path]:
    """The notebooks, as Python files whose cells begin with `# %%`."""
    return sorted(SOURCES.glob("*.py"))


def read(source: Path) -> Any:
    """The notebook that a source is, without outputs."""
    return jupytext.read(source, fmt="py:percent")


def executed(source: Path) -> Any | None:
    """The same with its outputs; None if it was not run, or its code was changed since."""
    path = EXECUTED / f"{source.stem}.ipynb"
    if not path.is_file():
        return None
    before, now = nbformat.read(path, as_version=4), read(source)
    pairs = list(zip(_code(before), _code(now), strict=False))
    if len(_code(before)) != len(_code(now)) or any(old.source != new.source for old, new in pairs):
        return None
    for old, new in pairs:
        new.outputs, new.execution_count = old.outputs, old.execution_count
    now.metadata["inlay"] = before.metadata["inlay"]
    return now


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pages() -> dict[str, str | bytes]:
    """Every file of the section: a page for each notebook, its pictures, and the files that it shows."""
    files: dict[str, str | bytes] = {f"{FOLDER}/index.md": (SOURCES / "README.md").read_text(encoding="utf-8")}
    for source in sources():
        run = executed(source)
        name = f"{FOLDER}/{source.stem}/{source.stem}"
        files[f"{name}.py"] = source.read_text(encoding="utf-8")
        files[f"{name}.ipynb"] = nbformat.writes(run or read(source))
        shown = [part for cell in (run or read(source)).cells for part in _cell(cell, source.stem, files)]
        shown.insert(1, _introduction(source.stem, run))
        files[f"{FOLDER}/{source.stem}.md"] = "\n\n".join(shown) + "\n"
    return files


def _introduction(name: str, run: Any | None) -> str:
    """The line below the title: where to get the notebook, and what is shown of it."""
    files = f"Download it: [notebook]({name}/{name}.ipynb), [Python file]({name}/{name}.py)."
    if run is None:
        return f"*{files} This page was built without its results: `make notebooks` makes them.*"
    if run.metadata.inlay.small:
        return f"*{files} The results below are from a quick check with few rows and few steps: they mean nothing.*"
    return f"*{files}*"


def _cell(cell: Any, name: str, files: dict[str, str | bytes]) -> Iterator[str]:
    if cell.cell_type == "markdown":
        # The title by itself: what is said of the notebook stands below it.
        title, _, rest = cell.source.partition("\n") if cell.source.startswith("# ") else ("", "", cell.source)
        yield from (part.strip() for part in (title, rest) if part.strip())
        return
    yield f"{FENCE}python\n{cell.source}\n{FENCE}"
    for output in cell.get("outputs", []):
        yield from _output(output, name, files)


def _output(output: Any, name: str, files: dict[str, str | bytes]) -> Iterator[str]:
    """What a cell gave. What it told on stderr (progress, notes) is left out."""
    if output.output_type == "stream":
        if output.name == "stdout":
            yield f"{FENCE} {{ .text .output }}\n{output.text.rstrip()}\n{FENCE}"
        return
    data = output.data
    if "image/png" in data:
        earlier = [path for path in files if path.startswith(f"{FOLDER}/{name}/") and path.endswith(".png")]
        picture = f"{name}/{len(earlier) + 1}.png"
        files[f"{FOLDER}/{picture}"] = base64.b64decode(data["image/png"])
        yield f"![What the code above drew]({picture})"
    elif "text/html" in data:
        for shown in LOCAL.findall(data["text/html"]):
            files[f"{FOLDER}/{name}/{shown}"] = (EXECUTED / name / shown).read_bytes()
        yield _html(data["text/html"], name)
    elif "text/plain" in data and output.output_type == "display_data":
        yield f"{FENCE} {{ .text .output }}\n{data['text/plain']}\n{FENCE}"


def _html(text: str, name: str) -> str:
    """HTML without the notebook's own looks, and without empty lines, which would end it in Markdown."""
    text = STYLE.sub("", text).replace('<table border="1" class="dataframe">', "<table>")
    text = LOCAL.sub(rf'src="{name}/\1"', re.sub(r' style="text-align: \w+;"', "", text))
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
