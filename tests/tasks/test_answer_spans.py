"""Answers found in texts: windows and their characters, the best legal stretch, thresholds and SQuAD's metrics, each
against a plain oracle."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from checkpoints import WORDS, write_tokenizer
from inlay import InlayError
from inlay.backbones.answer_outputs import has_answer, span_loss
from inlay.tasks.answer_spans import METRICS, best_span, candidates, choose_no_answer, decode, score
from inlay.tasks.encode import IGNORED, TextCollator
from inlay.tasks.schema import TaskSchema
from inlay.tasks.windows import FIRST, LAST, LEGAL, EncodedWindows, encode_windows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    made = write_tokenizer(tmp_path_factory.mktemp("words"))
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", WORDS.index("<s>")), ("</s>", WORDS.index("</s>"))],
    )
    return made


def schema(**given: Any) -> TaskSchema:
    return TaskSchema("t", "question-answering", ("question", "context"), ("squad-f1", "squad-exact"), **given)


# A context of words between which any white space may stand.
blanks = st.sampled_from([" ", "  ", "\n", " \t "])
words = st.integers(0, 40).map("w{}".format)
contexts = st.lists(st.tuples(words, blanks), max_size=30).map(lambda parts: "".join(a + b for a, b in parts))
questions = st.lists(words, max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(questions, contexts), min_size=1, max_size=4), st.integers(8, 24), st.data())
def test_windows_cover_a_context_and_know_its_characters(
    tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]], length: int, data: st.DataObject
) -> None:
    made = encode_windows([{"question": q, "context": c} for q, c in rows], tokenizer, length)
    assert made.rows == len(rows)
    assert sorted(set(made.row_of)) == list(range(len(rows)))
    seen: dict[int, set[tuple[int, int]]] = {row: set() for row in range(len(rows))}
    labels = []
    for _, context in rows:
        there = list(re.finditer(r"\S+", context))
        if not there or data.draw(st.booleans()):
            labels.append({"text": [], "start": []})
            continue
        i = data.draw(st.integers(0, len(there) - 1))
        j = data.draw(st.integers(i, min(i + 1, len(there) - 1)))
        labels.append({"text": [context[there[i].start() : there[j].end()]], "start": [there[i].start()]})
    made.mark(labels)
    found = set()
    for window, row in enumerate(made.row_of):
        item = made[window]
        starts, ends = made.places(window)
        assert len(item["input_ids"]) == len(starts) == len(item["labels"]) <= length
        context = rows[row][1]
        for token, a, b, mark in zip(item["input_ids"], starts, ends, item["labels"], strict=True):
            assert (mark == IGNORED) == (a < 0) or token == item["input_ids"][0]
            if a >= 0:
                assert tokenizer.convert_ids_to_tokens(token) == context[a:b]
                seen[row].add((int(a), int(b)))
        marks = np.asarray(item["labels"])
        (first,) = np.flatnonzero((marks > 0) & (marks & FIRST > 0))
        (last,) = np.flatnonzero((marks > 0) & (marks & LAST > 0))
        if starts[first] >= 0:
            assert context[starts[first] : ends[last]] == labels[row]["text"][0]
            found.add(row)
        else:
            assert first == last == 0
    for row, (_, context) in enumerate(rows):
        assert seen[row] == {match.span() for match in re.finditer(r"\S+", context)}
        # Two words lie in one window, for windows overlap, but where these are too short to.
        assert (row in found) == bool(labels[row]["text"]) or length < 14


def test_what_is_cut_and_read_in_windows_is_said(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"question": "w1 w2", "context": " ".join(f"w{i}" for i in range(30))},
        {"question": " ".join(["w3"] * 30), "context": "w4 w5"},
        {"question": "w1", "context": "w2"},
    ]
    made = encode_windows(rows, tokenizer, 15, "train")
    assert made.notes == (
        (
            "1 of 3 train contexts are longer than 15 tokens with their question: they are read in windows that share "
            "3 tokens, 6 windows in all"
        ),
        "1 of 3 train questions take more than half of 15 tokens and were cut",
    )
    part = made.take([0, 2])
    assert part.rows == 2
    assert part.contexts == [rows[0]["context"], rows[2]["context"]]
    assert part.row_of == [0, 0, 0, 0, 1]
    assert [part[i] for i in range(len(part))] == [made[i] for i in (0, 1, 2, 3, 5)]


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(InlayError, match=r"needs a fast tokenizer; int is not one"):
        encode_windows([], 3, 20)


spans = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-9, 9), min_size=n, max_size=n),
        st.lists(st.integers(-9, 9), min_size=n, max_size=n),
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=n, max_size=n),
    )
)


@given(spans, st.sampled_from([None, 1, 3, 7, 20]))
def test_the_best_stretch_is_that_of_all_pairs(parts: Any, longest: int | None) -> None:
    first, last, gaps = parts
    ends, starts, at = [], [], 0
    for gap, size in gaps:
        starts.append(at + gap)
        ends.append(at := at + gap + size)
    pairs = [
        (-(first[i] + last[j]), j - i, i)
        for i, j in itertools.combinations_with_replacement(range(len(first)), 2)
        if longest is None or ends[j] - starts[i] <= longest
    ]
    found = best_span(
        *(np.array(each, dtype=np.float64) for each in (first, last)), np.array(starts), np.array(ends), longest
    )
    if not pairs:
        assert found is None
    else:
        worth, apart, i = min(pairs)
        assert found == (-worth, i, i + apart)


def test_the_best_stretch_over_all_windows(tokenizer: PreTrainedTokenizerFast) -> None:
    """Against every legal pair of tokens of every window, with virtual tokens ahead, in float64."""
    rng = np.random.default_rng(0)
    rows = [
        {"question": "w1 w2", "context": " ".join(f"w{rng.integers(40)}" for _ in range(size))}
        for size in (0, 3, 12, 40)
    ]
    made = encode_windows(rows, tokenizer, 16)
    for ahead in (0, 5):
        outputs = rng.normal(size=(len(made), ahead + int(made.lengths.max()), 2)).astype(np.float32)
        # What is no context is worth most, and never chosen.
        for window in range(len(made)):
            starts, _ = made.places(window)
            outputs[window, ahead : ahead + len(starts)][starts < 0] += 50
            outputs[window, ahead + len(starts) :] += 90
        found = candidates(outputs, made, 12)
        for row, each in enumerate(found):
            worth, nothing = [], []
            for window in np.flatnonzero(np.array(made.row_of) == row):
                starts, ends = made.places(window)
                z = outputs[window, ahead : ahead + len(starts)].astype(np.float64)
                legal = [0, *(i for i in range(len(starts)) if starts[i] >= 0)]
                share = [sum(math.exp(z[i, k]) for i in legal) for k in (0, 1)]
                nothing.append((z[0, 0] + z[0, 1], math.exp(z[0, 0]) / share[0] * math.exp(z[0, 1]) / share[1]))
                worth += [
                    (z[i, 0] + z[j, 1], starts[i], ends[j], math.exp(z[i, 0]) / share[0] * math.exp(z[j, 1]) / share[1])
                    for i in legal[1:]
                    for j in legal[1:]
                    if i <= j and ends[j] - starts[i] <= 12
                ]
            assert (each.nothing.worth, each.nothing.score) == pytest.approx(min(nothing))
            if not worth:
                assert each.best is None
                continue
            assert each.best is not None
            assert (each.best.worth, each.best.start, each.best.end, each.best.score) == pytest.approx(max(worth))
        said = decode(schema(longest_answer=12), outputs, made)
        assert said[0] == {"answer": "", "score": found[0].nothing.score, "start": None, "end": None}
        for row, each in list(zip(rows, said, strict=True))[1:]:
            assert each["answer"] == row["context"][each["start"] : each["end"]] != ""


def plain_f1(said: str, wanted: str) -> tuple[float, float]:
    """The official definitions, word by word."""

    def words_of(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
        return [word for word in re.sub(r"\b(a|an|the)\b", " ", kept).split() if word]

    a, b = words_of(said), words_of(wanted)
    same = float(" ".join(a) == " ".join(b))
    if not a or not b:
        return same, same
    rest, common = list(b), 0
    for word in a:
        if word in rest:
            rest.remove(word)
            common += 1
    if not common:
        return 0.0, same
    precision, recall = common / len(a), common / len(b)
    return 2 * precision * recall / (precision + recall), same


said_words = st.lists(
    st.sampled_from(["the", "The", "a", "cat", "Cat,", "cats", "an", "sat.", "-", "on\tit", "theme", "é"]), max_size=5
)
texts = said_words.map(" ".join)


@given(texts, st.lists(texts, max_size=3))
def test_metrics_are_those_of_the_official_evaluation(said: str, answers: list[str]) -> None:
    wanted = [answer for answer in answers if plain_f1(answer, "")[1] == 0] or [""]
    both = [plain_f1(said, answer) for answer in wanted]
    assert METRICS["squad-f1"](said, answers) == pytest.approx(max(f1 for f1, _ in both))
    assert METRICS["squad-exact"](said, answers) == max(same for _, same in both)


def test_examples_of_metrics() -> None:
    f1, exact = METRICS["squad-f1"], METRICS["squad-exact"]
    assert exact("The  Eiffel Tower!", ["eiffel tower"]) == 1
    assert f1("the tower of Eiffel", ["Eiffel Tower", "Paris"]) == pytest.approx(0.8)
    assert (f1("", []), exact("", []), f1("it", []), exact("", ["it"])) == (1, 1, 0, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-4, 4), st.booleans()), min_size=1, max_size=9))
def test_the_threshold_is_the_best_there_is(
    tokenizer: PreTrainedTokenizerFast, rows: list[tuple[bool, int, bool]]
) -> None:
    made = encode_windows([{"question": "w1", "context": "w2 w3"} for _ in rows], tokenizer, 20)
    made.mark(
        [
            {"text": ["w2" if right else "w9"], "start": [0]} if there else {"text": [], "start": []}
            for there, _, right in rows
        ]
    )
    outputs = np.full((len(rows), 7, 2), -20.0)
    for window, (_, lead, _) in enumerate(rows):
        outputs[window, 3] = 0, 0
        outputs[window, 0] = lead, 0
    (token,) = {int(np.flatnonzero(made.places(i)[0] == 0)[0]) for i in range(len(made))}
    outputs[:, [3, token]] = outputs[:, [token, 3]]
    chosen = choose_no_answer(schema(), outputs, made)

    def mean(threshold: float) -> float:
        return score(schema(no_answer=threshold), outputs, made)["squad-f1"]

    best = max(mean(at) for at in np.arange(-5, 6, 0.5))
    assert mean(chosen) == pytest.approx(best)
    assert not any(abs(at) < abs(chosen) - 0.5 and mean(at) >= best - 1e-12 for at in np.arange(-5, 6, 0.5))
    if mean(0.0) == pytest.approx(best):
        assert chosen == 0.0


def test_the_loss_is_that_of_legal_tokens_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    made = encode_windows(
        [{"question": "w1", "context": "w2 w3 w4"}, {"question": "w1", "context": "w5"}], tokenizer, 20
    )
    made.mark([{"text": ["w3 w4"], "start": [3]}, {"text": [], "start": []}])
    batch = TextCollator(tokenizer)([made[0], made[1]])
    labels = batch["labels"]
    torch.manual_seed(0)
    logits = torch.randn(2, 3 + labels.shape[1], 2, dtype=torch.float64, requires_grad=True)
    z = logits[:, 3:].detach().numpy()
    each = []
    for row, (i, j) in enumerate(((4, 5), (0, 0))):
        legal = [t for t in range(labels.shape[1]) if labels[row, t] >= LEGAL]
        total = [math.log(sum(math.exp(z[row, t, k]) for t in legal)) for k in (0, 1)]
        each.append((total[0] - z[row, i, 0] + total[1] - z[row, j, 1]) / 2)
    loss = span_loss(logits, labels)
    assert float(loss) == pytest.approx(sum(each) / 2)
    assert torch.autograd.gradcheck(lambda given: span_loss(given, labels), logits)
    wider = torch.nn.functional.pad(labels, (0, 4), value=IGNORED)  # padding changes nothing
    padded = torch.cat([logits, torch.randn(2, 4, 2, dtype=torch.float64)], 1)
    assert float(span_loss(padded, wider)) == pytest.approx(float(loss))
    unknown = torch.where(labels > 0, LEGAL, labels)
    mixed = torch.stack([labels[0], unknown[1]])
    assert has_answer(mixed).tolist() == [True, False]
    assert float(span_loss(logits, mixed)) == pytest.approx(each[0])


def test_decoding_needs_the_windows() -> None:
    with pytest.raises(InlayError, match=r"decode\(predictions, inputs\)"):
        schema().decode(np.zeros((1, 3, 2)))


def test_a_real_tokenizer_gives_back_the_characters(shared: Path) -> None:
    """Pieces of odd characters, where such a tokenizer is here."""
    from transformers import AutoTokenizer

    context = "Größe: 5 µm — “naïve” 日本語 👩‍🚀 in\u00a0Zürich, 1843.  End"
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "minilm_l6_mlm")
    made: EncodedWindows = encode_windows([{"question": "Where?", "context": context}], tokenizer, 64)
    begin = context.index("Zürich")
    made.mark([{"text": ["Zürich"], "start": [begin]}])
    marks, (starts, ends) = np.asarray(made[0]["labels"]), made.places(0)
    at = np.flatnonzero(marks > 0)
    assert context[starts[at[0]] : ends[at[-1]]] == "Zürich"
    assert all(context[a:b] == context[a:b].strip() != "" for a, b in zip(starts, ends, strict=True) if a >= 0)
