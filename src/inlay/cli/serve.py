"""`inlay serve`: tasks, or a model with LoRAs or compressed prompts, answer over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError

# The settings of a service, each an option of the same name; times are in milliseconds or seconds, sizes in MiB.
SERVICE = {
    "host": o.Option("The address to listen on; others than loopback need a token.", None, str, "127.0.0.1"),
    "port": o.Option("The port; 0 takes any that is free.", None, int, 8000),
    "max_batch": o.Option("The most rows in one pass of the model.", None, int, 64),
    "max_wait": o.Option("The longest a row waits for others, in milliseconds.", None, float, 5.0),
    "max_queue": o.Option("The most rows that wait; one more is answered with 503.", None, int, 1024),
    "max_body": o.Option("The largest request, in MiB; a larger one gets 413.", None, float, 4.0),
    "max_characters": o.Option(
        "The longest text. Default: 100 for each token that the task reads, 20000 at least.", None, int | None
    ),
    "max_pixels": o.Option("The largest image; a larger one gets 413.", None, int, 25_000_000),
    "max_connections": o.Option("The most connections; one more is closed with 503.", None, int, 1024),
    "max_per_client": o.Option("The most connections of one address. Default: half of all.", None, int | None),
    "timeout": o.Option("Seconds after which a row is given up, with 504.", None, float, 30.0),
    "read_timeout": o.Option(
        "Seconds within which a request must have arrived; a slower one gets 408.", None, float, 30.0
    ),
    "max_tokens": o.Option(
        "With --prompts and --adapters: the longest answer, in tokens; a request may ask for less.", None, int, 512
    ),
    "add_from": o.Option(
        "Tasks or adapters may be added from below this folder. Default: the run's folder of runs, or --adapters.",
        None,
        Path | None,
    ),
}


@o.takes(given=SERVICE)
def command(
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter", "--run", help="A run's folder, or a folder of several tasks (`inlay export --to tasks`)."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="In place of it: a folder of folders that `inlay compress` wrote, each a prompt by its folder's name."
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of them: PEFT LoRAs. A folder of adapters, each by its folder's name, which come and go; "
            "one adapter's folder, a run, or a hub id, or name=source. May be given several times."
        ),
    ] = None,
    *,
    given: dict[str, Any],
    tasks: Annotated[str | None, typer.Option(help="Serve only these, as in rte,sst2. Default: all.")] = None,
    token: Annotated[str | None, typer.Option(hidden=True)] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token that clients must send. Default: INLAY_TOKEN in the environment."),
    ] = None,
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Serve a run, a folder of several tasks, or a model with many LoRAs or compressed prompts, over HTTP.

    Rows of different tasks, LoRAs or prompts are answered in one pass of the model.

    \b
    inlay serve --adapter runs/<id>
    curl localhost:8000/predict --json '{"task": "rte", "sentence1": "A dog runs.", "sentence2": "A dog moves."}'

    \b
    POST   /predict       one request, or a list of them; an image goes into "image", in base64
    GET    /tasks         what is served, and which fields each task reads
    POST   /tasks         {"task": "sst2", "adapter": "<run>"}: load one more
    DELETE /tasks/sst2    serve it no longer (its files stay)

    \b
    inlay serve --model embedded:minilm --adapters loras/
    curl localhost:8000/predict --json '{"model": "reviews", "text": "a fine film"}'

    \b
    /predict, /adapters   as above: POST {"name": ..., "source": ...}, DELETE /adapters/<name>
    /v1/chat/completions  and completions, embeddings, models: as OpenAI's clients ask; "model" is an adapter

    \b
    inlay serve --prompts prompts/
    curl localhost:8000/generate --json '{"prompt": "support", "text": "My card was declined.", "stream": true}'

    \b
    POST   /generate      text, prompt (or null), max_tokens, temperature, top_p, seed, stream
    GET    /prompts       what is served: size, tokens it stands for, SHA-256; and what is not, and why

    \b
    GET    /health        200 while requests are taken; GET /metrics: counts and times, for Prometheus
    GET    /              a page to look at what is served, and to try it

    Ctrl-C or SIGTERM stops it when what waits has been answered. Adapters are only read.
    """
    from inlay.serve.running import serve, serve_adapters, serve_prompts
    from inlay.serve.settings import ServiceSettings

    _check_one(adapter, adapters, prompts, tasks, given)
    given |= {"max_wait": given["max_wait"] / 1e3, "max_body": given["max_body"] * 2**20}
    settings = ServiceSettings(token=_token(token, token_file), **given)
    how: dict[str, Any] = {"model": model, "trust_remote_code": trust_remote_code, "say": show.say}
    if prompts is not None:
        serve_prompts(prompts, settings, **how)
    if adapters is not None:
        serve_adapters(adapters, settings, **how)
    if adapter is not None:
        serve(adapter, settings, tasks=o.names_in(tasks) if tasks else None, **how)


def _check_one(adapter: Any, adapters: Any, prompts: Any, tasks: Any, given: dict[str, Any]) -> None:
    """An error where it is not one thing that is to be served, or an option is for another."""
    if sum(each is not None for each in (adapter, adapters, prompts)) != 1:
        raise InlayError(
            "Give --adapter (a run, or tasks), --adapters (LoRAs) or --prompts (compressed prompts), one of the three."
        )
    if prompts is not None and (tasks or given["add_from"]):
        raise InlayError("--tasks and --add-from are for tasks: a prompt is served while its folder is there.")
    if adapters is not None and tasks:
        raise InlayError("--tasks is for --adapter: of LoRAs give the folders of those that are to be served.")


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
