"""`run.yaml`: one run, written down with the keys of a sweep.

    model: embedded:minilm
    task: rotten-tomatoes          # or tasks: [rte, sst2], trained together; or data: a path, with text, label, ...
    method: lora
    settings: {r: 16}              # or by method, as in a sweep: {lora: {r: 16}}
    seed: 0
    shots: 200
    epochs: 5                      # and every other field of a run's spec
    out: runs

What is given beside the file takes the place of what it says. Every mistake in it is told at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inlay.backbones import embedded
from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.spec_values import Unfit
from inlay.tasks import catalogue
from inlay.workflow.keys import OF_SPEC, Check, checked, read_keys, refuse, text, whole
from inlay.workflow.settle import check_settings
from inlay.workflow.tune import AUTO

SUBJECTS = ("task", "tasks", "data")  # a run has one of them
NEEDS = "model, method and task (or data)"
FIRST = ("model", "task", "tasks", "data", "method", "settings", "seed", "shots")
WIDTH = 120


@dataclass(frozen=True)
class RunFile:
    """One run as it was written: its spec, and where it goes if the file says so."""

    spec: Spec
    out: str | None = None


def _tasks(value: Any) -> tuple[str, ...]:
    """Tasks that are trained together; a sweep has them as a list within its list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise Unfit("a list of names, as in [rte, sst2]")
    return tuple(value)


def _settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise Unfit("settings of the method, as in {r: 16}")
    return value


SCHEMA: dict[str, Check] = {
    "model": text,
    "task": text,
    "tasks": _tasks,
    "method": text,
    "settings": _settings,
    "seed": whole,
    "shots": whole,
    "out": text,
    **OF_SPEC,
}
"""Every key of a run's file, and what checks its value."""


def read(path: Path | str, given: Mapping[str, Any] | None = None) -> RunFile:
    """The run in a file, checked against the schema. Fields of the spec that are `given` override it.

    Its settings are kept where those that are given do not say otherwise; another task or other data take the place of
    the file's.
    """
    given, path = dict(given or {}), Path(path)
    data = read_keys(path, "run", NEEDS)
    found, mistakes = checked(data, SCHEMA)
    out = found.pop("out", None)
    if any(given.get(name) for name in SUBJECTS):
        found = {name: value for name, value in found.items() if name not in (*SUBJECTS, "task_fields")}
    fields = found | given
    fields["settings"] = _of_method(fields.get("method"), found.get("settings", {})) | given.get("settings", {})
    try:
        refuse([*mistakes, *_mistakes(fields, data.keys())])
        return RunFile(Spec(**fields), out)
    except InlayError as error:
        raise InlayError(f"{path}: {error}") from error


def make(fields: Mapping[str, Any]) -> Spec:
    """The spec of a run that is given without a file."""
    for key in ("model", "method"):
        if not fields.get(key):
            raise InlayError(f"--{key} is missing: give it, or a file of YAML that has it: `inlay tune run.yaml`.")
    return Spec(**fields)


def write(spec: Spec, out: str | None = None) -> str:
    """A run's file, as YAML: reading it makes the same spec. What is not set, and says nothing, is left out."""
    fields = spec.to_json()
    if fields["settings"]:
        fields["settings"] = {spec.method: fields["settings"]}  # by method, as a sweep has them
    if fields["tasks"]:
        fields["tasks"] = [fields["tasks"]]
    else:
        del fields["sampling"]
    if spec.sampling != "temperature":
        del fields["temperature"]
    defaults = {entry.name: entry.default for entry in dataclasses.fields(Spec)}
    order = (*FIRST, *(name for name in defaults if name not in FIRST))
    kept = {name: fields[name] for name in order if name in SCHEMA and _says(fields.get(name), defaults[name])}
    if out is not None:
        kept["out"] = out
    return yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, allow_unicode=True, width=WIDTH)


def _says(value: Any, default: Any) -> bool:
    return value is not None and (value is not False or default is None) and value not in ([], {})


def _of_method(method: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run's method, where they are given by method."""
    methods = registry.all_methods()
    if settings and all(name in methods and isinstance(each, Mapping) for name, each in settings.items()):
        return dict(settings.get(method, {}))
    return dict(settings)


def _mistakes(fields: Mapping[str, Any], written: Any) -> list[InlayError]:
    """What is missing, what contradicts, and what the method refuses; what was written wrongly is told already."""
    missing = [key for key in ("model", "method") if key not in fields and key not in written]
    found = [InlayError(f"{key} is missing: a run needs {NEEDS}.") for key in missing]
    subjects = [name for name in SUBJECTS if fields.get(name)]
    if len(subjects) > 1:
        found.append(InlayError(f"{' and '.join(subjects)} contradict each other: give one of them."))
    if not subjects and not written & set(SUBJECTS):
        found.append(InlayError(f"task is missing: a run needs {NEEDS}."))
    own = fields.get("task_fields", {})  # of tasks by names of the user's own
    for name in [fields["task"]] if fields.get("task") else fields.get("tasks", ()):
        if "/" not in name and name not in own:  # a data set of the hub has one
            found += _refused(catalogue.describe, name)
    if str(fields.get("model")).startswith(embedded.PREFIX):
        found += _refused(embedded.card, fields["model"])
    if "method" in fields and fields["method"] != AUTO:
        found += _refused(_check_method, fields["method"], fields["settings"])
    return found


def _check_method(name: str, settings: Mapping[str, Any]) -> None:
    registry.get(name)
    check_settings(Spec(model="-", method=name, task="-", settings=settings))


def _refused(check: Callable[..., object], *values: Any) -> list[InlayError]:
    try:
        check(*values)
    except InlayError as error:
        return [error]
    return []
