"""From what a client sent to a row of its task.

Nothing that a client names is ever opened: images come in the body.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.serve.fairness import NamedRow
from inlay.serve.refusals import Refusal, unknown_task
from inlay.workflow.answer import TASK, Request, find_unsayable

if TYPE_CHECKING:
    from inlay.tasks import TaskSchema

MOST_PIXELS = 25_000_000  # a small file may unfold into an image that fills the memory
FEWEST_CHARACTERS, A_TOKEN = 20_000, 100  # a token of ordinary text has about 4 characters
TEXTS_A_BATCH = 4  # texts of the greatest length in one batch: what comes after them waits no longer than for these


@dataclass(frozen=True)
class Limits:
    """The longest text and the largest image that are read, in characters (None: from the task) and pixels."""

    characters: int | None = None
    pixels: int = MOST_PIXELS

    def of_text(self, schema: TaskSchema) -> int:
        """The characters of the longest text that a task reads, all its fields together.

        A tokenizer reads a text whole before it is cut to the task's `max_length`.
        """
        return self.characters or max(FEWEST_CHARACTERS, A_TOKEN * (schema.max_length or 0))


@dataclass(frozen=True)
class Read:
    """A request as its task reads it, and the part of a batch that it fills."""

    request: NamedRow
    load: float


def read(given: Any, schemas: Mapping[str, TaskSchema], limits: Limits) -> Read:
    """A request as its task reads it; where one task is served it need not be named. A `Refusal` says what is wrong."""
    if not isinstance(given, Mapping):
        raise Refusal(400, f"A request is an object with a {TASK!r} and that task's fields, not {_named(given)}.")
    task = given.get(TASK, next(iter(schemas)) if len(schemas) == 1 else None)
    if not isinstance(task, str):
        raise Refusal(400, f"The request names no {TASK!r}. Known: {', '.join(sorted(schemas))}.")
    schema = schemas.get(task)  # looked up once: it may be removed at any moment
    if schema is None:
        raise unknown_task(task, schemas)
    if schema.modality == "image":
        return _of_image(task, schema, given, limits)
    _check_echo(given)
    try:
        request = Request(task, dict(given), schema.row(given, "the request", 1))
    except InlayError as error:
        raise Refusal(400, str(error)) from None
    most, size = limits.of_text(schema), _characters(request.row)
    if size > most:
        raise Refusal(413, f"The text has {size:,} characters; the task {task!r} reads at most {most:,}.")
    return Read(request, size / (TEXTS_A_BATCH * most))


def _characters(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else len(str(value))


def _of_image(task: str, schema: TaskSchema, given: Mapping[str, Any], limits: Limits) -> Read:
    """An image comes as base64; it is not sent back."""
    field = schema.columns.get("image", "image")
    if not isinstance(given.get(field), str):
        raise Refusal(400, f"The task {task!r} reads an image: give it in {field!r}, its file's bytes in base64.")
    data = given[field]
    if data.startswith("data:"):  # as browsers write them
        data = data.partition(",")[2]
    try:
        data = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, f"{field!r} is not base64: give the bytes of an image file, never its path.") from None
    pixels = _pixels(data, limits.pixels)
    rest = {key: value for key, value in given.items() if key != field}
    _check_echo(rest)
    return Read(Request(task, rest, {"image": data}), pixels / limits.pixels)


def _pixels(data: bytes, most: int) -> int:
    """How many pixels an image has, by its header: it is not decoded."""
    from PIL import Image

    from inlay.tasks.images import open_image

    try:
        with open_image(data) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise Refusal(413, f"The image is too large; at most {most:,} pixels are read.") from None
    except Exception:  # whatever Pillow's many readers make of bytes that are no image
        raise Refusal(400, "What was sent is not an image that can be read.") from None
    if width * height > most:
        raise Refusal(413, f"The image has {width * height:,} pixels; at most {most:,} are read.")
    return width * height


def _check_echo(given: Mapping[str, Any]) -> None:
    if (wrong := find_unsayable(given)) is not None:
        raise Refusal(400, f"The request holds {wrong}.")


def _named(given: Any) -> str:
    return "null" if given is None else f"a {type(given).__name__}"
