"""The process around the application: bind, load, say where, serve, and end without losing what waits."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, listed
from inlay.serve.settings import ServiceSettings

if TYPE_CHECKING:
    from inlay.serve.adapters import Adapters
    from inlay.serve.batching import Batcher
    from inlay.serve.hosting import Hosted
    from inlay.serve.prompts import Prompts
    from inlay.serve.watching import Watched

Say = Callable[[str], None]
SHOWN = 8
LOGGERS = ("inlay.serve", "uvicorn.error", "asyncio")
A_MINUTE = 60  # records of the service, with their tracebacks


def serve(
    adapter: Path | str,
    settings: ServiceSettings | None = None,
    *,
    model: str | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    say: Say = print,
) -> None:
    """Serve an adapter folder or a run until the process is told to stop (SIGINT, SIGTERM); what waits is answered."""
    settings = settings or ServiceSettings()

    def load() -> Hosted:
        from inlay.serve.hosting import host

        return host(adapter, model=model, only=tasks, batch=settings.max_batch, trust_remote_code=trust_remote_code)

    _serve(load, settings, say)


def serve_prompts(
    folder: Path | str,
    settings: ServiceSettings | None = None,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    say: Say = print,
) -> None:
    """Serve one model with the prompts of the folders below a folder, until the process is told to stop."""

    def load() -> Prompts:
        from inlay.serve.prompts import Prompts

        return Prompts(Path(folder), model=model, trust_remote_code=trust_remote_code)

    _serve(load, settings or ServiceSettings(), say)


def serve_adapters(
    sources: Sequence[str],
    settings: ServiceSettings | None = None,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    say: Say = print,
) -> None:
    """Serve one model with LoRAs (folders, folders of them, runs, hub ids), until the process is told to stop."""

    def load() -> Adapters:
        from inlay.serve.adapters import Adapters

        return Adapters(sources, model=model, trust_remote_code=trust_remote_code, batch=chosen.max_batch)

    chosen = settings or ServiceSettings()
    _serve(load, chosen, say)


def _serve(load: Callable[[], Hosted | Watched], settings: ServiceSettings, say: Say) -> None:
    check_installed()
    # Bound before the model is loaded, to fail early; it listens only when there is something to answer with.
    with contextlib.closing(settings.bind()) as bound, warnings.catch_warnings(), bounded_logs():
        # PEFT warns of several adapters in one model, and of every one that is taken out.
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        say("loading the model")
        batcher = _batcher(load(), settings)
        # What was loaded stays: looking through the pieces of many tasks for garbage would hold up batches.
        gc.collect()
        gc.freeze()
        # uvicorn ends in order, then raises the signal again: the process has done what it was asked, and ends well.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with _beside(batcher):
                _server(batcher, settings, lambda: say(started(batcher, settings, bound))).run(sockets=[bound])
        finally:
            batcher.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        counted = batcher.metrics
        say(f"stopped: rows answered: {counted.rows.total:,}, in batches: {counted.batch_rows.count:,}")


@contextlib.contextmanager
def serving(hosted: Hosted | Watched, settings: ServiceSettings) -> Iterator[str]:
    """Serve from a thread of this process, for as long as the block lasts; gives the address."""
    check_installed()
    with contextlib.closing(settings.bind()) as bound, bounded_logs():
        batcher = _batcher(hosted, settings)
        ready = threading.Event()
        server = _server(batcher, settings, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="inlay-http", daemon=True)
        thread.start()
        try:
            while not ready.wait(1):
                if not thread.is_alive():
                    raise InlayError("The service did not start; what was printed before this says why.")
            with _beside(batcher):
                yield address(bound)
        finally:
            server.should_exit = True
            thread.join()
            batcher.close()


def check_installed() -> None:
    """A clear error where what serves HTTP is not installed: it is an extra."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InlayError(f"Serving needs {error.name}, which is not installed: pip install 'inlay[serve]'.") from None


def address(bound: socket.socket) -> str:
    """Where a bound socket is reached."""
    name, port = bound.getsockname()[:2]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def started(batcher: Batcher[Any], settings: ServiceSettings, bound: socket.socket) -> str:
    """The line that says what is served, where and how; then one for each task that failed in training, or prompt or
    adapter that cannot be served."""
    hosted = batcher.hosted
    if _is_watched(batcher):
        what, names = hosted.what, sorted(hosted.served)
        about = hosted.describe()["model"]
        refused = [(name, why) for name, (_, why) in hosted.refused.items()] + hosted.twice
        more = [f"{name} is not served: {why}" for name, why in sorted(refused)]
    else:
        from inlay.workflow.answer import describe_failed

        what, names = "task", list(hosted.schemas)
        about = "{model} with {method}".format_map(hosted.describe())
        more = describe_failed(hosted.failed, names)
    line = (
        f"serving {about} at {address(bound)}"
        f"{' (with a token)' if settings.token else ''}; "
        f"{len(names)} {what}{'s' if len(names) != 1 else ''}: {listed(names, SHOWN) or 'none yet'}; "
        f"batches of at most {settings.max_batch} rows, waiting at most {1e3 * settings.max_wait:g} ms, "
        f"at most {settings.max_queue} rows in the queue"
    )
    return "\n".join([line, *more])


def _batcher(hosted: Any, settings: ServiceSettings) -> Batcher[Any]:
    from inlay.serve.batching import Batcher

    return Batcher(hosted, max_batch=settings.max_batch, max_wait=settings.max_wait, max_queue=settings.max_queue)


def _is_watched(batcher: Batcher[Any]) -> bool:
    from inlay.serve.watching import Watched

    return isinstance(batcher.hosted, Watched)


def _beside(batcher: Batcher[Any]) -> contextlib.AbstractContextManager[None]:
    """What goes on beside the service: the folders that it serves from are watched."""
    return batcher.hosted.watched(batcher.change) if _is_watched(batcher) else contextlib.nullcontext()


def _application(batcher: Batcher[Any], settings: ServiceSettings) -> Any:
    """The application for what is served."""
    from inlay.serve.web import create_app

    if not _is_watched(batcher):
        return create_app(batcher, settings)
    from inlay.serve.prompts import Prompts

    if isinstance(batcher.hosted, Prompts):
        from inlay.serve.prompt_web import create_prompt_app

        return create_prompt_app(batcher, settings)
    from inlay.serve.adapter_web import create_adapter_app

    return create_adapter_app(batcher, settings)


def _server(batcher: Batcher[Any], settings: ServiceSettings, ready: Callable[[], None]) -> Any:
    import uvicorn

    from inlay.serve.connections import AT_ONCE, QUEUED, Bounds, limit_connections

    most = limit_connections(settings.max_connections)
    bounds = Bounds(most, min(settings.max_per_client or max(1, most // 2), most), settings.read_timeout)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for listening in sockets or ():
                listening.listen(QUEUED)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            batcher.hurry()  # nobody comes to whom a batch could be worth waiting for
            await super().shutdown(sockets)

    config = uvicorn.Config(
        _application(batcher, settings),
        log_level="warning",
        access_log=False,
        server_header=False,
        http=bounds.protocol(),
        ws="none",
        backlog=AT_ONCE,
        proxy_headers=False,  # a client is who connects: what a header says of it anybody can write
        # In order means: everybody who was taken on gets an answer, if only that there was none in time.
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 1,
    )
    return Server(config)


# ------------------------------------------------------------- a log that nobody can fill the disk with


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


@contextlib.contextmanager
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
