"""A spec's command, typed, makes the same spec: by the options that `inlay tune` has, and as a real run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay import Spec
from inlay.cli import options
from inlay.records.command import arguments, command
from inlay.records.store import Store

words = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
numbers = st.floats(1e-12, 1e12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | numbers | words, lambda inner: st.lists(inner, max_size=3)
)
specs = st.builds(
    Spec,
    model=words,
    method=words,
    data=words,
    text=st.lists(words, max_size=2).map(tuple),
    label=st.none() | words,
    template=st.none() | words,
    data_dir=st.none() | words,
    shots=st.none() | st.integers(1, 10**6),
    seed=st.integers(0, 2**32 - 1),
    epochs=st.none() | numbers,
    max_steps=st.none() | st.integers(1, 10**6),
    batch_size=st.none() | st.integers(1, 999),
    learning_rate=st.none() | numbers,
    weight_decay=numbers,
    warmup=st.floats(0, 0.99),
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
    clip=numbers,
    precision=st.sampled_from(["auto", "float32"]),
    gradient_checkpointing=st.booleans(),
    trust_remote_code=st.booleans(),
    augment=st.none() | st.just("crop-flip"),
    settings=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), values, max_size=3),
)


def parsed(line: list[str]) -> Spec:
    """The spec that `tune`'s options make of a command."""
    made: list[Spec] = []

    @partial(options.takes_spec, joint=True)
    def tune(
        model: options.Model, method: Annotated[str, typer.Option()], fields: dict[str, Any], seed: int = 0
    ) -> None:
        """As the real one declares them."""
        made.append(Spec(model=model, method=method, seed=seed, **fields))

    app = typer.Typer()
    app.command("tune")(tune)
    app.callback()(lambda: None)
    app(line[1:], standalone_mode=False)
    return made[0]


@settings(max_examples=60, deadline=None)
@given(specs)
def test_a_command_makes_the_same_spec(spec: Spec) -> None:
    """Through the shell's own quoting: whatever is in names and settings."""
    again = parsed(shlex.split(command(spec)))
    assert again == spec
    assert again.digest() == spec.digest()


def test_several_tasks() -> None:
    """Tasks that are trained together, and how they are drawn."""
    spec = Spec(model="m", method="multi-lora", tasks=("rte", "sst2"), sampling="temperature", temperature=5)
    assert parsed(arguments(spec)) == spec


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(words, words, min_size=1, max_size=3), words)
def test_several_tasks_of_ones_own(paths: dict[str, str], label: str) -> None:
    fields = {f"t{i}": {"data": path, "text": [name], "shots": 5} for i, (name, path) in enumerate(paths.items())}
    spec = Spec(model="m", method="lora", tasks=("rte", *fields), task_fields=fields, label=label)
    again = parsed(shlex.split(command(spec)))
    assert again == spec
    assert again.digest() == spec.digest()


def test_defaults_are_left_out() -> None:
    """A short spec is a short command; the seed is always said."""
    spec = Spec(model="embedded:vit", task="digits", method="lora", learning_rate=0.0005, settings={"r": 16})
    expected = "inlay tune --model embedded:vit --task digits --method lora --seed 0 --learning-rate 0.0005 --set r=16"
    assert command(spec) == expected
    assert command(spec, "my runs") == f"{expected} --out 'my runs'"


@pytest.mark.usefixtures("text_model")
def test_typed_it_finds_the_run(review_spec: Spec, typed: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """The command of a run that was made finds that run: its identity is the same."""
    from inlay.workflow.tune import tune

    run = tune(review_spec, tmp_path / "runs", progress=False)
    status, _, said = typed(*shlex.split(command(run.spec, str(tmp_path / "runs")))[1:])
    assert status == 0
    assert f"already done: {run.id}" in said
    assert len(Store(tmp_path / "runs").list()) == 1
