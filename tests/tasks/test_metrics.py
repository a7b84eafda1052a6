"""Every metric against an oracle written out here."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import InlayError
from inlay.tasks import kinds, metrics
from inlay.tasks.prepare import entities

NAMES = ["a", "b", "c"]
pairs_of = st.integers(4, 40).flatmap(
    lambda n: st.tuples(*(st.lists(st.integers(0, 2), min_size=n, max_size=n) for _ in range(2)))
)


def f1_of(cls: int, predicted: list[int], true: list[int]) -> float:
    hit = sum(p == t == cls for p, t in zip(predicted, true, strict=True))
    claimed, present = predicted.count(cls), true.count(cls)
    return 2 * hit / (claimed + present) if claimed + present else 0.0


@given(pairs_of)
def test_accuracy_and_macro_f1(pair: tuple[list[int], list[int]]) -> None:
    predicted, true = pair
    found = metrics.of_classes(["accuracy", "macro-f1"], np.array(predicted), np.array(true), NAMES)
    assert found["accuracy"] == pytest.approx(sum(p == t for p, t in zip(predicted, true, strict=True)) / len(true))
    occurring = sorted({*predicted, *true})
    assert found["macro-f1"] == pytest.approx(np.mean([f1_of(c, predicted, true) for c in occurring]))


@given(pairs_of)
def test_accuracy_is_scikit_learns_to_the_bit(pair: tuple[list[int], list[int]]) -> None:
    from sklearn.metrics import accuracy_score

    predicted, true = (np.array(values) for values in pair)
    assert metrics.of_classes(["accuracy"], predicted, true, NAMES) == {"accuracy": accuracy_score(true, predicted)}


def test_an_accuracy_does_not_wait_for_scikit_learn() -> None:
    code = (
        "import sys, numpy as np; from inlay.tasks import metrics; "
        "metrics.of_classes(['accuracy'], np.ones(2), np.ones(2), ['a', 'b']); print('sklearn' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@given(pairs_of)
def test_binary_f1_and_matthews(pair: tuple[list[int], list[int]]) -> None:
    predicted, true = ([min(v, 1) for v in values] for values in pair)
    found = metrics.of_classes(["f1", "matthews"], np.array(predicted), np.array(true), NAMES[:2])
    assert found["f1"] == pytest.approx(f1_of(1, predicted, true))
    n = Counter(zip(predicted, true, strict=True))
    tp, tn, fp, fn = n[1, 1], n[0, 0], n[1, 0], n[0, 1]
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / below if below else 0.0)


def test_correlations_and_squared_error() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=50)
    predicted = true + rng.normal(size=50)
    found = metrics.of_values(["pearson", "spearman", "mse"], predicted, true)
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, true)]
    assert found["pearson"] == pytest.approx(np.corrcoef(predicted, true)[0, 1])
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["mse"] == pytest.approx(((predicted - true) ** 2).mean())


def test_a_constant_prediction_correlates_with_nothing() -> None:
    assert metrics.of_values(["pearson", "spearman"], np.ones(3), np.arange(3.0)) == {"pearson": 0.0, "spearman": 0.0}


def test_semeval_counts_the_direction() -> None:
    true = ["Cause-Effect(e1,e2)", "Cause-Effect(e2,e1)", "Message-Topic(e1,e2)", "Other", "Other"]
    assert metrics.semeval_f1(true, true) == 1.0
    # One direction wrong: one hit of two claimed and two present. One Other claimed as Message-Topic: 1 of 2 and 1.
    predicted = ["Cause-Effect(e1,e2)", "Cause-Effect(e1,e2)", "Message-Topic(e1,e2)", "Message-Topic(e2,e1)", "Other"]
    assert metrics.semeval_f1(predicted, true) == pytest.approx((0.5 + 2 / 3) / 2)
    # What Other gets right counts for nothing.
    assert metrics.semeval_f1(["Other"] * 5, true) == 0.0


def test_semeval_against_precision_and_recall_by_relation() -> None:
    relations = [f"R{i}(e{a},e{b})" for i in range(9) for a, b in ((1, 2), (2, 1))] + ["Other"]
    rng = np.random.default_rng(1)
    true = [relations[i] for i in rng.integers(0, 19, 500)]
    predicted = [t if rng.random() < 0.6 else relations[rng.integers(0, 19)] for t in true]
    scores = []
    for i in range(9):
        mine = [p.startswith(f"R{i}(") for p in predicted], [t.startswith(f"R{i}(") for t in true]
        right = sum(p == t for p, t, m in zip(predicted, true, mine[1], strict=True) if m)
        precision, recall = right / sum(mine[0]), right / sum(mine[1])
        scores.append(2 * precision * recall / (precision + recall))
    assert metrics.semeval_f1(predicted, true) == pytest.approx(np.mean(scores))


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", []),
        ("B-A I-A O B-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A B-A", [("A", 0, 1), ("A", 1, 2)]),
        ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
        ("B-x-y I-x-y", [("x-y", 0, 2)]),
        ("", []),
    ],
)
def test_entities_of_tags(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


def test_entity_scores_need_type_and_both_ends() -> None:
    true = [["B-A", "I-A", "O", "B-B"], ["B-A", "O"]]
    predicted = [["B-A", "I-A", "O", "B-A"], ["B-A", "I-A"]]
    found = metrics.of_entities(["entity-f1", "entity-precision", "entity-recall", "token-accuracy"], predicted, true)
    assert found == {
        "token-accuracy": pytest.approx(4 / 6),
        "entity-f1": pytest.approx(1 / 3),
        "entity-precision": pytest.approx(1 / 3),
        "entity-recall": pytest.approx(1 / 3),
    }
    assert metrics.of_entities(["entity-f1"], [["O"]], [["O"]]) == {"entity-f1": 0.0}


def test_perplexity_is_over_tokens_not_over_examples() -> None:
    losses, counts = np.array([2.0, 30.0]), np.array([1, 9])
    found = metrics.of_tokens(["perplexity", "last-word-accuracy"], losses, counts, np.array([1.0, 0.0]))
    assert found == {"perplexity": pytest.approx(math.exp(3.2)), "last-word-accuracy": 0.5}
    assert metrics.of_tokens(["perplexity"], np.array([1e6]), np.array([1]), np.array([0]))["perplexity"] == math.inf


def test_bleu_against_the_formula_with_several_references() -> None:
    texts = ["the cat sat on the mat today", "a dog ran into the wide garden"]
    references = [["the cat sat on a mat today", "on the mat the cat sat"], ["a dog ran into the garden"]]
    logs = []
    for n in range(1, 5):
        hit = total = 0
        for text, found in zip(texts, references, strict=True):
            grams = Counter(zip(*(text.split()[i:] for i in range(n)), strict=False))
            most: Counter[tuple[str, ...]] = Counter()
            for reference in found:
                most |= Counter(zip(*(reference.split()[i:] for i in range(n)), strict=False))
            hit += sum((grams & most).values())
            total += sum(grams.values())
        logs.append(math.log(hit / total))
    closest = [
        min((abs(len(r.split()) - len(t.split())), len(r.split())) for r in found)[1]
        for t, found in zip(texts, references, strict=True)
    ]
    written = sum(len(text.split()) for text in texts)
    brevity = min(1.0, math.exp(1 - sum(closest) / written))
    assert metrics.bleu(texts, references) == pytest.approx(100 * brevity * math.exp(sum(logs) / 4))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so 3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("#### 1,234", "1,234"),
        (r"hence $\boxed{\frac{1}{2}}$, as \boxed{x^{2}} shows", "x^{2}"),
        ("The answer is: 12 apples", "12"),
        ("we get 5 and then 6.5 in all", "6.5"),
        ("no idea", "no idea"),
    ],
)
def test_the_final_answer_is_found(text: str, found: str) -> None:
    assert metrics.answer(text) == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,234", "1234"),
        ("$18.00", "18"),
        (r"\dfrac{3}{4}", r"\frac34"),
        (r"\frac{1}{2}", "0.5"),
        (r"-\frac{1}{2}", "-1/2"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"90^\circ", "90"),
        (r"\text{(A)}", "(A)"),
        ("50\\%", "50"),
    ],
)
def test_typography_does_not_make_an_answer_wrong(one: str, other: str) -> None:
    assert metrics.same_answer(one, other)
    assert metrics.same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"), [("12", "13"), ("(1,2)", "(2,1)"), ("x^2", "x^3"), ("1/0", "2/0"), ("", "7")]
)
def test_other_answers_are_wrong(one: str, other: str) -> None:
    assert not metrics.same_answer(one, other)


def test_answer_accuracy_and_exact_match() -> None:
    assert metrics.answer_accuracy(["it is 7", "#### 8"], ["#### 7", "#### 9"]) == 0.5
    assert metrics.exact_match(["a  b\n", "c"], ["a b", "d"]) == 0.5


def test_directions() -> None:
    assert not metrics.greater_is_better("perplexity")
    assert not metrics.greater_is_better("mse")
    assert metrics.greater_is_better("bleu")
    with pytest.raises(InlayError, match="Did you mean 'accuracy'"):
        metrics.greater_is_better("acuracy")


@pytest.mark.parametrize("kind", kinds.TABLE.values(), ids=lambda kind: kind.name)
def test_the_metrics_of_a_kind_are_there(kind) -> None:
    assert set(kind.metrics) <= set(metrics.ALL)


def test_a_metric_that_does_not_score_what_is_predicted_is_refused() -> None:
    for name in ("mse", "top-2"):
        with pytest.raises(InlayError, match=f"Unknown metric '{name}'"):
            metrics.of_classes(["accuracy", name], np.ones(2), np.ones(2), NAMES)
