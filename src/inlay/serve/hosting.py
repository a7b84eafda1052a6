"""The model that is served, and its tasks: many of one adapter folder, or the one of a run by any method.

What is served is only ever read from disk. A task that is added is checked whole before the model is touched, and a
task that could not be added leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from inlay.errors import InlayError, unknown
from inlay.methods import registry
from inlay.methods.folder import TASKS, base_fingerprint
from inlay.records.store import Run
from inlay.serve.batching import Answering
from inlay.serve.refusals import Refusal, missing_task, unknown_task
from inlay.workflow.answer import Request, Tasks
from inlay.workflow.answer_files import JOIN, find_run_of, holds_one_task, read_facts
from inlay.workflow.loaded import LoadedRun

if TYPE_CHECKING:
    from inlay.tasks import TaskSchema


class Hosted(Answering, Protocol):
    """What the service needs of a model with its tasks."""

    @property
    def schemas(self) -> Mapping[str, TaskSchema]:
        """What each task reads and says."""

    @property
    def failed(self) -> Mapping[str, str]:
        """The tasks that could not be trained to the end, and why."""

    @property
    def folder(self) -> Path:
        """Where what is served lies."""

    def describe(self) -> dict[str, str]:
        """The base model and the method, in words."""

    def check(self, folder: Path, task: str) -> None:
        """An error where the task of an adapter folder could not be added. Does not touch the model."""

    def add(self, folder: Path, task: str) -> None:
        """Load a task that `check` has passed. Only the thread that runs the model calls this."""

    def remove(self, task: str) -> None:
        """Forget a task; its files stay. Only the thread that runs the model calls this."""


def host(
    adapter: Path | str,
    *,
    model: str | None = None,
    only: Sequence[str] | None = None,
    batch: int,
    trust_remote_code: bool = False,
) -> Hosted:
    """Load what is to be served: a folder of several tasks, or a run of one.

    `trust_remote_code` lets code run that comes with the model; nothing that is read from a folder does.
    """
    folder = Path(adapter)
    how: dict[str, Any] = {"model": model, "only": only, "batch": batch, "trust_remote_code": trust_remote_code}
    if any((place / TASKS).is_file() for place in (folder, folder / "adapter")):
        return ManyTasks(folder, **how)
    run = find_run_of(folder)
    if run is None:
        raise InlayError(
            f"{folder} holds nothing to serve: give a run's folder (`inlay runs list` shows them), or a folder of "
            f"several tasks, in which runs of {_mixing()} are joined: {JOIN}."
        )
    return ManyTasks(folder, **how) if holds_one_task(run) else OneTask(run, **how)


def _mixing() -> str:
    """The methods whose tasks share a model, in words."""
    return " or ".join(registry.names_where(lambda method: method.mixes_tasks))


class ManyTasks:
    """The tasks of an adapter folder, mixed in one pass; they come and go while the model stays."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str | None,
        only: Sequence[str] | None,
        batch: int,
        trust_remote_code: bool = False,
    ) -> None:
        self.tasks = Tasks(folder, model=model, only=only, trust_remote_code=trust_remote_code)
        self.tasks.spec = self.tasks.spec.with_(batch_size=batch)
        self.schemas, self.failed, self.folder = self.tasks.schemas, self.tasks.failed, self.tasks.folder
        self.method = registry.get(self.tasks.spec.method)
        _ = self.tasks.place  # to its device now, not when the first request waits

    def describe(self) -> dict[str, str]:
        return {"model": self.tasks.spec.model, "method": self.method.name}

    def missing(self, task: str) -> Refusal | None:
        return missing_task(task, self.schemas)

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        return self.tasks.answer(requests)

    def check(self, folder: Path, task: str) -> None:
        from inlay.methods.saving import read
        from inlay.workflow.settle import check_together

        facts = read_facts(folder)
        if task not in facts["tasks"]:
            raise unknown(f"task of {folder}", task, facts["tasks"])
        for key in ("method", "max_length", "precision", "pooling", "image_size"):
            mine = getattr(self.tasks.spec, key)
            if facts[key] != mine:
                raise InlayError(
                    f"{task!r} has {key}={facts[key]!r} and the service {mine!r}: its answers would not be those "
                    "that it gives by itself. Serve it from a service of its own."
                )
        schema = _schema(facts["tasks"][task])
        check_together({**self.schemas, task: schema, f"{task} ": schema})  # the second: one alone is never mixed
        read(self.method, folder, task)
        if base_fingerprint(folder, task) != self.tasks.fingerprint:
            raise InlayError(f"{task!r} in {folder} was trained on another base model than the one that is served.")

    def add(self, folder: Path, task: str) -> None:
        from inlay.methods import attach

        if task in self.schemas:
            raise Refusal(409, f"There is a task called {task!r} already: remove it first.")
        facts = read_facts(folder)
        schema = _schema(facts["tasks"][task])
        before = self.tasks.model
        attach.check_adapter_name(before, task)
        try:
            restored = attach.restore(before, self.method, folder, adapter_name=task)
            self.tasks.model = restored.to(self.tasks.place.device).eval()
        except BaseException:
            if task in before.peft_config:
                before.delete_adapter(task)
            raise
        if task in facts["failed"]:
            self.failed[task] = facts["failed"][task]
        self.schemas[task] = schema

    def remove(self, task: str) -> None:
        if task not in self.schemas:
            raise unknown_task(task, self.schemas)
        if len(self.schemas) == 1:
            raise Refusal(409, f"{task!r} is the last task: a service without one is stopped, not emptied.")
        # First of all: whatever happens to the model, nobody is answered by half a task.
        del self.schemas[task]
        self.failed.pop(task, None)
        self.tasks.model.delete_adapter(task)


class OneTask:
    """The task of a run, by whatever method."""

    def __init__(
        self, run: Run, *, model: str | None, only: Sequence[str] | None, batch: int, trust_remote_code: bool = False
    ) -> None:
        from inlay.training.plan import pick_device

        self.loaded = LoadedRun(run, model=model, trust_remote_code=trust_remote_code, say=lambda line: None)
        schema = self.loaded.schema
        if schema.pairs_images:
            raise InlayError(
                f"The run {run.id} compares images with texts and has no classes, and a service answers with those. "
                "Train on classes (images in class folders) to serve it; `inlay embed` gives vectors of either, and "
                "`inlay predict --labels` classifies."
            )
        for name in only or ():
            if name != schema.name:
                raise unknown("task", name, [schema.name])
        self.schemas: Mapping[str, TaskSchema] = {schema.name: schema}
        self.failed: Mapping[str, str] = {}  # a run whose one task fails has failed
        self.folder = run.adapter
        self.spec = self.loaded.spec = run.spec.with_(batch_size=batch, gradient_accumulation=1)
        self.loaded.model.to(pick_device())  # now, not when the first request waits

    def describe(self) -> dict[str, str]:
        return {"model": self.spec.model, "method": self.spec.method}

    def missing(self, task: str) -> Refusal | None:
        return missing_task(task, self.schemas)

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        return self.loaded.answer([each.given for each in requests], [each.row for each in requests])

    def check(self, folder: Path, task: str) -> None:
        self.remove(task)

    def add(self, folder: Path, task: str) -> None:
        self.remove(task)

    def remove(self, task: str) -> None:
        raise Refusal(
            409,
            f"A run of {self.spec.method!r} is served, with its one task. Tasks come and go where runs of {_mixing()} "
            "are served.",
        )


def _schema(data: Mapping[str, Any]) -> TaskSchema:
    from inlay.tasks import TaskSchema

    return TaskSchema.from_json(data)
