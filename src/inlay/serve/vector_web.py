"""`/v1/embeddings` of a service of tasks, as OpenAI's clients ask: `model` is the name of a task that gives vectors."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from inlay.serve.batching import Batcher
from inlay.serve.gate import OPENAI
from inlay.serve.hosting import Hosted
from inlay.serve.openai_web import Embedding, answer_all, shape_vectors
from inlay.serve.reading import Limits, Read, read
from inlay.serve.refusals import Refusal, unknown_task
from inlay.serve.settings import ServiceSettings
from inlay.workflow.answer import TASK


def add_vectors(app: FastAPI, batcher: Batcher[Hosted], settings: ServiceSettings, limits: Limits) -> None:
    """Let the application answer them."""
    hosted = batcher.hosted

    def rows_of(asked: Embedding) -> list[Read]:
        schema = hosted.schemas.get(asked.model)
        if schema is None:
            raise unknown_task(asked.model, hosted.schemas)
        if schema.predicts != "vector":
            raise Refusal(400, f"The task {asked.model!r} is of kind {schema.kind}, which gives no embeddings.")
        return [
            read({TASK: asked.model, "text": each}, hosted.schemas, limits) for each in asked.texts(batcher.max_queue)
        ]

    @app.post(f"{OPENAI}embeddings")
    async def embeddings(request: Request, asked: Embedding) -> JSONResponse:
        """A vector of length 1 for each text."""
        asked.check()
        rows = await asyncio.to_thread(rows_of, asked)
        return JSONResponse(shape_vectors(asked, await answer_all(request, batcher, rows, settings.timeout)))
