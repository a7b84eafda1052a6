"""The service over real HTTP: answers as offline, under load, with bad requests, while tasks come and go."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hosts import IMAGES, TEXTS, WRITTEN, call, in_base64, picture, rows, same, until, write

from inlay import InlayError
from inlay.serve.batching import FAILING, Batcher
from inlay.serve.hosting import ManyTasks, host
from inlay.serve.running import serving, started
from inlay.serve.settings import ServiceSettings
from inlay.training import predict
from inlay.workflow.answer import Request, Tasks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKEN = "a-token-of-enough-letters"
ANY = ServiceSettings(port=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return write(place, TEXTS)


@pytest.fixture(scope="module")
def offline(folder: Path) -> Tasks:
    return Tasks(folder)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """One service for all tests that leave it as it was."""
    with serving(host(folder, batch=64), ServiceSettings(port=0, max_body=20_000)) as found:
        yield found


def answers(tasks: Tasks, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return tasks.answer([tasks.request(each) for each in given])


class Slow(ManyTasks):
    """Takes its time, and can be held."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, model=None, only=None, batch=64)
        self.go = threading.Event()
        self.sizes: list[int] = []

    def answer(self, requests: Any) -> list[dict[str, Any]]:
        self.sizes.append(len(requests))
        assert self.go.wait(300)
        return super().answer(requests)


# ---- answers


def test_two_hundred_clients_at_once(address: str, offline: Tasks) -> None:
    given = rows(400)
    expected = answers(offline, given)
    together = threading.Barrier(200, timeout=60)

    def client(number: int) -> list[tuple[int, Any]]:
        together.wait()
        return [call(address, "/predict", given[i]) for i in (number, number + 200)]

    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(client, range(200)))
    for number, pair in enumerate(found):
        for i, (status, said) in zip((number, number + 200), pair, strict=True):
            assert status == 200, said
            assert same(said, expected[i]), (said, expected[i])
    _, counted = call(address, "/metrics")
    batches = int(_value(counted, "inlay_batch_rows_count"))
    assert _value(counted, "inlay_batch_rows_sum") >= 400
    assert batches < 200  # rows were gathered


def test_a_list_has_its_answers_in_order_and_its_own_errors(address: str, offline: Tasks) -> None:
    given = rows(9)
    bad = [{"task": "nope"}, {"sentence": "w6"}, 7, {"task": "cola"}, {"task": "cola", "sentence": "\ud800"}]
    status, said = call(address, "/predict", [bad[0], *given, *bad[1:]])
    assert status == 200
    for found, expected in zip(said[1:10], answers(offline, given), strict=True):
        assert same(found, expected)
    refused = [said[0], *said[10:]]
    assert [each["status"] for each in refused] == [404, 400, 400, 400, 400]
    assert "cb, cola, sst, stsb" in refused[0]["error"]
    assert "sentence" in refused[3]["error"]
    assert call(address, "/predict", []) == (200, [])


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"task": "colla", "sentence": "w6"}, 404, "'cola'"),
        ({"sentence": "w6"}, 400, "names no 'task'"),
        ({"task": ["cola"], "sentence": "w6"}, 400, "names no 'task'"),
        ({"task": "cola"}, 400, "'sentence'"),
        ({"task": "cola", "sentence": {"body": "w6"}}, 400, "'sentence' holds an object, not a text"),
        ({"task": "cola", "sentence": ["w6"]}, 400, "'sentence' holds a list of 1, not a text"),
        ({"task": "cola", "sentence": None}, 400, "'sentence' is missing"),
        (b"{", 400, "cannot be read"),
        (b'"cola"', 400, "cannot be read"),
        (b'{"task": "cola", "sentence": "w6", "x": NaN}', 400, "number"),
        (b"[" * 9000, 400, "body"),
        ({"task": "cola", "sentence": "w6 " * 9000}, 413, "20,000 bytes"),
        ([{"task": "cola", "sentence": "w"}] * 1025, 413, "bytes"),
    ],
)
def test_a_bad_request_has_one_clear_error(address: str, body: Any, status: int, says: str) -> None:
    found, said = call(address, "/predict", body)
    assert found == status, said
    assert says in said["error"]
    assert call(address, "/health")[1]["status"] == "ok"


