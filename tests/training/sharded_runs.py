"""Train with FSDP2 in several processes: run by test_several_gpus.py under `accelerate launch --use_fsdp`.

    accelerate launch --use_fsdp --fsdp_version 2 sharded_runs.py FOLDER WHAT...

WHAT is PLACE/METHOD:FAMILY, a run in a folder PLACE, or one that goes on from what is there; with @STEP after it, it is
interrupted after a step. `tasks` in the place of METHOD are several tasks, and FAMILY is then their method; `texts`
are written by an untrained model with that method. Every process writes what it found of each into PLACE.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import test_joint as joint  # noqa: E402
import torch  # noqa: E402
import toys  # noqa: E402
from transformers import TrainerCallback, ViTImageProcessor  # noqa: E402

import zoo  # noqa: E402
from inlay.errors import InlayError  # noqa: E402
from inlay.methods.attach import attach  # noqa: E402
from inlay.methods.registry import get  # noqa: E402
from inlay.records import Spec  # noqa: E402
from inlay.training import FitOptions, FitResult, Interrupted, fit  # noqa: E402
from inlay.training.batches import Placement  # noqa: E402
from inlay.training.generation import generate  # noqa: E402
from inlay.training.joint import SeveralTasks  # noqa: E402
from inlay.training.sharding import Alone, Sharding  # noqa: E402


def case(method: str, family: str) -> tuple[Any, Any, Spec]:
    """A backbone in float64, a task, and a run in which neither an epoch nor what is held out divides evenly: its last
    update has one row, and the last batch of the validation split none for the second process."""
    backbone = toys.backbone(family, "causal-lm" if family == "gpt2" else "classification", dropout=0.0)
    backbone.model.double()
    if family == "vit":
        backbone.processor = ViTImageProcessor(size={"height": zoo.IMAGE_SIZE, "width": zoo.IMAGE_SIZE})
        task = toys.image_task(train=25)
        for row in (*task.train, *task.validation, *task.test):
            row["pixel_values"] = row["pixel_values"].double()
    else:
        task = toys.lm_task(train=25) if family == "gpt2" else toys.text_task(train=25, validation=13, test=17)
    spec = Spec(
        model="toy", method=method, task="toy", epochs=2, batch_size=12, gradient_accumulation=2, learning_rate=1e-2,
        weight_decay=0.01,
    )  # fmt: skip
    return backbone, task, spec


class Stop(TrainerCallback):
    """Ends a run after a step, in one of the processes."""

    def __init__(self, at: int | None) -> None:
        self.at, self.now = at, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rank = os.environ.get("RANK", "0")
        self.now = state.global_step == self.at and rank == os.environ.get("STOPS", "0")
        if state.global_step == 2 and rank == os.environ.get("FAILS"):
            raise ZeroDivisionError("as a mistake in one process does")


def told(outcome: FitResult) -> dict[str, Any]:
    return {
        "metrics": outcome.metrics,
        "history": outcome.history,
        "parameters": outcome.portrait["parameters"],
        "notes": outcome.notes,
        "failed": outcome.failed,
        "resumed_from": outcome.resumed_from,
    }


def train(what: str, folder: Path) -> dict[str, Any]:
    """What a run comes to, or why it is refused."""
    name, _, step = what.partition("@")
    method, family = name.rpartition("/")[2].split(":")
    stop = Stop(int(step) if step else None)
    place = folder / name.replace(":", "-")
    options = FitOptions(progress=False, checkpoint_seconds=1000, watchers=[stop], stop=lambda: stop.now)
    try:
        if method == "tasks":
            return told(fit_tasks(family, place, options))
        backbone, task, spec = case(method, family)
        return told(fit(backbone, task, get(method), spec, place, options))
    except Alone:
        raise
    except InlayError as error:
        return {"refused": str(error)}
    except Interrupted:
        return {"interrupted": True}


def fit_tasks(method: str, folder: Path, options: FitOptions) -> FitResult:
    """Three tasks, of which one fails in training and one stops early; in float64."""
    tasks = joint.three()
    for row in tasks["stsb"].train[30:31]:
        row["labels"] = float("nan")
    spec = joint.spec(get(method), early_stopping=2, evaluations=8, gradient_accumulation=2, clip=0.5)
    return fit(joint.backbone(), SeveralTasks(tasks), get(method), spec, folder, options)


class Writing:
    """A task of prompts to be continued, and its tokenizer: an id is its own text."""

    max_new_tokens, model_max_length, pad_token_id = 6, 64, zoo.PAD

    def encode_inputs(self, rows: Any, processor: Any, length: int | None) -> Any:
        return rows

    def collator(self, processor: Any, model: Any, *, generation: bool) -> Any:
        def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            widest = max(len(row["input_ids"]) for row in rows)
            fill = {"input_ids": zoo.PAD, "attention_mask": 0}
            return {
                name: torch.tensor([[pad] * (widest - len(row[name])) + row[name] for row in rows])
                for name, pad in fill.items()
            }

        return collate

    def stops(self, processor: Any) -> list[int]:
        return [44]

    def batch_decode(self, ids: list[list[int]], **how: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in ids]


def write(method: str) -> dict[str, Any]:
    """Five texts in batches of two: processes have other numbers of batches, and texts end at other places."""
    torch.manual_seed(0)
    model = attach(toys.backbone("gpt2", "causal-lm", dropout=0.0).model, method).eval()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        Sharding().divide(model, torch.device("cpu"), whole=False)
    rows, task = toys.lm_task(train=5).train, Writing()
    return {"texts": generate(model, task, rows, task, 40, Placement(torch.device("cpu"), None, 2))}


def main(folder: Path, everything: list[str]) -> None:
    """Carry out everything, and write down what came of it."""
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    for what in everything:
        found = write(what.rpartition(":")[2]) if "texts:" in what else train(what, folder)
        (folder / f"{what.partition('@')[0]}.{rank}.json").write_text(json.dumps(found))
        if rank == "0":
            print(what, found.get("refused", "done"), flush=True)


if __name__ == "__main__":
    # What was imported stays: each training looks for garbage, and would look through a million objects.
    gc.collect()
    gc.freeze()
    main(Path(sys.argv[1]), sys.argv[2:])
