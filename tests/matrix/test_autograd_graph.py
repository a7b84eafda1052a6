"""The check of what enters the graph can fail: it looks at real parts, and sees a trunk that is pulled in."""

from __future__ import annotations

import pytest
from autograd_graph import leaves, untrained_from_the_input

from inlay.anatomy import anatomy
from inlay.methods.attach import attach, trained_parameters
from zoo import tiny


@pytest.mark.parametrize("family", ["vit", "swin", "resnet", "bert"])
def test_all_before_the_last_block_is_looked_at(family: str) -> None:
    model, _ = tiny(family)
    last = len(anatomy(model).blocks)
    adapted = attach(model, "norm", settings={"layers": [last]})
    parts = anatomy(adapted)
    found = [part.name for part in untrained_from_the_input(adapted)]
    assert found == [part.name for part in (*parts.stem_parts, *parts.blocks[:-1])]
    assert untrained_from_the_input(attach(tiny(family)[0], "full")) == []


def test_a_trunk_that_is_pulled_in_is_seen() -> None:
    model, batch = tiny("vit")
    adapted = attach(model, "norm", settings={"layers": [3]})
    trained = {id(parameter) for parameter in trained_parameters(adapted).values()}
    assert {id(leaf) for leaf in leaves(adapted(**batch).loss)} == trained
    batch["pixel_values"].requires_grad_()
    assert id(batch["pixel_values"]) in {id(leaf) for leaf in leaves(adapted(**batch).loss)}
