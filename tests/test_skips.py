"""What was skipped is said in one line a cause; in CI it fails what nothing excuses; every skip has a cause."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skips import CAUSES, UNKNOWN, cause_of, is_excused

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOME = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_kernel(number):
    pytest.skip("needs a GPU")

def test_cluster():
    pytest.importorskip("no_such_ray", reason="needs Ray, which is an extra")

@pytest.mark.slow
def test_long():
    pass

def test_short():
    pass
"""


def ran(folder: Path, *arguments: str, target: str | None = None) -> subprocess.CompletedProcess[str]:
    """Some tests in a folder of their own, with the summary."""
    (folder / "conftest.py").write_text("from skips import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("INLAY_CI", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(TESTS)} | ({"INLAY_CI": target} if target else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_the_last_lines_say_how_to_have_it(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(SOME)
    whole_file = 'import pytest\npytest.importorskip("no_such_ray", reason="needs Ray, which is an extra")\n'
    (tmp_path / "test_whole.py").write_text(whole_file)
    done = ran(tmp_path, "-m", "not slow", *processes)
    assert done.returncode == 0, done.stdout
    *_, title, gpu, ray, slow, end = done.stdout.splitlines()
    assert "not run here, and how to run it" in title
    assert re.split("  +", gpu.strip()) == ["3 tests", "needs an NVIDIA GPU", "make test on a machine with one"]
    assert re.split("  +", ray.strip()) == ["1 test and 1 file", "needs Ray", "make test-real"]
    assert re.split("  +", slow.strip()) == ["1 test", "long checks", "make test-all"]
    assert end.startswith("1 passed")


def test_in_ci_what_another_target_runs_is_excused(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SOME)
    assert ran(tmp_path, target="test").returncode == 0
    done = ran(tmp_path, target="test-real")
    assert done.returncode == 1
    title, said, _ = done.stdout.splitlines()[-3:]
    assert "skipped, and `make test-real` has to run it in CI" in title
    assert said == "test_some.py:9: needs Ray, which is an extra"


def test_in_ci_an_unknown_reason_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\ndef test_a():\n    pytest.skip('not today')\n")
    assert ran(tmp_path).returncode == 0
    done = ran(tmp_path, target="test")
    assert done.returncode == 1
    assert "test_some.py:3: not today" in done.stdout


def test_every_target_that_excuses_a_skip_is_run_in_ci_and_is_strict() -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "INLAY_CI=test make test\n" in run
    for target in {cause.target for cause in CAUSES} - {""}:
        assert f"\nmake {target}\n" in run
        (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", made, flags=re.MULTILINE)
        commands = re.sub(r"\\\n\s*", "", recipe).splitlines()
        assert all(f"INLAY_CI={target} " in line for line in commands if "/pytest " in line)


def reasons() -> Iterator[tuple[str, str]]:
    """Where a test may be skipped, and the words that are always in its reason."""
    for path in sorted(TESTS.rglob("*.py")):
        if path.name == Path(__file__).name or "fixtures" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "skip",
                "skipif",
                "importorskip",
            ):
                given = next((each.value for each in node.keywords if each.arg == "reason"), None)
                by_name = ast.unparse(node.func).endswith("importorskip")
                if given is None and by_name:
                    given = ast.Constant(f"could not import {ast.literal_eval(node.args[0])!r}")
                words = [each for each in ast.walk(given or node.args[0]) if isinstance(each, ast.Constant)]
                if words:  # otherwise the reason is said elsewhere
                    yield f"{path.name}:{node.lineno}", " ".join(str(each.value) for each in words)


def test_every_skip_has_a_known_cause() -> None:
    found = dict(reasons())
    assert len(found) > 30
    assert {where: reason for where, reason in found.items() if cause_of(reason) is UNKNOWN} == {}


def test_what_needs_no_gpu_is_not_excused_as_if_it_did() -> None:
    interpreted = cause_of("no GPU, and Triton's interpreter is not on")
    assert is_excused(interpreted, "test")
    assert not is_excused(interpreted, "test-kernels")
    assert is_excused(cause_of("needs a GPU"), "test-kernels")
    assert not is_excused(UNKNOWN, "test")
