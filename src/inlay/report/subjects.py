"""What a run is about, by which a reader filters: the kind of its task, what its model reads, its method's family."""

from __future__ import annotations

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.report.collect import Result
from inlay.tasks import catalogue, kinds

UNKNOWN = "not known"


def kind(result: Result) -> str:
    """The kind of the task, or of the tasks that were trained together; older runs of their own data do not have it on
    record."""
    tasks = result.record.get("tasks") or {result.spec.task: result.record.get("task") or {}}
    return ", ".join(dict.fromkeys(kind_of(name, task.get("schema") or {}) for name, task in tasks.items()))


def kind_of(name: str | None, schema: dict[str, object]) -> str:
    """The kind that a schema has on record, otherwise that of the catalogue's task of this name."""
    if "kind" in schema:
        return str(schema["kind"])
    return catalogue.describe(name).kind if name is not None and catalogue.is_named(name) else UNKNOWN


def reads(result: Result) -> str:
    """What kind of data it is: texts or images."""
    first = kind(result).partition(", ")[0]
    return f"{kinds.modality(first)}s" if first in kinds.TABLE else UNKNOWN


def family(method: str) -> str:
    """What a method trains; one that is not installed here is not known."""
    try:
        return registry.get(method).family
    except InlayError:
        return UNKNOWN
