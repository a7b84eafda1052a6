"""Proposition 1, Lemma 1 and Theorem 1 (appendix C), by the functions of `inlay lab activation-prompts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.predicates import stated
from inlay.papers.reproduce.recipe import Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Results, from_finding

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

LAB = "The same as `inlay lab activation-prompts`, which draws it: see docs/theory/activation-prompts.md."


def proposition_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    from inlay.papers.activation_prompts.theory import lab

    def work() -> Results:
        return from_finding(
            lab.proposition_1(**settings), ("condition",), panel="norm", curve=("departure", "relative gap")
        )

    return bench.once("activation-prompts/proposition-1", settings, work)


def lemma_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    from inlay.papers.activation_prompts.theory import lab

    def work() -> Results:
        return from_finding(
            lab.lemma_1(**settings), ("P", "d_A", "sigma P"), columns=("layer 1", "(1 + d_A)/P", "layer 2", "1/P")
        )

    return bench.once("activation-prompts/lemma-1", settings, work)


def theorem_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    from inlay.papers.activation_prompts.theory import SampleSetting, lab

    def work() -> Results:
        found = lab.theorem_1(SampleSetting(**settings["setting"]), settings["sizes"], settings["seeds"], bench.say)
        return from_finding(found, ("gradient", "layer"), curve=("P", "samples to zero error"))

    return bench.once("activation-prompts/theorem-1", settings, work)


RECIPES = (
    Recipe(
        name="activation-prompts/proposition-1",
        title="Norm tuning is an activation prompt, under conditions",
        scales={
            "paper": RecipeScale("Exact in doubles. Not in the paper, ours: all sizes.", "1 s"),
            "here": RecipeScale("Exact in doubles; the paper has no sizes.", "1 s"),
            "smoke": RecipeScale("The same with fewer positions.", "1 s", settings={"positions": 4, "channels": 3}),
        },
        run=proposition_1,
        claims=(
            Claim(
                "Batch norm after a convolution is a prompt, under the conditions",
                stated("a 1 x 1 convolution and batch norm: the same"),
                "C.2",
            ),
            Claim("Each of its conditions is needed", stated("a 1 x 1 convolution and batch norm: each"), "C.2"),
            Claim("Layer norm is a prompt, under the conditions", stated("layer norm: the same"), "C.2"),
            Claim("Each of its conditions is needed", stated("layer norm: each"), "C.2"),
        ),
        notes=(LAB,),
    ),
    Recipe(
        name="activation-prompts/lemma-1",
        title="Attention distance before and after layer 1",
        scales={
            "paper": RecipeScale("P from 3 to 64. Not in the paper, ours: all sizes.", "2 s"),
            "here": RecipeScale("P from 3 to 64; the paper has no sizes.", "2 s"),
            "smoke": RecipeScale("P = 3, 4 and 8.", "1 s", settings={"sizes": (3, 4, 8), "images": 10}),
        },
        run=lemma_1,
        claims=(
            Claim("Layer 1 has the distance (1 + d_A)/P, without noise", stated("layer 1:"), "lemma 1"),
            Claim("Layer 2 has the distance 1/P, without noise, if exp(beta^2) < P - 1", stated("layer 2:"), "lemma 1"),
            Claim("The same for every P", stated("lambda_1 < 1/2"), "C.3, after (A19)"),
            Claim("The same with the noise of the data", stated("with noise"), "section 5"),
        ),
        notes=(LAB,),
    ),
    Recipe(
        name="activation-prompts/theorem-1",
        title="Samples that a prompt needs at layer 1 and at layer 2, against P",
        scales={
            "paper": RecipeScale(
                "SGD for P = 8 to 24 with 10 seeds, and the expected gradient. Not in the paper, ours: all sizes.",
                "3 min on one core",
                settings={"setting": {"beta": 3**0.5}, "sizes": (8, 12, 16, 24), "seeds": 10},
            ),
            "here": RecipeScale(
                "SGD for P = 8, 12, 16 and 24 with 5 seeds, and the expected gradient up to P = 256.",
                "1 min on one core",
                settings={"setting": {"beta": 3**0.5}, "sizes": (8, 12, 16, 24), "seeds": 5},
            ),
            "smoke": RecipeScale(
                "SGD for P = 6 and 8 with one seed.",
                "1 s",
                settings={
                    "setting": {"beta": 3**0.5, "background": "mixed", "budget": 0.5, "held_out": 64},
                    "sizes": (6, 8),
                    "seeds": 1,
                },
            ),
        },
        run=theorem_1,
        claims=(
            Claim(
                "Layer 1 needs samples of order P (SGD, zero error)", stated("SGD, zero error, layer 1"), "theorem 1"
            ),
            Claim(
                "Layer 2 needs samples of order P^2 log P (SGD, zero error)",
                stated("SGD, zero error, layer 2"),
                "theorem 1",
            ),
            Claim("Layer 2 needs more, order-wise (SGD, zero error)", stated("SGD, zero error: layer 2"), "theorem 1"),
            Claim(
                "Layer 1 needs samples of order P (expected gradient, zero error)",
                stated("expected gradient, zero error, layer 1"),
                "theorem 1",
            ),
            Claim(
                "Layer 2 needs samples of order P^2 log P (expected gradient, zero error)",
                stated("expected gradient, zero error, layer 2"),
                "theorem 1",
            ),
            Claim(
                "Layer 2 needs more, order-wise (expected gradient, zero error)",
                stated("expected gradient, zero error: layer 2"),
                "theorem 1",
            ),
        ),
        notes=(LAB,),
    ),
)
