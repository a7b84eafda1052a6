"""The application for a model with LoRAs: `/predict`, `/adapters`, and what OpenAI's clients ask (openai_web.py)."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from inlay.errors import InlayError
from inlay.serve.adapters import Adapters
from inlay.serve.batching import Batcher
from inlay.serve.lora_rows import ADAPTER, MODEL
from inlay.serve.openai_web import add_openai
from inlay.serve.reading import Read
from inlay.serve.refusals import Refusal
from inlay.serve.settings import ServiceSettings
from inlay.serve.web import bare_app, entry_of, submit, try_reading, wait_for
from inlay.tasks import kinds
from inlay.workflow.generation import Sampling

LIMIT = "max_tokens"


class NewAdapter(BaseModel):
    """An adapter to add: its name, and the folder (or run) it lies in; without one, that it had before."""

    model_config = ConfigDict(extra="forbid")

    name: str
    source: str | None = None


def create_adapter_app(batcher: Batcher[Adapters], settings: ServiceSettings) -> FastAPI:
    """The application around a batcher that runs."""
    hosted = batcher.hosted
    root = settings.add_from or hosted.sources.root
    folders = (
        *([root] if root else ()),
        *hosted.sources.folders,
        *(each.parent for each in hosted.sources.fixed.values()),
    )
    app, told = bare_app(batcher, settings, folders, "adapters", lambda: len(hosted.served))
    reading = partial(_read, hosted, settings)

    @app.post("/predict")
    async def predict(request: Request, body: Annotated[dict[str, Any] | list[Any], Body()]) -> JSONResponse:
        """Answer one request, an object, or several, a list: then each has its own answer, or its own error."""
        loop = asyncio.get_running_loop()
        if isinstance(body, dict):
            row = await loop.run_in_executor(hosted.readers, reading, body)
            (found,) = await wait_for(request, submit(batcher, [row], request), settings.timeout)
            if isinstance(found, BaseException):
                raise found
            return JSONResponse(found)
        if len(body) > batcher.max_queue:
            raise Refusal(413, f"{len(body):,} requests at once are more than the queue holds ({batcher.max_queue:,}).")
        entries = await loop.run_in_executor(hosted.readers, lambda: [try_reading(each, reading) for each in body])
        rows = [each for each in entries if isinstance(each, Read)]
        answers = iter(await wait_for(request, submit(batcher, rows, request), settings.timeout) if rows else ())
        found = [each if isinstance(each, Refusal) else next(answers) for each in entries]
        return JSONResponse([entry_of(each, told, batcher.metrics) for each in found])

    @app.get("/adapters")
    async def adapters() -> dict[str, Any]:
        """What is served, and what is not, and why."""
        found = hosted.describe()
        refused = [{ADAPTER: each[ADAPTER], "error": told(each["error"])} for each in found["refused"]]
        shown = [each | {"source": told(each["source"])} for each in found["adapters"]]
        return found | {"adapters": shown, "refused": refused, LIMIT: settings.max_tokens}

    @app.post("/adapters", status_code=201)
    async def add(new: NewAdapter) -> dict[str, Any]:
        """Serve one more, from a folder on the service's machine."""
        if not new.name or "/" in new.name or new.name.startswith(".") or not new.name.isprintable():
            raise Refusal(400, f"name={new.name!r}: give a name without slashes, and without a dot at its beginning.")
        place = None if new.source is None else _below(root, new.source)
        found = await asyncio.to_thread(hosted.add, new.name, place, batcher.change)
        return {"added": new.name, ADAPTER: found.tag(), "kind": found.kind, "adapters": sorted(hosted.served)}

    @app.delete("/adapters/{name}")
    async def remove(name: str) -> dict[str, Any]:
        """Serve an adapter no longer. Its files stay."""
        await asyncio.to_thread(hosted.drop, name, batcher.change)
        return {"removed": name, "adapters": sorted(hosted.served)}

    add_openai(app, batcher, settings, told)
    return app


def _read(hosted: Adapters, settings: ServiceSettings, given: Any) -> Read:
    """A request as its adapter reads it; a `Refusal` says what is wrong."""
    if not isinstance(given, dict):
        raise Refusal(400, f"A request is an object with a {MODEL!r} and that adapter's fields.")
    served = hosted.get(given.get(MODEL))
    if served.kind in kinds.LANGUAGE_MODELS:
        given = dict(given)
        tokens = given.pop(LIMIT, settings.max_tokens)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= settings.max_tokens:
            raise Refusal(400, f"{LIMIT}={tokens!r}: give a whole number from 1 to {settings.max_tokens:,}.")
        text = hosted.rows.prompt_of(served, given)
        row, load = hosted.rows.begin(served, text, Sampling(tokens), most=settings.max_characters)
        return Read(row, load)
    return Read(*hosted.rows.read(served, given, settings.max_characters))


def _below(root: Path | None, source: str) -> Path:
    """The folder that a client names, which must lie below `root`."""
    if root is None:
        raise Refusal(403, "This service was started without a folder that adapters may be added from (--add-from).")
    try:
        place = (root.resolve() / source).resolve()
        if not place.is_relative_to(root.resolve()):
            raise Refusal(403, f"{source!r} does not lie below the folder that adapters are added from (--add-from).")
        if not place.is_dir():
            raise Refusal(400, f"{source!r} is no folder below {root.name!r}.")
        return place
    except Refusal:
        raise
    except (InlayError, OSError, ValueError) as error:
        raise Refusal(400, str(error)) from None
