"""In-context learning with representations as experiments: numbers, and beside each claim what was measured."""

from __future__ import annotations

from collections.abc import Callable

from inlay.theory.findings import Finding, Tick
from inlay.theory.icl.lab_deep import FIGURE_5_HEADS, figure_2b, figure_5
from inlay.theory.icl.lab_theory import INSTANCES, figure_3, proposition_1, theorem_1, theorem_2
from inlay.theory.icl.lab_training import FIGURE_4_HEADS, TOKENS, figure_2a, figure_4, free
from inlay.theory.icl.language import KINDS, SIZES
from inlay.theory.icl.setting import Setting, Show

__all__ = ["EXPERIMENTS", "Setting", "beginnings", "free"]

EXPERIMENTS: dict[str, Callable[[Setting, Tick, Show], Finding]] = {
    "2a": figure_2a,
    "2b": figure_2b,
    "3": figure_3,
    "4": figure_4,
    "5": figure_5,
    "theorem-1": theorem_1,
    "theorem-2": theorem_2,
    "proposition-1": proposition_1,
}


def beginnings(name: str, setting: Setting) -> int:
    """How often the experiment of that name tells `tick` of something new."""
    return {
        "2a": 3,
        "4": len(TOKENS) * len(setting.heads or FIGURE_4_HEADS),
        "5": len(setting.heads or FIGURE_5_HEADS),
        "theorem-1": len(INSTANCES) + 1,
        "theorem-2": len(INSTANCES[:3]),
        "language": len(KINDS) * len(SIZES),
    }.get(name, 1)
