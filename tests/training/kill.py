"""Train, be killed, train on: run by test_resume.py as a process of its own.

    python kill.py FOLDER SCENARIO:KILLS ...
    python kill.py FOLDER checkpoints

Everything is imported once and every training runs in a fork. The moments at which one can be killed are counted:
before every forward pass, every forcing of a file to disk, every rename and every removal. A first training is not
killed. Then, for KILLS moments spread over the whole of it, a training is killed with SIGKILL at that moment, resumed,
killed again a little later, and resumed until it ends. Prints, as JSON by scenario, how each differs from the first,
and where one was resumed from an earlier step than that of a checkpoint that had been completed. `checkpoints` trains
nothing: checkpoints are written one after the other, several of them at the same step, and that is killed at every
moment.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import toys  # noqa: E402

from inlay.methods.registry import get  # noqa: E402
from inlay.records import Spec  # noqa: E402
from inlay.training import FitOptions, fit  # noqa: E402
from inlay.training.checkpoints import TRAINED, Checkpoints, load_tensors, step_of  # noqa: E402
from inlay.training.trunk import data  # noqa: E402
from inlay.training.trunk.rows import FILE, LIMIT  # noqa: E402

data.FEWEST_READ, data.CHECK_SHARE = 0, float("inf")  # the trunk is kept however little that saves
BASE = Spec(model="toy", method="lora", task="toy", epochs=3, batch_size=16, learning_rate=3e-2)
SCENARIOS: dict[str, tuple[Spec, Callable[[], tuple[toys.ToyBackbone, toys.ToyTask]]]] = {
    # Dropout in the adapter and before the head, early stopping with a best state to return to, uneven accumulation.
    "lora": (
        BASE.with_(settings={"lora_dropout": 0.2}, gradient_accumulation=2, early_stopping=2, evaluations=12, epochs=6),
        lambda: (toys.backbone("bert", dropout=0.3), toys.text_task(train=40)),
    ),
    # Everything trains, dropout everywhere; the last update is in the middle of an epoch.
    "full": (
        BASE.with_(method="full", max_steps=7, learning_rate=1e-3, schedule="cosine"),
        lambda: (toys.backbone("bert", dropout=0.3), toys.text_task(train=40)),
    ),
    # Batch statistics move.
    "batch-norm": (
        BASE.with_(method="full", epochs=2, learning_rate=1e-3),
        lambda: (toys.backbone("resnet"), toys.image_task(train=40)),
    ),
    # The trunk's output is kept, in a file.
    "trunk": (
        BASE.with_(method="norm", settings={"layers": [3]}, learning_rate=1e-2),
        lambda: (toys.backbone("vit"), toys.image_task(train=40)),
    ),
}


class Moments:
    """Counts the moments at which this process can be killed, and kills it before number `kill_at` (0: never)."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.count = kill_at, 0
        os.fsync, os.replace, shutil.rmtree = self.at(os.fsync), self.at(os.replace), self.at(shutil.rmtree)

    def at(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted


def watch_checkpoints(folder: Path) -> None:
    """Note every checkpoint that was completed, and every resumption from before the last of them."""
    write, latest = Checkpoints.write, Checkpoints.latest
    completed, fell_back = folder / "completed.txt", folder / "fell-back.txt"

    def noted_write(self: Checkpoints, step: int, **contents: Any) -> None:
        write(self, step, **contents)
        with completed.open("a") as file:
            file.write(f"{step}\n")

    def checked_latest(self: Checkpoints) -> Path | None:
        found = latest(self)
        steps = [int(line) for line in completed.read_text().split()] if completed.exists() else []
        if steps and (found is None or step_of(found) < max(steps)):
            with fell_back.open("a") as file:
                file.write(f"from {max(steps)} to {found}\n")
        return found

    Checkpoints.write, Checkpoints.latest = noted_write, checked_latest  # type: ignore[method-assign]


def train(folder: Path, scenario: str, kill_at: int, every: float) -> None:
    """One training, in this process, killed before the moment number `kill_at` (0: never)."""
    moments = Moments(kill_at)
    watch_checkpoints(folder)
    spec, make = SCENARIOS[scenario]
    backbone, task = make()
    passes = moments.at(lambda *_: None)
    backbone.model.register_forward_pre_hook(lambda module, args: passes())
    outcome = fit(backbone, task, get(spec.method), spec, folder, FitOptions(progress=False, checkpoint_seconds=every))
    digest = hashlib.sha256()
    for name, tensor in sorted(outcome.model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    result = {
        "metrics": outcome.metrics,
        "history": outcome.history,
        "journal": (folder / "metrics.jsonl").read_text(),
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "stopped_early": outcome.stopped_early,
        "left": sorted(path.name for path in folder.glob(FILE)),
        "weights": digest.hexdigest(),
    }
    (folder / "result.json").write_text(json.dumps({"result": result, "moments": moments.count}))
    (folder / "resumed.txt").write_text(str(outcome.resumed_from))


def write_checkpoints(folder: Path, kill_at: int) -> None:
    """Checkpoints with the numbers 0 to 5, some of them at the same step; `completed.txt` has the last whole one's."""
    moments = Moments(kill_at)
    store = Checkpoints(folder / "checkpoints", base="f")
    for number, step in enumerate((3, 3, 3, 4, 4, 5)):
        store.write(
            step,
            trained={"number": torch.tensor(number)},
            optimizer={"state": {}, "param_groups": []},
            plain={},
            state=TrainerState(),
        )
        (folder / "completed.txt").write_text(str(number))
    (folder / "moments.txt").write_text(str(moments.count))


def kill_checkpoints(folder: Path) -> dict[str, Any]:
    """For every moment of the writing, the last checkpoint known to be whole and the one that is found."""
    (folder / "whole").mkdir(parents=True)
    assert finishes(lambda: write_checkpoints(folder / "whole", 0))
    pairs = []
    for moment in range(1, int((folder / "whole" / "moments.txt").read_text()) + 1):
        place = folder / str(moment)
        place.mkdir()
        assert not finishes(lambda place=place, moment=moment: write_checkpoints(place, moment))
        known = place / "completed.txt"
        found = Checkpoints(place / "checkpoints", base="f").latest()
        pairs.append(
            (
                int(known.read_text()) if known.exists() else -1,
                -1 if found is None else int(load_tensors(found / TRAINED)["number"]),
            )
        )
    return {"pairs": pairs}


def in_a_fork(folder: Path, scenario: str, kill_at: int = 0, every: float = 0) -> bool:
    """Whether a training in a child came to its end."""
    return finishes(lambda: train(folder, scenario, kill_at, every))


def finishes(work: Callable[[], None]) -> bool:
    """Whether something done in a child came to its end, or was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "it failed"
    return True


def kill(folder: Path, scenario: str, kills: int) -> dict[str, Any]:
    """One scenario: what was expected, and every result that differs from it."""
    assert in_a_fork(folder / "whole", scenario)
    whole = json.loads((folder / "whole" / "result.json").read_text())
    found: dict[str, Any] = {"expected": whole["result"], "moments": whole["moments"], "different": {}, "resumed": []}
    found["fell_back"] = {}
    # How often checkpoints are written must make no difference either.
    assert in_a_fork(folder / "seldom", scenario, every=1000)
    seldom = json.loads((folder / "seldom" / "result.json").read_text())["result"]
    if seldom != whole["result"]:
        found["different"]["seldom"] = seldom
    for number in range(kills):
        moment = 1 + number * (whole["moments"] - 1) // max(1, kills - 1)
        place = folder / f"killed-{moment}"
        in_a_fork(place, scenario, kill_at=moment)
        in_a_fork(place, scenario, kill_at=5 + 7 * number)
        assert in_a_fork(place, scenario)
        result = json.loads((place / "result.json").read_text())["result"]
        found["resumed"].append((place / "resumed.txt").read_text())
        if result != whole["result"]:
            found["different"][str(moment)] = result
        if (place / "fell-back.txt").exists():
            found["fell_back"][str(moment)] = (place / "fell-back.txt").read_text()
        shutil.rmtree(place)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What was imported stays: each training looks for garbage, and would look through a million objects.
    gc.collect()
    gc.freeze()
    os.environ[LIMIT] = "0"
    if sys.argv[2:] == ["checkpoints"]:
        print(json.dumps(kill_checkpoints(Path(sys.argv[1]))))
        sys.exit()
    chosen = [argument.partition(":") for argument in sys.argv[2:]]
    print(json.dumps({name: kill(Path(sys.argv[1]) / name, name, int(kills)) for name, _, kills in chosen}))
