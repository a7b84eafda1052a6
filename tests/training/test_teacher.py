"""The prompted model, asked once: what is kept gives the same logits, and where it would not, nothing is kept."""

from __future__ import annotations

import pytest
import torch
from test_distil import HERE, make_pair
from torch import Tensor

from inlay.methods.plain import base_of
from inlay.training import teacher as module
from inlay.training.distil import Pair, batches
from inlay.training.teacher import Teacher

TEXTS = [[7, 21, 14, 40], [11, 3], [9, 9, 30], [4, 18, 2, 5]]


def calls(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts the prompted model was asked about, a call each."""
    found: list[int] = []
    prompted = pair.prompted

    def counted(ids: Tensor, last_only: bool = False) -> Tensor:
        found.append(len(ids))
        return prompted(ids, last_only)

    monkeypatch.setattr(pair, "prompted", counted)
    return found


@pytest.mark.parametrize("lead", [(), (0,)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma"])
def test_what_is_remembered_is_what_was_said(
    family: str, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(family, lead, rank=2)
    asked = calls(pair, monkeypatch)
    teacher = Teacher(pair)
    for number, batch in enumerate(batches(TEXTS, HERE)):
        teacher([2 * number, 2 * number + 1], batch)
    assert asked == [2, 2]
    # in another order, so that texts meet others and are padded otherwise
    order = [3, 1, 0, 2]
    for begin, batch in zip((0, 2), batches([TEXTS[number] for number in order], HERE), strict=True):
        found, kept = teacher(order[begin : begin + 2], batch), pair.positions(batch)
        assert asked == [2, 2]
        torch.testing.assert_close(found[kept], Pair.prompted(pair, batch.ids)[kept], atol=1e-5, rtol=1e-5)


def test_capped_logits_are_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("gemma")
    base_of(pair.model).config.final_logit_softcapping = 0.5
    asked, teacher = calls(pair, monkeypatch), Teacher(pair)
    batch = next(batches(TEXTS, HERE))
    wanted = Pair.prompted(pair, batch.ids)
    for _ in range(2):
        torch.testing.assert_close(teacher([0, 1], batch), wanted)
    assert asked == [2, 2]


def test_what_does_not_fit_is_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair()
    width = pair.model.config.hidden_size
    monkeypatch.setattr(module, "ROOM", 6 * width * 8)  # the first two texts have six tokens, of float64
    asked, teacher = calls(pair, monkeypatch), Teacher(pair)
    first, second = batches(TEXTS, HERE)
    for _ in range(2):
        teacher([0, 1], first)
        teacher([2, 3], second)
    assert asked == [2, 2, 2]
