"""Runs on a Ray cluster: one that is there already, or a small one on this machine for as long as the command lasts.

The runs' folder stays at home. For each run this process holds the lock, sends a parcel there (see parcels.py) and
unpacks what comes back as it comes: log, metrics, every new checkpoint, at last the result. No disk need be shared. A
worker or a node that is lost costs the work since its last checkpoint; the run goes on elsewhere, from there. Models
and data are found by their names or paths: every node must see the same, and a run whose data turn out to differ from
those at home is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inlay.engines import parcels
from inlay.engines.job import Engine, Job, JobOutcome, Listener, outcome_of, until, work
from inlay.engines.queue import Queue
from inlay.errors import InlayError, first_line
from inlay.records.store import Run, Store, name

TICK = 0.5  # seconds between two looks at a run, there and here
RETRIES = 3  # after lost workers
GRACE = 60.0  # seconds after the deadline for what is away to come home
ANSWER = 5.0  # seconds for an address to answer
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def import_ray() -> Any:
    """Ray itself, or how to get it."""
    try:
        import ray
    except ImportError:
        raise InlayError("The engine ray needs Ray, which is not installed: pip install 'inlay[ray]'.") from None
    return ray


class RayEngine(Engine):
    """As many runs at once as the cluster has room for, with `cpus` cores and `gpus` GPUs each.

    `gpus` None is one where the cluster has any, and none otherwise.
    """

    def __init__(self, address: str | None = None, *, cpus: float = 1.0, gpus: float | None = None) -> None:
        self.address, self.cpus, self.gpus = address, cpus, gpus
        self._ours = False
        self._home: str | None = None
        self._empty: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RayEngine:
        ray = import_ray()
        if not ray.is_initialized():
            self._connect(ray)
        try:
            self._check(ray.cluster_resources())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._ours:
            import_ray().shutdown()
            self._ours = False
        if self._empty is not None:
            self._empty.cleanup()
            self._empty = None

    def _connect(self, ray: Any) -> None:
        quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
        if self.address is not None:
            quiet.pop("include_dashboard")
            if self.address != "auto":
                check_answers(self.address)
        # Ray lets its workers import from the folder that it was started in, before all others: that is an empty one.
        # In a cluster of its own a run works in this process's folder all the same, for paths that begin there.
        self._home = os.getcwd() if self.address is None else None
        self._empty = tempfile.TemporaryDirectory(prefix="inlay-")
        try:
            with contextlib.chdir(self._empty.name):
                ray.init(address=self.address or "local", **quiet)
        except Exception as error:
            raise InlayError(
                f"No Ray cluster at {self.address or 'this machine'}: {first_line(error)} Start one with `ray start "
                "--head`, give its host:port with --address, or leave --address out for one of its own."
            ) from error
        self._ours = True

    def _check(self, there: dict[str, float]) -> None:
        if self.gpus is None:
            self.gpus = 1.0 if there.get("GPU", 0) else 0.0
        for what, each in (("CPU", self.cpus), ("GPU", self.gpus)):
            if each > there.get(what, 0):
                raise InlayError(
                    f"Every run is to have {each:g} {what}, and the cluster has {there.get(what, 0):g} in all. Ask for "
                    f"less with --{what.lower()}s, or add nodes."
                )

    def room(self, ray: Any) -> int:
        """How many runs the cluster can do at once, by what it has now."""
        there = ray.cluster_resources()
        fits = [there.get("CPU", 0) / self.cpus]
        if self.gpus:
            fits.append(there.get("GPU", 0) / self.gpus)
        return max(1, int(min(fits) + 1e-9))

    def run(self, jobs: list[Job], listener: Listener, deadline: float | None = None) -> list[JobOutcome]:
        """The outcome of every job, in their order."""
        ray = import_ray()
        queue = Queue(jobs, listener, deadline)
        away: list[Away] = []
        # A run that the cluster never finds room for does not know when to stop.
        late = until(None if deadline is None else deadline + GRACE)
        send = ray.remote(do).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0, num_returns="streaming", scheduling_strategy="SPREAD"
        )
        try:
            while queue.open and not late():
                while len(away) < self.room(ray) and (number := queue.take()) is not None:
                    away += self._begin(queue, number, send, deadline)
                if not away:
                    time.sleep(TICK)
                    continue
                ready, _ = ray.wait([each.stream for each in away], timeout=TICK, fetch_local=False)
                for each in [each for each in away if each.stream in ready]:
                    if not self._hear(ray, each, queue, send, deadline):
                        away.remove(each)
        finally:
            for each in away:
                ray.cancel(each.stream)
                each.run.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        return queue.results()

    def _begin(self, queue: Queue, number: int, send: Any, deadline: float | None) -> list[Away]:
        """Take a run up: found finished, refused, or away."""
        job, began = queue.jobs[number], time.monotonic()
        try:
            spec, digest = job.load_maker().identify(job.spec)
            run = Store(job.out).open(spec, digest, retry_failed=job.retry_failed)
        except InlayError as error:
            queue.settle(number, outcome_of(error))
            return []
        if run.status == "finished":
            run.close()
            queue.settle(number, JobOutcome("finished", run.id))
            return []
        away = Away(number, run, job.maker, began, self._home)
        away.go(send, deadline)
        return [away]

    def _hear(self, ray: Any, away: Away, queue: Queue, send: Any, deadline: float | None) -> bool:
        """The next word of a run; whether it is still away."""
        try:
            word = ray.get(next(away.stream))
        except StopIteration:
            return self._lost(away, queue, send, deadline, "it ended without a result")
        except ray.exceptions.RayTaskError as error:
            return self._settle(away, queue, JobOutcome("failed", error=first_line(error.cause), made=True))
        except ray.exceptions.RayError as error:
            return self._lost(away, queue, send, deadline, type(error).__name__)
        try:
            parcels.receive(word["parcel"], away.run)
        except InlayError as error:
            return self._settle(away, queue, outcome_of(error))
        for line in word["said"]:
            queue.listener.say(away.number, line)
        if word["step"] is not None:
            queue.listener.step(away.number, *word["step"])
        if word["end"] is None:
            return True
        return self._settle(away, queue, JobOutcome(**word["end"]))

    def _lost(self, away: Away, queue: Queue, send: Any, deadline: float | None, why: str) -> bool:
        """A worker is gone: the run goes on elsewhere from what came home, a few times."""
        away.lost += 1
        away.run.log(f"its worker was lost: {why}")
        if away.lost > RETRIES:
            error = f"Its worker was lost {away.lost} times, the last time because: {why}."
            return self._settle(away, queue, JobOutcome("failed", error=error, made=True))
        queue.listener.say(away.number, f"{away.run.id}: its worker was lost ({why}); it goes on elsewhere")
        away.go(send, deadline)
        return True

    def _settle(self, away: Away, queue: Queue, outcome: JobOutcome) -> bool:
        try:
            if outcome.status == "failed":
                away.run.fail(str(outcome.error))
            elif outcome.status != "finished":
                away.run.interrupt()
        except InlayError as error:
            outcome = JobOutcome("unwritable", error=str(error), made=True)
        away.run.close()
        queue.settle(away.number, replace(outcome, run=away.run.id, seconds=time.monotonic() - away.began))
        return False


@dataclass
class Away:
    """A run on its way. `stream` brings its words home; `place` is the folder to work in, if not the node's own."""

    number: int
    run: Run
    maker: str
    began: float
    place: str | None = None
    stream: Any = None
    lost: int = 0

    def go(self, send: Any, deadline: float | None) -> None:
        """Send it off with what there is of it at home."""
        parcel, checkpoint = parcels.unfinished(self.run.folder)
        seconds = None if deadline is None else deadline - time.monotonic()
        spec = self.run.spec.to_json()
        self.stream = send.remote(spec, self.run.digest, self.maker, parcel, checkpoint, seconds, self.place)


