"""Adapter folders damaged at random: each loads, or is one clear error; none runs code, hangs, or is silently wrong.

A folder is damaged in one of three ways: as by a bad disk, its note in place; by somebody who takes the note away; and
by somebody who writes a new note that fits what was changed.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz.mutations import cases, damage_file
from inlay.errors import InlayError
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.folder import NOTE
from inlay.methods.registry import get
from inlay.records.sealed import sealed
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
SEED = 19
# Of each form, of each way to be put into a model; those whose settings say sizes, names and patterns.
METHODS = {
    "lora": "bert",
    "bias": "bert",
    "prompt": "bert",
    "ntk-attention": "bert",
    "multi-lora": "bert",
    "infoprompt": "bert",
    "linear-probe": "bert",
    "full": "bert",
    "vpt-deep": "vit",
    "e2vpt": "vit",
}
# What Python says when code from elsewhere is about to run, or somebody is about to be asked.
FORBIDDEN = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """The folder of each method, and what its model says."""
    found = {}
    for method, family in METHODS.items():
        model, batch = tiny(family)
        adapted = attach(model, method)
        drawn = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for parameter in trained_parameters(adapted).values():
                parameter.add_(torch.randn(parameter.shape, generator=drawn), alpha=0.1)
        folder = tmp_path_factory.mktemp("made") / method
        save(adapted, method, folder)
        found[method] = folder, logits(restore(tiny(family)[0], method, folder), batch)
    return found


def reseal(folder: Path, method: str) -> None:
    """A note that fits what is there now, as anybody can write one."""
    path = folder / NOTE[get(method).form]
    if not path.is_file():  # it is a pipe now: reading it would be for ever
        return
    try:
        note = json.loads(path.read_text())
        note["sha256"] = {}
        path.write_text(json.dumps(sealed(note, "digest")))
    except (ValueError, TypeError, RecursionError):
        pass  # the note itself is what was damaged


def attempt(number: int, rng: random.Random, made: dict[str, tuple[Path, Tensor]], place: Path) -> str:
    """Damage a folder and load it; what came of it."""
    method = rng.choice(list(METHODS))
    source, expected = made[method]
    folder = Path(shutil.copytree(source, place / str(number)))
    way = rng.choice(("disk", "no note", "new note"))
    if way == "no note":
        (folder / NOTE[get(method).form]).unlink()
    files = sorted(path for path in folder.iterdir() if path.name != "README.md")
    done = [damage_file(path, rng) for path in rng.sample(files, rng.choice((1, 1, min(2, len(files)))))]
    if way == "new note":
        reseal(folder, method)
    what = f"case {number}: {method}, {way}, {'; '.join(done)}"
    model, batch = tiny(METHODS[method])
    try:
        restored = restore(model, method, folder)
    except InlayError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder)
    try:
        found = logits(restored, batch)
    except InlayError:
        assert way != "disk", what
        return "refused"
    except Exception as error:
        raise AssertionError(f"{what}: loaded, and then {type(error).__name__}: {error}") from error
    if way == "disk":
        assert torch.equal(found, expected), f"{what}: loaded as something else"
    return "loaded"


def run(count: int, made: dict[str, tuple[Path, Tensor]], place: Path) -> dict[str, int]:
    counts = {"refused": 0, "loaded": 0}
    ran: list[str] = []
    watching = [True]

    def hook(event: str, arguments: Any) -> None:
        if watching[0] and event in FORBIDDEN:
            ran.append(event)

    sys.addaudithook(hook)  # it cannot be taken away again: it stops looking
    try:
        for number, rng in cases(SEED, count):
            counts[attempt(number, rng, made, place)] += 1
    finally:
        watching[0] = False
    assert not ran
    return counts


def test_some_damaged_folders(made: dict[str, tuple[Path, Tensor]], tmp_path: Path) -> None:
    counts = run(120, made, tmp_path)
    assert counts["refused"] > 60
    assert counts["loaded"] > 3  # what lay unread, and what was changed into itself


@pytest.mark.slow
def test_many_damaged_folders(made: dict[str, tuple[Path, Tensor]], tmp_path: Path) -> None:
    assert run(4800, made, tmp_path)["refused"] > 2400
