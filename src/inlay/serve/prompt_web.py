"""The application for a model with prompts: `/generate`, `/prompts`, `/health`, `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from inlay.serve.batching import Batcher
from inlay.serve.prompts import PromptRow, Prompts
from inlay.serve.reading import A_TOKEN, FEWEST_CHARACTERS, TEXTS_A_BATCH, Read
from inlay.serve.refusals import Refusal
from inlay.serve.settings import ServiceSettings
from inlay.serve.streaming import event, from_thread, stream
from inlay.serve.web import bare_app, submit, wait_for
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
        tell = from_thread(queue)
        row, load = await asyncio.to_thread(_begin, hosted, asked, settings, tell)
        (future,) = submit(batcher, [Read(row, load)], request)
        if asked.stream:
            future.add_done_callback(lambda _: tell(None))
            say = _PromptEvents(told)
            return await stream(request, queue, (row.row, future), settings.timeout, say, batcher.metrics)
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


class _PromptEvents:
    """Pieces without a name, then `end` with the rest of the answer."""

    def __init__(self, told: Callable[[str], str]) -> None:
        self._told = told

    def piece(self, text: str) -> str:
        return event({"text": text})

    def end(self, found: Mapping[str, Any]) -> str:
        return event({name: value for name, value in found.items() if name != "text"}, "end")

    def error(self, refusal: Refusal) -> str:
        return event({"error": self._told(str(refusal)), "status": refusal.status}, "error")