@pytest.mark.parametrize("depth", [100, 700, 850, 930, 985, 2000])
def test_lists_within_lists_never_break_the_service(address: str, depth: int) -> None:
    nested = '{"task": "cola", "sentence": "w6", "x": ' + "[" * depth + "]" * depth + "}"
    status, said = call(address, "/predict", nested.encode())
    assert status == 200 if depth == 100 else status in (200, 400), said


def test_a_body_that_does_not_say_its_size_is_cut_off_too(address: str) -> None:
    name, port = address.removeprefix("http://").split(":")
    head = f"POST /predict HTTP/1.1\r\nHost: {name}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((name, int(port)), timeout=30) as connection:
        connection.sendall(
            head.encode() + b"Transfer-Encoding: chunked\r\n\r\n7530\r\n" + b" " * 30000 + b"\r\n0\r\n\r\n"
        )
        assert b" 413 " in connection.recv(4096).partition(b"\r\n")[0] + b" "


def test_only_what_says_it_is_json_is_read(address: str) -> None:
    # A page in a browser may send plain text to any address without asking.
    status, _ = call(address, "/predict", rows(1)[0], headers={"Content-Type": "text/plain"})
    assert status == 400


def test_the_other_pages(address: str) -> None:
    status, listed = call(address, "/tasks")
    assert status == 200
    assert listed["method"] == "multi-lora"
    by_name = {each["task"]: each for each in listed["tasks"]}
    assert by_name["cb"]["fields"] == ["premise", "hypothesis"]
    assert by_name["cb"]["labels"] == ["yes", "no", "maybe"]
    assert call(address, "/nowhere")[0] == 404
    assert call(address, "/predict")[0] == 405
    call(address, "/predict", rows(1)[0])
    _, text = call(address, "/metrics")
    assert _value(text, 'inlay_responses_total{path="/predict",status="200"}') >= 1
    assert _value(text, "inlay_tasks") == 4
    assert _value(text, 'inlay_batch_rows_bucket{le="+Inf"}') == _value(text, "inlay_batch_rows_count")
    assert "/nowhere" not in text


def test_a_task_that_failed_in_training_says_so(tmp_path: Path) -> None:
    why = "the loss is not a finite number at step 3; its parameters are those from before that"
    folder = write(tmp_path, {name: TEXTS[name] for name in ("cola", "cb")}, failed={"cb": why})
    hosted = host(folder, batch=8)
    with contextlib.closing(ANY.bind()) as bound:
        batcher = Batcher(hosted, max_batch=8, max_wait=0.0, max_queue=8)
        first, second = started(batcher, ANY, bound).splitlines()
        batcher.close()
    assert "2 tasks: cola, cb" in first
    assert second == f"cb failed in training: {why}"
    cola, cb = rows(2, ("cola", "cb"))
    with serving(hosted, ANY) as address:
        assert "failed_in_training" not in call(address, "/predict", cola)[1]
        assert call(address, "/predict", cb)[1]["failed_in_training"] == why
        listed = {each["task"]: each for each in call(address, "/tasks")[1]["tasks"]}
        assert "failed_in_training" not in listed["cola"]
        assert listed["cb"]["failed_in_training"] == why
        call(address, "/tasks/cb", method="DELETE")
        assert hosted.failed == {}
        status, told = call(address, "/tasks", {"task": "cb"})
        assert (status, told["failed_in_training"]) == (201, why)
        assert call(address, "/predict", cb)[1]["failed_in_training"] == why


# ---- who may


def test_a_token(folder: Path) -> None:
    with serving(host(folder, only=["cola"], batch=4), ServiceSettings(port=0, token=TOKEN)) as address:
        asked = {"sentence": "w6 w7"}  # the only task need not be named
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            status, said = call(address, "/predict", asked, headers=headers)
            assert status == 401
            assert "Bearer" in said["error"]
        assert call(address, "/tasks")[0] == call(address, "/metrics")[0] == 401
        assert call(address, "/health")[0] == 200
        status, said = call(address, "/predict", asked, headers={"Authorization": f"Bearer {TOKEN}"})
        assert status == 200
        assert said["label"] in ("no", "yes")


