"""Rows of the data sets, normalised."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.errors import InlayError
from inlay.tasks import prepare


def only(found: Any) -> dict[str, Any]:
    (row,) = found
    return row


@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 3), (2, 4), (0, 4)])
def test_what_is_marked_is_what_must_be_kept(start: int, end: int) -> None:
    words = ["the", "cat", "sat", "down"]
    row = prepare.mark_words(words, start, end)
    assert row["text"][row["start"] : row["end"]] == f"[ {row['span']} ]"
    assert row["text"].replace("[ ", "").replace(" ]", "") == "the cat sat down"
    text = " ".join(words)
    first = len(" ".join([*words[:start], ""]))
    assert prepare.mark_characters(text, first, first + len(row["span"])) == row


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (2, 2), (3, 5), (4, 4)])
def test_spans_outside_the_text_are_refused(start: int, end: int) -> None:
    with pytest.raises(InlayError, match="does not lie in a text of 4 words"):
        prepare.mark_words(["a", "b", "c", "d"], start, end)
    with pytest.raises(InlayError, match="does not lie in a text of 4 characters"):
        prepare.mark_characters("abcd", start, end)


def test_every_entity_of_a_tagged_sentence() -> None:
    row = {"tokens": ["Ann", "saw", "New", "York"], "ner_tags": ["B-PER", "O", "B-LOC", "I-LOC"]}
    found = [(each["type"], each["text"]) for each in prepare.spans(row)]
    assert found == [("PER", "[ Ann ] saw New York"), ("LOC", "Ann saw [ New York ]")]


def test_marked_entities_in_either_order() -> None:
    row = only(prepare.marked_entities({"sentence": " a <e2>b</e2> c <e1>d</e1> e", "relation": "r"}))
    assert row["text"][row["start"] : row["end"]] == "<e2>b</e2> c <e1>d</e1>"
    assert row["relation"] == "r"
    with pytest.raises(InlayError, match="should mark two entities"):
        list(prepare.marked_entities({"sentence": "a <e1>b</e1>"}))


@pytest.mark.parametrize("index", [4, 3, 5])
def test_the_right_pronoun_is_marked_even_when_the_index_is_off(index: int) -> None:
    row = {"text": "it rained so that it flooded.", "span1_text": "rain", "span2_text": "it", "span2_index": index}
    assert only(prepare.wsc(row))["text"] == "it rained so that [ it ] flooded."


def test_attributes_and_triples_in_one_line() -> None:
    row = {"meaning_representation": "name[The Vaults], priceRange[more than £30, or so]", "human_reference": "x"}
    assert only(prepare.e2e(row)) == {
        "source": "name : The Vaults | priceRange : more than £30, or so",
        "references": ["x"],
    }
    row = {"triples": [["A_B", "in", '"C, D"'], ["C", "of", "E"]], "texts": ["one", "two"]}
    assert only(prepare.triples(row)) == {
        "source": "A B : in : C, D | C : of : E",
        "references": ["one", "two"],
    }
    assert list(prepare.triples({"triples": [["a", "b", "c"]], "texts": []})) == []
    assert only(prepare.triples({"triples": [["a", "b", "c"]]})) == {"source": "a : b : c"}
