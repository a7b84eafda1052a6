"""The generated part of docs/fidelity.md, from the latest `here` results, which are committed as data.

python -m inlay.reproduce.document --take reproduce     # copy the results of `inlay reproduce` into docs/data/reproduce
python -m inlay.reproduce.document --write              # write the page's generated part from them
python -m inlay.reproduce.document --check              # fail where it is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.records.atomic import write_json, write_text
from inlay.reproduce import catalogue, kept
from inlay.reproduce.perform import grid
from inlay.reproduce.recipe import FAILS, HOLDS, PRINTED, READING, UNTESTED, Recipe, Verdict
from inlay.reproduce.results import Results

ROOT = Path(__file__).parents[3]
DATA = ROOT / "docs" / "data" / "reproduce"
PAGE = ROOT / "docs" / "fidelity.md"
BEGIN, END = "<!-- reproduce:begin -->", "<!-- reproduce:end -->"
SHORT = {HOLDS: "yes", FAILS: "no", UNTESTED: "not tested"}
KEPT = ("recipe", "scale", "seconds", "ours", "versions")


def path_of(name: str, data: Path | None = None) -> Path:
    """Where a recipe's latest result is committed."""
    paper, _, item = name.partition("/")
    return (DATA if data is None else data) / paper / f"{item}.json"


def latest(name: str) -> dict[str, Any] | None:
    """A recipe's committed result; None where it was not run yet, or this is no checkout."""
    path = path_of(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def last_verdict(name: str) -> str:
    """The committed result in a few words: how many claims hold, do not, were not tested."""
    found = latest(name)
    if found is None:
        return "not run yet"
    verdicts = catalogue.recipes()[name].judged(Results.from_json(found["ours"]))
    count = Counter(verdict.judgement for verdict in verdicts)
    words = {HOLDS: "hold", FAILS: "do not hold", UNTESTED: "not tested"}
    return ", ".join(f"{count[judgement]} {word}" for judgement, word in words.items() if count[judgement])


def take(out: Path) -> list[str]:
    """Copy what is needed of the `here` results under `out` into the checkout; the names taken."""
    taken = []
    for name in catalogue.recipes():
        paper, _, item = name.partition("/")
        source = out / paper / item / "here" / f"{item}.json"
        if source.is_file():
            found = json.loads(source.read_text(encoding="utf-8"))
            target = path_of(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Where models and data lay concerns nobody else.
            command = {"command": ["inlay", "reproduce", name, "--scale", "here"]}
            write_json(target, {key: found[key] for key in KEPT} | command)
            taken.append(name)
    return taken


def section() -> str:
    """The generated part: for every paper its recipes, and of each claim what the printed numbers and ours say."""
    by_paper: dict[str, list[Recipe]] = {}
    for recipe in catalogue.recipes().values():
        by_paper.setdefault(recipe.paper, []).append(recipe)
    parts = []
    for paper, recipes in by_paper.items():
        rows = [row for recipe in recipes for row in rows_of(recipe)]
        head = ["recipe", "claim", "holds in the paper's numbers?", "holds here?", "measured here"]
        parts += [f"### {catalogue.title(paper)}", grid(head, rows)]
    return "\n\n".join(parts)


def rows_of(recipe: Recipe) -> list[list[str]]:
    """A row a claim; the recipe's name in the first."""
    found = latest(recipe.name)
    ours = recipe.judged(Results.from_json(found["ours"])) if found else [None] * len(recipe.claims)
    rows = []
    for number, (claim, printed, measured) in enumerate(
        zip(recipe.claims, recipe.judged_as_printed(), ours, strict=True)
    ):
        first = f"`{recipe.item}`: {recipe.title}" + ("" if found is None else circumstances(found))
        paper = SHORT[printed.judgement] + (f": {printed.measured}" if printed.judgement == FAILS else "")
        paper = "printed so" if claim.where == PRINTED else paper
        text = f"{claim.text} (our reading)" if claim.where == READING else claim.text
        rows.append([first if number == 0 else "", text, paper, *_ours(measured)])
    return rows


def _ours(verdict: Verdict | None) -> tuple[str, str]:
    if verdict is None:
        return "not run yet", ""
    told = SHORT[verdict.judgement] + (", not told apart" if verdict.clear is False else "")
    span = "" if verdict.interval is None else f" [{verdict.interval[0]:.3g}, {verdict.interval[1]:.3g}]"
    return told, verdict.measured + span


def circumstances(found: Mapping[str, Any]) -> str:
    """What was read, or how long it took on what."""
    read = [match[1] for note in found["ours"]["notes"] if (match := re.match(rf"{kept.READ} (\S+):", note))]
    if read:
        return f" (read from {', '.join(f'`{path}`' for path in dict.fromkeys(read))})"
    machine = found["versions"]
    where = machine.get("gpu") or f"{machine['threads'] or 1} of {machine['cores']} CPU cores"
    return f" ({max(1, round(found['seconds']))} s on {where})"


def page() -> str:
    """docs/fidelity.md as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    head, begun, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise InlayError(f"{PAGE} has no lines {BEGIN} and {END}, between which the generated part goes.")
    return f"{head}{BEGIN}\n\n{section()}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, help="a folder of `inlay reproduce` whose `here` results to commit")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.take:
        print("\n".join(take(args.take)) or f"no `here` results under {args.take}")
    if args.write:
        write_text(PAGE, page())
    if args.check and page() != PAGE.read_text(encoding="utf-8"):
        print("docs/fidelity.md is not up to date: python -m inlay.reproduce.document --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
