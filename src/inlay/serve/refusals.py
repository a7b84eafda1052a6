"""What a client is told when it is not answered: a status of HTTP and one sentence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from inlay.errors import InlayError, unknown

GONE = 499  # nobody reads it: the client has closed the connection


class Refusal(InlayError):
    """A request that is not answered. `headers` go with the response."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def unknown_task(task: str, known: Iterable[str]) -> Refusal:
    """The answer to a request for a task that is not served, or no longer."""
    return Refusal(404, str(unknown("task", task, known, "`GET /tasks` lists them.")))


def missing_task(task: str, known: Collection[str]) -> Refusal | None:
    """The answer to a request for a task that was removed while it waited; None where the task is served."""
    return None if task in known else unknown_task(task, known)


def unknown_prompt(prompt: str, known: Iterable[str]) -> Refusal:
    """The answer to a request for a prompt that is not served, or no longer."""
    return Refusal(404, str(unknown("prompt", prompt, known, "`GET /prompts` lists them; null is for none.")))


def unknown_adapter(name: str, known: Iterable[str]) -> Refusal:
    """The answer to a request for an adapter that is not served, or no longer."""
    return Refusal(404, str(unknown("model", name, known, "`GET /adapters` lists the adapters.")))


def full(limit: int) -> Refusal:
    """The answer when more is waiting than the service takes on."""
    return Refusal(503, f"The queue is full ({limit} rows). Try again in a moment.", {"Retry-After": "1"})


def stopping() -> Refusal:
    """The answer while the service shuts down."""
    return Refusal(503, "The service is stopping and takes no more requests.", {"Retry-After": "5"})


_PATH = re.compile(r"(?<![\w/.:])/(?:[^\s/'\"`,;:()<>]+/)+[^\s/'\"`,;:()<>]*")


def without_paths(message: str, folders: Iterable[Path] = ()) -> str:
    """A message as a client may read it: of a folder of this machine its last name alone.

    `folders` are known to be named in messages; others are found by their looks, unless there is a blank in them. What
    looks like a path and begins in no folder of this machine, as `/tasks/<task>` does, is left as it is.
    """
    named = [folder for folder in folders if folder.name]  # not the root, which is the beginning of every path
    for folder in sorted(named, key=lambda folder: len(str(folder)), reverse=True):
        whole = re.compile(rf"(?<![\w/.:-]){re.escape(str(folder))}(?![\w-]|\.\w)")
        message = whole.sub(lambda _, name=folder.name: name, message)  # type: ignore[misc]
    return _PATH.sub(_shortened, message)


def _shortened(found: re.Match[str]) -> str:
    path = Path(found.group().rstrip("."))
    return path.name + "." * found.group().endswith(".") if Path("/", path.parts[1]).exists() else found.group()
