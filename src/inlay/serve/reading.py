"""From what a client sent to a row of its task.

Nothing that a client names is ever opened: pictures come in the body.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.serve.refusals import Refusal, unknown_task
from inlay.tasks import kinds
from inlay.workflow.answer import TASK, Request, unsayable

if TYPE_CHECKING:
    from inlay.tasks import TaskSchema

MOST_PIXELS = 50_000_000  # a small file may unfold into a picture that fills the memory


def read(given: Any, schemas: Mapping[str, TaskSchema]) -> Request:
    """A request as its task reads it; where one task is served it need not be named. A `Refusal` says what is wrong."""
    if not isinstance(given, Mapping):
        raise Refusal(400, f"A request is an object with a {TASK!r} and that task's fields, not {_named(given)}.")
    task = given.get(TASK, next(iter(schemas)) if len(schemas) == 1 else None)
    if not isinstance(task, str):
        raise Refusal(400, f"The request names no {TASK!r}. Known: {', '.join(sorted(schemas))}.")
    schema = schemas.get(task)  # looked up once: it may be removed at any moment
    if schema is None:
        raise unknown_task(task, schemas)
    if schema.kind == kinds.IMAGES:
        return _of_picture(task, schema, given)
    _check_echo(given)
    try:
        return Request(task, dict(given), schema.row(given, "the request", 1))
    except InlayError as error:
        raise Refusal(400, str(error)) from None


def _of_picture(task: str, schema: TaskSchema, given: Mapping[str, Any]) -> Request:
    """A picture comes as base64; it is not sent back."""
    field = schema.columns.get("image", "image")
    if not isinstance(given.get(field), str):
        raise Refusal(400, f"The task {task!r} reads a picture: give it in {field!r}, its file's bytes in base64.")
    data = given[field]
    if data.startswith("data:"):  # as browsers write them
        data = data.partition(",")[2]
    try:
        picture = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, f"{field!r} is not base64: give the bytes of a picture's file, never its path.") from None
    _check_picture(picture)
    rest = {key: value for key, value in given.items() if key != field}
    _check_echo(rest)
    return Request(task, rest, {"image": picture})


def _check_picture(picture: bytes) -> None:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(picture)) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise Refusal(413, f"The picture is too large; at most {MOST_PIXELS:,} pixels are read.") from None
    except Exception:  # whatever Pillow's many readers make of bytes that are no picture
        raise Refusal(400, "What was sent is not a picture that can be read.") from None
    if width * height > MOST_PIXELS:
        raise Refusal(413, f"The picture has {width * height:,} pixels; at most {MOST_PIXELS:,} are read.")


def _check_echo(given: Mapping[str, Any]) -> None:
    if (wrong := unsayable(given)) is not None:
        raise Refusal(400, f"The request holds {wrong}.")


def _named(given: Any) -> str:
    return "null" if given is None else f"a {type(given).__name__}"
