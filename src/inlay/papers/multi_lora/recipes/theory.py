"""Table 3: the constants of softmax regression at random points (appendix B), by `inlay lab decomposable`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.experiments import Shape, performed
from inlay.papers.reproduce.predicates import stated
from inlay.papers.reproduce.recipe import PRINTED, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

SIZES = ((10, 5), (10, 10), (10, 20), (20, 5), (20, 10), (20, 20), (20, 40))
# The table's columns by the lab's. M is the Hessian's change between two draws of x, over their distance.
COLUMNS = {"alpha": "alpha", "beta": "beta", "M far": "M", "gamma": "gamma"}
HESSIANS = {"corrected": "", "printed": "with the printed B"}


def table_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """A row an (n, d). The first panel has the true Hessian, the second that of Lemma B.4 as printed."""
    shapes = [
        Shape(
            ("n", "d", "b", "Hessian"),
            columns=tuple(COLUMNS),
            named={f"n {n}, d {d}, gaussian, {kind}": f"n = {n}, d = {d}" for n, d in SIZES},
            within=panel,
        )
        for kind, panel in HESSIANS.items()
    ]
    made = performed(bench, "decomposable", "table-3", settings, shapes)
    cells = {(panel, row, COLUMNS[column]): cell for (panel, row, column), cell in made.cells.items()}
    return replace(made, cells=cells)


def not_negative(results: Results) -> Verdict:
    """A Hessian at least 0, as a strongly convex loss has it, everywhere in the first panel."""
    found = {row: cell for (panel, row, column), cell in results.cells.items() if (panel, column) == ("", "alpha")}
    if not found:
        return Verdict.untested("the table has no alpha")
    least = min(found, key=lambda row: found[row].mean)
    return Verdict.of(found[least].mean >= 0, f"least {found[least].mean:.3g} ({least})")


RECIPES = (
    Recipe(
        name="multi-lora/table-3",
        title="Constants of softmax regression at random points",
        printed=Path(__file__).parent / "table-3.csv",
        scales={
            "paper": RecipeScale(
                "10,000 samples for each (n, d). Not in the paper, ours: A, b and x from N(0, 1).", "20 s on one core"
            ),
            "here": RecipeScale("10,000 samples for each (n, d); A, b and x from N(0, 1).", "20 s on one core"),
            "smoke": RecipeScale("20 samples.", "1 s", settings={"samples": 20}),
        },
        run=table_3,
        claims=(
            Claim("The loss is convex at a typical point: alpha is not negative", not_negative, "appendix B"),
            Claim("alpha is 0.00", stated("alpha = 0.00"), PRINTED),
            Claim("beta is 148 to 2512", stated("beta = 148"), PRINTED),
            Claim("M is 21 to 74", stated("M = 21"), PRINTED),
            Claim("gamma is 0.54 to 1.24", stated("gamma = 0.54"), PRINTED),
            Claim("The B of Lemma B.4 gives the Hessian", stated("the B of Lemma B.4"), "lemma B.4"),
        ),
        notes=(
            "The same as `inlay lab decomposable --figure table-3`: see docs/theory/decomposable.md.",
            "The paper does not say how it draws A, b and x, nor between which points M is taken.",
        ),
    ),
)
