"""From a wheel the papers do the same as from a checkout: what was measured before ships with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as its wheel has it."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    code = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = (place / "out").iterdir()
    with zipfile.ZipFile(made) as archive:
        archive.extractall(place / "site")
    shutil.rmtree(place / "src")
    code = f"import sys; sys.path.insert(0, {str(place / 'site')!r}); import inlay; print(inlay.__file__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()) == place / "site" / "inlay" / "__init__.py", "it is what runs, not the checkout"
    return place / "site"


@pytest.fixture
def here(typed: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command prints, given in an empty folder to the checkout; in this process, which has imported it."""

    def run(folder: Path, *arguments: str) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "200")
        status, out, errors = typed(*arguments)
        assert status == 0, errors
        return out

    return run


def installed(package: Path, folder: Path, *arguments: str) -> str:
    """The same of a process of its own with the package that lies in `package`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(package), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "inlay", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_that_is_kept_is_in_it(wheel: Path) -> None:
    kept = {
        path.relative_to(ROOT / "src"): path for path in (ROOT / "src" / "inlay").rglob("kept/**/*") if path.is_file()
    }
    assert len(kept) > 100
    for name, path in kept.items():
        assert (wheel / name).read_bytes() == path.read_bytes(), name


def test_the_latest_verdicts_are_listed(wheel: Path, tmp_path: Path, here: Callable[..., str]) -> None:
    listed = installed(wheel, tmp_path, "reproduce", "--list")
    assert "activation-prompts/table-2" in listed
    assert listed == here(tmp_path, "reproduce", "--list")


def result(run: Callable[..., str], folder: Path) -> dict[str, Any]:
    """A recipe at `here` that reads what is kept, without what differs from one call to the next."""
    printed = run(folder, "reproduce", "activation-prompts/table-2", "--scale", "here", "--quiet")
    found = json.loads((folder / "reproduce/activation-prompts/table-2/here/table-2.json").read_text())
    known = {key: value for key, value in found.items() if key not in ("seconds", "versions", "command")}
    return known | {"printed": [line for line in printed.splitlines() if not line.startswith("kept in")]}


def test_a_recipe_reads_what_is_kept(wheel: Path, tmp_path: Path, here: Callable[..., str]) -> None:
    found = result(partial(installed, wheel), tmp_path / "installed")
    assert found["ours"]["notes"][0].startswith("Read from inlay/papers/activation_prompts/kept/vision-cuda.json")
    assert found == result(here, tmp_path / "checkout")
