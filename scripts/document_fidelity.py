"""The generated part of docs/fidelity.md, and docs/verdicts.md, from the latest `here` results, which are kept.

python scripts/document_fidelity.py --take reproduce     # copy results into src/inlay/papers/<paper>/kept/reproduce
python scripts/document_fidelity.py --write              # write the generated part and the short page from them
python scripts/document_fidelity.py --check              # fail where it is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from generated import ROOT, replaced
from short_verdicts import verdicts_page

from inlay.errors import InlayError
from inlay.papers.reproduce import catalogue, kept
from inlay.papers.reproduce.latest import count_verdicts, last_verdicts, latest, path_of
from inlay.papers.reproduce.perform import grid
from inlay.papers.reproduce.recipe import FAILS, HOLDS, OPEN, PRINTED, READING, UNJUDGED, UNTESTED, Recipe, Verdict
from inlay.papers.reproduce.results import Results
from inlay.records.atomic import write_text

PAGE, VERDICTS = ROOT / "docs" / "fidelity.md", ROOT / "docs" / "verdicts.md"
BEGIN, END = "<!-- reproduce:begin -->", "<!-- reproduce:end -->"
TOTALS = "<!-- totals:begin -->", "<!-- totals:end -->"
SHORT = {HOLDS: "yes", FAILS: "no", OPEN: OPEN, UNJUDGED: UNJUDGED, UNTESTED: UNTESTED}
KEPT = ("recipe", "scale", "settings", "models", "data", "notes", "seconds", "ours", "versions")
DIRTY = "+"  # how the commit of a tree with changes ends


def dirty(found: Mapping[str, Any] | None) -> bool:
    """Whether a result was made from a tree with changes: nobody can make it again."""
    return found is not None and str(found["versions"]["commit"]).endswith(DIRTY)


def take(out: Path) -> list[str]:
    """Copy what is needed of the `here` results under `out` into the checkout; the names taken.

    One that was made from a tree with changes is refused: nobody could make it again.
    """
    taken = []
    for name in catalogue.recipes():
        paper, _, item = name.partition("/")
        source = out / paper / item / "here" / f"{item}.json"
        if source.is_file():
            found = json.loads(source.read_text(encoding="utf-8"))
            if dirty(found):
                raise InlayError(
                    f"{source} was made from a tree with changes (commit {found['versions']['commit']}): make it "
                    "again from a clean clone. Nothing of what comes after it was taken."
                )
            target = path_of(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Where models and data lay concerns nobody else.
            command = {"command": ["inlay", "reproduce", name, "--scale", "here"]}
            needed = kept.rounded({key: found[key] for key in KEPT} | command, kept.VERDICT_DIGITS)
            write_text(target, kept.as_text(needed, 3) + "\n")
            taken.append(name)
    return taken


def recipes_by_paper() -> dict[str, list[Recipe]]:
    """Every recipe, under its paper."""
    by_paper: dict[str, list[Recipe]] = {}
    for recipe in catalogue.recipes().values():
        by_paper.setdefault(recipe.paper, []).append(recipe)
    return by_paper


def totals() -> str:
    """The verdicts of all papers together, and how often each paper's printed numbers contradict its claims."""
    by_paper = recipes_by_paper()
    counts = {paper: count_claims(recipes) for paper, recipes in by_paper.items()}
    recipes, claims, holds, fails, here, not_here, unclear, unjudged, untested, _ = map(
        sum, zip(*counts.values(), strict=True)
    )
    judged = {paper: (count[3], count[2] + count[3]) for paper, count in counts.items()}
    most = sorted((paper for paper in judged if judged[paper][1]), key=lambda paper: -judged[paper][0])
    against = ", ".join(f"`{paper}` ({judged[paper][0]} of {judged[paper][1]})" for paper in most)
    open_and_others = f"{unclear} are {OPEN}, {unjudged} are {UNJUDGED}, {untested} are {UNTESTED}"
    lines = (
        f"- **{claims} claims** of {len(by_paper)} papers are judged, by {recipes} recipes.",
        f"- **In the papers' own numbers**: {holds} hold, {fails} do not; {claims - holds - fails} cannot be tested.",
        f"- **Claims that the paper's own numbers contradict**: {against}.",
        f"- **In our measurements**: {here} hold, {not_here} do not, {open_and_others}.",
    )
    return "\n".join(lines)


def section() -> str:
    """The generated part: all papers in a table, then of every recipe its circumstances, and each claim on both."""
    by_paper = recipes_by_paper()
    parts = [grid(SUMMARY, [summary(paper, recipes) for paper, recipes in by_paper.items()])]
    for paper, recipes in by_paper.items():
        parts.append(f"### {catalogue.title(paper)}")
        for recipe in recipes:
            parts += [f"#### `{recipe.item}`: {recipe.title}", here(recipe), grid(CLAIMS, rows_of(recipe))]
    return "\n\n".join(parts)


