"""Train in several processes: run by test_processes.py under `accelerate launch`.

    accelerate launch processes.py FOLDER

Trains a run whole; then one that the second process is told to interrupt, and resumes it; then one in which the
processes do not agree on when a checkpoint is due; then several tasks, whole and interrupted. Every process writes what
it found into FOLDER.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import test_joint as joint  # noqa: E402
import torch  # noqa: E402
import toys  # noqa: E402

from inlay.methods.registry import get  # noqa: E402
from inlay.records import Spec, Store  # noqa: E402
from inlay.training import FitOptions, FitResult, Interrupted, evaluate, fit  # noqa: E402
from inlay.training.joint import SeveralTasks  # noqa: E402

SPEC = Spec(
    model="toy", method="lora", task="toy", epochs=3, batch_size=16, gradient_accumulation=2, learning_rate=3e-2,
    early_stopping=5,
)  # fmt: skip


JOINT = ("lora", "multi-lora")


def described(outcome: FitResult) -> dict:
    digest = hashlib.sha256()
    for name, tensor in sorted(outcome.model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return {
        "metrics": outcome.metrics,
        "history": outcome.history,
        "weights": digest.hexdigest(),
        "resumed_from": outcome.resumed_from,
        "best_step": outcome.best_step,
        "failed": outcome.failed,
        "notes": outcome.notes,
    }


def predictions(outcome: FitResult) -> list:
    return evaluate(outcome.model, toys.text_task(), "test", None, SPEC)[1].tolist()


def train(folder: Path, interrupt_at: int = 0, checkpoint_seconds: float = 1000) -> FitResult:
    backbone = toys.backbone(dropout=0.0)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)

    backbone.model.register_forward_pre_hook(count)
    return fit(
        backbone,
        toys.text_task(),
        get("lora"),
        SPEC,
        folder,
        FitOptions(progress=False, checkpoint_seconds=checkpoint_seconds),
    )


def train_tasks(method: str, folder: Path, interrupt_at: int = 0) -> FitResult:
    """Three tasks, of which one fails in training and one stops early; in float64."""
    tasks = joint.three()
    for row in tasks["stsb"].train[30:31]:
        row["labels"] = float("nan")
    options = FitOptions(progress=False, checkpoint_seconds=1000)
    spec = joint.spec(get(method), early_stopping=2, evaluations=8, gradient_accumulation=2, clip=0.5)
    return fit(joint.backbone(), Cut(tasks, interrupt_at), get(method), spec, folder, options)


class Cut(SeveralTasks):
    """Interrupted at a step of this process."""

    def __init__(self, tasks: dict, at: int) -> None:
        super().__init__(tasks)
        self.at = at

    def step(self, *args: Any) -> torch.Tensor:
        if self.at and self.trainer.state.global_step == self.at:
            self.at = 0
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(*args)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = {}
    with Store(folder / "runs").open(SPEC, SPEC.digest()) as run:
        outcome = train(run.folder)
        run.finish({"metrics": outcome.metrics, "portrait": outcome.portrait})
    found["whole"] = described(outcome)
    found["predictions"] = predictions(outcome)
    try:
        train(folder / "interrupted", interrupt_at=15 if rank == 1 else 0)
    except Interrupted:
        found["resumed"] = described(train(folder / "interrupted"))
    for method in JOINT:
        found[method] = described(train_tasks(method, folder / method))
    try:
        train_tasks(JOINT[0], folder / "tasks-interrupted", interrupt_at=9 if rank == 1 else 0)
    except Interrupted:
        found["tasks resumed"] = described(train_tasks(JOINT[0], folder / "tasks-interrupted"))
    found["disagreeing"] = described(train(folder / "disagreeing", checkpoint_seconds=0 if rank == 1 else 1000))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    # What was imported stays: each training looks for garbage, and would look through a million objects.
    gc.collect()
    gc.freeze()
    main(Path(sys.argv[1]))
