"""What a single client can cost the others: characters, pixels, connections, time, lines of log."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hosts import IMAGES, TEXTS, call, in_base64, picture, until, write
from PIL import Image
from typer.testing import CliRunner

from inlay import InlayError
from inlay.cli.app import app
from inlay.serve import connections
from inlay.serve.hosting import ManyTasks, host
from inlay.serve.reading import Limits, read
from inlay.serve.refusals import Refusal, without_paths
from inlay.serve.running import Quota, serving
from inlay.serve.settings import ServiceSettings
from inlay.tasks import TaskSchema

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PATIENCE = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits")


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return write(place, TEXTS)


def connected(address: str) -> socket.socket:
    name, port = address.removeprefix("http://").split(":")
    return socket.create_connection((name, int(port)), timeout=PATIENCE)


def heard(connection: socket.socket) -> bytes:
    """All that is said until the other end hangs up."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(4096):
            parts.append(part)
    return b"".join(parts)


# ---- texts


@pytest.mark.parametrize(
    ("schema", "limits", "most"),
    [
        (TEXTS["cola"], Limits(), 20_000),
        (
            TaskSchema("long", "classification", ("sentence",), ("accuracy",), ("a", "b"), max_length=512),
            Limits(),
            51_200,
        ),
        (TEXTS["cola"], Limits(characters=50), 50),
    ],
)
def test_a_text_is_measured_before_it_is_tokenised(schema: TaskSchema, limits: Limits, most: int) -> None:
    given = {"sentence": "w" * most}
    assert read(given, {"cola": schema}, limits).load == 0.25
    with pytest.raises(
        Refusal, match=f"{most + 1:,} characters; the task '{schema.name}' reads at most {most:,}"
    ) as no:
        read({"sentence": "w" * (most + 1)}, {schema.name: schema}, limits)
    assert no.value.status == 413


def test_all_fields_of_a_text_are_measured_together() -> None:
    halves = {"premise": "w" * 30, "hypothesis": "w" * 30}
    with pytest.raises(Refusal, match="60 characters"):
        read(halves, {"cb": TEXTS["cb"]}, Limits(characters=50))


