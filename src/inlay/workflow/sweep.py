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

A sweep of several parts, such as texts and images, has in `parts` a list of what is different in each; the other keys
are those of all. What differs from machine to machine is a variable: `variables: {data: null, epochs: 5}` names
those of the file with their defaults, and `${data}` in any text stands for its value (`inlay sweep --var data=/mnt`).

Every model with every task is a comparison. A list among the tasks, as in [[rte, sst2], mrpc], is one comparison whose
runs train those tasks together. A task on data of your own has its fields in task_fields, by its name, as in
{reviews: {data: reviews.csv, label: stars}}. An unknown key, or a value of the wrong kind, is an error with what would
do.
A file of one run (run_file.py) is a sweep too: method and seed stand for methods and seeds of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inlay.engines import ENGINES
from inlay.errors import InlayError, unknown
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.spec_values import Unfit
from inlay.workflow.keys import (
    OF_SPEC,
    Check,
    checked,
    count,
    number,
    positive,
    read_keys,
    refuse,
    several,
    text,
    whole,
)
from inlay.workflow.notes import Say
from inlay.workflow.planning import ALL, DEFAULT, GRID, Planned, Rates, plan
from inlay.workflow.tune import DEFAULT_OUT


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was written: what to compare, and where. Each of `specs` is a comparison; `parts` come after them,
    and what they say of place, time and engine does not count."""

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
    parts: tuple[Sweep, ...] = ()

    def plan(self, say: Say | None = None) -> list[Planned]:
        """Every run of the sweep, comparison by comparison."""
        own = [
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
        return own + [planned for part in self.parts for planned in part.plan(say)]


def read(path: Path | str, variables: Mapping[str, str] | None = None) -> Sweep:
    """The sweep in a file, checked against the schema; `variables` have these values in place of the file's."""
    path = Path(path)
    data = read_keys(path, "sweep", "model, task (or data) and methods")
    try:
        data = _filled_in(data, variables or {})
        return _several_parts(data) if "parts" in data else _sweep(data)
    except InlayError as error:
        raise InlayError(f"{path}: {error}") from error


# ------------------------------------------------------------------------------------------ variables and parts

OF_THE_WHOLE = ("baseline", "minutes", "out", "engine")
"""Keys that no part has of its own."""
_NAMED = re.compile(r"\$\{([^}]*)\}")


