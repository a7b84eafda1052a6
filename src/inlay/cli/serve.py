"""`inlay serve`: tasks answer over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError


def command(
    adapter: Annotated[
        Path,
        typer.Option(
            "--adapter", "--run", help="A run's folder, or a folder of several tasks (`inlay export --to tasks`)."
        ),
    ],
    tasks: Annotated[str | None, typer.Option(help="Serve only these, as in rte,sst2. Default: all.")] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.")] = 8000,
    token: Annotated[str | None, typer.Option(hidden=True)] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token that clients must send. Default: INLAY_TOKEN in the environment."),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="The most rows in one pass of the model.")] = 64,
    max_wait: Annotated[float, typer.Option(help="The longest a row waits for others, in milliseconds.")] = 5.0,
    max_queue: Annotated[int, typer.Option(help="The most rows that wait; one more is answered with 503.")] = 1024,
    max_body: Annotated[float, typer.Option(help="The largest request, in MiB; a larger one gets 413.")] = 4.0,
    max_characters: Annotated[
        int | None,
        typer.Option(help="The longest text. Default: 100 for each token that the task reads, 20000 at least."),
    ] = None,
    max_pixels: Annotated[int, typer.Option(help="The largest picture; a larger one gets 413.")] = 25_000_000,
    max_connections: Annotated[int, typer.Option(help="The most connections; one more is closed with 503.")] = 1024,
    max_per_client: Annotated[
        int | None, typer.Option(help="The most connections of one address. Default: half of all.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a row is given up, with 504.")] = 30.0,
    read_timeout: Annotated[
        float, typer.Option(help="Seconds within which a request must have arrived; a slower one gets 408.")
    ] = 30.0,
    add_from: Annotated[
        Path | None, typer.Option(help="Tasks may be added from below this folder. Default: the run's folder of runs.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is now, if it has moved.")] = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Serve the tasks of an adapter folder, or a run, over HTTP: rows of different tasks in one pass.

    \b
    inlay serve --adapter runs/<id>
    curl localhost:8000/predict --json '{"task": "rte", "sentence1": "A dog runs.", "sentence2": "A dog moves."}'

    \b
    POST   /predict       one request, or a list of them; a picture goes into "image", in base64
    GET    /tasks         what is served, and which fields each task reads
    POST   /tasks         {"task": "sst2", "adapter": "<run>"}: load one more
    DELETE /tasks/sst2    serve it no longer (its files stay)
    GET    /health        200 while requests are taken
    GET    /metrics       counts and times, for Prometheus

    Ctrl-C or SIGTERM stops it when what waits has been answered. Adapters are only read.
    """
    from inlay.serve.running import serve
    from inlay.serve.settings import Settings

    settings = Settings(
        host=host,
        port=port,
        token=_token(token, token_file),
        max_batch=max_batch,
        max_wait=max_wait / 1e3,
        max_queue=max_queue,
        max_body=max_body * 2**20,
        max_characters=max_characters,
        max_pixels=max_pixels,
        max_connections=max_connections,
        max_per_client=max_per_client,
        timeout=timeout,
        read_timeout=read_timeout,
        add_from=add_from,
    )
    only = [name.strip() for name in tasks.split(",")] if tasks else None
    serve(adapter, settings, model=model, tasks=only, trust_remote_code=trust_remote_code, say=show.say)


def _token(argument: str | None, file: Path | None) -> str | None:
    """The token, from a file or the environment: everybody on the machine can read the arguments of a process."""
    if argument is not None:
        raise InlayError(
            "--token would show the token to everybody on this machine, in the list of processes. Set INLAY_TOKEN in "
            "the environment, or give --token-file."
        )
    if file is None:
        return os.environ.get("INLAY_TOKEN") or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InlayError(f"--token-file {str(file)!r} cannot be read: {error}.") from None
