"""The Ray engine on a real cluster of several nodes on one host: a node is killed in the middle and nothing is lost."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import InlayError, Spec, tune
from inlay.engines import JobOutcome, make
from inlay.engines.on_ray import RayEngine, check_answers
from inlay.records.store import Store
from inlay.workflow.compare import job_of

ray = pytest.importorskip("ray", reason="needs Ray, which is an extra")


def test_an_address_that_does_not_answer_is_said_soon() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    began = time.monotonic()
    with (
        pytest.raises(InlayError, match=f"Nobody answers at 127.0.0.1:{port}"),
        make("ray", address=f"127.0.0.1:{port}"),
    ):
        pass
    assert time.monotonic() - began < 10


def test_something_else_that_answers_is_not_taken_for_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.engines.on_ray.ANSWER", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InlayError, match=r"Nobody answers.*no answer"):  # it accepts and says nothing
            check_answers(address)

        def speak() -> None:
            channel, _ = server.accept()
            channel, _ = server.accept()  # the first one was the silent one's
            with channel:
                channel.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        with pytest.raises(InlayError, match="is not a Ray cluster"):
            check_answers(address)
    for wrong in ("here", "host:port", ":6379"):
        with pytest.raises(InlayError, match="host:port"):
            check_answers(wrong)


def test_auto_without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(InlayError, match="No Ray cluster at auto"), make("ray", address="auto"):
        pass


class Follower:
    """Kills a node once every run that is away has sent a checkpoint home."""

    def __init__(self, out: Path, kill: Any) -> None:
        self.out, self.kill, self.said, self.killed = out, kill, [], False
        self.working: set[int] = set()

    def begin(self, number: int) -> None:
        self.working.add(number)

    def step(self, number: int, done: int, total: int) -> None:
        if not self.killed and len(list(self.out.glob("*/checkpoints/step-*"))) >= 2:
            self.killed = True
            self.kill()

    def say(self, number: int, line: str) -> None:
        self.said.append(line)

    def end(self, number: int, outcome: JobOutcome) -> None:
        self.working.discard(number)


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_a_killed_node_loses_nothing(
    cluster: Any, review_spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs on two nodes of one core; one node is killed when both runs on the way have a checkpoint at home. All
    four finish, in the bits of runs made here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nodes: list[Any] = []
    given = int(os.environ.get("INLAY_TEST_STEPS", "8000"))
    for steps in (given, 4 * given):  # on a busy machine a short run may end before the node is gone
        nodes.extend(cluster.add_node(num_cpus=1) for _ in range(2 - len(nodes)))
        cluster.wait_for_nodes()
        out = tmp_path / f"runs-{steps}"
        specs = [review_spec.with_(method=m, seed=s, max_steps=steps) for m in ("bias", "lora") for s in (0, 1)]
        follower = Follower(out, lambda: cluster.remove_node(nodes.pop(0), allow_graceful=False))
        with RayEngine(cluster.address, cpus=1) as engine:
            outcomes = engine.run([job_of(spec, str(out)) for spec in specs], follower)
        assert [each.status for each in outcomes] == ["finished"] * 4, outcomes
        if any("its worker was lost" in line for line in follower.said):
            break
    assert follower.killed
    assert any("its worker was lost" in line for line in follower.said)
    runs = [Store(out).get(str(each.run)) for each in outcomes]
    lost = [run for run in runs if "its worker was lost" in (run.folder / "log.txt").read_text()]
    assert lost
    for run in lost:
        assert "resumes at step" in (run.folder / "log.txt").read_text()
        assert run.record["resumed_from"] > 0
    for spec, run in zip(specs, runs, strict=True):
        run.verify()
        assert sorted(path.name for path in run.folder.iterdir() if path.name != ".lock") == [
            "adapter", "log.txt", "metrics.jsonl", "predictions", "record.json", "spec.json", "versions.json"
        ]  # fmt: skip
        if run in lost:
            here = tune(spec, tmp_path / "here", progress=False)
            assert here.id == run.id
            assert here.metrics == run.metrics
            assert here.record["files"] == run.record["files"]


@pytest.mark.slow
def test_more_than_the_cluster_has_is_refused(cluster: Any) -> None:
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    for what in ({"gpus": 1.0}, {"cpus": 64.0}):
        with pytest.raises(InlayError, match="the cluster has"), make("ray", address=cluster.address, **what):
            pass