def do(
    spec: dict[str, Any],
    digest: str,
    maker: str,
    parcel: parcels.Parcel,
    checkpoint: str | None,
    seconds: float | None,
    home: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Make a run on this node, from a parcel; its words, as they come: news, parcels, and the end."""
    from inlay.records.spec import Spec

    if home is not None:
        os.chdir(home)
    deadline = None if seconds is None else time.monotonic() + seconds
    made, here = Spec.from_json(spec), socket.gethostname()
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    with tempfile.TemporaryDirectory(prefix="inlay-") as place:
        folder = Path(place) / name(made, digest)
        parcels.unpack(parcel, folder)
        said: list[str] = []
        state: dict[str, Any] = {"step": None, "end": None}
        job = Job(made, place, retry_failed=True, maker=maker)

        def check(found: str) -> None:
            if found != folder.name:
                raise InlayError(f"The data or the model on the node {here} differ from those at home.")

        def run() -> None:
            state["end"] = work(
                job,
                step=lambda done, total: state.update(step=(done, total)),
                say=said.append,
                stop=until(deadline),
                opened=check,
                signals_stop=True,
            )

        worker = threading.Thread(target=run, daemon=True)
        worker.start()
        while worker.is_alive():
            worker.join(TICK)
            news, told = state["step"], [said.pop(0) for _ in range(len(said))]
            sent, newest = parcels.unfinished(folder, but=checkpoint)
            if newest == checkpoint and not told and news is None:
                continue
            checkpoint, state["step"] = newest, None
            yield {"parcel": sent, "said": told, "step": news, "end": None}
        outcome: JobOutcome = state["end"]
        if outcome.status == "unwritable":  # this node's disk, not the one at home
            outcome = JobOutcome("failed", error=f"On the node {here}: {outcome.error}", made=True)
        last = parcels.finished(folder) if outcome.status == "finished" else parcels.unfinished(folder)[0]
        yield {"parcel": last, "said": said, "step": None, "end": outcome.to_json()}


def check_answers(address: str) -> None:
    """A clear error, soon, where nobody answers at an address: Ray itself would try for minutes and then give up hard.

    A cluster's head speaks HTTP/2, and an HTTP/2 server sends its settings first.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    hint = "Start a cluster with `ray start --head`, or leave --address out for one of its own."
    if not host or not port.isdecimal():
        raise InlayError(f"address={address!r} is not auto, host:port or ray://host:port. {hint}")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER) as channel:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            channel.sendall(PREFACE)
            spoke = channel.recv(9)
    except (OSError, OverflowError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else first_line(error)
        raise InlayError(f"Nobody answers at {address} ({why}). {hint}") from None
    if len(spoke) < 4 or spoke[3] != 4:
        raise InlayError(f"What answers at {address} is not a Ray cluster. {hint}")
