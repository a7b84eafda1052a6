"""Train, be killed, train on: run by test_resume.py as a process of its own.

    python kill.py FOLDER SCENARIO:KILLS ...

Everything is imported once and every training runs in a fork. The moments at which one can be killed are counted:
before every forward pass, every forcing of a file to disk, every rename and every removal. A first training is not
killed. Then, for KILLS moments spread over the whole of it, a training is killed with SIGKILL at that moment, resumed,
killed again a little later, and resumed until it ends. Prints, as JSON by scenario, how each differs from the first.
"""

from __future__ import annotations

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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import toys  # noqa: E402

from inlay.methods.registry import get  # noqa: E402
from inlay.records import Spec  # noqa: E402
from inlay.training import fit  # noqa: E402

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
}


def train(folder: Path, scenario: str, kill_at: int, every: float) -> None:
    """One training, in this process, killed before the moment number `kill_at` (0: never)."""
    moments = 0

    def moment(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal moments
            moments += 1
            if moments == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    os.fsync, os.replace, shutil.rmtree = moment(os.fsync), moment(os.replace), moment(shutil.rmtree)
    spec, make = SCENARIOS[scenario]
    backbone, task = make()
    passes = moment(lambda *_: None)
    backbone.model.register_forward_pre_hook(lambda module, args: passes())
    outcome = fit(backbone, task, get(spec.method), spec, folder, progress=False, checkpoint_seconds=every)
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
        "weights": digest.hexdigest(),
    }
    (folder / "result.json").write_text(json.dumps({"result": result, "moments": moments}))
    (folder / "resumed.txt").write_text(str(outcome.resumed_from))


def in_a_fork(folder: Path, scenario: str, kill_at: int = 0, every: float = 0) -> bool:
    """Whether a training in a child came to its end."""
    child = os.fork()
    if child == 0:
        try:
            train(folder, scenario, kill_at, every)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the training failed"
    return True


def kill(folder: Path, scenario: str, kills: int) -> dict[str, Any]:
    """One scenario: what was expected, and every result that differs from it."""
    assert in_a_fork(folder / "whole", scenario)
    whole = json.loads((folder / "whole" / "result.json").read_text())
    found: dict[str, Any] = {"expected": whole["result"], "moments": whole["moments"], "different": {}, "resumed": []}
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
        shutil.rmtree(place)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = [argument.partition(":") for argument in sys.argv[2:]]
    print(json.dumps({name: kill(Path(sys.argv[1]) / name, name, int(kills)) for name, _, kills in chosen}))
