"""The queue and the one thread that owns the model.

Clients take turns, and the rows of one client are taken in the order in which they came. A batch leaves when it is
full, or when a row has waited long enough; while the model runs others gather, so that under load batches are full and
nobody waits on purpose. Adding and removing a task take their turn in the same queue: what came before is answered by
the tasks that were there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from inlay.errors import InlayError
from inlay.serve.fairness import HERE, Client, FairQueue, NamedRow, QueuedRow
from inlay.serve.metrics import Gauge, Metrics
from inlay.serve.refusals import Refusal, full, stopping

logger = logging.getLogger("inlay.serve")
FAILING = 5  # batches one after another of which the model answered no row: it is the model, not the rows
SHARE = 16  # of a queue that others have filled, an address still gets one part in so many


class Answering(Protocol):
    """What the queue needs of a model."""

    def missing(self, task: str) -> Refusal | None:
        """Why rows of this name are not answered, or no longer; None where they are."""

    def answer(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        """An answer to each request, in order."""


H = TypeVar("H", bound=Answering)


@dataclass(frozen=True)
class Change:
    """Something to be done to the model between two batches."""

    action: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


class Batcher(Generic[H]):
    """Takes rows from any thread and answers them in batches from its own.

    `max_wait` is in seconds; `max_queue` counts rows that no batch has taken yet. A batch is full with `max_batch`
    rows, or as soon as their loads come to 1.
    """

    def __init__(
        self, hosted: H, *, max_batch: int, max_wait: float, max_queue: int, metrics: Metrics | None = None
    ) -> None:
        self.hosted, self.max_batch, self.max_wait, self.max_queue = hosted, max_batch, max_wait, max_queue
        self.metrics = metrics or Metrics()
        self.metrics.gauges += [
            Gauge("inlay_queue_rows", "Rows that wait.", lambda: self.waiting),
        ]
        self._queue: deque[FairQueue | Change] = deque()  # what comes after a change stands in a queue of its own
        self._by_address: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._waiting = 0
        self._stopping = False
        self._in_vain = 0
        self._thread = threading.Thread(target=self._run, name="inlay-model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return self._waiting

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes more."""
        return self._thread.is_alive() and not self._stopping

    @property
    def failing(self) -> bool:
        """Whether the model broke down on every row of the last few batches, as it does when its device is gone."""
        return self._in_vain >= FAILING

    def submit(
        self, requests: Sequence[NamedRow], client: Client = HERE, loads: Sequence[float] | None = None
    ) -> list[Future[dict[str, Any]]]:
        """Queue a client's rows, all of them or none; a `Refusal` where there is no room."""
        jobs = [
            QueuedRow(request, client, load)
            for request, load in zip(requests, loads or [0.0] * len(requests), strict=True)
        ]
        with self._changed:
            if not self.alive:
                raise stopping()
            if not self._has_room(len(jobs), client.address):
                self.metrics.refused.add(by=len(jobs))
                raise full(self.max_queue)
            if not self._queue or isinstance(self._queue[-1], Change):
                self._queue.append(FairQueue())
            for job in jobs:
                self._queue[-1].append(job)  # type: ignore[union-attr]
            self._count(client.address, len(jobs))
            self._changed.notify()
        for job in jobs:
            job.answer.add_done_callback(partial(self._give_up, job))
        return [job.answer for job in jobs]

    def change(self, action: Callable[[], Any]) -> Future[Any]:
        """Do something to the model when the rows that wait have been answered."""
        change = Change(action)
        with self._changed:
            if not self.alive:
                raise stopping()
            self._queue.append(change)
            self._changed.notify()
        return change.done

    def hurry(self) -> None:
        """Wait for nobody any more: what is there, and what still comes, leaves at once."""
        with self._changed:
            self.max_wait = 0.0
            self._changed.notify()

    def close(self) -> None:
        """Take no more, answer what waits, and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _give_up(self, job: QueuedRow, answer: Future[dict[str, Any]]) -> None:
        """A row that is cancelled before a batch has taken it leaves the queue at once: there is room for another."""
        if not answer.cancelled():
            return
        with self._changed:
            if not any(each.discard(job) for each in self._queue if isinstance(each, FairQueue)):
                return
            self._count(job.client.address, -1)
            self.metrics.cancelled.add()
            self._changed.notify()

    def _has_room(self, rows: int, address: str) -> bool:
        """Whether so many more rows are taken on: from who has few waiting, though others have filled the queue."""
        own = self._by_address[address] + rows
        return self._waiting + rows <= self.max_queue or (
            own <= self.max_queue // SHARE and self._waiting + rows <= 2 * self.max_queue
        )

    def _count(self, address: str, more: int) -> None:
        self._waiting += more
        self._by_address[address] += more
        if not self._by_address[address]:
            del self._by_address[address]

    # ---- the thread

    def _run(self) -> None:
        try:
            while (taken := self._take()) is not None:
                if isinstance(taken, Change):
                    _settle(taken.done, taken.action)
                else:
                    self._batch(taken)
        finally:
            # Nobody waits for ever, whatever ended the thread.
            with self._changed:
                self._stopping = True
                left, self._queue = list(self._queue), deque()
                self._waiting = 0
            for each in left:
                futures = [each.done] if isinstance(each, Change) else [job.answer for job in each]
                for future in futures:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(stopping())

    def _take(self) -> list[QueuedRow] | Change | None:
        """The next batch, or a change to the model; None at the end."""
        with self._changed:
            while True:
                # Looked at anew whenever something has changed: who was first may have been cancelled.
                if not self._queue:
                    if self._stopping:
                        return None
                    self._changed.wait()
                    continue
                first = self._queue[0]
                if isinstance(first, Change) or not first:
                    self._queue.popleft()
                    if isinstance(first, Change):
                        return first
                    continue
                left = first.oldest() + self.max_wait - time.monotonic()
                if self._stopping or self._waiting >= self.max_batch or left <= 0:
                    break
                self._changed.wait(left)
            return self._take_rows(first)

    def _take_rows(self, rows: FairQueue) -> list[QueuedRow]:
        """A batch from the front of a queue: as many rows as are allowed, and no more load; a first row always."""
        jobs: list[QueuedRow] = []
        load = 0.0
        while rows and len(jobs) < self.max_batch and (not jobs or load + rows.first.load <= 1.0):
            job = rows.popleft()
            load += job.load
            jobs.append(job)
            self._count(job.client.address, -1)
        return jobs

    def _batch(self, jobs: Sequence[QueuedRow]) -> None:
        """Answer those that are still wanted, and whose tasks are still there."""
        begin = time.monotonic()
        wanted = []
        for job in jobs:
            self.metrics.wait_seconds.observe(begin - job.came)
            if not job.answer.set_running_or_notify_cancel():
                self.metrics.cancelled.add()
            elif (missing := self.hosted.missing(job.request.task)) is not None:
                self._fail(job, missing)
            else:
                wanted.append(job)
        if not wanted:
            return
        answers = self._answer_all(wanted)
        broken = all(isinstance(each, Refusal) and each.status >= 500 for each in answers)
        self._in_vain = self._in_vain + 1 if broken else 0
        self.metrics.batch_rows.observe(len(wanted))
        self.metrics.batch_seconds.observe(time.monotonic() - begin)
        for job, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Refusal):
                self._fail(job, answer)
            elif any(isinstance(value, float) and not math.isfinite(value) for value in answer.values()):
                self._fail(job, Refusal(500, f"The task {job.request.task!r} answers with what is not a number."))
            else:
                self.metrics.rows.add(job.request.task)
                job.answer.set_result(answer)

    def _answer_all(self, jobs: Sequence[QueuedRow]) -> list[dict[str, Any] | Refusal]:
        """What is said of each row. A batch that fails is halved until the rows that spoil it stand alone."""
        found = self._try_pass(jobs)
        if found is not None:
            return found
        middle = len(jobs) // 2
        return self._answer_all(jobs[:middle]) + self._answer_all(jobs[middle:])

    def _try_pass(self, jobs: Sequence[QueuedRow]) -> list[dict[str, Any] | Refusal] | None:
        """What a pass says of its rows; None where several failed together.

        Halves are tried only after this has returned: the error holds the frames of its pass, and so its memory, which
        may be just what was lacking.
        """
        try:
            return [*self.hosted.answer([job.request for job in jobs])]
        except Exception as error:
            return [_refusal_of(error)] if len(jobs) == 1 else None

    def _fail(self, job: QueuedRow, refusal: Refusal) -> None:
        self.metrics.failed.add()
        job.answer.set_exception(refusal)


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except Exception as error:
        future.set_exception(_refusal_of(error))
    else:
        future.set_result(result)


def _refusal_of(error: Exception) -> Refusal:
    """What a client may know of an error: a mistake of its own in full; of ours, that there is one, and the log has it.

    An exception is raised anew in another thread: it must not carry the frames of this one, and the tensors in them.
    """
    if isinstance(error, Refusal):
        return Refusal(error.status, str(error), error.headers)
    if isinstance(error, InlayError):
        return Refusal(400, str(error))
    logger.error("a request could not be answered", exc_info=error)
    return Refusal(500, f"The request could not be answered ({type(error).__name__}); the service's log says more.")
