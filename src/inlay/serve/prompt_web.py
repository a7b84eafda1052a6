"""The application for a model with prompts: `/generate`, `/prompts`, `/health`, `/metrics`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from inlay.serve.batching import Batcher
from inlay.serve.prompts import PromptRow, Prompts
from inlay.serve.reading import A_TOKEN, FEWEST_CHARACTERS, TEXTS_A_BATCH, Read
from inlay.serve.refusals import Refusal
from inlay.serve.settings import ServiceSettings
from inlay.serve.web import GONE, bare_app, submit, wait_for
from inlay.workflow.answer import find_unsayable


class NewText(BaseModel):
    """A text to continue, behind a prompt (null: none). A temperature of 0 takes the likeliest token every time."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    text: str
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False


def create_prompt_app(batcher: Batcher[Prompts], settings: ServiceSettings) -> FastAPI:
    """The application around a batcher that runs."""
    hosted = batcher.hosted
    app, told = bare_app(batcher, settings, (hosted.folder,), "prompts", lambda: len(hosted.served))

    @app.post("/generate")
    async def generate(request: Request, asked: NewText) -> Any:
        """Continue a text, in one answer or as events."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        tell = _from_thread(queue)
        row, load = await asyncio.to_thread(_begin, hosted, asked, settings, tell)
        (future,) = submit(batcher, [Read(row, load)], request)
        if asked.stream:
            future.add_done_callback(lambda _: tell(None))
            return await _stream(request, queue, (row, future), settings.timeout, told)
        try:
            (found,) = await wait_for(request, [future], settings.timeout)
        finally:
            row.row.stop()
        if isinstance(found, BaseException):
            raise found
        return JSONResponse(found)

    @app.get("/prompts")
    async def prompts() -> dict[str, Any]:
        """What is served, and which folders are not, and why."""
        found = hosted.describe()
        refused = [{"prompt": each["prompt"], "error": told(each["error"])} for each in found["refused"]]
        return found | {"refused": refused, "max_tokens": settings.max_tokens}

    return app


def _begin(
    hosted: Prompts, asked: NewText, settings: ServiceSettings, tell: Callable[[str], None]
) -> tuple[PromptRow, float]:
    """What a client asked for, checked, and the part of a batch that it fills."""
    from inlay.errors import InlayError
    from inlay.workflow.generation import Sampling

    if (wrong := find_unsayable({"text": asked.text, "prompt": asked.prompt})) is not None:
        raise Refusal(400, f"The request holds {wrong}.")
    most = settings.max_characters or max(FEWEST_CHARACTERS, A_TOKEN * (hosted.writer.context or 0))
    if len(asked.text) > most:
        raise Refusal(413, f"The text has {len(asked.text):,} characters; at most {most:,} are read.")
    tokens = settings.max_tokens if asked.max_tokens is None else asked.max_tokens
    if tokens > settings.max_tokens:
        raise Refusal(
            400, f"max_tokens={tokens:,}: this service writes at most {settings.max_tokens:,} (--max-tokens)."
        )
    try:
        sampling = Sampling(tokens, asked.temperature, asked.top_p, asked.seed)
    except InlayError as error:
        raise Refusal(400, str(error)) from None
    row = hosted.begin(asked.prompt, asked.text, sampling, tell if asked.stream else None)
    return row, len(asked.text) / (TEXTS_A_BATCH * most)


def _from_thread(queue: asyncio.Queue[str | None]) -> Callable[[str | None], None]:
    """Put into a queue of this loop from any thread; nothing happens where the loop is gone."""
    loop = asyncio.get_running_loop()

    def put(piece: str | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, piece)

    return put


async def _stream(
    request: Request,
    queue: asyncio.Queue[str | None],
    job: tuple[PromptRow, Future[dict[str, Any]]],
    timeout: float,
    told: Callable[[str], str],
) -> StreamingResponse:
    """The answer as events. What goes wrong before the first of them has a status of its own."""
    row, future = job
    try:
        first = await _first(request, queue, timeout)
        if first is None and (error := future.exception()) is not None:
            raise error
    except BaseException:
        row.row.stop()
        future.cancel()
        raise

    async def events() -> AsyncIterator[str]:
        piece = first
        try:
            while piece is not None:
                yield _event({"text": piece})
                piece = await asyncio.wait_for(queue.get(), timeout)
            found = future.result()
            yield _event({name: value for name, value in found.items() if name != "text"}, "end")
        except TimeoutError:
            yield _event({"error": f"Nothing came within {timeout:g} seconds.", "status": 504}, "error")
        except Refusal as error:
            yield _event({"error": told(str(error)), "status": error.status}, "error")
        finally:
            row.row.stop()
            future.cancel()

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


async def _first(request: Request, queue: asyncio.Queue[str | None], timeout: float) -> str | None:
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


def _event(data: dict[str, Any], name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
