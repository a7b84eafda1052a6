"""A lock is one process's at a time, goes with it, and is not taken for held because somebody looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inlay.records.lock import Busy, Lock, held

HOLD = """
import sys, time
from pathlib import Path
from inlay.records.lock import Lock
Lock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    assert not held(path)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert held(path)
        with pytest.raises(Busy, match=f"process {other.pid} on "):
            Lock(path).acquire()
        other.kill()
    assert not held(path)
    lock = Lock(path)
    lock.acquire()
    assert lock.acquired
    assert held(path)
    lock.release()
    assert not held(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_child_neither_keeps_nor_frees_its_parents_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    lock.acquire()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert held(lock.path)
        lock.release()
        assert not held(lock.path), "the child, which lives on, has no copy of it"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_many_may_look_at_once(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()
    wrong: list[bool] = []

    def look() -> None:
        wrong.extend(held(path) for _ in range(300))

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()
    assert not any(wrong)
    assert len(wrong) == 600


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    lock.acquire()
    lock.path.chmod(0o444)
    assert held(lock.path)
    lock.release()
    assert not held(lock.path)
