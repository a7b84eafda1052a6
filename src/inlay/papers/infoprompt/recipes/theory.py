"""Theorem 3.1, whose formal version is D.1: softmax regression by an approximate Newton method (appendices C and D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.drawing import curves
from inlay.papers.reproduce.experiments import Shape, performed
from inlay.papers.reproduce.predicates import stated
from inlay.papers.reproduce.recipe import Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench


def theorem_3_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The error by step of each way to run Algorithm 1; of the lemmas and the times what the lab judged."""
    shapes = {
        "theorem-d1": [Shape(("case",), curve=("t", "error"), points=21)],
        "lemmas-c15-c16": [],
        "newton-time": [],
    }
    return Results().with_(
        performed(bench, "softmax_regression", name, settings, shape) for name, shape in shapes.items()
    )


RECIPES = (
    Recipe(
        name="infoprompt/theorem-3-1",
        title="A gradient-descent-type algorithm finds the optimum: theorem D.1 and its lemmas",
        scales={
            "paper": RecipeScale(
                "n = 8,192, d = 16, 5 seeds; times for n up to 262,144, d = 256. Not in the paper, ours: all sizes.",
                "1 min",
            ),
            "here": RecipeScale("n = 8,192, d = 16, 5 seeds; times for n up to 262,144, d = 256.", "1 min, 0.5 GB"),
            "smoke": RecipeScale(
                "n = 8,192, d = 16, one seed; times for n = 64 and 128.",
                "2 s",
                settings={"rows": (64, 128), "size": 8, "seeds": 1},
            ),
        },
        run=theorem_3_1,
        claims=(
            Claim("Algorithm 1 is within epsilon after T steps, w_i^2 = 1/n", stated("|x_T - x*| <= 1e-6"), "D.1"),
            Claim(
                "The same under the theorem's own conditions",
                stated("the same under the theorem's own conditions"),
                "D.1",
            ),
            Claim(
                "Under those conditions there is something to regress",
                stated("under those conditions there is something"),
                "D.1",
            ),
            Claim("x + H^-1 g, as line 8 is printed, finds the minimum", stated("x + H^-1 g"), "algorithm 1"),
            Claim("H >= l I with the weights as printed", stated("H >= l I where"), "C.15, part 1"),
            Claim("R_0 is of the size that is needed", stated("R_0 = exp(R^2 + log n) is of the size"), "C.15"),
            Claim("W^2 is within 1 % of B + W^2", stated("0.99 B~ <= W^2"), "C.15, part 2"),
            Claim("The Hessian is Lipschitz with the printed constant", stated("|H(x) - H(y)| <= n^4"), "C.16"),
            Claim(
                "A step is cheaper than an exact one for n >> d",
                stated("faster than exact Newton for n >> d, a step: sampled"),
                "D.1",
            ),
        ),
        draw=curves("Algorithm 1", "step", "|x - x*|", log_y=True),
        notes=(
            "The same as `inlay lab softmax-regression`, which draws it: see docs/theory/softmax-regression.md.",
            "The theorem is about softmax regression and Newton's method, and not about the loss (1) that is trained.",
        ),
    ),
)
