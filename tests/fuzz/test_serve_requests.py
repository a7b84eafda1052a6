"""Requests to `inlay serve` damaged at random: each is answered or refused in one sentence, and harms no other.

The application itself is asked, without a socket: what a server hands it is what is damaged.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz.mutations import cases, mutate_bytes, mutate_json, odd_value

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from hosts import IMAGES, TEXTS, in_base64, picture, rows, same, write

from inlay.serve.batching import Batcher
from inlay.serve.hosting import host
from inlay.serve.settings import ServiceSettings
from inlay.serve.web import create_app

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SEED = 19
PATHS = (
    "/predict",
    "/predict",
    "/predict",
    "/predict",
    "/tasks",
    "/tasks/cola",
    "/health",
    "/metrics",
    "/\ud83d",
    "//",
    "",
)
ALLOWED = {200, 201, 307, 400, 403, 404, 405, 409, 413, 415, 422}


class App:
    """An application with its batcher, asked as a server asks it."""

    def __init__(self, folder: Path) -> None:
        self.batcher = Batcher(host(folder, batch=16), max_batch=16, max_wait=0.0, max_queue=64)
        self.app = create_app(self.batcher, ServiceSettings(port=0, max_body=50_000, max_queue=64))

    def ask(
        self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> tuple[int, bytes]:
        """The status and the body."""
        if headers is None:
            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode("utf-8", "surrogatepass"), "query_string": b"", "root_path": ""}
        scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        sent: list[Any] = []

        async def run() -> None:
            parts = [body[: len(body) // 2], body[len(body) // 2 :]]

            async def receive() -> Any:
                if parts:
                    return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
                await asyncio.sleep(3600)  # the client waits for its answer
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            await self.app(scope, receive, send)

        asyncio.run(run())
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, App]]:
    place = tmp_path_factory.mktemp("fuzz")
    found = {"texts": App(write(place, TEXTS)), "images": App(write(place, IMAGES, "vit"))}
    yield found
    for each in found.values():
        each.batcher.close()


def good(kind: str, rng: random.Random) -> Any:
    if kind == "images":
        file = picture((rng.randrange(256), 10, 10))
        return {"task": rng.choice(list(IMAGES)), "image": in_base64(file), "id": rng.randrange(9)}
    found = rows(8)
    return rng.choice(found) if rng.random() < 0.7 else found[: rng.randrange(1, 8)]


def damaged(rng: random.Random, kind: str) -> tuple[str, str, bytes, list[tuple[bytes, bytes]]]:
    """A method, a path, a body and headers, some of them not what they should be."""
    body = good(kind, rng)
    if kind == "images" and rng.random() < 0.5:
        body["image"] = in_base64(mutate_bytes(picture((1, 2, 3)), rng)[0])
    path = rng.choice(PATHS)
    if path.startswith("/tasks"):
        body = {"task": rng.choice(["cola", "x"]), "adapter": rng.choice(["x", "../..", "/etc", ".", ""])}
    if rng.random() < 0.8:
        body = mutate_json(body, rng)[0]
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        data = mutate_bytes(data, rng)[0]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    if rng.random() < 0.2:
        odd = str(odd_value(rng)).encode("utf-8", "surrogatepass")[:200]
        at = rng.randrange(3)
        headers[at] = (headers[at][0], odd)
    method = rng.choice(("POST", "POST", "POST", "GET", "PUT", "OPTIONS")) if path != "/tasks/cola" else "GET"
    return method, path, data, headers


def run(count: int, apps: dict[str, App]) -> Counter[int]:
    statuses: Counter[int] = Counter()
    expected = {kind: json.loads(app.ask("POST", "/predict", sample(kind))[1]) for kind, app in apps.items()}
    for number, rng in cases(SEED, count):
        kind = "texts" if rng.random() < 0.8 else "images"
        method, path, data, headers = damaged(rng, kind)
        what = f"case {number}: {kind}, {method} {path!r} {headers} {data[:300]!r}"
        try:
            status, said = apps[kind].ask(method, path, data, headers)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        assert status in ALLOWED, f"{what}: {status} {said[:300]!r}"
        if status >= 400 and method != "HEAD":
            assert json.loads(said)["error"], what
            assert str(apps[kind].batcher.hosted.folder.parent.parent).encode() not in said, what
        statuses[status] += 1
        if number % 25 == 0:
            for name, app in apps.items():
                found = json.loads(app.ask("POST", "/predict", sample(name))[1])
                assert same(found, expected[name]), f"after {what}"
                assert app.batcher.waiting == 0, f"after {what}"
    return statuses


def sample(kind: str) -> bytes:
    return json.dumps(good(kind, random.Random(SEED)) if kind == "images" else rows(1)[0]).encode()


def test_some_damaged_requests(apps: dict[str, App]) -> None:
    statuses = run(1000, apps)
    assert statuses[200] > 40
    assert statuses[400] > 100


@pytest.mark.slow
def test_many_damaged_requests(apps: dict[str, App]) -> None:
    assert run(10_000, apps)[200] > 400
