"""From a wheel the papers do the same as from a checkout: what was measured before ships with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
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


def typed(package: Path, folder: Path, *arguments: str) -> str:
    """What a command prints, given in an empty folder to the package that lies in `package`."""
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


def test_the_latest_verdicts_are_listed(wheel: Path, tmp_path: Path) -> None:
    listed = [typed(package, tmp_path, "reproduce", "--list") for package in (wheel, ROOT / "src")]
    assert "activation-prompts/table-2" in listed[0]
    assert listed[0] == listed[1]


def result(package: Path, folder: Path) -> dict[str, Any]:
    """A recipe at `here` that reads what is kept, without what differs from one call to the next."""
    printed = typed(package, folder, "reproduce", "activation-prompts/table-2", "--scale", "here", "--quiet")
    found = json.loads((folder / "reproduce/activation-prompts/table-2/here/table-2.json").read_text())
    known = {key: value for key, value in found.items() if key not in ("seconds", "versions", "command")}
    return known | {"printed": [line for line in printed.splitlines() if not line.startswith("kept in")]}


def test_a_recipe_reads_what_is_kept(wheel: Path, tmp_path: Path) -> None:
    installed = result(wheel, tmp_path / "installed")
    assert installed["ours"]["notes"][0].startswith("Read from inlay/papers/activation_prompts/kept/vision-cuda.json")
    assert installed == result(ROOT / "src", tmp_path / "checkout")
