"""Pairs to embed: the columns they are found in, what a batch says of them, and metrics against plain sorting."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds, new_rows, retrieval, scored_rows
from inlay.tasks.pairs import Judged, PairCollator, encode_pairs

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]
FIELDS = ("anchor", "positive", "negative")


def lines(header: str, row: str, count: int = 30) -> str:
    return "\n".join([header, *(row.format(i=i) for i in range(count))]) + "\n"


# ------------------------------------------------------------------------------------------------------ columns


@pytest.mark.parametrize(
    ("header", "row", "given_kind", "fields", "scored"),
    [
        ("id,anchor,positive", "{i},a {i},b {i}", None, ("anchor", "positive"), False),
        ("query,positive,negative", "a {i},b {i},c {i}", None, ("query", "positive", "negative"), False),
        ("query,positive,negative_1,negative_2", "a {i},b {i},c {i},d", None,
         ("query", "positive", "negative_1", "negative_2"), False),
        ("question,answer", "a {i},b {i}", "embedding", ("question", "answer"), False),
        ("sentence1,sentence2,score", "a {i},b {i},{i}", "embedding", ("sentence1", "sentence2"), True),
    ],
)  # fmt: skip
def test_columns_are_found(
    write: Write, spec: MakeSpec, header: str, row: str, given_kind: str | None, fields: tuple[str, ...], scored: bool
) -> None:
    task = tasks.load(spec(data=write("a.csv", lines(header, row)), kind=given_kind))
    assert (task.kind, task.fields, task.schema.scored) == (kinds.EMBEDDING, fields, scored)
    assert task.metrics == (("spearman", "pearson") if scored else kinds.TABLE[kinds.EMBEDDING].metrics)
    assert any("anchor from" in note for note in task.notes)


def test_two_named_texts_are_pairs_only_where_the_kind_says_so(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", lines("anchor,positive,label", "a {i},b {i},yes") + lines("", "a {i},b {i},no").lstrip("\n"))
    assert tasks.load(spec(data=path, text=("anchor", "positive"))).kind == kinds.PAIR
    named = spec(data=path, text=("positive", "anchor"), kind=kinds.EMBEDDING)
    assert tasks.load(named).fields == ("positive", "anchor")


@pytest.mark.parametrize(
    ("header", "row", "options", "says"),
    [
        ("body", "a {i}", {}, "no two columns are plainly an anchor and its positive"),
        ("body", "a {i}", {"text": ("body",)}, "needs two texts that belong together"),
        ("a,b,c,s", "a,b,c,1", {"text": ("a", "b", "c"), "label": "s"}, "the scores in 's' are of two texts"),
        ("a,b", "a {i},b", {"text": ("a", "a")}, "names a column twice"),
        ("anchor,positive,score", "a {i},b,high", {}, "a.csv, row 1: the value 'high' of 'score' is not a number"),
    ],
)
def test_what_is_no_pair_is_one_error(
    write: Write, spec: MakeSpec, header: str, row: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InlayError, match=says):
        tasks.load(spec(data=write("a.csv", lines(header, row)), kind=kinds.EMBEDDING, **options))


def test_a_text_that_is_none_is_an_error_with_its_row(tmp_path: Path, spec: MakeSpec) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"anchor": "a", "positive": "b"}\n{"anchor": "a", "positive": {"of": 3}}\n')
    with pytest.raises(InlayError, match=r"a.jsonl, row 2.*'positive'"):
        tasks.load(spec(data=path))


def test_all_rows_of_an_anchor_are_in_one_split(write: Write, spec: MakeSpec) -> None:
    text = "anchor,positive\n" + "".join(f"a {i % 25},b {i}\n" for i in range(100))
    task = tasks.load(spec(data=write("a.csv", text)))
    found = [set(task.split(name)["anchor"]) for name in ("train", "validation", "test")]
    assert all(found)
    assert sum(map(len, found)) == 25


def test_texts_to_embed_come_alone_and_pairs_are_scored(write: Write, spec: MakeSpec) -> None:
    schema = tasks.load(spec(data=write("a.csv", lines("query,positive", "a {i},b {i}")))).schema
    assert new_rows.read(schema, ["x", "y"]).rows == [{"text": "x"}, {"text": "y"}]
    assert new_rows.read(schema, [{"query": "x", "positive": "z"}]).rows == [{"text": "x"}]
    assert new_rows.read(schema, [{"positive": "z"}]).rows == [{"text": "z"}]
    with pytest.raises(InlayError, match=r"row 1.* has no column 'text' or 'query'"):
        new_rows.read(schema, [{"a": "x", "b": "z"}])
    judged = scored_rows.read_labelled(schema, [{"query": "x", "positive": "z", "more": 1}])
    assert judged.test[0] == {"query": "x", "positive": "z"}
    with pytest.raises(InlayError, match="row 2: there is no text in the column 'positive'"):
        scored_rows.read_labelled(schema, [{"query": "x", "positive": "z"}, {"query": "x", "positive": None}])


# ------------------------------------------------------------------------------------------------------ batches


def triplets(*found: tuple[str, ...]) -> list[dict[str, str]]:
    return [dict(zip(FIELDS, each, strict=False)) for each in found]


def test_what_belongs_to_an_anchor_is_no_negative_of_it(wordpiece: Any) -> None:
    made: Any = encode_pairs(
        triplets(("a", "p", "n"), ("a", "q", "p"), ("b", "p", "a"), ("c", "r", "b"), ("b", "b", "n")),
        FIELDS, wordpiece, 16, judged=False,
    )  # fmt: skip
    batch = PairCollator(wordpiece)([made[i] for i in range(5)])
    x = -100
    assert batch["labels"].tolist() == [
        # p  q  p  r  b    n  p  a  b  n
        [1, x, x, 0, 0, 0, x, x, 0, 0],  # a: p, q
        [x, 1, x, 0, 0, 0, x, x, 0, 0],
        [x, 0, 1, 0, x, 0, x, 0, x, 0],  # b: p, b
        [0, 0, 0, 1, 0, 0, 0, 0, 0, 0],  # c: r
        [x, 0, x, 0, 1, 0, x, 0, x, 0],
    ]
    texts = wordpiece.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert texts == [*"aabcb", *"pqprb", *"npabn"]
    # A positive that is known from a row outside of the batch.
    alone = PairCollator(wordpiece)([made[0], made[3]])
    assert alone["labels"].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    other = PairCollator(wordpiece)([made[1], made[2]])
    assert other["labels"].tolist() == [[1, x, x, x], [0, 1, x, 0]]


def test_scored_pairs_have_their_scores(wordpiece: Any) -> None:
    found = [{"a": "x", "b": "y z", "label": 0.5}, {"a": "x x", "b": "z", "label": -2.0}]
    made: Any = encode_pairs(found, ("a", "b"), wordpiece, 16, judged=False)
    batch = PairCollator(wordpiece)([made[0], made[1]])
    assert batch["labels"].tolist() == [0.5, -2.0]
    assert batch["input_ids"].shape == (4, 4)
    assert made.lengths.tolist() == [4, 4]


# ------------------------------------------------------------------------------------------------------ metrics


def oracle(vectors: np.ndarray, judged: Judged) -> dict[str, float]:
    """By sorting, in float64, query by query."""
    found: dict[str, list[float]] = {"ndcg@10": [], "mrr@10": [], "recall@1": [], "recall@10": []}
    exact = vectors.astype(np.float64)
    for query, relevant in zip(judged.queries, judged.relevant, strict=True):
        documents = [each for each in judged.corpus if each != query or query in relevant]
        ordered = sorted(documents, key=lambda each: -math.fsum(exact[query] * exact[each]))
        hits = [each in relevant for each in ordered[:10]]
        gain = sum(1 / math.log2(i + 2) for i, hit in enumerate(hits) if hit)
        found["ndcg@10"].append(gain / sum(1 / math.log2(i + 2) for i in range(min(10, len(relevant)))))
        found["mrr@10"].append(1 / (hits.index(True) + 1) if any(hits) else 0.0)
        found["recall@1"].append(sum(hits[:1]) / len(relevant))
        found["recall@10"].append(sum(hits) / len(relevant))
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


@given(
    pairs=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60),
    seed=st.integers(0, 1000),
    at_once=st.sampled_from([1, 70, 1 << 24]),
)
def test_metrics_are_those_of_sorting(pairs: list[tuple[int, int, int]], seed: int, at_once: int) -> None:
    numbers: dict[int, int] = {}
    named = tuple(tuple(numbers.setdefault(each, len(numbers)) for each in pair) for pair in pairs)
    relevant: dict[int, set[int]] = {}
    for anchor, positive, _ in named:
        relevant.setdefault(anchor, set()).add(positive)
    corpus = tuple(dict.fromkeys(each for _, *others in named for each in others))
    judged = Judged(tuple(relevant), corpus, tuple(map(frozenset, relevant.values())), named)
    # Whole numbers: products are exact, in float32 too, and equal ones are frequent.
    vectors = np.random.default_rng(seed).integers(-3, 4, (len(numbers), 5)).astype(np.float32)
    before, retrieval.AT_ONCE = retrieval.AT_ONCE, at_once
    try:
        found = retrieval.score(("ndcg@10", "mrr@10", "recall@1", "recall@10"), vectors, judged)
    finally:
        retrieval.AT_ONCE = before
    assert found == pytest.approx(oracle(vectors, judged), abs=1e-12)


def test_scores_are_set_beside_cosines() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 6)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = tuple((i, 20 + i) for i in range(20))
    scores = tuple(rng.normal(size=20))
    judged = Judged((), (), (), pairs, scores)
    cosines = [float(np.dot(vectors[a].astype(float), vectors[b].astype(float))) for a, b in pairs]
    found = retrieval.score(("spearman", "pearson"), vectors, judged)
    assert found["spearman"] == pytest.approx(float(spearmanr(cosines, scores).statistic))
    assert found["pearson"] == pytest.approx(float(np.corrcoef(cosines, scores)[0, 1]))
