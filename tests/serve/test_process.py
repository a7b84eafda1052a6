"""`inlay serve` as a process: started, told to stop, killed, started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hosts import TEXTS, call, rows, same, until, write
from typer.testing import CliRunner

from inlay import InlayError, Spec, predict, tune
from inlay.cli.app import app
from inlay.serve.running import check_installed
from inlay.workflow.answer import Tasks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PATIENCE = 120


@contextmanager
def service(
    folder: Path, *options: str, files: int | None = None, flag: str = "--adapter"
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address, and the line with which it began."""
    command = [sys.executable, "-m", "inlay", "serve", flag, str(folder), "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r" at (http://[^\s;]+)", line):
                yield process, found.group(1), line
                break
        else:
            pytest.fail("".join(said))
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stderr.close()


def test_stopped_killed_and_started_again(tmp_path: Path) -> None:
    folder = write(tmp_path, TEXTS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = rows(60)
    tasks = Tasks(folder)
    expected = tasks.answer([tasks.request(each) for each in given])

    # Killed under load, with a task just removed and another on its way in.
    with service(folder) as (process, address, line):
        assert "4 tasks: cola, cb, stsb, sst" in line
        assert "at most 64 rows, waiting at most 5 ms" in line
        assert same(call(address, "/predict", given[1])[1], expected[1])
        assert call(address, "/tasks/sst", method="DELETE")[0] == 200
        ends = threading.Event()

        def ask(number: int) -> None:
            while not ends.is_set():
                try:
                    call(
                        address,
                        "/tasks" if number == 0 else "/predict",
                        {"task": "sst"} if not number else given[number],
                    )
                except (OSError, http.client.HTTPException):
                    return

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, number) for number in range(4)]
            time.sleep(0.2)
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
            ends.set()
            for each in asked:
                each.result()
        assert process.returncode == -signal.SIGKILL
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    # Started again everything is there; told to stop, it waits for no more and answers what it has taken on.
    with service(folder, "--max-wait", "60000", "--max-batch", "500", "--timeout", "120") as (process, address, _):
        with ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(call, address, "/predict", each) for each in given]
            until(lambda: call(address, "/health")[1]["waiting"] == len(given), seconds=50)
            process.send_signal(signal.SIGTERM)
            for each, wanted in zip(asked, expected, strict=True):
                status, said = each.result()
                assert status == 200
                assert same(said, wanted)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert "stopped: rows answered: 60, in batches: 1" in process.stderr.read()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def answered(address: str, given: dict[str, Any]) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):  # of many that are refused some are cut off
        return call(address, "/predict", given)[0] == 200
    return False


@pytest.mark.slow
def test_half_sent_requests_and_few_descriptors(tmp_path: Path) -> None:
    """Nine hundred clients that never finish, and 256 descriptors: the service says no to most, and goes on."""
    folder = write(tmp_path, TEXTS)
    given = rows(1)[0]
    with service(folder, "--read-timeout", "3", files=256) as (process, address, _), contextlib.ExitStack() as stack:
        name, port = address.removeprefix("http://").split(":")
        for _ in range(900):
            connection = stack.enter_context(socket.create_connection((name, int(port)), timeout=PATIENCE))
            with contextlib.suppress(ConnectionError):  # refused already
                connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-")
        until(lambda: answered(address, given), seconds=PATIENCE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert len(process.stderr.read()) < 10_000


def test_a_run_of_one_task_by_any_method(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    from inlay.serve.hosting import host
    from inlay.serve.running import serving
    from inlay.serve.settings import ServiceSettings

    run = tune(review_spec, tmp_path / "runs", progress=False)
    expected = predict(run, reviews)
    for folder in (run.folder, run.adapter):
        hosted = host(folder, batch=16)
        (name,) = hosted.schemas
        with serving(hosted, ServiceSettings(port=0)) as address:
            status, said = call(address, "/predict", [{"body": each["body"]} for each in expected])
            assert status == 200, said
            for found, wanted in zip(said, expected, strict=True):
                assert found["label"] == wanted["label"]
                assert found["score"] == pytest.approx(wanted["score"], abs=1e-5)
            assert call(address, "/predict", {"task": name, "body": "w6"})[0] == 200
            assert call(address, "/predict", {"task": "other", "body": "w6"})[0] == 404
            for answer in (call(address, "/tasks", {"task": "sst"}), call(address, f"/tasks/{name}", method="DELETE")):
                assert answer[0] == 409
                assert "'bias'" in answer[1]["error"]
    with pytest.raises(InlayError, match="Unknown task 'x'"):
        host(run.folder, only=["x"], batch=4)


def test_mistakes_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, says in (
        (["--adapter", str(tmp_path)], "nothing to serve"),
        (["--adapter", str(tmp_path), "--host", "0.0.0.0"], "INLAY_TOKEN"),
        (["--adapter", str(tmp_path), "--host", "no.such.name.invalid"], "127.0.0.1"),
        (["--adapter", str(tmp_path), "--max-batch", "0"], "max_batch"),
        (["--adapter", str(tmp_path), "--timeout", "0"], "timeout"),
        (["--adapter", str(tmp_path), "--max-wait", "-1"], "max_wait"),
    ):
        found = CliRunner().invoke(app, ["serve", *arguments])
        assert isinstance(found.exception, InlayError)
        assert says in str(found.exception)
    assert "POST   /tasks" in CliRunner().invoke(app, ["serve", "--help"]).output
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as where it is not installed
    with pytest.raises(InlayError, match=r"inlay\[serve\]"):
        check_installed()
