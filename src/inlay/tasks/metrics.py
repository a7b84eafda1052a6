"""What a prediction is worth. Each metric is a name, the direction that is better, and a function of a few lines.

F1 and the correlations come from scikit-learn and SciPy, BLEU and chrF from sacrebleu, ROUGE from rouge.py; accuracy,
the entity scorer, the official SemEval-2010 score and the matching of mathematical answers are here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from inlay.errors import unknown
from inlay.tasks import label_metrics
from inlay.tasks.prepare import entities
from inlay.tasks.rouge import rouge

if TYPE_CHECKING:
    from inlay.tasks.task import Task

T = TypeVar("T")

LOWER_IS_BETTER = frozenset({"mse", "perplexity"}) | label_metrics.LOWER_IS_BETTER

# Metrics of texts that the model has to write first.
OF_TEXTS = frozenset({"bleu", "chrf", "rouge-1", "rouge-2", "rouge-l", "answer-accuracy", "exact-match"})


def greater_is_better(name: str) -> bool:
    """Which way the metric improves."""
    if name not in ALL:
        raise unknown("metric", name, ALL)
    return name not in LOWER_IS_BETTER


def _found(name: str, known: Mapping[str, T]) -> T:
    """The entry of a metric; an error for one that does not score what is predicted."""
    if name not in known:
        raise unknown("metric", name, known)
    return known[name]


# ----------------------------------------------------------------------------------- one class or value an example


def of_classes(
    names: Sequence[str], predicted: np.ndarray, true: np.ndarray, label_names: Sequence[str]
) -> dict[str, float]:
    """The named metrics of predicted class numbers."""
    return {name: _found(name, _OF_CLASSES)(predicted, true, label_names) for name in names}


def _accuracy(predicted: np.ndarray, true: np.ndarray, _: Sequence[str]) -> float:
    return float(np.mean(predicted == true))  # scikit-learn's is the same number, and takes a second to import


def _f1(predicted: np.ndarray, true: np.ndarray, _: Sequence[str]) -> float:
    """F1 of class 1."""
    from sklearn.metrics import f1_score

    return float(f1_score(true, predicted, pos_label=1, average="binary", zero_division=0.0))


def _macro_f1(predicted: np.ndarray, true: np.ndarray, _: Sequence[str]) -> float:
    """Mean of the classes' F1 over the classes that occur, as predicted or as true."""
    from sklearn.metrics import f1_score

    return float(f1_score(true, predicted, average="macro", zero_division=0.0))


def _matthews(predicted: np.ndarray, true: np.ndarray, _: Sequence[str]) -> float:
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one class throughout is 0, and no news
        return float(matthews_corrcoef(true, predicted))


def semeval_f1(predicted: Sequence[str], true: Sequence[str]) -> float:
    """SemEval-2010 task 8, the official score: macro-F1 over the nine relations, direction counted, Other left out.

    The two directions of a relation are one class for counting what was predicted and what is there, but a prediction
    is right only with the right direction: the wrong one is a false positive and a false negative of that relation.
    """

    def relation(label: str) -> str:
        return label.partition("(")[0]

    scores = []
    for name in sorted({relation(label) for label in true} - {"Other"}):
        hits = sum(p == t for p, t in zip(predicted, true, strict=True) if relation(t) == name)
        claimed = sum(relation(p) == name for p in predicted)
        present = sum(relation(t) == name for t in true)
        scores.append(2 * hits / (claimed + present) if claimed + present else 0.0)
    return float(np.mean(scores)) if scores else 0.0


def _semeval(predicted: np.ndarray, true: np.ndarray, label_names: Sequence[str]) -> float:
    return semeval_f1([label_names[i] for i in predicted], [label_names[i] for i in true])


