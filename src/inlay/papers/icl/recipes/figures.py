"""Figures 2 to 5: trainings at the printed sizes, by the functions of `inlay lab icl`.

The paper prints curves and no numbers. Figures 2, 4 and 5 take from minutes to a quarter of an hour: at `here` what the
documentation shows of them is kept, and read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.drawing import curves
from inlay.papers.reproduce.experiments import Shape, from_lab, performed
from inlay.papers.reproduce.predicates import stated
from inlay.papers.reproduce.recipe import Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

LAB = "The same as `inlay lab icl`, which draws it: see docs/icl.md."
ITERATION = (
    "The figures' iteration is an epoch of 40 steps: the columns are epochs. The paper prints curves and no numbers."
)
ONE, FOUR = "one layer", "four layers"
FIGURE_3 = {
    "gap": "1/K |y* - y_best|^2",
    "excess error, y*": "excess error of y*",
    "excess error, y_best": "excess error of y_best",
}
FIGURE_4 = (1, 5, 10, 20, 30, 40, 50, 150, 400)
LOSSES = ("loss", "gap", "in-domain", "out-of-domain")
STARTS = 3  # one training from one start is not judged
TINY = {"N": 3, "K": 8, "d": 6, "m": 3, "steps": 2, "batch": 2}


def nobody(name: str, trace: Any) -> None:
    """Who watches the trainings."""


def found(bench: Bench, settings: Mapping[str, Any], part: str, *shapes: Shape) -> Results:
    """One experiment: read where the scale says so and the documentation has it, otherwise made."""
    known = from_lab("icl", f"icl-figure-{part}", shapes) if settings.get("kept") else None
    return performed(bench, "icl", part, settings[part], shapes, nobody) if known is None else known


def figure_2(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """A row for each loss; of the one layer the training in closed form, with Gaussian tokens as printed."""
    closed = "Gaussian, closed form"
    one = [Shape(("tokens", "training"), curve=("epoch", loss), named={closed: loss}, within=ONE) for loss in LOSSES]
    four = [Shape(curve=("epoch", loss), named={"all": loss}, within=FOUR) for loss in LOSSES]
    return found(bench, settings, "2a", *one).with_([found(bench, settings, "2b", *four)])


def figure_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    shapes = [Shape(curve=("N", column), named={"all": row}, points=21) for column, row in FIGURE_3.items()]
    return found(bench, settings, "3", *shapes)


def figure_4(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The trainings at the printed rate; the lab's claims are also about those at a larger one."""
    named = {f"rate 0.0001, H {heads}": f"H = {heads}" for heads in FIGURE_4}
    return found(bench, settings, "4", Shape(("rate", "H"), panel="tokens", curve=("epoch", "gap"), named=named))


