"""Appendix B and Theorem 3.1 of NTK-Attention as experiments: numbers, and beside each claim what was measured."""

from __future__ import annotations

from collections.abc import Callable

from inlay.papers.findings import Finding, Tick
from inlay.papers.ntk_attention.theory.lab.attention import PREFIXES, theorem_31
from inlay.papers.ntk_attention.theory.lab.descent import proposition_b3, theorem_b2
from inlay.papers.ntk_attention.theory.lab.kernels import LONGEST_FOR_ASCENT, kernel, lemma_b1, lemma_m6
from inlay.papers.ntk_attention.theory.setting import PrefixSetting

SETTING = PrefixSetting
EXPERIMENTS: dict[str, Callable[[PrefixSetting, Tick], Finding]] = {
    "kernel": kernel,
    "lemma-m6": lemma_m6,
    "lemma-b1": lemma_b1,
    "theorem-b2": theorem_b2,
    "proposition-b3": proposition_b3,
    "theorem-3-1": theorem_31,
}


def beginnings(name: str, setting: PrefixSetting) -> int:
    """How often the experiment of that name tells `tick` of something new."""
    widths = len(setting.widths)
    drifts = max(1, sum(width <= LONGEST_FOR_ASCENT for width in setting.widths))
    return {
        "kernel": widths,
        "lemma-m6": 1,
        "lemma-b1": widths + drifts,
        "theorem-b2": 2 * widths,
        "proposition-b3": widths,
        "theorem-3-1": len(PREFIXES),
    }[name]
