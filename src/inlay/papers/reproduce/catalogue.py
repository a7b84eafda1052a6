"""Every recipe, by its name: the modules of a paper's `recipes/` list theirs in `RECIPES`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from inlay.errors import InlayError, nearest
from inlay.papers.reproduce.recipe import Recipe

PAPERS = Path(__file__).parents[1]


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes, paper by paper, in the order of the papers' modules and of their lists."""
    found: dict[str, Recipe] = {}
    for paper in papers():
        package = importlib.import_module(f"inlay.papers.{paper}.recipes")
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
            for recipe in getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "RECIPES", ()):
                assert recipe.paper == paper.replace("_", "-"), f"{recipe.name} is in {paper}"
                assert recipe.name not in found, f"{recipe.name} is there twice"
                found[recipe.name] = recipe
    return dict(sorted(found.items(), key=lambda entry: order(entry[0])))


def papers() -> list[str]:
    """The folders that hold recipes."""
    return sorted(folder.parent.name for folder in PAPERS.glob("*/recipes"))


def title(paper: str) -> str:
    """A paper's title: `TITLE` of its folder."""
    return str(importlib.import_module(f"inlay.papers.{paper.replace('-', '_')}").TITLE)


def order(name: str) -> tuple[str, int, str, int, str]:
    """Tables, then figures, then theory; by number, the appendix last."""
    paper, _, item = name.partition("/")
    kind, _, number = item.partition("-")
    appendix = number[:1].lower() if number[:1].isalpha() and number[1:2].isdigit() else ""
    digits = "".join(letter for letter in number.removeprefix(appendix) if letter.isdigit())
    kinds = ("table", "figure", "section", "proposition", "lemma", "theorem")
    return paper, kinds.index(kind) if kind in kinds else len(kinds), appendix, int(digits or 0), item


def choose(name: str) -> list[Recipe]:
    """The recipe of this name; all of a paper by the paper's; every one by `all`."""
    known = recipes()
    if name == "all":
        return list(known.values())
    if name in known:
        return [known[name]]
    of_paper = [recipe for recipe in known.values() if recipe.paper == name.removesuffix("/")]
    if of_paper:
        return of_paper
    close = nearest(name, known) or [full for full in known if full.partition("/")[2] == name][:3]
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise InlayError(f"Unknown recipe {name!r}.{hint} `inlay reproduce --list` has all {len(known)} names.")
