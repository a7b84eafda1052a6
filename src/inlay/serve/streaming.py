"""Answers that come piece by piece, as server-sent events: from the thread that runs the model to a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import StreamingResponse

from inlay.serve.metrics import Metrics
from inlay.serve.refusals import GONE, Refusal
from inlay.workflow.generation import Continuation

Pieces = asyncio.Queue[str | None]


class Events(Protocol):
    """How pieces, the end and an error are said as events."""

    def piece(self, text: str) -> str:
        """A piece of the answer."""

    def end(self, found: Mapping[str, Any]) -> str:
        """What is said when all has come; `found` is the whole answer."""

    def error(self, refusal: Refusal) -> str:
        """What went wrong after the first piece."""


def event(data: Any, name: str | None = None) -> str:
    """One event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def from_thread(queue: Pieces) -> Callable[[str | None], None]:
    """Put into a queue of this loop from any thread; nothing happens where the loop is gone."""
    loop = asyncio.get_running_loop()

    def put(piece: str | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, piece)

    return put


async def stream(
    request: Request,
    queue: Pieces,
    job: tuple[Continuation, Future[dict[str, Any]]],
    timeout: float,
    say: Events,
    metrics: Metrics,
) -> StreamingResponse:
    """The answer as events. What goes wrong before the first of them has a status of its own."""
    row, future = job
    try:
        first = await _first(request, queue, timeout)
        if first is None and (error := future.exception()) is not None:
            raise error
    except BaseException:
        row.stop()
        future.cancel()
        raise

    def failed(refusal: Refusal) -> str:
        metrics.errors.add(str(refusal.status))
        return say.error(refusal)

    async def events() -> AsyncIterator[str]:
        piece = first
        try:
            while piece is not None:
                if said := say.piece(piece):
                    yield said
                piece = await asyncio.wait_for(queue.get(), timeout)
            yield say.end(future.result())
        except TimeoutError:
            yield failed(Refusal(504, f"Nothing came within {timeout:g} seconds."))
        except Refusal as error:
            yield failed(error)
        finally:
            row.stop()
            future.cancel()

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


async def _first(request: Request, queue: Pieces, timeout: float) -> str | None:
    """The first piece; an error where there is none in time, or nobody to read it."""
    piece = asyncio.ensure_future(queue.get())
    gone = asyncio.ensure_future(request.receive())  # the body has been read: what comes next is the end
    try:
        both: set[asyncio.Future[Any]] = {piece, gone}
        done, _ = await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if piece in done:
            return piece.result()
        if gone in done:
            raise Refusal(GONE, "The client has gone.")
        raise Refusal(504, f"There was no answer within {timeout:g} seconds.")
    finally:
        piece.cancel()
        gone.cancel()
