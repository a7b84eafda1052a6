"""Ctrl-C and SIGTERM, answered at the next moment when nothing is half-done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, has saved a checkpoint and can be resumed."""


class Interrupts:
    """While entered, the first signal is only noted (`wanted`); a second one interrupts at once.

    Signals can be handled in the main thread only: elsewhere nothing is changed. `also` is asked whenever it could
    stop: a run may have another reason to end early, such as a time that is up.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, also: Callable[[], bool] | None = None) -> None:
        self._signalled = False
        self._also = also
        self._earlier: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> bool:
        """Whether the run should stop."""
        return self._signalled or (self._also is not None and self._also())

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
