"""The application: `/predict`, `/tasks`, `/health`, `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from inlay import __version__
from inlay.errors import InlayError
from inlay.serve.batching import Batcher
from inlay.serve.fairness import HERE, Client
from inlay.serve.gate import RequestGate, refused
from inlay.serve.hosting import Hosted
from inlay.serve.metrics import CONTENT_TYPE, Gauge, Metrics
from inlay.serve.reading import Limits, Read, read
from inlay.serve.refusals import GONE, Refusal, unknown_task, without_paths
from inlay.serve.settings import ServiceSettings
from inlay.workflow.answer import FAILED
from inlay.workflow.answer_files import locate_tasks

PAGE = Path(__file__).with_name("page.html")
# Nothing but what the page itself holds, and the service that it came from.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class NewTask(BaseModel):
    """A task to add: its name, and the adapter folder (or run) it lies in; without one, the folder that is served."""

    model_config = ConfigDict(extra="forbid")

    task: str
    adapter: str | None = None


def create_app(batcher: Batcher[Hosted], settings: ServiceSettings) -> FastAPI:
    """The application around a batcher that runs."""
    hosted = batcher.hosted
    root = settings.add_from or _default_root(hosted.folder)
    limits = Limits(settings.max_characters, settings.max_pixels)
    app, told = bare_app(batcher, settings, (root, hosted.folder), "tasks", lambda: len(hosted.schemas))

    @app.post("/predict")
    async def predict(request: Request, body: Annotated[dict[str, Any] | list[Any], Body()]) -> JSONResponse:
        """Answer one request, an object, or several, a list: then each has its own answer, or its own error."""
        if isinstance(body, dict):
            futures = submit(batcher, [read(body, hosted.schemas, limits)], request)
            (found,) = await wait_for(request, futures, settings.timeout)
            if isinstance(found, BaseException):
                raise found
            return JSONResponse(found)
        if len(body) > batcher.max_queue:
            raise Refusal(413, f"{len(body):,} requests at once are more than the queue holds ({batcher.max_queue:,}).")
        entries = [try_reading(each, lambda given: read(given, hosted.schemas, limits)) for each in body]
        rows = [each for each in entries if isinstance(each, Read)]
        answers = iter(await wait_for(request, submit(batcher, rows, request), settings.timeout) if rows else ())
        found = [each if isinstance(each, Refusal) else next(answers) for each in entries]
        return JSONResponse([entry_of(each, told, batcher.metrics) for each in found])

    @app.get("/tasks")
    async def tasks() -> dict[str, Any]:
        """What is served, and what each task reads."""
        listed = [
            {
                "task": name,
                "kind": schema.kind,
                "fields": ["text"]
                if schema.predicts == "vector"
                else [schema.columns.get(field, field) for field in schema.fields],
                "labels": schema.label_names,
                **_failure(hosted, name),
            }
            for name, schema in list(hosted.schemas.items())
        ]
        return {key: told(value) for key, value in hosted.describe().items()} | {"tasks": listed}

    @app.post("/tasks", status_code=201)
    async def add(new: NewTask) -> dict[str, Any]:
        """Load one more task from a folder on the service's machine."""
        folder = _resolve_below(root, new.adapter) if new.adapter is not None else hosted.folder
        try:
            # Off the loop, and before the model is touched: files are read and hashed.
            await asyncio.to_thread(hosted.check, folder, new.task)
        except Refusal:
            raise
        except InlayError as error:
            raise Refusal(400, str(error)) from None
        await asyncio.wrap_future(batcher.change(lambda: hosted.add(folder, new.task)))
        return {"added": new.task, "tasks": sorted(hosted.schemas), **_failure(hosted, new.task)}

    @app.delete("/tasks/{task}")
    async def remove(task: str) -> dict[str, Any]:
        """Serve a task no longer. Its files stay."""
        if task not in hosted.schemas:
            raise unknown_task(task, hosted.schemas)
        await asyncio.wrap_future(batcher.change(lambda: hosted.remove(task)))
        return {"removed": task, "tasks": sorted(hosted.schemas)}

    from inlay.serve.vector_web import add_vectors

    add_vectors(app, batcher, settings, limits)
    return app


