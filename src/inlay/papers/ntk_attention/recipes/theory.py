"""Theorem 3.1 and appendix B, by the functions of `inlay lab prefix`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.drawing import curves
from inlay.papers.reproduce.experiments import Shape, performed
from inlay.papers.reproduce.predicates import Test, judged, stated
from inlay.papers.reproduce.recipe import Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

LAB = "The same as `inlay lab prefix`, which draws it: see docs/theory/prefix.md. The paper prints no numbers."
MAPS = (
    "paper, r = d",
    "elu, r = d",
    "elu, r = 2d",
    "favor, r = 16d",
    "taylor, order 0",
    "taylor, order 2",
    "taylor, order 4",
    "taylor, order 8",
)


def theorem_3_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The error of each feature map against the length of the prefix."""
    named = {f"error, {name}": name for name in MAPS}
    shape = Shape(("kind", "map"), curve=("m", "error"), named=named)
    return performed(bench, "prefix", "theorem-3-1", settings["setting"], [shape], options=settings.get("options"))


def appendix_b(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The kernel, the start and the end of descent against m; of drift and decay what the lab judged."""
    shapes = {
        "kernel": [
            Shape(curve=("m", column), named={"all": column}, within="kernels")
            for column in ("printed lambda_min", "true lambda_min", "apart")
        ],
        "lemma-m6": [
            Shape(curve=("m", column), named={"all": column}, within="start (lemma M.6)")
            for column in ("|F(0) - Y|_F", "expected")
        ],
        "lemma-b1": [],
        "theorem-b2": [],
        "proposition-b3": [
            Shape(curve=("m", column), named={"all": column}, within="end of descent (B.3), last seed", last=True)
            for column in ("L", "law")
        ],
    }
    setting = settings["setting"]
    return Results().with_(performed(bench, "prefix", name, setting, shape) for name, shape in shapes.items())


def about(words: str, inputs: str = "unit inputs") -> Test:
    """A claim of Theorem B.2 by the inputs that it is about and the words in it."""
    return judged(lambda text: text.startswith(inputs) and words in text)


THEOREM_3_1 = Recipe(
    name="ntk-attention/theorem-3-1",
    title="The error of NTK-Attention against exact prefix attention as the prefix grows",
    scales={
        "paper": RecipeScale(
            "Prefixes of 4 to 65,536, d = 4, 3 seeds. Not in the paper, ours: all sizes.",
            "20 s",
            settings={"setting": {}},
        ),
        "here": RecipeScale(
            "Prefixes of 4 to 65,536, d = 4, 3 seeds; the paper has no sizes.", "20 s", settings={"setting": {}}
        ),
        "smoke": RecipeScale(
            "Prefixes of 256 and 512, one seed.",
            "1 s",
            settings={"setting": {"seeds": 1}, "options": {"prefixes": (256, 512)}},
        ),
    },
    run=theorem_3_1,
    claims=(
        Claim(
            "The error is 1/poly(m) with the phi of section 3.2",
            stated("error <= 1/poly(m) with the phi of section 3.2"),
            "theorem 3.1",
        ),
        Claim(
            "The error is 1/poly(m) with random features",
            stated("error <= 1/poly(m) with random features"),
            "theorem 3.1",
        ),
        Claim(
            "The error is 1/poly(m) with Taylor features of a fixed order",
            stated("error <= 1/poly(m) with Taylor features"),
            "theorem 3.1",
        ),
        Claim(
            "The phi of section 3.2 sees more of the prefix than its mean",
            stated("the phi of section 3.2 sees more"),
            "section 3.2",
        ),
        Claim("A larger r brings a smaller error (Taylor)", stated("a larger r brings"), "section 3.1"),
        Claim(
            "1/m with fewer features than tokens, scale 1/sqrt(d)",
            stated("1/m with fewer features than tokens, scale 1/sqrt(d)"),
            "theorem 3.1",
        ),
        Claim(
            "1/m with fewer features than tokens, scale 1/d",
            stated("1/m with fewer features than tokens, scale 1/d"),
            "lemma N.7",
        ),
    ),
    draw=curves("Error against exact prefix attention", "m", "largest error", log_x=True, log_y=True),
    notes=(LAB,),
)
APPENDIX_B = Recipe(
    name="ntk-attention/appendix-b",
    title="The stylised network: its kernel, convergence and scaling law",
    scales={
        "paper": RecipeScale(
            "n = 4, d = 3, m = 16 to 4,096, 3 seeds, 3,000 steps. Not in the paper, ours: all sizes; the step size, as "
            "the theorem's is of no use.",
            "2 min",
            settings={"setting": {}},
        ),
        "here": RecipeScale("n = 4, d = 3, m = 16 to 4,096, 3 seeds, 3,000 steps.", "2 min", settings={"setting": {}}),
        "smoke": RecipeScale(
            "m = 8 and 16, one seed, 20 steps.",
            "3 s",
            settings={"setting": {"widths": (8, 16), "seeds": 1, "steps": 20}},
        ),
    },
    run=appendix_b,
    claims=(
        Claim("H is the kernel of the network", stated("H is the kernel"), "definition K.1"),
        Claim("The least eigenvalue of H* is above 0 (assumed)", stated("lambda_min(H*) > 0"), "definition K.1"),
        Claim("C_0 is minor", stated("what H leaves out is minor"), "lemma L.4"),
        Claim("C_12 is minor", stated("|C_12| <="), "lemma L.5"),
        Claim("C_11 <= -1.6 m eta r H r", stated("C_11 <="), "lemma L.2"),
        Claim(
            "The error at the start, of F(0) and Y, does not grow with m",
            stated("|F(0) - Y|_F <= O(sqrt(n d))"),
            "lemma M.6",
        ),
        Claim("H moves from H* by at most 8 R sqrt(n d) exp(22 B)", stated("|H - H*|_F <="), "lemma B.1"),
        Claim("Gradient descent stays within R < 0.01", stated("gradient descent stays within"), "lemma M.1"),
        Claim("The least eigenvalue stays above half of its start", stated("lambda_min(H(t)) >="), "lemma K.4"),
        Claim("The loss decays as printed, unit inputs", about("the printed kernel's lambda"), "lemma M.4"),
        Claim(
            "The loss decays as printed, short inputs along the axes",
            about("the printed kernel's lambda", "inputs 0.25 e_i"),
            "lemma M.4",
        ),
        Claim("The loss is below epsilon after T steps, unit inputs", about("(B.2)"), "theorem B.2"),
        Claim("The step size of the theorem can be used", about("eta = lambda"), "theorem M.2"),
        Claim("The length of prefix that it asks for can be had", about("m >= n^2"), "theorem M.2"),
        Claim("L is about n d exp(-eta lambda C / (n d))", stated("L is about n d exp"), "proposition B.3"),
        Claim("L falls exponentially with compute", stated("L falls exponentially with C"), "proposition B.3"),
        Claim("L falls with m at the same number of steps", stated("more compute by a longer prefix"), "scaling law"),
        Claim("A longer prefix pays at the same compute", stated("more parameters pay"), "scaling law"),
    ),
    notes=(LAB,),
)
RECIPES = (THEOREM_3_1, APPENDIX_B)
