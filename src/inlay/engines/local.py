"""This machine: one run after another in this process, or several at once in processes of their own.

Workers divide the cores and the GPUs evenly among themselves. Each is a process started afresh, not a fork: it has its
own torch, its own CUDA and its own memory. One that dies takes one run with it, which is put on record as failed; a
new one takes its place. Ctrl-C reaches the parent alone, which tells every worker to stop, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from inlay.engines.job import Engine, Job, JobOutcome, Listener, until, work
from inlay.engines.queue import Queue
from inlay.errors import InlayError

# Without the working folder on its path (-P), where a file called torch.py would be run; and with the folder that this
# very inlay was imported from, last, for one that is not installed.
START = "import sys; sys.path.append(sys.argv[1]); from inlay.engines.worker import main; main(*sys.argv[2:])"
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds for a worker to come to a moment at which its run can be resumed
TICK = 0.5


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalEngine(Engine):
    """`workers` runs at once. `cpus` and `gpus` are what each run is given: cores, and a GPU or a part of one."""

    def __init__(self, workers: int = 1, cpus: int | None = None, gpus: float | None = None) -> None:
        if workers < 1:
            raise InlayError(f"workers={workers!r}: give 1 or more.")
        if cpus is not None and not 1 <= cpus * workers <= cores():
            raise InlayError(
                f"{workers} worker{'s' * (workers > 1)} with {cpus} core{'s' * (cpus > 1)} each need {cpus * workers}, "
                f"and there are {cores()}. Give fewer of one or the other."
            )
        self.workers, self.cpus, self.gpus = workers, cpus, gpus
        if sys.platform == "win32" and not self.inside:
            raise InlayError(
                "On Windows runs are made one after another: processes there cannot be given a socket the way our "
                "workers are. Give --workers 1, and neither --cpus nor --gpus; or use WSL."
            )
        self.pool: list[Worker] = []

    @property
    def threads(self) -> int:
        """Threads of each worker: its part of the cores, or fewer where the user says so."""
        mine = self.cpus or max(1, cores() // self.workers)
        given = os.environ.get("OMP_NUM_THREADS", "")
        return min(mine, int(given)) if given.isdecimal() and int(given) else mine

    @property
    def inside(self) -> bool:
        """Whether this process can do it alone."""
        return self.workers == 1 and self.cpus is None and self.gpus is None

    def __enter__(self) -> LocalEngine:
        if not self.inside:
            self.pool = [self.start(index) for index in range(self.workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.pool:
            worker.close()
        self.pool = []

    def start(self, index: int) -> Worker:
        """A new worker."""
        return Worker(
            {
                "index": index,
                "workers": self.workers,
                "threads": self.threads,
                "gpus": self.gpus,
                "parent": os.getpid(),
            }
        )

    def run(self, jobs: list[Job], listener: Listener, deadline: float | None = None) -> list[JobOutcome]:
        """The outcome of every job, in their order."""
        queue = Queue(jobs, listener, deadline)
        if self.inside:
            self._one_by_one(queue, listener, deadline)
            return queue.results()
        if not self.pool:
            raise InlayError("The engine has not been started: use it in a `with` statement.")
        try:
            with terminable():
                self._side_by_side(queue, deadline)
        except BaseException:
            self._stop(queue)
            raise
        return queue.results()

    def _one_by_one(self, queue: Queue, listener: Listener, deadline: float | None) -> None:
        while queue.open:
            number = queue.take()
            if number is None:
                time.sleep(TICK)
                continue
            outcome = work(
                queue.jobs[number],
                step=lambda done, total, number=number: listener.step(number, done, total),  # type: ignore[misc]
                say=lambda line, number=number: listener.say(number, line),  # type: ignore[misc]
                stop=until(deadline),
            )
            queue.settle(number, outcome)

    def _side_by_side(self, queue: Queue, deadline: float | None) -> None:
        with selectors.DefaultSelector() as ready:
            for worker in self.pool:
                ready.register(worker.channel, selectors.EVENT_READ, worker)
            while queue.open:
                for worker in self.pool:
                    if worker.number is None and (number := queue.take()) is not None:
                        worker.give(number, queue.jobs[number], deadline)
                for key, _ in ready.select(TICK):
                    worker = key.data
                    alive = worker.hear(queue)
                    if not alive:
                        ready.unregister(worker.channel)
                        self._replace(worker, queue)
                        ready.register(self.pool[worker.index].channel, selectors.EVENT_READ, self.pool[worker.index])

    def _replace(self, worker: Worker, queue: Queue) -> None:
        """A worker is dead: its run, if it had one, has failed, and another one takes its place."""
        why, number = worker.epitaph(), worker.number
        if not worker.was_ready:
            raise InlayError(f"A worker process could not start. {why}")
        if number is not None:
            if worker.run is not None:
                record_death(queue.jobs[number], worker.run, why)
            queue.settle(number, JobOutcome("failed", worker.run, why, made=True))
        worker.close()
        self.pool[worker.index] = self.start(worker.index)

    def _stop(self, queue: Queue) -> None:
        """Tell every worker to stop, once, and wait until what it does can be resumed."""
        for worker in self.pool:
            worker.stop()
        end = time.monotonic() + PATIENCE
        for worker in self.pool:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is answered as Ctrl-C is: it must reach the workers."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = None
    with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
        earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if earlier is not None:
            signal.signal(signal.SIGTERM, earlier)


@dataclass
class Worker:
    """The parent's end of a worker. `number` is the job it is at, and `run` the name of the run, once it has one."""

    settings: dict[str, Any]
    number: int | None = None
    run: str | None = None
    was_ready: bool = False

    def __post_init__(self) -> None:
        self.index: int = self.settings["index"]
        self.channel, theirs = socket.socketpair()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.unread = b""
        threads = str(self.settings["threads"])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(ROOT), str(theirs.fileno()), json.dumps(self.settings)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )

    def give(self, number: int, job: Job, deadline: float | None) -> None:
        """A job to do."""
        self.number, self.run = number, None
        seconds = None if deadline is None else deadline - time.monotonic()
        with contextlib.suppress(OSError):  # a dead worker is noticed where it is listened to
            self.channel.sendall(json.dumps({"job": job.to_json(), "seconds": seconds}).encode() + b"\n")

    def hear(self, queue: Queue) -> bool:
        """Pass on what the worker says; whether it is alive."""
        try:
            received = self.channel.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        *lines, self.unread = (self.unread + received).split(b"\n")
        for line in lines:
            self._heard(json.loads(line), queue)
        return bool(received)

    def _heard(self, word: dict[str, Any], queue: Queue) -> None:
        if "refused" in word:
            raise InlayError(word["refused"])
        if "ready" in word:
            self.was_ready = True
            return
        assert self.number is not None
        if "step" in word:
            queue.listener.step(self.number, *word["step"])
        elif "opened" in word:
            self.run = word["opened"]
        elif "say" in word:
            queue.listener.say(self.number, word["say"])
        elif "end" in word:
            number, self.number = self.number, None
            queue.settle(number, JobOutcome(**word["end"]))

    def epitaph(self) -> str:
        """Why a worker died, as far as one can tell."""
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with status {code}"
        hint = " Signal 9 is often the kernel's, when memory runs out: fewer workers need less." if code == -9 else ""
        return f"The process that worked on it ended {how}.{hint}" + (f" It said: {last[0]}" if last else "")

    def stop(self) -> None:
        """Ask it to stop, once: a second signal would not wait for a checkpoint."""
        if self.process.poll() is None:
            if self.number is None:
                self.channel.close()
            else:
                self.process.terminate()
                self.channel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let it go; one that does not end by itself is ended."""
        self.channel.close()
        self.errors.close()
        try:
            self.process.wait(5 if self.process.poll() is None else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def record_death(job: Job, name: str, why: str) -> None:
    """Put it on record that a run's process died; not where it is finished, or somebody else's by now."""
    from inlay.records.store import Store, load

    store = Store(job.out)
    known = load(store.out / name)
    with contextlib.suppress(InlayError), store.open(known.spec, known.digest) as run:
        if run.status != "finished":
            run.fail(why)
