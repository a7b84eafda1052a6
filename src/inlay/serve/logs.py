"""A log that nobody can fill the disk with: so many records a minute, then a count of those that were left out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

LOGGERS = ("inlay.serve", "uvicorn.error", "asyncio")
A_MINUTE = 60  # records of the service, with their tracebacks


class Quota(logging.Filter):
    """Lets `most` records pass in any period of `seconds`; the first one of the next says how many did not."""

    def __init__(self, most: int = A_MINUTE, seconds: float = 60.0) -> None:
        super().__init__()
        self.most, self.seconds = most, seconds
        self._lock = threading.Lock()
        self._begin, self._passed, self._left_out = -float("inf"), 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        now = monotonic()
        with self._lock:
            if now - self._begin >= self.seconds:
                if self._left_out:
                    record.msg = f"{record.getMessage()} [before this, {self._left_out:,} records were left out]"
                    record.args = ()
                self._begin, self._passed, self._left_out = now, 0, 0
            if self._passed >= self.most:
                self._left_out += 1
                return False
            self._passed += 1
            return True


@contextmanager
def bounded_logs() -> Iterator[None]:
    """Bound what the service and what serves it write, for as long as the block lasts."""
    quota = Quota()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(quota)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(quota)
