"""Nothing that lies in the working folder is run, whatever it is called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from inlay import InlayError, Spec, fetch
from inlay.engines.job import JobOutcome, Listener
from inlay.engines.local import LocalEngine
from inlay.workflow.compare import job_of

SOURCE = Path(__file__).parents[1] / "src"
NAMES = ("torch", "pip", "json", "inlay", "typer", "peft", "sitecustomize", "runpy")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules that leave a trace where they are run; the trace's place."""
    trace = tmp_path / "trace.txt"
    place = tmp_path / "download"
    place.mkdir()
    for name in NAMES:
        (place / f"{name}.py").write_text(f"open({str(trace)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(7)\n")
    monkeypatch.chdir(place)
    return trace


def ran(trace: Path) -> str:
    return trace.read_text() if trace.exists() else ""


class Silent:
    """Follows the work and says nothing."""

    def begin(self, number: int) -> None: ...
    def step(self, number: int, done: int, total: int) -> None: ...
    def say(self, number: int, line: str) -> None: ...
    def end(self, number: int, outcome: JobOutcome) -> None: ...


def test_a_worker_of_the_local_engine(hostile: Path, tmp_path: Path) -> None:
    job = job_of(Spec(model="no-such-model", method="lora", data="no-such-file.csv"), str(tmp_path / "runs"))
    listener: Listener = Silent()
    with LocalEngine(workers=1, cpus=1) as engine:
        (outcome,) = engine.run([job], listener)
    assert outcome.error is not None
    assert "no-such-file.csv" in outcome.error, "the worker was ready, and did as it was told"
    assert ran(hostile) == ""


def test_pip(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InlayError, match=r"No matching distribution found for no-such-package==1\.0"):
        fetch.fetch_wheel("no-such-package", "1.0", "0" * 64, "x/", tmp_path / "into")
    assert ran(hostile) == ""


def test_python_m_inlay(hostile: Path) -> None:
    Path("inlay.py").unlink()  # that one is Python's to find: `python -m inlay` names it
    done = subprocess.run([sys.executable, "-m", "inlay", "methods"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lora" in done.stdout
    assert ran(hostile) == ""


def test_a_worker_of_ray(hostile: Path, tmp_path: Path, review_spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs Ray, which is an extra")
    from inlay.engines import make

    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    (tmp_path / "reviews.csv").rename("reviews.csv")  # a path that begins in the working folder
    job = job_of(review_spec.with_(data="reviews.csv"), str(tmp_path / "runs"))
    listener: Listener = Silent()
    with make("ray", cpus=1) as engine:
        (outcome,) = engine.run([job], listener)
    assert (outcome.status, outcome.error) == ("finished", None)
    assert ran(hostile) == ""


def test_every_python_that_is_started_leaves_the_working_folder_out() -> None:
    """`sys.executable` in a list of words is followed by -P, in all of the package."""
    found = 0
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            words = getattr(node, "elts", [])
            if words and ast.unparse(words[0]) == "sys.executable":
                found += 1
                assert ast.unparse(words[1]) == "'-P'", f"{path}:{node.lineno}"
    assert found >= 2
    uses = sum(path.read_text(encoding="utf-8").count("sys.executable") for path in SOURCE.rglob("*.py"))
    assert uses == found + 2, "the hint on ensurepip and what `doctor` prints are the only other uses"
