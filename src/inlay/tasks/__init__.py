"""Data sets with their templates, labels and metrics: named ones, and those of the user's own.

names(), describe(name)           what there is (light: imports neither torch nor datasets)
is_named(name), canonical(name)   whether the catalogue has it, and what it is called there (light too)
load(spec)                        a `Task`, its rows found, checked and divided
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.tasks.catalogue import TaskCard, canonical, describe, is_named, names
from inlay.tasks.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.records.spec import Spec
    from inlay.tasks.schema import TaskSchema
    from inlay.tasks.task import Task

__all__ = ["KINDS", "Task", "TaskCard", "TaskSchema", "canonical", "describe", "is_named", "load", "names"]


def load(spec: Spec, *, need_train: bool = True, writes: Callable[[], bool] | None = None) -> Task:
    """The task that `spec` names or whose data it points at; see `inlay.tasks.loading.load`."""
    from inlay.tasks import loading

    return loading.load(spec, need_train=need_train, writes=writes)


def __getattr__(name: str) -> Any:
    if name == "Task":
        from inlay.tasks.task import Task

        return Task
    if name == "TaskSchema":
        from inlay.tasks.schema import TaskSchema

        return TaskSchema
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
