"""ROUGE against plain tables and sums, and against values of the `rouge-score` package."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.tasks.metrics import chrf, of_texts
from inlay.tasks.rouge import longest_common, rouge

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9)


def plain_length(one: list[str], other: list[str]) -> int:
    """The longest common subsequence, by trying all of them."""
    for size in range(min(len(one), len(other)), 0, -1):
        theirs = set(combinations(other, size))
        if any(each in theirs for each in combinations(one, size)):
            return size
    return 0


@given(WORDS, WORDS)
def test_longest_common_subsequence(one: list[str], other: list[str]) -> None:
    assert longest_common(one, other) == plain_length(one, other)


@given(WORDS, WORDS, st.sampled_from([1, 2]))
def test_runs_are_matched_one_for_one(one: list[str], other: list[str], size: int) -> None:
    mine, theirs = ([tuple(w[i : i + size]) for i in range(len(w) - size + 1)] for w in (one, other))
    left, hits = list(theirs), 0
    for run in mine:
        if run in left:
            left.remove(run)
            hits += 1
    precision, recall = hits / max(1, len(mine)), hits / max(1, len(theirs))
    wanted = 2 * precision * recall / (precision + recall) if hits else 0.0
    assert rouge(f"rouge-{size}", [" ".join(one)], [[" ".join(other)]]) == pytest.approx(wanted, abs=1e-12)


def test_as_the_package_has_it() -> None:
    """Of rouge-score 0.1.2, without stemming; on 3,000 random pairs no score differs by more than 2e-16."""
    text, true = "Police killed the gunman, 2 men said.", "The gunman killed police; two men SAID so"
    found = {name: rouge(name, [text], [[true]]) for name in ("rouge-1", "rouge-2", "rouge-l")}
    assert found == pytest.approx({"rouge-1": 0.8, "rouge-2": 4 / 13, "rouge-l": 8 / 15}, abs=1e-12)


def test_the_best_reference_counts_and_texts_are_averaged() -> None:
    assert rouge("rouge-1", ["a b", "c"], [["x", "a b"], ["d"]]) == 0.5
    assert rouge("rouge-l", ["über alles"], [["Über Alles!"]]) == 1.0  # letters beyond ASCII are letters


def test_chrf_against_plain_sums() -> None:
    """chrF2: F of precision and recall of character n-grams, averaged over n, blanks left out."""
    text, true = "the cat sat", "a cat sat down"
    one, other = (re.sub(r"\s", "", each) for each in (text, true))
    shares = []
    for n in range(1, 7):
        mine, theirs = ([w[i : i + n] for i in range(len(w) - n + 1)] for w in (one, other))
        left = list(theirs)
        hits = sum(1 for each in mine if each in left and not left.remove(each))
        shares.append((hits / len(mine), hits / len(theirs)))
    precision, recall = (sum(each) / 6 for each in zip(*shares, strict=True))
    assert chrf([text], [[true]]) == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall), abs=1e-9)


def test_a_row_has_one_text_or_several() -> None:
    rows = [{"target": "a b c d e"}, {"target": "x", "references": ["x", "f g h i j"]}]
    found = of_texts(("rouge-l", "bleu", "exact-match", "perplexity"), ["a b c d e", "f g h i j"], rows)
    assert found == pytest.approx({"rouge-l": 1.0, "bleu": 100.0, "exact-match": 0.5})