_OF_CLASSES: Mapping[str, Callable[[np.ndarray, np.ndarray, Sequence[str]], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro-f1": _macro_f1,
    "matthews": _matthews,
    "semeval-f1": _semeval,
}


def of_values(names: Sequence[str], predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The named metrics of predicted numbers. A correlation with a constant is 0, not undefined."""
    from scipy.stats import pearsonr, spearmanr

    constant = len(true) < 2 or np.ptp(predicted) == 0 or np.ptp(true) == 0
    made = {
        "pearson": lambda: 0.0 if constant else float(pearsonr(predicted, true).statistic),
        "spearman": lambda: 0.0 if constant else float(spearmanr(predicted, true).statistic),
        "mse": lambda: float(np.mean((predicted - true) ** 2)),
    }
    return {name: _found(name, made)() for name in names}


# ------------------------------------------------------------------------------------------------------- entities


def of_entities(
    names: Sequence[str], predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Micro-averaged over entities, of which one is right when its type and both its ends are; or over words."""
    hits = claimed = present = 0
    for guess, truth in zip(predicted, true, strict=True):
        found, wanted = set(entities(guess)), set(entities(truth))
        hits, claimed, present = hits + len(found & wanted), claimed + len(found), present + len(wanted)
    words = [g == t for guess, truth in zip(predicted, true, strict=True) for g, t in zip(guess, truth, strict=True)]
    made = {
        "token-accuracy": float(np.mean(words)) if words else 0.0,
        "entity-f1": 2 * hits / (claimed + present) if claimed + present else 0.0,
        "entity-precision": hits / claimed if claimed else 0.0,
        "entity-recall": hits / present if present else 0.0,
    }
    return {name: _found(name, made) for name in names}


# ------------------------------------------------------------------------------------------------ language models


def of_tokens(names: Sequence[str], losses: np.ndarray, counts: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """From each example's summed loss, its number of predicted tokens, and whether all of them were predicted.

    Perplexity is exp of the mean loss over tokens (not over examples or batches); infinite when that overflows.
    """
    total = float(counts.sum())
    mean = float(losses.sum()) / total if total else math.nan
    made = {
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "last-word-accuracy": float(np.mean(right)) if len(right) else math.nan,
    }
    return {name: made[name] for name in names if name in made}


def of_texts(names: Sequence[str], texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Those of the named metrics that are of written texts. A row has a `target`, several `references`, or both."""
    references = [row.get("references") or [row["target"]] for row in rows]
    targets = [row["target"] if "target" in row else row["references"][0] for row in rows]
    made: dict[str, Callable[[], float]] = {
        "bleu": lambda: bleu(texts, references),
        "chrf": lambda: chrf(texts, references),
        "answer-accuracy": lambda: answer_accuracy(texts, targets),
        "exact-match": lambda: exact_match(texts, targets),
        **{name: partial(rouge, name, texts, references) for name in ("rouge-1", "rouge-2", "rouge-l")},
    }
    return {name: made[name]() for name in names if name in made}


def of_masks(names: Sequence[str], losses: np.ndarray, counts: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """From each row's summed loss at its masks, their number, and how many of them were right."""
    made = of_tokens(("perplexity",), losses, counts, right)
    made["masked-accuracy"] = float(right.sum() / counts.sum()) if counts.sum() else math.nan
    return {name: _found(name, made) for name in names}


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU, 0 to 100, over all references of each text; sacrebleu's 13a tokens, case kept."""
    from sacrebleu import corpus_bleu

    return float(corpus_bleu(list(texts), _columns(references)).score)


def chrf(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus chrF2, 0 to 100: n-grams of characters up to 6, recall counted twice, as sacrebleu has it."""
    from sacrebleu import corpus_chrf

    return float(corpus_chrf(list(texts), _columns(references)).score)


def _columns(references: Sequence[Sequence[str]]) -> list[list[Any]]:
    """The first reference of every text, the second of every text, and so on, as sacrebleu takes them."""
    most = max((len(found) for found in references), default=1)
    return [[f[i] if i < len(f) else None for f in references] for i in range(most)]


_BOXED = re.compile(r"\\boxed\s*\{|\\fbox\s*\{")
_SAID = re.compile(r"(?:####|[Tt]he (?:final )?answer is:?)\s*([^\n]+)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
# Signs of a formula, or a letter that stands alone and is no word of English.
_FORMULA = re.compile(r"[\\^{}()\[\]+*]|(?<![A-Za-z'])[b-zB-HJ-Z](?![A-Za-z])")


def answer(text: str) -> str:
    """The final answer of a worked solution: what is boxed, what follows `####` or "the answer is", the last number."""
    boxes = list(_BOXED.finditer(text))
    if boxes:
        start, depth = boxes[-1].end(), 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    said = _SAID.findall(text)
    if said:
        numbers = _NUMBER.findall(said[-1])
        words = _NUMBER.sub("", re.sub(r"^\$?\s*[A-Za-z]\s*=", "", said[-1]))
        return numbers[0] if len(numbers) == 1 and not _FORMULA.search(words) else said[-1]
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else text


def same_answer(one: str, other: str) -> bool:
    """Whether two final answers are the same but for typography: 1,000 and $1000.00, \\dfrac12 and 1/2."""
    one, other = _plain(one), _plain(other)
    if one == other:
        return True
    left, right = _value(one), _value(other)
    return left is not None and right is not None and math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)


def _plain(text: str) -> str:
    """The answer without typography."""
    text = text.strip().rstrip(".").strip()
    text = re.sub(r"\\(?:left|right|!|,|;|:|quad|%|\$)", "", text.replace("\\ ", ""))
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\{?\\circ\}?", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    return re.sub(r"[\s$%]", "", text)


def _value(text: str) -> float | None:
    """The answer as a number, if it is one."""
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}|(-?\d+)/(\d+)", text)
    try:
        if fraction:
            sign, top, bottom, plain_top, plain_bottom = fraction.groups()
            value = int(top or plain_top) / int(bottom or plain_bottom)
            return -value if sign else value
        return float(text)
    except (ValueError, ZeroDivisionError):
        return None


def answer_accuracy(texts: Sequence[str], solutions: Sequence[str]) -> float:
    """The share of texts whose final answer is that of the solution."""
    right = [same_answer(answer(text), answer(true)) for text, true in zip(texts, solutions, strict=True)]
    return float(np.mean(right)) if right else math.nan


def exact_match(texts: Sequence[str], wanted: Sequence[str]) -> float:
    """The share of texts that are what was wanted, but for white space."""
    right = [text.split() == true.split() for text, true in zip(texts, wanted, strict=True)]
    return float(np.mean(right)) if right else math.nan


_ELSE = (
    *("pearson", "spearman", "mse"),
    *("entity-f1", "entity-precision", "entity-recall", "token-accuracy"),
    *("perplexity", "last-word-accuracy", "masked-accuracy"),
    *("squad-f1", "squad-exact"),
    *("ndcg@10", "mrr@10", "recall@1", "recall@10"),
    *(
        "two-way-ndcg@10",
        "i2t-ndcg@10",
        "i2t-recall@1",
        "i2t-recall@10",
        "t2i-ndcg@10",
        "t2i-recall@1",
        "t2i-recall@10",
    ),
    *("bleu", "chrf", "rouge-1", "rouge-2", "rouge-l", "answer-accuracy", "exact-match"),
)
ALL = tuple(dict.fromkeys((*_OF_CLASSES, *_ELSE, *label_metrics.ALL)))


# ------------------------------------------------------------------------------------------------------- baselines


def majority(task: Task) -> dict[str, Any] | None:
    """The metrics of the majority class on the test split, as JSON-ready data; None where an example has no one class,
    or nothing to be tested on. Of classes that are equally frequent the first is taken."""
    if task.schema.predicts != "class" or not len(task.test) or not len(task.train):
        return None
    names = task.label_names or ()
    counts = Counter(task.train["label"])
    answer = max(range(len(names)), key=lambda label: counts[label])
    labels = np.asarray(task.test["label"])
    constant = np.zeros((len(labels), len(names)))
    constant[:, answer] = 1
    return {
        "answer": str(names[answer]),
        "examples": len(labels),
        "metrics": {name: float(value) for name, value in task.compute_metrics(constant, labels).items()},
    }