SUMMARY = (
    *("paper", "recipes", "claims", "hold in print", "do not hold in print", "hold here", "do not hold here"),
    *("not significant here", "not judged here", "not tested here", "not run yet"),
)
CLAIMS = ("claim", "holds in the paper's numbers?", "holds here?", "measured here")


def summary(paper: str, recipes: Sequence[Recipe]) -> list[str]:
    """A paper's row of the table of all papers."""
    return [catalogue.title(paper), *map(str, count_claims(recipes))]


def count_claims(recipes: Sequence[Recipe]) -> tuple[int, ...]:
    """A paper's recipes and claims, and the verdicts: in its own numbers, and here; in the order of `SUMMARY`."""
    print_ = count_verdicts(verdict for recipe in recipes for verdict in recipe.judged_as_printed())
    known = [(recipe, last_verdicts(recipe)) for recipe in recipes]
    ours = count_verdicts(verdict for _, verdicts in known for verdict in verdicts or ())
    claims = sum(len(recipe.claims) for recipe in recipes)
    waiting = sum(len(recipe.claims) for recipe, verdicts in known if verdicts is None)
    return (len(recipes), claims, print_[HOLDS], print_[FAILS], *ours.values(), waiting)


def here(recipe: Recipe) -> str:
    """What the committed result was made with, from the result itself, and what a reader must know of it."""
    found = latest(recipe.name)
    if found is None:
        return "Not run yet."
    results = Results.from_json(found["ours"])
    said = [f"Here{circumstances(found)}: {found.get('settings', {}).get('summary', UNKNOWN)}"]
    theirs = recipe.scales["paper"].models_of(True)
    if theirs and found.get("models"):
        said.append(f"Models: {', '.join(theirs)} in the paper; {', '.join(found['models'])} here.")
    if results.seeds:
        numbers = dict.fromkeys((results.seeds[0], results.seeds[-1]))
        said.append(f"Values per cell: {' to '.join(map(str, numbers))}.")
    said += [*found.get("notes", ()), *(note for note in results.notes if not note.startswith(kept.READ))]
    said += [f"Failed: {which}: {why}." for which, why in results.failures.items()]
    unjudged = [verdict.unjudged for verdict in last_verdicts(recipe) or () if verdict.kind == UNJUDGED]
    if unjudged:
        said.append(f"Not judged: {'; '.join(dict.fromkeys(unjudged))}. {cost_of(recipe)}")
    if dirty(found):
        said.append("It was made from a working tree with changes and must be made again.")
    return " ".join(said)


def cost_of(recipe: Recipe) -> str:
    """What testing the claims costs."""
    return f"To test it: `inlay reproduce {recipe.name} --scale paper` ({recipe.scales['paper'].time})."


UNKNOWN = "the settings are not on record."


def rows_of(recipe: Recipe) -> list[list[str]]:
    """A row a claim: what the printed numbers say of it, and ours."""
    known = last_verdicts(recipe)
    ours: list[Verdict | None] = [None] * len(recipe.claims) if known is None else [*known]
    rows = []
    for claim, printed, measured in zip(recipe.claims, recipe.judged_as_printed(), ours, strict=True):
        paper = SHORT[printed.kind] + (f": {printed.measured}" if printed.judgement == FAILS else "")
        paper = "printed so" if claim.where == PRINTED else paper if claim.printed else "not printed"
        text = f"{claim.text} (our reading)" if claim.where == READING else claim.text
        rows.append([text, paper, *_ours(measured)])
    return rows


def _ours(verdict: Verdict | None) -> tuple[str, str]:
    if verdict is None:
        return "not run yet", ""
    told = SHORT[verdict.kind] + (f" (by the means {SHORT[verdict.judgement]})" if verdict.kind == OPEN else "")
    told += f": {verdict.unjudged}" if verdict.kind == UNJUDGED else ""
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
    text = replaced(PAGE.read_text(encoding="utf-8"), TOTALS, totals(), PAGE)
    return replaced(text, (BEGIN, END), f"\n{section()}\n", PAGE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, help="a folder of `inlay reproduce` whose `here` results to commit")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.take:
        try:
            print("\n".join(take(args.take)) or f"no `here` results under {args.take}")
        except InlayError as error:
            print(error, file=sys.stderr)
            return 2
    if args.write:
        write_text(PAGE, page())
        write_text(VERDICTS, verdicts_page(recipes_by_paper()))
    if args.check and (names := [name for name in catalogue.recipes() if dirty(latest(name))]):
        print(f"made from a tree with changes, to be made again: {', '.join(names)}", file=sys.stderr)
    if args.check:
        wanted = {PAGE: page(), VERDICTS: verdicts_page(recipes_by_paper())}
        old = [path.name for path, text in wanted.items() if text != path.read_text(encoding="utf-8")]
        for name in old:
            print(f"docs/{name} is not up to date: python scripts/document_fidelity.py --write", file=sys.stderr)
        return int(bool(old))
    return 0


if __name__ == "__main__":
    sys.exit(main())
