"""Adapter folders to serve, of tiny models and tasks whose parameters are drawn, not trained; and a client."""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import zoo
from checkpoints import write_tokenizer
from inlay import Spec, backbones
from inlay.methods import registry
from inlay.tasks import TaskSchema
from inlay.training.joint import attach_tasks, save_tasks

SENTENCE, PAIR = ("sentence",), ("premise", "hypothesis")
TEXTS = {
    "cola": TaskSchema("cola", "classification", SENTENCE, ("accuracy",), ("no", "yes"), max_length=20),
    "cb": TaskSchema("cb", "pair-classification", PAIR, ("accuracy",), ("yes", "no", "maybe"), max_length=20),
    "stsb": TaskSchema("stsb", "regression", PAIR, ("pearson",), mean=2.0, deviation=3.0, max_length=20),
    "sst": TaskSchema("sst", "classification", SENTENCE, ("accuracy",), ("bad", "good"), max_length=20),
}
IMAGES = {
    "tone": TaskSchema("tone", "image-classification", ("image",), ("accuracy",), ("dark", "bright")),
    "hue": TaskSchema("hue", "image-classification", ("image",), ("accuracy",), ("red", "green", "blue")),
}
WRITTEN = {
    name: TaskSchema(name, "causal-lm", ("text",), ("perplexity",), answers=True, max_length=20, max_new_tokens=new)
    for name, new in (("e2e", 4), ("dart", 6), ("webnlg", 6))
}
SCALE = 0.3


def write(
    place: Path,
    schemas: dict[str, TaskSchema],
    family: str = "bert",
    task: zoo.Task = "base",
    failed: dict[str, str] | None = None,
    *,
    by: str = "multi-lora",
) -> Path:
    """An adapter folder below `place`, as `inlay tune --tasks` leaves it, and its base model."""
    model = place / f"{family}-model"
    if not model.exists():
        zoo.tiny(family, task)[0].save_pretrained(model)
        write_tokenizer(model)
    folder = place / "-".join([*schemas, *([by] if by != "multi-lora" else [])]) / "adapter"
    first = next(iter(schemas.values()))
    backbone = backbones.load(str(model), kind=first.kind, num_labels=first.num_labels, label_names=first.label_names)
    method = registry.get(by)
    adapted = attach_tasks(backbone, schemas, method, {"r": 2})
    drawn = torch.Generator().manual_seed(len(schemas))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=SCALE, generator=drawn)
    spec = Spec(model=str(model), method=by, tasks=tuple(schemas), batch_size=4)
    save_tasks(adapted, schemas, method, backbone, spec, folder, failed)
    return folder


def rows(count: int, tasks: tuple[str, ...] = ("cola", "cb", "stsb", "sst")) -> list[dict[str, Any]]:
    """Requests that go round the tasks, of different lengths."""
    found = []
    for i in range(count):
        task = tasks[i % len(tasks)]
        words = " ".join(f"w{(7 * i + 3 * j) % 40}" for j in range(1 + i % 7))
        fields = {field: words if n == 0 else f"w{i % 40}" for n, field in enumerate(TEXTS[task].fields)}
        found.append({"task": task, "id": i} | fields)
    return found


def picture(colour: tuple[int, int, int]) -> bytes:
    """A file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (20, 24), colour).save(file, "PNG")
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def call(
    address: str, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """One request on a connection of its own: the status and what was said."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        address + path, data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, _said(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _said(error.read())


def _said(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what must come; fail where it does not."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Equal, but for what the order of additions in a batch of another shape does to the last digits."""
    return found.keys() == expected.keys() and all(
        abs(value - expected[key]) < 1e-5 if isinstance(value, float) else value == expected[key]
        for key, value in found.items()
    )