def test_without_a_token_only_this_machine(address: str) -> None:
    with pytest.raises(InlayError, match="INLAY_TOKEN"):
        ServiceSettings(host="0.0.0.0")
    with pytest.raises(InlayError, match="at least 16"):
        ServiceSettings(token="short")
    assert ServiceSettings(host="0.0.0.0", token=TOKEN).token == TOKEN
    assert ServiceSettings(host="localhost").is_local
    # Another site's name that was made to point here.
    assert call(address, "/tasks", headers={"Host": "evil.example:80"})[0] == 403
    assert call(address, "/tasks", headers={"Host": "LOCALHOST:80"})[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_that_does_not_start_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("no sockets today")

    monkeypatch.setattr("uvicorn.Server.startup", broken)
    with pytest.raises(InlayError, match="did not start"), serving(host(folder, only=["cola"], batch=4), ANY):
        pass


def test_a_port_that_is_taken(address: str) -> None:
    with pytest.raises(InlayError, match="another --port"):
        ServiceSettings(port=int(address.rpartition(":")[2])).bind()


# ---- too much, too late


def test_a_full_queue_refuses_and_loses_nothing(folder: Path, offline: Tasks) -> None:
    hosted = Slow(folder)
    given = rows(30)
    with (
        serving(hosted, ServiceSettings(port=0, max_batch=4, max_queue=8, max_wait=0)) as address,
        ThreadPoolExecutor(30) as pool,
    ):
        asked = [pool.submit(call, address, "/predict", each) for each in given]
        until(lambda: sum(each.done() for each in asked) >= 30 - 12)
        assert call(address, "/health")[1]["waiting"] <= 8
        assert call(address, "/predict", given[:9])[0] == 413  # more at once than ever fits
        hosted.go.set()
        found = [each.result() for each in asked]
        expected = answers(offline, given)
        refused = [said["error"] for status, said in found if status == 503]
        assert 18 <= len(refused) <= 30 - 8
        assert "full" in refused[0]
        for i, (status, said) in enumerate(found):
            assert status == 503 or same(said, expected[i])
        assert max(hosted.sizes) <= 4
        assert call(address, "/predict", given[0])[0] == 200


def test_what_has_waited_too_long_or_is_not_wanted_any_more(folder: Path) -> None:
    hosted = Slow(folder)
    with serving(hosted, ServiceSettings(port=0, timeout=1.5, max_wait=0, max_batch=1)) as address:
        status, said = call(address, "/predict", rows(1)[0])
        assert status == 504
        assert "1.5 seconds" in said["error"]
        hosted.go.set()
    # A client that goes away leaves the queue.
    hosted = Slow(folder)
    with (
        serving(hosted, ServiceSettings(port=0, timeout=300, max_wait=0, max_batch=1)) as address,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(call, address, "/predict", rows(1)[0])
        until(lambda: hosted.sizes == [1])
        name, port = address.removeprefix("http://").split(":")
        body = json.dumps(rows(1)[0]).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: {name}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((name, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: call(address, "/health")[1]["waiting"] == 1)
        until(lambda: 'status="499"' in call(address, "/metrics")[1])
        hosted.go.set()
        until(lambda: _value(call(address, "/metrics")[1], "inlay_rows_cancelled_total") == 1)
        assert first.result()[0] == 200
        assert call(address, "/predict", rows(1)[0])[0] == 200
        assert hosted.sizes == [1, 1]


class Picky(ManyTasks):
    """Stumbles over a word, as a model may over what nobody thought of."""

    def answer(self, requests: Any) -> list[dict[str, Any]]:
        if any("w13" in str(each.row) for each in requests):
            raise RuntimeError("never seen")
        found = super().answer(requests)
        return [each | ({"score": float("nan")} if "w14" in str(each) else {}) for each in found]


def test_a_row_that_breaks_a_batch_harms_no_other(folder: Path, offline: Tasks) -> None:
    given = [{"task": "cola", "sentence": f"w{i}"} for i in range(5, 25)]
    picky = Picky(folder, model=None, only=None, batch=64)
    with serving(picky, ServiceSettings(port=0, max_wait=0.05)) as address:
        status, said = call(address, "/predict", given)
        assert status == 200
        for each, expected in zip(said, answers(offline, given), strict=True):
            if expected["sentence"] in ("w13", "w14"):
                assert each["status"] == 500
            else:
                assert same(each, expected)
        assert "RuntimeError" in said[8]["error"]
        assert "never seen" not in said[8]["error"]
        for _ in range(FAILING):
            assert call(address, "/health")[0] == 200
            assert call(address, "/predict", given[8])[0] == 500
        status, said = call(address, "/health")
        assert status == 503
        assert said["status"] == "failing"
        assert call(address, "/predict", given[0])[0] == 200
        assert call(address, "/health")[1]["status"] == "ok"


def test_what_is_refused_or_fails_is_counted(folder: Path) -> None:
    good, bad, broken = [{"task": "cola", "sentence": word} for word in ("w6", ["w6"], "w13")]
    with serving(Picky(folder, model=None, only=None, batch=64), ServiceSettings(port=0)) as address:

        def counted() -> dict[str, float]:
            text = call(address, "/metrics")[1]
            return {
                status: _value(text, name)
                for status in ("400", "404", "405", "500")
                if (name := f'inlay_errors_total{{status="{status}"}}') in text
            }

        assert call(address, "/predict", good)[0] == call(address, "/predict", [good])[0] == 200
        assert call(address, "/nowhere")[0] == 404  # nothing was asked of the model
        assert counted() == {}
        assert call(address, "/predict", bad)[0] == 400
        assert call(address, "/predict", {"task": "nope"})[0] == 404
        assert call(address, "/predict", broken)[0] == 500
        assert counted() == {"400": 1, "404": 1, "500": 1}
        assert [each.get("status") for each in call(address, "/predict", [good, bad, broken])[1]] == [None, 400, 500]
        assert call(address, "/predict", b"{")[0] == 400
        assert counted() == {"400": 3, "404": 1, "500": 2}


# ---- tasks that come and go


@pytest.mark.parametrize("by", ["multi-lora", "lora"])
def test_tasks_come_and_go_under_load(by: str, place: Path) -> None:
    folder = write(place, TEXTS, by=by)
    offline, given = Tasks(folder), rows(40)
    expected = answers(offline, given)
    stop = threading.Event()
    wrong: list[Any] = []
    seen = {200: 0, 404: 0}

    def client(number: int) -> None:
        turn = number
        while not stop.is_set():
            i = turn % len(given)
            status, said = call(address, "/predict", given[i])
            fine = same(said, expected[i]) if status == 200 else status == 404 and given[i]["task"] == "sst"
            if not fine or (status == 404 and "Known: cb, cola, stsb." not in said["error"]):
                wrong.append((status, said))
            seen[status] = seen.get(status, 0) + 1
            turn += 1

    with (
        serving(host(folder, batch=16), ServiceSettings(port=0, max_batch=16)) as address,
        ThreadPoolExecutor(8) as pool,
    ):
        running = [pool.submit(client, number) for number in range(8)]
        try:
            for _ in range(5):
                assert call(address, "/tasks/sst", method="DELETE") == (
                    200,
                    {"removed": "sst", "tasks": ["cb", "cola", "stsb"]},
                )
                missed = seen[404]
                until(lambda missed=missed: seen[404] > missed)
                status, said = call(address, "/tasks", {"task": "sst"})
                assert status == 201, said
                assert said["tasks"] == ["cb", "cola", "sst", "stsb"]
                answered = seen[200]
                until(lambda answered=answered: seen[200] > answered + 20)
        finally:
            stop.set()
            for each in running:
                each.result()
        assert not wrong


def test_what_cannot_be_added(folder: Path, place: Path, offline: Tasks, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = write(place, {"new": TEXTS["cb"]} | {"sst": TEXTS["sst"]})
    damaged = place / "damaged"
    shutil.copytree(other, damaged)
    weights = damaged / "new" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    stranger = write(tmp_path, {"new": TEXTS["cb"], "far": TEXTS["sst"]}, "roberta")
    shutil.copytree(stranger, place / "stranger")
    shutil.copytree(stranger, tmp_path / "outside")
    with serving(host(folder, batch=16), ServiceSettings(port=0, add_from=place)) as address:
        for body, status, says in (
            ({"task": "sst"}, 409, "already"),
            ({"task": "what"}, 400, "Known: cb, cola, sst, stsb"),
            ({"task": "new", "adapter": "nowhere"}, 400, "tasks.json"),
            ({"task": "new", "adapter": "\0"}, 400, ""),
            ({"task": "new", "adapter": str(tmp_path / "outside")}, 403, "--add-from"),
            ({"task": "new", "adapter": "../outside"}, 403, "--add-from"),
            ({"task": "new", "adapter": "damaged"}, 400, "SHA-256"),
            ({"task": "new", "adapter": "stranger"}, 400, "another base model"),
            ({"task": "new", "adapters": "new-sst"}, 400, "adapters"),
            ({}, 400, "task"),
        ):
            found, said = call(address, "/tasks", body)
            assert found == status, said
            assert says in said["error"]
        assert len(call(address, "/tasks")[1]["tasks"]) == 4
        assert call(address, "/tasks", {"task": "new", "adapter": "new-sst"})[0] == 201
        asked = {"task": "new", "premise": "w6", "hypothesis": "w7 w8"}
        assert same(call(address, "/predict", asked)[1], answers(Tasks(other), [asked])[0])
        given = rows(8)
        for each, expected in zip(call(address, "/predict", given)[1], answers(offline, given), strict=True):
            assert same(each, expected)
        assert call(address, "/tasks/nope", method="DELETE")[0] == 404
        for name in ("cb", "cola", "sst", "stsb"):
            assert call(address, f"/tasks/{name}", method="DELETE")[0] == 200
        assert call(address, "/tasks/new", method="DELETE")[0] == 409
        assert same(call(address, "/predict", asked)[1], answers(Tasks(other), [asked])[0])
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- other kinds


def test_pictures(place: Path) -> None:
    folder = write(place, IMAGES, "vit")
    offline = Tasks(folder)
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (0, 0, 0)]
    tasks = ["tone", "hue", "tone", "hue"]
    expected = offline.answer(
        [Request(task, {"task": task}, {"image": picture(c)}) for task, c in zip(tasks, colours, strict=True)]
    )
    with serving(host(folder, batch=16), ANY) as address:
        given = [{"task": t, "image": in_base64(picture(c))} for t, c in zip(tasks, colours, strict=True)]
        given[1]["image"] = f"data:image/png;base64,{given[1]['image']}"
        status, said = call(address, "/predict", given)
        assert status == 200
        assert all(same(each, wanted) for each, wanted in zip(said, expected, strict=True))
        cut = in_base64(picture(colours[0])[:60])
        for image, says in (
            ("/etc/passwd", "base64"),
            (in_base64(b"/etc/passwd"), "not an image"),
            (cut, "image"),
            (3, "base64"),
            (None, "base64"),
        ):
            status, said = call(address, "/predict", [{"task": "tone", "image": image}, given[0]])
            assert said[0]["status"] == 400
            assert says in said[0]["error"]
            assert same(said[1], expected[0])


def test_texts_are_written(place: Path) -> None:
    folder = write(place, WRITTEN, "gpt2", "causal-lm")
    names = tuple(WRITTEN)
    given = [{"task": names[i % 3], "text": " ".join(f"w{i + j}" for j in range(1 + i))} for i in range(9)]
    tasks = Tasks(folder)
    expected = answers(tasks, given)
    # Written in one batch and task by task, each alone.
    for each in expected:
        tasks.model.set_adapter(each["task"])
        row = {"text": each["text"]}
        (text,), _ = predict(tasks.model, tasks.schemas[each["task"]], [row], tasks.processor, tasks.spec)
        assert each["predicted_text"] == text.strip()
    assert len({each["predicted_text"] for each in expected}) > 3
    with serving(host(folder, batch=16), ANY) as address:
        status, said = call(address, "/predict", given)
        assert status == 200
        assert said == expected


# ---- helpers


def _value(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))
