"""A spec is plain data: the same fields are the same run."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import InlayError
from inlay.records import Spec

SPEC = Spec(model="m", method="lora", task="t", text=["a", "b"], settings={"r": 4, "target_modules": ["q", "v"]})


def test_round_trip_through_json() -> None:
    assert Spec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC
    assert Spec.from_json({"model": "m", "method": "lora", "task": "t"}) == Spec(model="m", method="lora", task="t")
    with pytest.raises(InlayError, match="Did you mean 'batch_size'"):
        Spec.from_json({**SPEC.to_json(), "batchsize": 3})


@given(st.sampled_from(sorted(SPEC.to_json())), st.integers(1, 9))
def test_every_field_is_part_of_the_identity(name: str, value: int) -> None:
    assert SPEC.digest({name: f"other-{value}"}) != SPEC.digest()


def test_runs_from_before_a_field_was_added_keep_their_identity() -> None:
    old = Spec(model="m", method="lora", task="t", epochs=3.0, batch_size=32)  # its defaults
    # What the first version of inlay computed for this spec.
    assert old.digest() == "9a7874852301300071a3963f507652b549c2ddf69fe0dff665df6933eb99d806"
    assert old.with_(trunk_cache="off").digest() != old.digest()


def test_identity_follows_contents_and_not_paths_or_the_order_of_settings() -> None:
    here, there = (Spec(model="m", method="lora", data=path) for path in ("a/x.csv", "b/y.csv"))
    assert here.digest() != there.digest()
    assert here.digest({"data": "d1"}) == there.digest({"data": "d1"})
    assert here.digest({"data": "d1"}) != here.digest({"data": "d2"})
    one, other = (SPEC.with_(settings=settings) for settings in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": None}, "not both or neither"),
        ({"data": "x.csv"}, "not both or neither"),
        ({"epochs": 0}, "epochs=0 must be greater than 0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"warmup": 1.0}, "0 <= warmup < 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "from 0 to"),
        ({"weight_decay": -0.1}, "must not be negative"),
        ({"precision": "bf16"}, "Unknown precision 'bf16'"),
        ({"schedule": "linaer"}, "Did you mean 'linear'"),
        ({"trunk_cache": "yes"}, "Unknown trunk_cache 'yes'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        SPEC.with_(**changes)
