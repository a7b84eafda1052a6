"""What a client is told when it is not answered: a status of HTTP and one sentence."""

from __future__ import annotations

from collections.abc import Iterable

from inlay.errors import InlayError, unknown


class Refusal(InlayError):
    """A request that is not answered. `headers` go with the response."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def unknown_task(task: str, known: Iterable[str]) -> Refusal:
    """The answer to a request for a task that is not served, or no longer."""
    return Refusal(404, str(unknown("task", task, known, "`GET /tasks` lists them.")))


def full(limit: int) -> Refusal:
    """The answer when more is waiting than the service takes on."""
    return Refusal(503, f"The queue is full ({limit} rows). Try again in a moment.", {"Retry-After": "1"})


def stopping() -> Refusal:
    """The answer while the service shuts down."""
    return Refusal(503, "The service is stopping and takes no more requests.", {"Retry-After": "5"})
