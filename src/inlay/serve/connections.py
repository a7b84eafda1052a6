"""Connections that come and go on the service's terms: so many, so many of one client, and none that waits for ever.

uvicorn waits for the rest of a request as long as its client likes, and takes every connection on. Both are bounded
here, and so are clients that do not read their answers.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSED, A_MOMENT = 32, 1.0  # so many are told that they are refused, and have so many seconds to hear it
AT_ONCE, QUEUED = 32, 1024  # the event loop accepts so many before the first of them is counted; the system holds more
SPARE = 32 + REFUSED + 3 * AT_ONCE  # descriptors left for files and pipes, for these, and for what is being closed


@dataclass(frozen=True)
class Bounds:
    """How many connections there are at most, how many of one address, and how long a request takes to arrive."""

    connections: int
    per_address: int
    seconds: float

    def protocol(self) -> type[H11Protocol]:
        """The protocol for uvicorn's `http`."""
        return type("Bounded", (Connection,), {"bounds": self})


class Connection(H11Protocol):
    """One client's connection. A request must be whole within `seconds`, however its bytes are spaced."""

    bounds: Bounds
    refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        held = [each for each in self.connections if isinstance(each, Connection) and not each.refused]
        of_address = sum(_address(each) == _address(self) for each in held)
        if len(held) > self.bounds.connections:
            self._refuse(503, f"There are {self.bounds.connections} connections already. Try again in a moment.")
        elif of_address > self.bounds.per_address:
            self._refuse(503, f"You have {self.bounds.per_address} connections already. Close some.")
        else:
            self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        super().data_received(data)
        if self._is_whole():
            self._stop_waiting()
        elif self._deadline is None:
            self._wait_for_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()  # closing waits for what is not written yet, and a client need not read it

    def _is_whole(self) -> bool:
        """Whether the request has arrived and is being answered."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _wait_for_client(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.bounds.seconds, self._too_late)

    def _abort_later(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.bounds.seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if begun or self.transport.is_closing():
            self.transport.abort()
        else:
            self._refuse(408, f"The request did not arrive within {self.bounds.seconds:g} seconds.")

    def _refuse(self, status: int, why: str) -> None:
        """Say why and close; no application is asked, and nothing more is read."""
        phrase = {408: "Request Timeout", 503: "Service Unavailable"}[status]
        body = json.dumps({"error": why}).encode()
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n{retry}Connection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.refused = True
        # Closed while something is on its way that nobody reads, a connection is reset, and its client hears nothing.
        if sum(isinstance(each, Connection) and each.refused for each in self.connections) <= REFUSED:
            self.transport.write_eof()
            self._stop_waiting()
            self._deadline = self.loop.call_later(A_MOMENT, self.transport.abort)
        else:
            self.transport.abort()


def _address(connection: Connection) -> str | None:
    return connection.client[0] if connection.client else None


def limit_connections(wanted: int) -> int:
    """As many connections as are wanted, but no more than this process may have descriptors for."""
    try:
        import resource
    except ImportError:  # no such bound on this system
        return wanted
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, allowed - SPARE))