def _filled_in(data: Mapping[Any, Any], given: Mapping[str, str]) -> dict[Any, Any]:
    """What a file says, with the values of its variables in its texts. Without variables, `${` is plain text."""
    data = dict(data)
    if "variables" not in data and not given:
        return data
    known = data.pop("variables", {})
    if not isinstance(known, dict) or not all(isinstance(each, str | int | float | None) for each in known.values()):
        raise InlayError("variables: give names with their defaults, as in {data: null, epochs: 5}; null: no default.")
    for name in given:
        if name not in known:
            raise unknown("variable", name, known, "The file names its variables in `variables`.")
    values = {**known, **given}

    def value_of(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise unknown("variable", found[1], values, "The file names its variables in `variables`.")
        if values[found[1]] is None:
            raise InlayError(f"The variable {found[1]!r} has no value: give one, as in --var {found[1]}=VALUE.")
        return str(values[found[1]])

    def fill(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: fill(value) for key, value in each.items()}
        if isinstance(each, list):
            return [fill(value) for value in each]
        return _NAMED.sub(value_of, each) if isinstance(each, str) else each

    return fill(data)


def _several_parts(data: Mapping[Any, Any]) -> Sweep:
    """The sweep of a file with `parts`; all their mistakes are told at once."""
    listed, shared = data["parts"], {key: value for key, value in data.items() if key != "parts"}
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise InlayError("parts: give a list of parts, each with keys and values.")
    parts, mistakes = [], []
    for place, part in enumerate(listed, 1):
        try:
            if elsewhere := [key for key in OF_THE_WHOLE if key in part]:
                raise InlayError(f"{', '.join(elsewhere)}: belongs beside `parts`, and holds for all of them.")
            parts.append(_sweep({**shared, **part}))
        except InlayError as error:
            mistakes.append(InlayError(f"part {place}: {error}"))
    refuse(mistakes)
    return replace(parts[0], specs=(), parts=tuple(parts))


# ------------------------------------------------------------------------------------------------------ the schema


_names = several(text, "a name or a list of names")
# A list among the tasks is of tasks that are trained together.
_tasks = several(lambda one: _names(one) if isinstance(one, list) else text(one), "a name or a list of names")


def _seeds(value: Any) -> int | tuple[int, ...]:
    found = several(whole, "a number of seeds, or a list of seeds")(value)
    return found if isinstance(value, list) else count(value)


def _rates(value: Any) -> Rates:
    return value if value in (DEFAULT, GRID) else list(several(number, f"{DEFAULT}, {GRID}, or numbers")(value))


def _settings(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise Unfit("settings by method, as in {lora: {r: 16}}")
    return value


def _engine(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unfit(f"keys and values; the keys are {', '.join(ENGINE)}")
    found, mistakes = checked(value, ENGINE)
    refuse(mistakes)
    return found


def _engine_name(value: Any) -> str:
    if value not in ENGINES:
        raise Unfit(f"one of {', '.join(ENGINES)}")
    return str(value)


ENGINE: dict[str, Check]
ENGINE = {"name": _engine_name, "workers": count, "cpus": positive, "gpus": number, "address": text}
SCHEMA: dict[str, Check] = {
    "model": text,
    "models": _names,
    "task": text,
    "tasks": _tasks,
    "method": text,
    "methods": _names,
    "seed": whole,
    "seeds": _seeds,
    "shots": several(whole, "a number of examples, or a list of them"),
    "learning_rates": _rates,
    "baseline": text,
    "settings": _settings,
    "minutes": positive,
    "out": text,
    "engine": _engine,
    **OF_SPEC,
}
"""Every key of a sweep, and what checks its value."""


def _contradictions(
    found: Mapping[str, Any],
    data: Mapping[Any, Any],
    models: Sequence[Any],
    tasks: Sequence[Any],
    methods: tuple[Any, ...],
) -> list[InlayError]:
    """What is missing, and what does not go together; what was written wrongly is told already."""
    told = [
        InlayError(f"{one} and {many} contradict each other: give one of them.")
        for one, many in (("model", "models"), ("task", "tasks"), ("method", "methods"), ("seed", "seeds"))
        if one in data and many in data
    ]
    needs = "a sweep needs model, task (or data) and methods at least"
    for keys, given in (
        (("model", "models"), models),
        (("methods", "method"), methods),
        (("task", "tasks", "data"), tasks or found.get("data")),
    ):
        if not given and not data.keys() & set(keys):
            told.append(InlayError(f"{keys[0]} is missing: {needs}."))
    if tasks and "data" in found:
        told.append(InlayError("task and data contradict each other: give one of them."))
    baseline = found.get("baseline")
    if baseline is not None and methods and methods != (ALL,) and baseline not in methods:
        told.append(InlayError(f"baseline: {baseline!r} is not among the methods {', '.join(methods)}."))
    if methods and methods != (ALL,):
        known = registry.all_methods()
        told += [unknown("method", name, known) for name in methods if name not in (*known, ALL)]
    return told


def _either(found: dict[str, Any], one: str, many: str) -> tuple[Any, ...]:
    return (found[one],) if one in found else found.get(many, ())


def _sweep(data: Mapping[Any, Any]) -> Sweep:
    found, mistakes = checked(data, SCHEMA)
    if isinstance(data.get("learning_rate"), list):
        mistakes = [each for each in mistakes if not str(each).startswith("learning_rate")]
        mistakes.append(InlayError("learning_rate is one number: several are learning_rates."))
    models, tasks = _either(found, "model", "models"), _either(found, "task", "tasks")
    methods = _either(found, "method", "methods")
    refuse([*mistakes, *_contradictions(found, data, models, tasks, methods)])
    fields = {name: found[name] for name in OF_SPEC if name in found}
    if "seed" in found:
        found["seeds"] = (found["seed"],)

    own = fields.pop("task_fields", {})
    named = [name for task in tasks for name in (task if isinstance(task, tuple) else (task,))]
    for name, each in own.items():
        if name not in named:
            raise unknown("task in task_fields", str(name), named)
        if not isinstance(each, dict):
            raise InlayError(f"task_fields: {name}: {each!r} will not do: give keys and values, as in {{data: x.csv}}.")

    def spec(model: str, task: str | tuple[str, ...] | None) -> Spec:
        if isinstance(task, tuple):
            told: dict[str, Any] = {"tasks": task, "task_fields": {name: own[name] for name in task if name in own}}
        else:
            told = own.get(task, {"task": task})
        return Spec(model=model, method="", **{**fields, **told})

    kept = {"seeds", "shots", "baseline", "settings", "minutes", "out", "engine"} & found.keys()
    return Sweep(
        specs=tuple(spec(model, task) for model in models for task in tasks or (None,)),
        methods=methods,
        rates=found.get("learning_rates", DEFAULT),
        **{name: found[name] for name in kept},
    )
