"""The local engine with real processes: same records as in one process, a dead worker, a signal, a time that is up."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from inlay import InlayError, Spec, tune
from inlay.engines import JobOutcome, make
from inlay.engines.local import LocalEngine, cores
from inlay.engines.queue import Queue
from inlay.engines.worker import GpuShare, share_of, visible
from inlay.records.store import Store
from inlay.workflow.compare import job_of


class Follower:
    """Notes what is told; `on_step` may interfere."""

    def __init__(self) -> None:
        self.ended: list[JobOutcome] = []
        self.said: list[str] = []
        self.steps: list[tuple[int, int, int]] = []
        self.on_step = lambda number: None

    def begin(self, number: int) -> None: ...

    def step(self, number: int, done: int, total: int) -> None:
        self.steps.append((number, done, total))
        self.on_step(number)

    def say(self, number: int, line: str) -> None:
        self.said.append(line)

    def end(self, number: int, outcome: JobOutcome) -> None:
        self.ended.append(outcome)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_that_die_stop_or_fail_take_nobody_along(workers: int, review_spec: Spec, tmp_path: Path) -> None:
    """One pool, for importing takes long; a single worker with a core of its own is a process of its own too. Two good
    runs in the bits of this process; one that fails; one whose worker is killed; then one that a signal to the parent
    stops where it can be resumed."""
    out, long = str(tmp_path / "runs"), review_spec.with_(max_steps=100_000)
    follower = Follower()
    with LocalEngine(workers, cpus=1) as engine:
        pids = [worker.process.pid for worker in engine.pool]

        def kill(number: int) -> None:
            if number == 3:
                doomed = next(worker for worker in engine.pool if worker.number == 3)
                os.kill(doomed.process.pid, signal.SIGKILL)

        follower.on_step = kill
        specs = [review_spec, review_spec.with_(seed=1), review_spec.with_(settings={"r": 2}), long]
        outcomes = engine.run([job_of(spec, out) for spec in specs], follower)
        assert [each.status for each in outcomes] == ["finished", "finished", "failed", "failed"]
        assert "'r'" in str(outcomes[2].error)
        assert "ended by signal 9 (SIGKILL)" in str(outcomes[3].error)
        assert [worker.process.pid for worker in engine.pool] != pids, "the dead one was replaced"
        killed = Store(out).get(str(outcomes[3].run))
        assert (killed.status, killed.error) == ("failed", outcomes[3].error)

        again = engine.run([job_of(review_spec, out), job_of(long, out)], Follower())
        assert [(each.status, each.made) for each in again] == [("finished", False), ("failed", False)]

        stopper = Follower()
        stopper.on_step = lambda number: os.kill(os.getpid(), signal.SIGTERM) if len(stopper.steps) == 5 else None
        with pytest.raises(KeyboardInterrupt):
            engine.run([job_of(long.with_(seed=2), out)], stopper)
    stopped = next(run for run in Store(out).list() if run.spec.seed == 2)
    assert stopped.status == "interrupted"
    assert list((stopped.folder / "checkpoints").glob("step-*"))
    for spec, outcome in zip(specs[:2], outcomes[:2], strict=True):
        there, here = Store(out).get(str(outcome.run)), tune(spec, tmp_path / "here", progress=False)
        assert there.id == here.id
        assert there.record["files"] == here.record["files"]
        assert there.metrics == here.metrics


def test_asking_for_more_than_there_is(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="cores each need"):
        make("local", workers=cores(), cpus=2)
    with pytest.raises(InlayError, match="give 1 or more"):
        LocalEngine(workers=0)
    for wrong, message in (
        ({"name": "slurm"}, "Unknown engine"),
        ({"address": "auto"}, "is for the engine ray"),
        ({"name": "ray", "workers": 2}, "is for the local engine"),
        ({"cpus": 0.5}, "whole cores"),
        ({"cpus": 0.0}, "more than 0"),
        ({"gpus": -1.0}, "0 or more"),
    ):
        with pytest.raises(InlayError, match=message):
            make(**wrong)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_a_gpu_where_there_is_none_is_one_error(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="there is no GPU here"), make("local", gpus=1.0) as engine:
        engine.run([job_of(review_spec, str(tmp_path / "runs"))], Follower())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("workers", "gpus", "devices", "wanted"),
    [
        (3, None, 0, [GpuShare(None)] * 3),
        (2, 0, 4, [GpuShare(None)] * 2),
        (2, None, 1, [GpuShare(0, 0.5)] * 2),
        (2, 0.5, 1, [GpuShare(0, 0.5)] * 2),
        (3, None, 2, [GpuShare(0, 0.5), GpuShare(1, 1.0), GpuShare(0, 0.5)]),
        (2, 1, 2, [GpuShare(0), GpuShare(1)]),
        (4, 0.25, 2, [GpuShare(0, 0.25), GpuShare(1, 0.25), GpuShare(0, 0.25), GpuShare(1, 0.25)]),
    ],
)
def test_gpus_are_shared_fairly(workers: int, gpus: float | None, devices: int, wanted: list[GpuShare]) -> None:
    assert [share_of(index, workers, gpus, devices) for index in range(workers)] == wanted


def test_what_is_visible_is_chosen_from() -> None:
    assert [visible(None, 1), visible("3,5", 1), visible("GPU-a, GPU-b", 0), visible("", 2)] == ["1", "5", "GPU-a", "2"]


@pytest.mark.parametrize(
    ("workers", "gpus", "devices", "message"),
    [(2, 1, 1, "--workers 1, or --gpus 0.5"), (1, 1, 0, "no GPU here"), (1, 2, 4, "accelerate launch")],
)
def test_gpus_that_are_not_there(workers: int, gpus: float, devices: int, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        share_of(0, workers, gpus, devices)


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.engines.local.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [LocalEngine(workers).threads for workers in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert LocalEngine(2, cpus=3).threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert LocalEngine(2).threads == 1, "the user's word counts"


def queue_of(count: int, deadline: float | None = None) -> tuple[Queue, Follower]:
    follower = Follower()
    spec = Spec(model="m", task="t", method="lora")
    return Queue([job_of(spec.with_(seed=seed), "runs") for seed in range(count)], follower, deadline), follower


def test_a_busy_run_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.engines.queue.AGAIN", 0.01)
    queue, follower = queue_of(2)
    assert (queue.take(), queue.take(), queue.take()) == (0, 1, None)
    queue.settle(0, JobOutcome("busy", error="Process 7 is at it."))
    queue.settle(1, JobOutcome("finished", "one"))
    assert queue.open
    time.sleep(0.02)
    assert queue.take() == 0
    queue.settle(0, JobOutcome("finished", "zero"))
    assert not queue.open
    assert [each.run for each in queue.results()] == ["zero", "one"]
    assert follower.said == ["Process 7 is at it. It is waited for."]


def test_nothing_begins_after_the_deadline_or_on_a_full_disk() -> None:
    queue, _ = queue_of(2, deadline=time.monotonic() - 1)
    assert queue.take() is None
    assert not queue.open
    assert [each.status for each in queue.results()] == ["not begun"] * 2
    queue, _ = queue_of(3)
    queue.take()
    queue.take()
    queue.settle(0, JobOutcome("unwritable", error="No room"))
    assert queue.take() is None
    assert queue.open, "the other one is still at work"
    queue.settle(1, JobOutcome("interrupted"))
    assert not queue.open


def test_signals_elsewhere_than_in_the_main_thread_are_left_alone(review_spec: Spec, tmp_path: Path) -> None:
    outcomes: list[JobOutcome] = []

    def work() -> None:
        with make() as engine:
            outcomes.extend(engine.run([job_of(review_spec, str(tmp_path / "runs"))], Follower()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [each.status for each in outcomes] == ["finished"]
