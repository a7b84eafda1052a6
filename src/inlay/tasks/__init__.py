"""Data sets with their templates, labels and metrics: named ones, and those of the user's own.

names(), describe(name)    what there is (light: imports neither torch nor datasets)
load(spec)                 a `Task`, its rows found, checked and divided
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.tasks.catalogue import TaskCard, describe, names
from inlay.tasks.kinds import KINDS

if TYPE_CHECKING:
    from inlay.records.spec import Spec
    from inlay.tasks.schema import TaskSchema
    from inlay.tasks.task import Task

__all__ = ["KINDS", "Task", "TaskCard", "TaskSchema", "content_digest", "describe", "load", "names"]


def load(spec: Spec, *, need_train: bool = True) -> Task:
    """The task that `spec` names or whose data it points at; see `inlay.tasks.assemble.load`."""
    from inlay.tasks import assemble

    return assemble.load(spec, need_train=need_train)


def content_digest(path: str) -> str:
    """A digest of what is in a file or folder, wherever it lies; see `inlay.tasks.files.content_digest`."""
    from inlay.tasks import files

    return files.content_digest(path)


def __getattr__(name: str) -> Any:
    if name == "Task":
        from inlay.tasks.task import Task

        return Task
    if name == "TaskSchema":
        from inlay.tasks.schema import TaskSchema

        return TaskSchema
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
