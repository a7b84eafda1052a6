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

Every model with every task is a comparison. A list among the tasks, as in [[rte, sst2], mrpc], is one comparison whose
runs train those tasks together. An unknown key, or a value of the wrong kind, is an error with what would do.
"""

from __future__ import annotations

import contextlib
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
from inlay.workflow.notes import Say
from inlay.workflow.planning import ALL, DEFAULT, GRID, Planned, Rates, plan
from inlay.workflow.tune import DEFAULT_OUT

Check = Callable[[Any], Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was written: what to compare, and where. Each of `specs` is a comparison."""

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


class _WrongValue(Exception):
    """A value of the wrong kind; says what would do."""


def _kind(kind: type, what: str) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, kind) or value == "":
            raise _WrongValue(f"give {what}")
        return value

    return check


def _number(what: str, fits: Callable[[float], bool] = lambda number: True, kind: type = float) -> Check:
    def check(value: Any) -> Any:
        # YAML reads 1e-3 as a text: it wants 1.0e-3.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool) and math.isfinite(number := float(value)) and fits(number):
                return kind(number)
        raise _WrongValue(f"give {what}")

    return check


def _list(each: Check, what: str) -> Check:
    """A list, or a single one."""

    def check(value: Any) -> tuple[Any, ...]:
        try:
            found = tuple(each(one) for one in (value if isinstance(value, list) else [value]))
        except _WrongValue:
            found = ()
        if not found or len(set(found)) < len(found):
            raise _WrongValue(f"give {what}, each once")
        return found

    return check


TEXT, FLAG, NUMBER = _kind(str, "a text"), _kind(bool, "true or false"), _number("a number")
POSITIVE = _number("a number greater than 0", lambda number: number > 0)
WHOLE = _number("a whole number", float.is_integer, int)
COUNT = _number("1 or more", lambda number: number.is_integer() and number >= 1, int)
NAMES = _list(TEXT, "a name or a list of names")


def _seeds(value: Any) -> int | tuple[int, ...]:
    found = _list(WHOLE, "a number of seeds, or a list of seeds")(value)
    return found if isinstance(value, list) else COUNT(value)


def _tasks(value: Any) -> tuple[str | tuple[str, ...], ...]:
    """Names of tasks; a list among them is of tasks that are trained together."""

    def each(one: Any) -> str | tuple[str, ...]:
        return NAMES(one) if isinstance(one, list) else TEXT(one)

    return _list(each, "a name or a list of names")(value)


def _rates(value: Any) -> Rates:
    if value in (DEFAULT, GRID):
        return str(value)
    return list(_list(NUMBER, f"{DEFAULT}, {GRID}, or numbers")(value))


def _settings(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise _WrongValue("give settings by method, as in {lora: {r: 16}}")
    return value


def _engine(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongValue(f"give keys and values; the keys are {', '.join(ENGINE)}")
    return _checked(value, ENGINE)


def _engine_name(value: Any) -> str:
    if value not in ENGINES:
        raise _WrongValue(f"give one of {', '.join(ENGINES)}")
    return str(value)


ENGINE: dict[str, Check] = {
    "name": _engine_name,
    "workers": COUNT,
    "cpus": POSITIVE,
    "gpus": NUMBER,
    "address": TEXT,
}
_BY_TYPE: dict[Any, Check] = {str: TEXT, int: WHOLE, float: NUMBER, bool: FLAG}
# Given in other ways here, or (code from a hub) not to be switched on by a file that somebody sent.
_NOT_HERE = {"model", "method", "task", "tasks", "seed", "shots", "settings", "text", "trust_remote_code"}


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
        "model": TEXT,
        "models": NAMES,
        "task": TEXT,
        "tasks": _tasks,
        "text": NAMES,
        "methods": NAMES,
        "seeds": _seeds,
        "shots": _list(WHOLE, "a number of examples, or a list of them"),
        "learning_rates": _rates,
        "baseline": TEXT,
        "settings": _settings,
        "minutes": POSITIVE,
        "out": TEXT,
        "engine": _engine,
        **_of_spec(),
    }


def _checked(data: Mapping[Any, Any], known: Mapping[str, Check]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise unknown("key", str(key), known)
        try:
            found[key] = known[key](value)
        except _WrongValue as wrong:
            raise InlayError(f"{key}: {value!r} will not do: {wrong}.") from None
    return found


def _either(found: dict[str, Any], one: str, several: str) -> tuple[Any, ...]:
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

    def spec(model: str, task: str | tuple[str, ...] | None) -> Spec:
        several = {"tasks": task} if isinstance(task, tuple) else {"task": task}
        return Spec(model=model, method="", **several, **fields)

    kept = {"seeds", "shots", "baseline", "settings", "minutes", "out", "engine"} & found.keys()
    return Sweep(
        specs=tuple(spec(model, task) for model in models for task in tasks or (None,)),
        methods=methods,
        rates=found.get("learning_rates", DEFAULT),
        **{name: found[name] for name in kept},
    )
