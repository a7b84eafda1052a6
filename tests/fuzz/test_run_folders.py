"""Damaged run folders: every command ends with a result or with one clear error, and the other runs are still there.

Seeds and counts are stated in docs/security.md.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mutations import cases, damage_file, mutate_json

import recorded
from inlay.records.sealed import sealed
from inlay.records.store import Store

SEED = 19
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, the second by an earlier inlay, one that failed and one that was interrupted."""
    out = tmp_path_factory.mktemp("fuzz") / "runs"
    for seed in (0, 1):
        with Store(out).open(spec := recorded.spec_of("lora", seed), spec.digest()) as run:
            run.adapter.mkdir()
            (run.adapter / "adapter_model.safetensors").write_bytes(bytes(range(200)))
            (run.adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        run = recorded.finished(out, spec)
    for name in ("spec.json", "versions.json"):
        data = json.loads((run.folder / name).read_text())
        del data["checksum"]
        (run.folder / name).write_text(json.dumps(data))
    old = json.loads((run.folder / "record.json").read_text())
    old["files"] = {name: entry for name, entry in old["files"].items() if name.startswith("adapter/")}
    (run.folder / "record.json").write_text(json.dumps(sealed(old)))
    recorded.failed(out, recorded.spec_of("bias"), "out of memory")
    with Store(out).open(spec := recorded.spec_of("norm"), spec.digest()):
        pass
    return out


def damage_run(run: Path, rng: random.Random) -> str:
    """Change one to three files of a run; a change to JSON is sometimes sealed again, as an attacker would."""
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        files = sorted(path for path in run.rglob("*") if path.is_file())
        if not files:
            break
        path = rng.choice([path for path in files if path.name in ("spec.json", "record.json")] * 3 + files)
        if path.name in ("spec.json", "record.json", "state.json") and rng.random() < 0.5:
            try:
                data, what = mutate_json(json.loads(path.read_bytes()), rng)
                path.write_text(json.dumps(sealed(data) if isinstance(data, dict) else data))
                done.append(f"{path.name}, sealed again: {what}")
                continue
            except (ValueError, RecursionError):
                pass  # it is not JSON any more
        done.append(damage_file(path, rng))
    return "; ".join(done)


def ends_well(typed: Typed, what: str, *command: str | Path) -> tuple[int, str, str]:
    """A command ends with status 0, or 2 and one error; anything else is reported with what was damaged."""
    try:
        status, out, error = typed(*command)
    except BaseException as trouble:
        raise AssertionError(f"{what}\n{' '.join(map(str, command))}\n{type(trouble).__name__}: {trouble}") from trouble
    assert status in (0, 2), f"{what}: {command} ended with {status}: {error}"
    assert "Traceback" not in error + out, what
    assert (status == 2) == any(line.startswith("Error: ") for line in error.splitlines()), (what, error)
    return status, out, error


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_run_folders(runs: Path, typed: Typed, tmp_path: Path, count: int) -> None:
    out, names = tmp_path / "runs", sorted(path.name for path in runs.iterdir())
    for number, rng in cases(SEED, count):
        shutil.copytree(runs, out, symlinks=True)
        chosen = rng.choice(names)
        what = f"case {number}: {chosen}: {damage_run(out / chosen, rng)}"
        status, listed, _ = ends_well(typed, what, "runs", "list", "--out", out)
        assert status == 0, what
        for name in names:
            if name != chosen:
                assert any(line.startswith(f"{name}\t") and "unreadable" not in line for line in listed.splitlines())
        ends_well(typed, what, "runs", "show", chosen, "--out", out)
        status, _, error = ends_well(typed, what, "report", out, "--out", tmp_path / "page.html", "--csv", "table.csv")
        assert status == 0, (what, error)  # one finished run at least is whole
        ends_well(typed, what, "runs", "rm", "--yes", chosen, "--out", out)
        shutil.rmtree(out)
