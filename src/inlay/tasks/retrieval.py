"""How good vectors are to find texts by, as benchmarks of retrieval count it; and how well they tell likeness.

A query's documents are ranked by cosine. r are the ranks, from 1, of those that belong to it (its relevant ones, R):

    recall@k = |{r <= k}| / R      MRR@10 = 1 / min r, 0 beyond 10
    nDCG@10 = sum_{r <= 10} 1 / log2(1 + r)  /  sum_{i = 1}^{min(R, 10)} 1 / log2(1 + i)

each averaged over the queries. A query that is a document itself is no answer to itself. Of documents with the same
cosine the earlier one comes first. Likeness is the correlation of the cosines of pairs with their scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from inlay.tasks.metrics import of_values
from inlay.tasks.pairs import Judged

DEEPEST = 10
AT_ONCE = 1 << 24  # cosines


def score(names: Sequence[str], vectors: np.ndarray, judged: Judged) -> dict[str, float]:
    """The named metrics of vectors of length 1, one for each of the judged texts."""
    if judged.scores is not None:
        return of_values(names, cosines(vectors, judged), np.asarray(judged.scores))
    found = list(ranks(vectors, judged))
    made = {
        "recall@1": lambda: np.mean([np.mean(each <= 1) for each in found]),
        "recall@10": lambda: np.mean([np.mean(each <= DEEPEST) for each in found]),
        "mrr@10": lambda: np.mean([1 / each.min() if each.min() <= DEEPEST else 0.0 for each in found]),
        "ndcg@10": lambda: np.mean([_gain(each[each <= DEEPEST]) / _gain(_best(len(each))) for each in found]),
    }
    return {name: float(made[name]()) for name in names}


def cosines(vectors: np.ndarray, judged: Judged) -> np.ndarray:
    """That of the first two texts of each pair."""
    first, second = (vectors[[pair[i] for pair in judged.pairs]].astype(np.float64) for i in (0, 1))
    return (first * second).sum(axis=1)


def ranks(vectors: np.ndarray, judged: Judged) -> Iterator[np.ndarray]:
    """For each query the ranks of the documents that belong to it, from 1, in the order of the corpus."""
    corpus, place = np.asarray(judged.corpus), judged.place
    documents = vectors[corpus]
    step = max(1, AT_ONCE // max(1, len(corpus)))
    for start in range(0, len(judged.queries), step):
        queries = judged.queries[start : start + step]
        found = vectors[list(queries)] @ documents.T
        for query, own, relevant in zip(queries, found, judged.relevant[start : start + step], strict=True):
            if query in place and query not in relevant:
                own[place[query]] = -np.inf
            at = np.asarray([place[each] for each in judged.in_order(relevant)])
            before = own[None, :] > own[at][:, None]
            level = (own[None, :] == own[at][:, None]) & (np.arange(len(own))[None, :] < at[:, None])
            yield 1 + (before | level).sum(axis=1)


def _gain(found: np.ndarray) -> float:
    return float((1 / np.log2(1 + found)).sum())


def _best(count: int) -> np.ndarray:
    return np.arange(1, min(count, DEEPEST) + 1)
