"""A spec is plain data: the same fields are the same run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
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


def test_what_tasks_have_of_their_own() -> None:
    own = {"a": {"data": "x.csv", "text": "body", "label": None}, "b": {"task": "rte", "shots": 8}}
    spec = Spec(model="m", method="lora", tasks=("a", "b", "sst2"), task_fields=own)
    assert spec.task_fields == {"a": {"data": "x.csv", "text": ["body"]}, "b": {"task": "rte", "shots": 8}}
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    named = spec.with_(task_fields={})
    assert named.digest() != spec.digest()
    assert "task_fields" not in json.dumps({k: v for k, v in named.to_json().items() if v})
    for fields, message in (
        ({"c": {"data": "x"}}, "Unknown task in task_fields 'c'"),
        ({"a": "x.csv"}, "'a' has 'x.csv': give a mapping"),
        ({"a": {"date": "x.csv"}}, r"Task 'a': Unknown field 'date'. Did you mean 'data'"),
        ({"a": {"data": 3}}, "Task 'a': data=3 will not do"),
        ({"a": {"text": ["x"]}}, "Task 'a': give either task"),
        ({"a": {"data": "x", "task": "rte"}}, "Task 'a': give either task"),
        ({"a": {"data": "x", "shots": 0}}, "Task 'a': shots=0"),
    ):
        with pytest.raises(InlayError, match=message):
            spec.with_(task_fields=fields)
    with pytest.raises(InlayError, match=r"test_data='t\.csv' would be that of every task"):
        spec.with_(test_data="t.csv")


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": "3"}, "epochs='3' will not do: give a finite number or None"),
        ({"epochs": True}, "epochs=True will not do"),
        ({"learning_rate": math.inf}, "learning_rate=inf will not do: give a finite number"),
        ({"learning_rate": 10**400}, "learning_rate=1000.*will not do"),
        ({"clip": None}, r"clip=None will not do: give a finite number\."),
        ({"seed": 1.5}, "seed=1.5 will not do: give a whole number"),
        ({"seed": True}, "seed=True will not do"),
        ({"shots": 2**70}, "shots=1180591620717411303424 will not do: give a whole number of at most"),
        ({"text": 5}, "text=5 will not do: give a text or a list of texts"),
        ({"text": ["a", None]}, "text=.*will not do: give a list, and in it a text"),
        ({"tasks": {"rte": 1}}, "tasks=.*will not do"),
        ({"model": 3}, "model=3 will not do: give a text"),
        ({"model": "a\0b"}, "model=.*NUL"),
        ({"data": "caf\udce9.csv", "task": None}, "data=.*UTF-8"),
        ({"label": ["a"]}, r"label=\['a'\] will not do: give a text or None"),
        ({"schedule": 1}, "schedule=1 will not do"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing=1 will not do: give True or False"),
        ({"settings": [1]}, r"settings=\[1\] will not do: give a mapping"),
        ({"settings": {"r": math.nan}}, "settings=.*finite number"),
        ({"settings": {1: 2}}, "settings=.*JSON"),
        ({"settings": {"target_modules": {"q", "v"}}}, "settings=.*JSON"),
    ],
)
def test_a_value_of_another_type_is_refused_when_the_spec_is_made(changes: dict, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        SPEC.with_(**changes)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["linear", "auto", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(SPEC.to_json())), ANY_JSON, max_size=4), ANY_JSON)
def test_whatever_stands_in_a_spec_it_is_read_or_refused(changed: dict, instead: object) -> None:
    for data in ({**SPEC.to_json(), **changed}, {**SPEC.to_json(), "task": None, **changed}, instead):
        try:
            spec = Spec.from_json(data)  # type: ignore[arg-type]
        except InlayError:
            continue
        assert Spec.from_json(json.loads(json.dumps(spec.to_json()))).digest() == spec.digest()
        json.dumps(spec.to_json(), ensure_ascii=False).encode()


def test_settings_nested_without_end_are_refused_and_shown_in_short() -> None:
    deep: dict = {}
    for _ in range(900):
        deep = {"a": [deep]}
    with pytest.raises(InlayError, match="at most 16 levels") as refused:
        SPEC.with_(settings=deep)
    assert len(str(refused.value)) < 300


def test_numbers_of_numpy_and_one_task_by_itself_are_taken_for_what_they_are() -> None:
    spec = SPEC.with_(seed=np.int64(3), learning_rate=np.float32(0.5), epochs=np.int64(2), model=Path("m"))
    assert spec == SPEC.with_(seed=3, learning_rate=0.5, epochs=2.0)
    assert json.loads(json.dumps(spec.to_json()))["seed"] == 3
    assert Spec(model="m", method="multi-lora", tasks="rte").tasks == ("rte",)  # type: ignore[arg-type]
