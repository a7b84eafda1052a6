"""What the generators of the pages with tables of runs share: rows in Markdown, cells, and the marks in a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from generated import ROOT

BENCHMARKS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"


def row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"


def head(*cells: str) -> list[str]:
    """The first two rows of a table in Markdown: names to the left, numbers to the right."""
    return [row(*cells), "| --- |" + " ---: |" * (len(cells) - 1)]


def shown(values: Sequence[float], wanted: int, size: float = 100, digits: int = 1) -> str:
    """Mean and half of the 95 % interval, times `size`; how many seeds there are where more are wanted."""
    from inlay.workflow.statistics import half_width

    width = half_width(values)
    fewer = "" if len(values) >= wanted else f" ({len(values)} seed{'s' * (len(values) > 1)})"
    return f"{size * fmean(values):.{digits}f}" + ("" if width is None else f" ± {size * width:.{digits}f}") + fewer


def with_error(values: Sequence[float], digits: int = 1) -> str:
    """Mean and standard error."""
    from inlay.workflow.statistics import standard_error

    error = standard_error(values)
    return f"{fmean(values):.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def difference(mine: Sequence[float], theirs: Sequence[float], size: float = 100, digits: int = 1) -> str:
    """The mean of paired differences, times `size`; bold where the 95 % interval excludes 0."""
    from inlay.workflow.statistics import half_width

    values = [size * (a - b) for a, b in zip(mine, theirs, strict=True)]
    width = half_width(values)
    text = f"{fmean(values):+.{digits}f}" + ("" if width is None else f" ± {width:.{digits}f}")
    return f"**{text}**" if width is not None and abs(fmean(values)) > width else text


def fill(page: Path, parts: Mapping[str, Sequence[str]]) -> None:
    """Put tables into a page, each between its marks; the words around them are people's."""
    page.write_text(filled(page, parts))


def filled(page: Path, parts: Mapping[str, Sequence[str]]) -> str:
    """The page's text with the tables in it."""
    text = page.read_text()
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{page} has no marks for {name!r}")
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text
