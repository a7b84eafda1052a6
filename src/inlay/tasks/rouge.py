"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004): how much of a text's words, pairs of words, or order is a reference's.

Each is F1 of one text and one reference, from 0 to 1; of several references the best counts, and a split has the mean
over its texts. Words are runs of letters and digits in lower case, without stemming. For ASCII these are the words of
the `rouge-score` package, and the scores are its scores; it drops all other letters, and this does not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

_WORD = re.compile(r"[^\W_]+")


def rouge(name: str, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean of `rouge-1`, `rouge-2` or `rouge-l` over the texts."""
    score = _f1_of_order if name == "rouge-l" else lambda one, other: _f1_of_runs(one, other, int(name[-1]))
    best = [max(score(_words(text), _words(true)) for true in own) for text, own in zip(texts, references, strict=True)]
    return fmean(best) if best else math.nan


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _f1_of_runs(text: Sequence[str], true: Sequence[str], length: int) -> float:
    """F1 of the runs of so many words, each counted as often as it occurs in both."""
    mine, theirs = (
        Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1)) for words in (text, true)
    )
    return _f1((mine & theirs).total(), mine.total(), theirs.total())


def _f1_of_order(text: Sequence[str], true: Sequence[str]) -> float:
    """F1 of the longest common subsequence."""
    return _f1(longest_common(text, true), len(text), len(true))


def _f1(common: int, mine: int, theirs: int) -> float:
    return 2 * common / (mine + theirs) if common else 0.0


def longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence, a row of the usual table at a time as the bits of one number
    (Hyyro, 2004): a bit is 0 where the length grows by one."""
    places: dict[str, int] = {}
    for i, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << i
    every = (1 << len(one)) - 1
    row = every
    for word in other:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & every
    return len(one) - row.bit_count()