class Counting(ManyTasks):
    """Takes note of the characters in each batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, model=None, only=None, batch=64)
        self.go = threading.Event()
        self.batches: list[list[str]] = []

    def answer(self, requests: Any) -> list[dict[str, Any]]:
        self.batches.append([each.row["sentence"] for each in requests])
        assert self.go.wait(PATIENCE)
        return super().answer(requests)


def test_long_texts_of_one_client_do_not_hold_up_another(folder: Path) -> None:
    hosted = Counting(folder)
    long = [{"task": "cola", "sentence": "w6 " * 30}] * 40
    with (
        serving(hosted, ServiceSettings(port=0, max_wait=0, max_characters=100)) as address,
        ThreadPoolExecutor(3) as pool,
    ):
        first = pool.submit(call, address, "/predict", {"task": "cola", "sentence": "w6"})
        until(lambda: len(hosted.batches) == 1)
        heavy = pool.submit(call, address, "/predict", long)
        until(lambda: call(address, "/health")[1]["waiting"] == 40)
        light = pool.submit(call, address, "/predict", {"task": "cola", "sentence": "w7"})
        until(lambda: call(address, "/health")[1]["waiting"] == 41)
        hosted.go.set()
        assert light.result()[0] == first.result()[0] == 200
        assert [each["label"] for each in heavy.result()[1]]
    # The late row left with the first four of the forty.
    assert "w7" in hosted.batches[1]
    assert max(sum(map(len, batch)) for batch in hosted.batches) <= 4 * 100


@pytest.mark.parametrize("value", [None, {"a": "b"}, ["w6"], [["w6"]], {}], ids=str)
def test_what_is_not_text_is_not_read_as_text(value: Any) -> None:
    for task, field in (("cola", "sentence"), ("cb", "premise")):
        given = {"task": task, "hypothesis": "w6"} | {field: value}
        with pytest.raises(Refusal, match=f"'{field}'") as refusal:
            read(given, TEXTS, Limits())
        assert refusal.value.status == 400


def test_numbers_are_text_and_words_may_come_in_a_list() -> None:
    assert read({"task": "cola", "sentence": 7}, TEXTS, Limits()).request.row == {"sentence": "7"}
    tags = TaskSchema("tags", "token-classification", ("tokens",), ("f1",), ("O", "B-x"))
    assert read({"tokens": ["w6", "w7"]}, {"tags": tags}, Limits()).request.row == {"tokens": ["w6", "w7"]}
    with pytest.raises(Refusal, match="an object"):
        read({"tokens": ["w6", {}]}, {"tags": tags}, Limits())


# ---- pictures


def test_a_picture_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("L", (5001, 5000)).save(file, "PNG")
    small = in_base64(picture((9, 9, 9)))
    Image.init()  # some of Pillow's readers build an image of their own when they are imported
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(Refusal, match="25,005,000 pixels; at most 25,000,000") as refusal:
        read({"image": in_base64(file.getvalue())}, {"tone": IMAGES["tone"]}, Limits())
    assert refusal.value.status == 413
    # As many in one batch as one of the largest would be.
    assert read({"image": small}, {"tone": IMAGES["tone"]}, Limits(pixels=960)).load == 0.5


# ---- connections


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[str]:
    settings = ServiceSettings(port=0, read_timeout=2)
    with serving(host(folder, only=["cola"], batch=4), settings) as found:
        yield found


BODY = json.dumps({"sentence": "w6 w7"}).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALVES = {
    "nothing": b"",
    "a line": HEAD[:20],
    "headers": HEAD,
    "a body": HEAD + b"Content-Length: 1000\r\n\r\n" + BODY,
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n",
}


def test_what_is_sent_by_half_is_given_up(hasty: str) -> None:
    with contextlib.ExitStack() as stack:
        held = {what: stack.enter_context(connected(hasty)) for what in HALVES}
        for what, connection in held.items():
            connection.sendall(HALVES[what])
        for what, connection in held.items():
            said = heard(connection)
            assert said.startswith(b"HTTP/1.1 408 "), what
            assert b"within 2 seconds" in said
    assert call(hasty, "/predict", {"sentence": "w6 w7"})[0] == 200


def test_a_second_request_on_a_connection_has_its_time_too(hasty: str) -> None:
    connection = http.client.HTTPConnection(hasty.removeprefix("http://"), timeout=PATIENCE)
    for _ in range(2):
        connection.request("POST", "/predict", BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        response.read()
    connection.sock.sendall(HEAD[:20])
    assert heard(connection.sock).startswith(b"HTTP/1.1 408 ")
    connection.close()


def test_bytes_that_drip_do_not_buy_time(hasty: str) -> None:
    with connected(hasty) as connection:
        connection.settimeout(0.1)
        for byte in HEAD * 10:
            try:
                connection.sendall(bytes([byte]))
                if connection.recv(4096).startswith(b"HTTP/1.1 408 "):
                    return
            except TimeoutError:
                continue
    pytest.fail("it took all the bytes that came")


def test_so_many_connections_and_no_more(folder: Path) -> None:
    settings = ServiceSettings(port=0, max_connections=6, max_per_client=4, read_timeout=300)
    with serving(host(folder, only=["cola"], batch=4), settings) as address, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(address)) for _ in range(4)]
        said = heard(stack.enter_context(connected(address)))
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"You have 4 connections" in said
        held[0].close()
        until(lambda: call(address, "/predict", {"sentence": "w6"})[0] == 200)
    with serving(
        host(folder, only=["cola"], batch=4),
        ServiceSettings(port=0, max_connections=3, max_per_client=3, read_timeout=300),
    ) as address:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connected(address))
            assert b"There are 3 connections" in heard(stack.enter_context(connected(address)))
        until(lambda: call(address, "/predict", {"sentence": "w6"})[0] == 200)


def test_no_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 4096))
    assert connections.limit_connections(1024) == 512 - connections.SPARE
    assert connections.limit_connections(100) == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connections.limit_connections(1024) == 1024


# ---- what is said


def test_a_flood_of_log_is_counted_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("inlay.serve.running.monotonic", lambda: now[0])
    logger, said = logging.Logger("flood"), io.StringIO()
    logger.addHandler(logging.StreamHandler(said))
    logger.addFilter(Quota(most=3))
    for i in range(1000):
        logger.error("line %d", i)
    assert said.getvalue().splitlines() == ["line 0", "line 1", "line 2"]
    now[0] = 61.0
    logger.error("line %d", 1000)
    logger.error("and on")
    assert said.getvalue().splitlines()[3:] == ["line 1000 [before this, 997 records were left out]", "and on"]


def test_the_logs_of_a_service_are_bounded(folder: Path) -> None:
    watched = [logging.getLogger(name) for name in ("asyncio", "uvicorn.error", "inlay.serve")]
    before = [list(logger.filters) for logger in watched]
    with serving(host(folder, only=["cola"], batch=4), ServiceSettings(port=0)):
        for logger, had in zip(watched, before, strict=True):
            (new,) = (each for each in logger.filters if each not in had)
            assert isinstance(new, Quota)
    assert [logger.filters for logger in watched] == before


def test_no_error_tells_where_things_lie(folder: Path, place: Path) -> None:
    damaged = place / "damaged one"
    damaged.mkdir()
    (damaged / "tasks.json").write_text("{")
    with serving(host(folder, batch=4), ServiceSettings(port=0, add_from=place)) as address:
        for adapter in ("damaged one", "nowhere", "../other", "bert-model"):
            status, said = call(address, "/tasks", {"task": "new", "adapter": adapter})
            assert status in (400, 403)
            assert str(place) not in said["error"]
            assert str(place.parent) not in said["error"]
            assert adapter.rpartition("/")[2] in said["error"]
        assert str(place) not in json.dumps(call(address, "/tasks")[1])
        assert "`GET /tasks` lists them" in call(address, "/predict", {"task": "x"})[1]["error"]
    assert without_paths("see /usr/lib/python3.11/x.py.") == "see x.py."
    assert without_paths("DELETE /tasks/sst, http://127.0.0.1:8000/a/b and a/b") == (
        "DELETE /tasks/sst, http://127.0.0.1:8000/a/b and a/b"
    )
    assert without_paths("GET /tasks, 1/2, /runs/x and /runs2", [Path("/"), Path("/runs")]) == (
        "GET /tasks, 1/2, runs/x and /runs2"
    )


# ---- the token


def test_a_token_is_never_an_argument(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-enough-letters"
    arguments = ["serve", "--adapter", str(folder), "--host", "0.0.0.0", "--port", "0"]
    taken: list[ServiceSettings] = []
    monkeypatch.setattr("inlay.serve.running.serve", lambda adapter, settings, **_: taken.append(settings))
    for more, says in (
        (["--token", token], "--token-file"),
        ([f"--token={token}"], "INLAY_TOKEN"),
        (["--token-file", str(tmp_path / "none")], "cannot be read"),
        ([], "--token-file"),
    ):
        found = CliRunner().invoke(app, [*arguments, *more])
        assert isinstance(found.exception, InlayError)
        assert says in str(found.exception)
        assert token not in str(found.exception)
    assert CliRunner().invoke(app, arguments, env={"INLAY_TOKEN": token}).exit_code == 0
    file = tmp_path / "token"
    file.write_text(f"{token}-2\n")
    given = [*arguments, "--token-file", str(file)]
    assert CliRunner().invoke(app, given, env={"INLAY_TOKEN": token}).exit_code == 0
    assert [each.token for each in taken] == [token, f"{token}-2"]
    assert "--token " not in CliRunner().invoke(app, ["serve", "--help"]).output


@pytest.mark.parametrize(
    "wrong",
    [{"max_characters": 0}, {"max_pixels": 0}, {"max_connections": 0}, {"max_per_client": 0}, {"read_timeout": 0}],
    ids=str,
)
def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InlayError, match=next(iter(wrong))):
        ServiceSettings(**wrong)
