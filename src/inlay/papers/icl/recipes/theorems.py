"""Proposition 1, section 3.3, and Theorems 1 and 2 where their constants say something; by the functions of `inlay lab
icl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.icl.recipes.figures import LAB, STARTS, nobody
from inlay.papers.reproduce.drawing import curves
from inlay.papers.reproduce.experiments import Shape, performed
from inlay.papers.reproduce.predicates import Test, judged, stated
from inlay.papers.reproduce.recipe import Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

INSTANCES = ("N = 2, K = 4, H = 2", "N = 2, K = 4, H = 4", "N = 3, K = 5, H = 8", "N = 4, K = 6, H = 16")


def theorem_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Panels are instances: the gap of gradient descent beside the bound."""
    shapes = [Shape(panel="instance", curve=("step", row), named={"all": row}) for row in ("gap", "bound (18)")]
    return performed(bench, "icl", "theorem-1", settings, shapes, nobody)


def theorem_2(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """What each instance ended with, after T steps."""
    ends = Shape(("instance",), columns=("T", "share within epsilon", "largest error"), last=True)
    return performed(bench, "icl", "theorem-2", settings, [ends], nobody)


def proposition_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Panels are kinds of tokens, rows numbers of heads."""
    shape = Shape(("tokens",), curve=("H", "share with full rank"))
    return performed(bench, "icl", "proposition-1", settings, [shape], nobody)


def section_3_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Rows are numbers, columns draws of the problem."""
    return performed(bench, "icl", "section-3-3", settings, [Shape(("number",), curve=("draw", "value"))], nobody)


def within_epsilon(instance: str) -> Test:
    """The lab's claim begins with T, which follows from the constants: it is found by its instance."""
    return judged(lambda text: text.startswith("after T = ") and text.endswith(instance))


RECIPES = (
    Recipe(
        name="icl/proposition-1",
        title="The rank of a random start against the number of heads",
        scales={
            "paper": RecipeScale(
                "N = 6, K = 10; 200 draws of the start, from each of 3 seeds. Not in the paper, ours: all sizes.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "here": RecipeScale(
                "N = 6, K = 10; 200 draws of the start, from each of 3 seeds.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "smoke": RecipeScale("The same from one seed.", "10 s"),
        },
        run=proposition_1,
        claims=(
            Claim(
                "With H >= N heads a Gaussian start has full row rank",
                judged(lambda text: text.startswith("H >= N = ")),
                "proposition 1",
            ),
            Claim(
                "So too with Gaussian tokens of the figures' size (d = 100), in floating point",
                stated("so too with Gaussian tokens in d = 100"),
                "section 4",
            ),
            Claim("With H < N heads it never has", stated("H < N: never"), "proposition 1"),
            Claim("Without assumption 3 (a token twice) it never has", stated("a token twice"), "assumption 3"),
        ),
        notes=(LAB,),
    ),
    Recipe(
        name="icl/section-3-3",
        title="What the transformer stands for, and why one head cannot learn it",
        scales={
            "paper": RecipeScale(
                "N = 6, K = 12, m = 4, tau = 0.1; 20 draws of the problem and 5 trainings, from each of 3 seeds. Not "
                "in the paper, ours: all sizes.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "here": RecipeScale(
                "N = 6, K = 12, m = 4, tau = 0.1; 20 draws of the problem and 5 trainings, from each of 3 seeds.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "smoke": RecipeScale("The same from one seed.", "3 s"),
        },
        run=section_3_3,
        claims=(
            Claim("Without noise, and with N >= m, Z^+ Zhat gives every label", stated("without noise"), "(26)"),
            Claim("A gives y*", stated("y* is <y, A_k>"), "(27)"),
            Claim("One head cannot reach the least loss", stated("one head cannot"), "section 3.3"),
            Claim("Trained, one head stays above what one head can reach", stated("trained, one head"), "section 3.3"),
            Claim(
                "Trained, N heads come below what one head can reach",
                judged(lambda text: text.startswith("trained, N = ")),
                "section 3.3",
            ),
        ),
        notes=(LAB,),
    ),
    Recipe(
        name="icl/theorem-1",
        title="Gradient descent at the theorem's step sizes: the bound (18) at every step",
        scales={
            "paper": RecipeScale(
                "N = 2 to 4, tau = 1, unit tokens; 2,000 steps, 3 starts. Not in the paper, ours: all sizes, as the "
                "bound says nothing at the figures' sizes.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "here": RecipeScale(
                "N = 2 to 4, tau = 1, unit tokens; 2,000 steps, 3 starts.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "smoke": RecipeScale(
                "The same for five steps.", "1 s", settings={"N": 3, "K": 8, "d": 6, "m": 3, "steps": 5}
            ),
        },
        run=theorem_1,
        claims=(
            *(
                Claim(
                    f"The gap is below (18) at every step; {instance}",
                    stated(f"(18): the gap is below (1 - eta_w zeta_0 / (2K))^t of its start; {instance}"),
                    "theorem 1",
                )
                for instance in INSTANCES
            ),
            Claim(
                "(18) says something at the printed size, Gaussian tokens (section 4)",
                stated("(18) says something at N = 30, H = 64: Gaussian tokens"),
                "theorem 1",
            ),
            Claim(
                "(18) says something at the printed size, tokens of norm 1 (section 2)",
                stated("(18) says something at N = 30, H = 64: tokens of norm 1"),
                "theorem 1",
            ),
            Claim(
                "A larger H makes the guaranteed rate slower", stated("a larger H makes the guaranteed rate"), "(18)"
            ),
        ),
        draw=curves("Gradient descent and (18)", "step", "loss - inf", log_y=True),
        notes=(
            LAB,
            "The paper has no instance: at its figures' sizes the constants say nothing, which two claims show.",
        ),
    ),
    Recipe(
        name="icl/theorem-2",
        title="After the theorem's number of steps, how many prompts are within epsilon of y*",
        scales={
            "paper": RecipeScale(
                "N = 2 and 3, tau = 1, unit tokens; 10,000 prompts, 3 starts. Not in the paper, ours: all sizes.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "here": RecipeScale(
                "N = 2 and 3, tau = 1, unit tokens; 10,000 prompts, 3 starts.",
                "a minute on one core",
                settings={"starts": STARTS},
            ),
            "smoke": RecipeScale("The same.", "2 s"),
        },
        run=theorem_2,
        claims=tuple(
            Claim(
                f"The error is at most epsilon with probability 1 - delta; {instance}",
                within_epsilon(instance),
                "theorem 2",
            )
            for instance in INSTANCES[:3]
        ),
        notes=(LAB,),
    ),
)
