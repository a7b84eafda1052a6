"""An experiment of the lab as files: written, read back, and drawn and judged again without the work."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.papers.findings import Finding, MeasuredClaim
from inlay.records.versions import versions
from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(
    found: Finding, folder: Path, command: Sequence[str], drawn: Mapping[str, Callable[[Finding], Figure]]
) -> None:
    """Draw an experiment, by its picture in `drawn`, and keep it with its numbers and circumstances."""
    claims = [vars(claim) for claim in found.claims]
    facts = {"claims": claims, "settings": found.facts, "command": list(command), "versions": versions()}
    charts.keep(folder, found.name, drawn[found.name](found), found.columns, found.rows, facts)


def read(folder: Path) -> tuple[Finding, dict[str, Any]]:
    """What `write` left in a folder: the finding, and the JSON as it is."""
    name = folder.name
    try:
        facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            columns, *rows = csv.reader(file)
        claims = [MeasuredClaim(**claim) for claim in facts["claims"]]
        cells = [tuple(map(_cell, row)) for row in rows]
        return Finding(name, tuple(columns), cells, claims, facts["settings"]), facts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InlayError(
            f"{folder} holds no experiment that can be read ({name}.csv and {name}.json): {error}. Run it first."
        ) from error


def _cell(text: str) -> str | int | float | None:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def redraw(
    folder: Path,
    drawn: Mapping[str, Callable[[Finding], Figure]],
    claims: Mapping[str, Callable[[Finding], list[MeasuredClaim]]],
) -> Finding:
    """Draw a kept experiment anew, with its claims read anew where `claims` can; command and versions stay."""
    found, facts = read(folder)
    if found.name not in drawn:
        raise InlayError(f"{folder} holds {found.name!r}, which is none of {', '.join(sorted(drawn))}.")
    try:
        if found.name in claims:
            found = replace(found, claims=claims[found.name](found))
        figure = drawn[found.name](found)
    except InlayError:
        raise
    except (KeyError, IndexError, ValueError) as error:
        raise InlayError(
            f"{folder} was made by another version of inlay, and lacks something ({error}). Run it again."
        ) from error
    facts["claims"] = [vars(claim) for claim in found.claims]
    charts.keep(folder, found.name, figure, found.columns, found.rows, facts)
    return found
