"""In-context learning with representations as experiments: numbers, and beside each claim what was measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from inlay.errors import InlayError
from inlay.papers.findings import Finding, MeasuredClaim, Tick
from inlay.papers.icl.theory.deep import D_MODEL
from inlay.papers.icl.theory.lab.four_layers import (
    FIGURE_5_HEADS,
    figure_2b,
    figure_2b_claims,
    figure_5,
    figure_5_claims,
)
from inlay.papers.icl.theory.lab.one_head import section_3_3
from inlay.papers.icl.theory.lab.one_layer import (
    FIGURE_2A,
    FIGURE_4_HEADS,
    TOKENS,
    figure_2a,
    figure_2a_claims,
    figure_4,
    figure_4_claims,
    free,
)
from inlay.papers.icl.theory.lab.theorems import INSTANCES, figure_3, proposition_1, theorem_1, theorem_2
from inlay.papers.icl.theory.language import KINDS, SIZES
from inlay.papers.icl.theory.setting import InContextSetting, Show, reads

__all__ = [
    "CLAIMS",
    "EXPERIMENTS",
    "SETTING",
    "WATCHED",
    "InContextSetting",
    "beginnings",
    "check",
    "check_given",
    "free",
]

SETTING = InContextSetting
EXPERIMENTS: dict[str, Callable[[InContextSetting, Tick, Show], Finding]] = {
    "2a": figure_2a,
    "2b": figure_2b,
    "3": figure_3,
    "4": figure_4,
    "5": figure_5,
    "theorem-1": theorem_1,
    "theorem-2": theorem_2,
    "proposition-1": proposition_1,
    "section-3-3": section_3_3,
}

# Those that show their trainings as they go, with a run of one's own.
WATCHED = ("2a", "2b", "4", "5", "run")
# Those of the trainings, from the rows that are kept: they can be read again without training again.
CLAIMS: dict[str, Callable[[Finding], list[MeasuredClaim]]] = {
    "icl-figure-2a": figure_2a_claims,
    "icl-figure-2b": figure_2b_claims,
    "icl-figure-4": figure_4_claims,
    "icl-figure-5": figure_5_claims,
}


def check_given(names: Sequence[str], optimiser: str, given: Collection[str]) -> None:
    """Refuse options that were given and that none of the experiments reads."""
    read = list(dict.fromkeys(option for name in names for option in reads(name, optimiser)))
    unread = ", ".join(f"--{option}" for option in given if option not in read)
    if unread:
        what = {"run": f"A run of your own with {optimiser}"}.get(names[0], f"Figure {', '.join(names)}")
        raise InlayError(
            f"{what} does not read {unread}: leave it out. What is read: {', '.join(f'--{option}' for option in read)}."
        )
    for option in ("task", "data-dir"):
        if option in given and "features" not in given:
            raise InlayError(f"--{option} is about the examples that enter the model of --features: give both.")


def check(name: str, setting: InContextSetting) -> None:
    """Refuse what the experiment of that name cannot do, before it or any other has begun."""
    if "N" in reads(name, setting.optimiser):
        setting.problem()
    if name == "3" and setting.tau == 0:
        raise InlayError("tau = 0: y* and y_best are then the same, and figure 3 compares them. Give a tau above 0.")
    deep = {"2b": (setting.heads or ())[:1], "5": setting.heads or ()}.get(name, ())
    wrong = [heads for heads in deep if D_MODEL % heads]
    if wrong:
        raise InlayError(
            f"heads = {wrong}: in figures 2b and 5 they must divide d_model = {D_MODEL}. Take 1, 2, 4, 8, ..."
        )


def beginnings(name: str, setting: InContextSetting) -> int:
    """How often the experiment of that name tells `tick` of something new."""
    return {
        "2a": len(FIGURE_2A),
        "4": (len(TOKENS) + 1) * len(setting.heads or FIGURE_4_HEADS),
        "5": len(setting.heads or FIGURE_5_HEADS),
        "theorem-1": len(INSTANCES) + 1,
        "theorem-2": len(INSTANCES[:3]),
        "language": len(KINDS) * len(SIZES),
    }.get(name, 1)
