"""`sweep.yaml`: comparisons over several models and tasks, written down; checked whole before anything starts.

    models: [embedded:vit, embedded:resnet]   # or model: one
    tasks: [digits]                           # or task: one; or data: a path, with text, label and so on
    methods: [linear-probe, norm, lora]       # or all: those that fit
    seeds: 5                                  # 0 to 4; or a list
    shots: [100, 400]
    learning_rates: grid                      # or default, or numbers
    baseline: linear-probe
    epochs: 5                                 # and every other field of a run's spec
    settings: {lora: {r: 16}}                 # by method
    minutes: 120
    out: runs/sweep
    engine: {name: local, workers: 2}         # or {name: ray, address: auto, cpus: 1, gpus: 0.5}

A key that is none of these is an error with the nearest one that is; so is a value of the wrong kind.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.engines import ENGINES
from inlay.errors import InlayError, first_line, misspelt, unknown
from inlay.records.spec import Spec
from inlay.workflow.planning import ALL, DEFAULT, GRID, Planned, Rates, plan
from inlay.workflow.tune import DEFAULT_OUT, Say

Check = Callable[[Any], Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was written: what to compare, and where. Every model with every task is a comparison."""

    specs: tuple[Spec, ...]
    methods: tuple[str, ...]
    seeds: int | tuple[int, ...] = 3
    shots: tuple[int | None, ...] = (None,)
    rates: Rates = DEFAULT
    baseline: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    minutes: float | None = None
    out: str = DEFAULT_OUT
    engine: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, say: Say | None = None) -> list[Planned]:
        """Every run of the sweep, comparison by comparison."""
        return [
            plan(
                spec,
                self.methods,
                self.seeds,
                shots=self.shots,
                rates=self.rates,
                settings=self.settings,
                say=say,
            )
            for spec in self.specs
        ]


