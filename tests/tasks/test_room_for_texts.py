"""A length with no room for a text is refused: tokenizers leave the texts uncut then, or cut everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from inlay import InlayError, Spec, tasks, tune
from inlay.tasks.encode import check_room


@pytest.fixture(scope="module")
def minilm(shared: Path):
    return AutoTokenizer.from_pretrained(shared / "models" / "minilm_l6_mlm")


@pytest.mark.parametrize(("template", "least"), [("{a}", 3), ("{a}{sep}{b}", 4)])
def test_one_token_of_a_text_is_the_least(template: str, least: int, minilm) -> None:
    for length in range(1, least):
        with pytest.raises(InlayError, match=f"max_length={length} has no room for a text.*Give {least} or more"):
            check_room(length, minilm, template, writes=False)
    check_room(least, minilm, template, writes=False)


def test_a_text_that_is_written_takes_two(minilm) -> None:
    with pytest.raises(InlayError, match=r"max_length=1 .* nothing to be predicted from\. Give 2 or more"):
        check_room(1, minilm, "{a}", writes=True)
    check_room(2, minilm, "{a}", writes=True)


def test_the_length_that_is_asked_for_is_kept(minilm, reviews: Path) -> None:
    task = tasks.load(Spec(model="m", method="bias", data=str(reviews), text=("body",), label="stars"))
    for length in (1, 2):
        with pytest.raises(InlayError, match="has no room"):
            task.encode("train", minilm, length)
    encoded = task.encode("train", minilm, 3)
    assert {len(encoded[row]["input_ids"]) for row in range(len(encoded))} == {3}


def test_tokens_of_a_method_that_take_every_position_are_refused(review_spec: Spec, tmp_path: Path) -> None:
    prompted = review_spec.with_(method="prompt", settings={"num_virtual_tokens": 64})
    with pytest.raises(InlayError, match="num_virtual_tokens=64 takes every position of the model, which has 20"):
        tune(prompted, tmp_path / "runs", progress=False)