def figure_5(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """What each H ended with."""
    ends = {"loss": "training loss", "in-domain": "in-domain", "out-of-domain": "out-of-domain", "step": "steps"}
    shapes = [Shape(curve=("H", column), named={"all": row}, last=True) for column, row in ends.items()]
    return found(bench, settings, "5", *shapes)


PRINTED_SIZES = "N = 30, K = 200, d = 100, m = 20, tau = 0.01, batch 256, Adam 1e-4"
EVERYWHERE = "; Gaussian tokens, closed form", "; four layers"
RECIPES = (
    Recipe(
        name="icl/figure-2",
        title="Training and inference losses of a one-layer and of a four-layer transformer",
        scales={
            "paper": RecipeScale(
                f"{PRINTED_SIZES}, H = 64 and 8. Not in the paper, ours: 200 epochs of 10,000 / 256 updates (its "
                "iteration fits an epoch).",
                "3 starts: 12 min of one core for one layer; on one GPU 30 min for four",
                settings={
                    "2a": {"heads": (64,), "starts": STARTS},
                    "2b": {"heads": (8,), "device": "cuda", "starts": STARTS},
                },
            ),
            "here": RecipeScale(
                f"{PRINTED_SIZES}, H = 64 and 8, as docs/icl.md shows it. With --fresh one layer for 200 epochs, "
                "four layers for 4 minutes with batches of 16.",
                "1 s; with --fresh 8 min on one core",
                settings={"kept": True, "2a": {"heads": (64,)}, "2b": {"heads": (8,)}},
            ),
            "smoke": RecipeScale("N = 3, two steps.", "1 s", settings={"2a": TINY, "2b": {**TINY, "heads": (2,)}}),
        },
        run=figure_2,
        claims=(
            *(
                Claim(f"{text}: {words}", stated(f"{lab}{where}"), "section 4")
                for where, words in zip(EVERYWHERE, (ONE, FOUR), strict=True)
                for text, lab in (
                    ("The three losses descend together", "the three curves descend together"),
                    (
                        "The out-of-domain loss is above the in-domain one",
                        "the out-of-domain loss is above the in-domain one",
                    ),
                    ("The output converges to y*", "the output converges to y* (Theorem 2)"),
                )
            ),
            Claim(
                "The population loss (9) is the limit of training on samples",
                stated("the population loss (9) is the limit"),
                "section 4",
            ),
        ),
        draw=curves("Losses", "epoch", "loss", log_y=True),
        notes=(LAB, ITERATION),
    ),
    Recipe(
        name="icl/figure-3",
        title="The gap between y* and y_best against N",
        scales={
            "paper": RecipeScale(
                "m = 100, K = 200, tau = 0.01, N = 50 to 150. Not in the paper, ours: in closed form, untrained.",
                "10 s",
                settings={"3": {}},
            ),
            "here": RecipeScale(
                "m = 100, K = 200, tau = 0.01, N = 50 to 150, in closed form.", "10 s", settings={"3": {}}
            ),
            "smoke": RecipeScale("m = 3, K = 8.", "1 s", settings={"3": TINY}),
        },
        run=figure_3,
        claims=(
            Claim("The gap is smallest at N = m", stated("the gap between y* and y_best is smallest"), "figure 3"),
            Claim("The closer N is to m, the better the prediction", stated("the closer N is to m"), "figure 3"),
            Claim("y_best is the best prediction one could hope for", stated("y_best is the best"), "(23)"),
            Claim("N < m: the transformer underfits", stated("N < m:"), "section 3.2"),
            Claim("N > m: the transformer overfits", stated("N > m:"), "section 3.2"),
        ),
        draw=curves("y* and y_best", "N", "", log_y=True),
        notes=(LAB,),
    ),
    Recipe(
        name="icl/figure-4",
        title="Training losses of one layer by the number of heads",
        scales={
            "paper": RecipeScale(
                f"{PRINTED_SIZES}, H = 1 to 400. Not in the paper, ours: 600 epochs of 10,000 / 256 updates.",
                "3 starts: 9 min on one GPU",
                settings={"4": {"device": "cuda", "starts": STARTS}},
            ),
            "here": RecipeScale(
                f"{PRINTED_SIZES}, H = 1 to 400, as docs/icl.md shows it: 600 epochs, 3 starts. With --fresh one "
                "start, on a CPU 200 epochs.",
                "1 s; with --fresh 15 min on two cores",
                settings={"kept": True, "4": {}},
            ),
            "smoke": RecipeScale("N = 3, H = 1 and 5, two steps.", "1 s", settings={"4": {**TINY, "heads": (1, 5)}}),
        },
        run=figure_4,
        claims=(
            *(
                Claim(f"{text}; {tokens} tokens", stated(f"{lab}; {tokens} tokens"), "section 4")
                for tokens in ("Gaussian", "norm 1")
                for text, lab in (
                    (
                        "H < N: the loss stops descending far from its minimum",
                        "H < N = 30: the loss stops descending far from its minimum",
                    ),
                    ("H >= N: the loss keeps descending", "H >= N = 30: the loss keeps descending"),
                    ("H = 400 is unstable and diverges", "H = 400 is unstable and diverges"),
                )
            ),
            Claim(
                "The largest H is the least stable, at 100 times the learning rate",
                stated("the largest H is the least stable"),
                "section 4",
            ),
            Claim("The population loss falls to 0.001", stated("the population loss falls to 10^-3"), "figure 4"),
        ),
        draw=curves("Gap to the infimum", "epoch", "loss - inf", log_y=True),
        notes=(LAB, ITERATION),
    ),
    Recipe(
        name="icl/figure-5",
        title="Training losses of four layers by the number of heads, in 100 s each",
        scales={
            "paper": RecipeScale(
                f"{PRINTED_SIZES}, H = 1 to 64, 100 s each. Not in the paper, ours: the GPU.",
                "3 starts: 36 min on one GPU",
                settings={"5": {"device": "cuda", "starts": STARTS}},
            ),
            "here": RecipeScale(
                f"{PRINTED_SIZES} (on a CPU 16), H = 1 to 64, 100 s each with --fresh; else the 60 s of docs/icl.md.",
                "1 s; with --fresh 12 min on two cores",
                settings={"kept": True, "5": {}},
            ),
            "smoke": RecipeScale(
                "N = 3, H = 1 and 4, two steps.", "1 s", settings={"5": {**TINY, "heads": (1, 4), "seconds": 5.0}}
            ),
        },
        run=figure_5,
        claims=(
            Claim("Four layers need no large H", stated("four layers need no large H"), "section 4"),
            Claim(
                "In a fixed time a small H ends lowest", stated("in a fixed time a small H ends lowest"), "figure 5(a)"
            ),
            Claim(
                "A larger H completes fewer iterations in that time",
                stated("a larger H completes fewer iterations"),
                "section 4",
            ),
            Claim("A large H descends more slowly by the step", stated("a large H (32, 64) descends"), "section 4"),
        ),
        draw=curves("At the end", "H", "", log_y=True),
        notes=(LAB,),
    ),
)