def read(path: Path | str) -> Sweep:
    """The sweep in a file, checked against the schema."""
    import yaml

    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _unique_keys())
    except OSError as error:
        raise InlayError(f"Cannot read {path}: {error.strerror}.{misspelt(path)}") from error
    except RecursionError as error:
        raise InlayError(f"{path} cannot be read: lists or mappings within one another too many times over.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InlayError(f"{path} is not YAML: {' '.join(str(error).split()) or first_line(error)}") from error
    if not isinstance(data, dict):
        raise InlayError(f"{path} is not a sweep: it has no keys. It needs model, task (or data) and methods at least.")
    try:
        return _sweep(data)
    except InlayError as error:
        raise InlayError(f"{path}: {error}") from error


def _unique_keys() -> Any:
    """YAML without code in it, in which a key that is given twice is an error: one of the two would be lost."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[Any] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.YAMLError(f"a key is a list or a mapping (line {key.start_mark.line + 1}); give a name")
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {key.value!r} is given twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader


# ------------------------------------------------------------------------------------------------------ the schema


class _Wrong(Exception):
    """A value of the wrong kind; says what would do."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Wrong("give a text")
    return value


def _number(value: Any) -> float:
    # YAML reads 1e-3 as a text: it wants 1.0e-3.
    try:
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise _Wrong("give a number")


def _positive(value: Any) -> float:
    if (number := _number(value)) <= 0:
        raise _Wrong("give a number greater than 0")
    return number


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise _Wrong("give a whole number")
    return int(number)


def _at_least_one(value: Any) -> int:
    if (number := _whole(value)) < 1:
        raise _Wrong("give 1 or more")
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("give true or false")
    return value


def _one_of(*allowed: str) -> Check:
    def check(value: Any) -> str:
        if value not in allowed:
            raise _Wrong(f"give one of {', '.join(allowed)}")
        return str(value)

    return check


def _list(each: Check, what: str) -> Check:
    """A list, or a single one."""

    def check(value: Any) -> tuple[Any, ...]:
        try:
            found = tuple(each(one) for one in (value if isinstance(value, list) else [value]))
        except _Wrong:
            found = ()
        if not found or len(set(found)) < len(found):
            raise _Wrong(f"give {what}, each once")
        return found

    return check


def _seeds(value: Any) -> int | tuple[int, ...]:
    found = _list(_whole, "a number of seeds, or a list of seeds")(value)
    if isinstance(value, list):
        return found
    return _at_least_one(value)


def _rates(value: Any) -> Rates:
    if value in (DEFAULT, GRID):
        return str(value)
    return list(_list(_number, f"{DEFAULT}, {GRID}, or numbers")(value))


def _settings(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise _Wrong("give settings by method, as in {lora: {r: 16}}")
    return value


def _section(schema: Mapping[str, Check]) -> Check:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Wrong(f"give keys and values; the keys are {', '.join(schema)}")
        return _checked(value, schema)

    return check


_BY_TYPE: dict[Any, Check] = {str: _text, int: _whole, float: _number, bool: _flag}
# Given in other ways here, or (code from a hub) not to be switched on by a file that somebody sent.
_NOT_HERE = {"model", "method", "task", "tasks", "seed", "shots", "settings", "sampling", "temperature", "text"}
_NOT_HERE |= {"trust_remote_code"}
_NAMES = _list(_text, "a name or a list of names")
ENGINE = {"name": _one_of(*ENGINES), "workers": _at_least_one, "cpus": _positive, "gpus": _number, "address": _text}


def _of_spec() -> dict[str, Check]:
    """The fields of a run's spec that a sweep may set, checked by their types."""
    hints = typing.get_type_hints(Spec)

    def check(name: str) -> Check:
        options = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        return next(_BY_TYPE[option] for option in options if option in _BY_TYPE)

    return {each.name: check(each.name) for each in dataclasses.fields(Spec) if each.name not in _NOT_HERE}


def schema() -> dict[str, Check]:
    """Every key of a sweep, and what checks its value."""
    return {
        "model": _text,
        "models": _NAMES,
        "task": _text,
        "tasks": _NAMES,
        "text": _NAMES,
        "methods": _NAMES,
        "seeds": _seeds,
        "shots": _list(_whole, "a number of examples, or a list of them"),
        "learning_rates": _rates,
        "baseline": _text,
        "settings": _settings,
        "minutes": _positive,
        "out": _text,
        "engine": _section(ENGINE),
        **_of_spec(),
    }


def _checked(data: Mapping[Any, Any], known: Mapping[str, Check]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise unknown("key", str(key), known)
        try:
            found[key] = known[key](value)
        except _Wrong as wrong:
            raise InlayError(f"{key}: {value!r} will not do: {wrong}.") from None
    return found


def _either(found: dict[str, Any], one: str, several: str) -> tuple[str, ...]:
    if one in found and several in found:
        raise InlayError(f"{one} and {several} contradict each other: give one of them.")
    return (found[one],) if one in found else found.get(several, ())


def _sweep(data: Mapping[Any, Any]) -> Sweep:
    found = _checked(data, schema())
    models, tasks = _either(found, "model", "models"), _either(found, "task", "tasks")
    for key, given in (("model", models), ("methods", found.get("methods")), ("task", tasks or found.get("data"))):
        if not given:
            raise InlayError(f"{key} is missing: a sweep needs model, task (or data) and methods at least.")
    if tasks and "data" in found:
        raise InlayError("task and data contradict each other: give one of them.")
    methods, baseline = found["methods"], found.get("baseline")
    if baseline is not None and methods != (ALL,) and baseline not in methods:
        raise InlayError(f"baseline: {baseline!r} is not among the methods {', '.join(methods)}.")
    fields = {name: found[name] for name in (*_of_spec(), "text") if name in found}
    return Sweep(
        specs=tuple(Spec(model=model, method="", task=task, **fields) for model in models for task in tasks or (None,)),
        methods=methods,
        seeds=found.get("seeds", 3),
        shots=found.get("shots", (None,)),
        rates=found.get("learning_rates", DEFAULT),
        baseline=baseline,
        settings=found.get("settings", {}),
        minutes=found.get("minutes"),
        out=found.get("out", DEFAULT_OUT),
        engine=found.get("engine", {}),
    )
