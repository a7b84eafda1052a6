"""One run as a piece of work: what an engine is given, what comes of it, and the function that does it.

Every engine does the same: `work(job)`, somewhere, and its outcome. What a run leaves is on disk, in its folder; an
outcome only says which folder, or why there is nothing in it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from inlay.errors import InlayError, first_line
from inlay.records.atomic import Unwritable
from inlay.records.lock import Busy
from inlay.records.spec import Spec
from inlay.records.store import FailedBefore, Run

Status = Literal["finished", "failed", "interrupted", "busy", "not begun", "unwritable"]
TOLD_EVERY = 0.2  # seconds between two words on how far a run has come


@dataclass(frozen=True)
class Job:
    """A run to make under `out`. One on record as failed is only tried again if so asked.

    `maker` is the import path of the module that makes it (see `Maker`): a name, so that a job can be sent to another
    process.
    """

    spec: Spec
    out: str
    retry_failed: bool = False
    maker: str = field(kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """From what `to_json` made."""
        return cls(**{**data, "spec": Spec.from_json(data["spec"])})

    def load_maker(self) -> Maker:
        """The module that makes this run."""
        return cast(Maker, importlib.import_module(self.maker))


class Maker(Protocol):
    """A module that makes runs. Callers of an engine name theirs: engines do not know how a run is made."""

    def tune(
        self,
        spec: Spec,
        out: Path | str,
        *,
        progress: bool,
        say: Callable[[str], None],
        retry_failed: bool,
        opened: Callable[[str], None],
        watchers: Sequence[Any],
        stop: Callable[[], bool],
    ) -> Run:
        """Make the run of `spec` under `out`, or find it finished."""

    def identify(self, spec: Spec) -> tuple[Spec, str]:
        """The spec as it will be run, and the digest that identifies its run."""


@dataclass(frozen=True)
class JobOutcome:
    """What came of a job. `run` is the name of the run's folder; `made`, whether it was worked on now or found done.

    `busy`: another process is at it. `interrupted`: its time was up, and it can be resumed. `unwritable`: the disk
    refused, as it would refuse every other run.
    """

    status: Status
    run: str | None = None
    error: str | None = None
    seconds: float = 0.0
    made: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class Listener(Protocol):
    """Who follows the work: jobs are called by their number."""

    def begin(self, number: int) -> None:
        """A run is taken up."""

    def step(self, number: int, done: int, total: int) -> None:
        """It has come so far."""

    def say(self, number: int, line: str) -> None:
        """Something that a person should know."""

    def end(self, number: int, outcome: JobOutcome) -> None:
        """It is over."""


class Engine(Protocol):
    """Something that does jobs. Entered before there are any: it may need a while to be ready."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *error: object) -> None: ...

    def run(self, jobs: list[Job], listener: Listener, deadline: float | None = None) -> list[JobOutcome]:
        """The outcome of every job, in their order. After `deadline` (by `time.monotonic`) nothing is begun, and what
        is at work stops at a moment at which it can be resumed."""


def work(
    job: Job,
    step: Callable[[int, int], None],
    say: Callable[[str], None],
    stop: Callable[[], bool],
    *,
    opened: Callable[[str], None] = lambda name: None,
    signals_stop: bool = False,
) -> JobOutcome:
    """Make one run, here. Whatever goes wrong with it is its outcome; only an interruption by hand is let through,
    unless `signals_stop`: then a signal is just another way to say stop. `opened` is told the run's name."""
    from inlay.training import Interrupted

    began, names, said = time.monotonic(), list[str](), list[str]()

    def name(found: str) -> None:
        names.append(found)
        opened(found)

    def heard(line: str) -> None:
        said.append(line)
        say(line)

    try:
        job.load_maker().tune(
            job.spec,
            job.out,
            progress=False,
            say=heard,
            retry_failed=job.retry_failed,
            opened=name,
            watchers=[steps_to(step)],
            stop=stop,
        )
    except Interrupted:
        if not signals_stop and not stop():
            raise
        found = JobOutcome("interrupted", made=True)
    except Exception as error:  # out of memory, a defect of a library or of ours: the other runs go on
        found = outcome_of(error)
    else:
        found = JobOutcome("finished", made=not any(line.startswith("already done") for line in said))
    run = found.run or (names[-1] if names else None)
    return replace(found, run=run, seconds=time.monotonic() - began)


def outcome_of(error: Exception) -> JobOutcome:
    """What an error makes of a run."""
    if isinstance(error, Busy):
        return JobOutcome("busy", error=str(error))
    if isinstance(error, FailedBefore):
        return JobOutcome("failed", error.run, str(error))
    why = str(error) if isinstance(error, InlayError) else f"{type(error).__name__}: {first_line(error)}"
    return JobOutcome("unwritable" if isinstance(error, Unwritable) else "failed", error=why, made=True)


def steps_to(step: Callable[[int, int], None]) -> Any:
    """A callback of the Trainer's that says how far a run has come, not too often."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        said = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.monotonic()
            if now - self.said >= TOLD_EVERY or state.global_step == state.max_steps:
                self.said = now
                step(state.global_step, state.max_steps)

    return Steps()


def until(deadline: float | None) -> Callable[[], bool]:
    """Whether a time by `time.monotonic` has come."""
    return lambda: deadline is not None and time.monotonic() >= deadline
