"""Which job comes next: in order, those that another process is at again after a while, none after the deadline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from inlay.engines.job import Job, JobOutcome, Listener, until

AGAIN = 2.0  # seconds until a run that another process is at is looked at again


class Queue:
    """Hands out the numbers of jobs and collects their outcomes.

    A run that another process is working on is not given up: that process may end in its middle, and then it is ours
    to resume; or it finishes it, and then it is found. A disk that refuses ends everything.
    """

    def __init__(self, jobs: Sequence[Job], listener: Listener, deadline: float | None = None) -> None:
        self.jobs, self.listener, self.over = jobs, listener, until(deadline)
        self.outcomes: dict[int, JobOutcome] = {}
        self.working: set[int] = set()
        self._waiting = deque(range(len(jobs)))
        self._later: list[tuple[float, int]] = []
        self._told: set[int] = set()
        self._refused: JobOutcome | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing new may begin."""
        return self._refused is not None or self.over()

    @property
    def open(self) -> bool:
        """Whether there is anything left to wait for."""
        return bool(self.working) or (not self.closed and bool(self._waiting or self._later))

    def take(self) -> int | None:
        """The number of the next job, or None where there is none now."""
        if self.closed:
            return None
        if not self._waiting and self._later and self._later[0][0] <= time.monotonic():
            self._waiting.append(self._later.pop(0)[1])
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        self.working.add(number)
        self.listener.begin(number)
        return number

    def settle(self, number: int, outcome: JobOutcome) -> None:
        """What came of a job."""
        self.working.discard(number)
        if outcome.status == "busy":
            if number not in self._told:
                self._told.add(number)
                self.listener.say(number, f"{outcome.error} It is waited for.")
            self._later.append((time.monotonic() + AGAIN, number))
        elif outcome.status == "unwritable":
            self._refused = outcome
        self.outcomes[number] = outcome
        self.listener.end(number, outcome)

    def results(self) -> list[JobOutcome]:
        """The outcome of every job, in order."""
        return [self.outcomes.get(number, JobOutcome("not begun")) for number in range(len(self.jobs))]