def bare_app(
    batcher: Batcher[Any], settings: ServiceSettings, folders: Sequence[Path], what: str, count: Callable[[], int]
) -> tuple[FastAPI, Callable[[str], str]]:
    """An application that has what every service has: the gate, `/health` and `/metrics`, and errors in one sentence;
    and what a client may read of a message. `what` is served, so many of it; it lies in `folders`."""
    places = [path for each in folders for path in (each.absolute(), each.resolve())]
    told = partial(without_paths, folders=[*places, *(path.parent for path in places), Path.cwd()])
    app = FastAPI(title="inlay", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(RequestGate, token=settings.token, max_body=int(settings.max_body), metrics=batcher.metrics)
    batcher.metrics.gauges.append(Gauge(f"inlay_{what}", f"{what.capitalize()} that are served.", count))
    _answer_errors(app, told)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether requests are taken, and the model answers."""
        status = "stopping" if not batcher.alive else "failing" if batcher.failing else "ok"
        state = {"status": status, what: count(), "waiting": batcher.waiting}
        return JSONResponse(state, 200 if status == "ok" else 503)

    @app.get("/")
    async def page() -> HTMLResponse:
        """A page to look at what is served, and to try it."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": POLICY})

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Counts and times, for Prometheus."""
        return PlainTextResponse(batcher.metrics.text(), media_type=CONTENT_TYPE)

    return app, told


def _answer_errors(app: FastAPI, told: Callable[[str], str]) -> None:
    """Every error is answered in one sentence, as JSON; `told` is what a client may read of it."""

    @app.exception_handler(Refusal)
    async def on_refusal(request: Request, error: Refusal) -> JSONResponse:
        return refused(Refusal(error.status, told(str(error)), error.headers), request.url.path)

    @app.exception_handler(RequestValidationError)
    async def on_unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        said = f"The request cannot be read: {first['msg']} ({place}). Send JSON, and say so."
        return refused(Refusal(400, said), request.url.path)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        return refused(Refusal(error.status_code, str(error.detail), dict(error.headers or {})), request.url.path)


async def wait_for(request: Request, futures: Sequence[Future[Any]], timeout: float) -> list[Any]:
    """The answers or errors, in order. A client that is gone or has waited too long gives up its places."""
    answers = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    gone = asyncio.ensure_future(request.receive())  # the body has been read: what comes next is the end
    try:
        both: set[asyncio.Future[Any]] = {answers, gone}
        done, _ = await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if answers in done:
            return answers.result()
        if gone in done:
            raise Refusal(GONE, "The client has gone.")
        raise Refusal(504, f"There was no answer within {timeout:g} seconds.")
    finally:
        gone.cancel()
        for future in futures:  # the places themselves: what waits for them would hand it on only later
            future.cancel()


def _failure(hosted: Hosted, task: str) -> dict[str, str]:
    """What an answer of a task that failed in training says too."""
    why = hosted.failed.get(task)
    return {} if why is None else {FAILED: why}


def submit(batcher: Batcher[Any], rows: Sequence[Read], request: Request) -> list[Future[Any]]:
    """Queue what a client sent."""
    client = Client(*request.client) if request.client else HERE
    return batcher.submit([row.request for row in rows], client, [row.load for row in rows])


def try_reading(given: Any, read: Callable[[Any], Read]) -> Read | Refusal:
    """A request as it is read, or what is wrong with it."""
    try:
        return read(given)
    except Refusal as error:
        return error


def entry_of(found: Any, told: Callable[[str], str], metrics: Metrics) -> Any:
    """What one request of a list is answered, in place; an error is counted."""
    if isinstance(found, Refusal):
        metrics.errors.add(str(found.status))
        return {"error": told(str(found)), "status": found.status}
    if isinstance(found, BaseException):
        raise found
    return found


def _default_root(folder: Path) -> Path:
    """Where tasks may be added from unless the settings say: the folder of runs, or the adapter folder itself."""
    return folder.parent.parent if (folder.parent / "spec.json").is_file() else folder


def _resolve_below(root: Path, adapter: str) -> Path:
    """The adapter folder that a client names, which must lie below `root`."""
    try:
        place = (root.resolve() / adapter).resolve()
        if not place.is_relative_to(root.resolve()):
            raise Refusal(403, f"{adapter!r} does not lie below the folder that tasks are added from (--add-from).")
        return locate_tasks(place)
    except Refusal:
        raise
    except (InlayError, OSError, ValueError) as error:
        raise Refusal(400, str(error)) from None
