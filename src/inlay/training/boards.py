"""Where the metrics of a run are shown beside its own files: TensorBoard, W&B, MLflow, trackio.

Transformers' own integrations write them, the ones that the Trainer's `report_to` names. They are told the run's spec
in place of the Trainer's arguments and the model's config, which have paths of this machine: what leaves it are the
metrics, the settings and the run's name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from inlay.backbones import embedded
from inlay.errors import InlayError, first_line, unknown
from inlay.records.spec import Spec
from inlay.training.batches import is_main

TENSORBOARD, WANDB, MLFLOW, TRACKIO = "tensorboard", "wandb", "mlflow", "trackio"
BOARDS = (TENSORBOARD, WANDB, MLFLOW, TRACKIO)
PROJECT = "inlay"
# Paths, or what holds some, and what says nothing of the training.
UNTOLD = ("data", "test_data", "data_dir", "task_fields", "trust_remote_code")


def check(names: Iterable[str]) -> tuple[str, ...]:
    """The boards by these names, each once; an error for one that there is not, or that is not installed."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in BOARDS:
            raise unknown("place to log to", name, BOARDS)
        if importlib.util.find_spec(name) is None:
            raise InlayError(f"{name} is not installed: `pip install {name}`, or leave it out of --log-to.")
    return found


def make(names: Iterable[str], spec: Spec, folder: Path) -> list[TrainerCallback]:
    """What writes the metrics there; `folder` is the run's."""
    return [Board(name, spec, folder) for name in check(names)]


class Told:
    """The Trainer's arguments, as far as a board may see them."""

    def __init__(self, arguments: Any, facts: dict[str, Any], name: str) -> None:
        self._arguments, self._facts = arguments, facts
        self.run_name, self.output_dir = name, name
        self.project = os.environ.get("TRACKIO_PROJECT", PROJECT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)

    def to_dict(self) -> dict[str, Any]:
        """The run's spec."""
        return dict(self._facts)

    def to_json_string(self) -> str:
        """The same as text."""
        return json.dumps(self._facts, indent=2)


class Board(TrainerCallback):
    """One of Transformers' integrations, told only what may leave this machine."""

    def __init__(self, name: str, spec: Spec, folder: Path) -> None:
        self.name, self.folder, self.facts = name, folder, facts_of(spec)
        self._opened = False
        if name != TENSORBOARD:
            self.inner = get_reporting_integration_callbacks([name])[0]()
        elif is_main():
            from torch.utils.tensorboard import SummaryWriter

            self.inner = TensorBoardCallback(SummaryWriter(log_dir=str(folder / name)))
        else:
            self.inner = TensorBoardCallback()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open it."""
        try:
            if state.is_world_process_zero:
                self._open()
            self._tell("on_train_begin", args, state, control)
        except InlayError:
            raise
        except Exception as error:  # whatever a service that is not set up raises
            raise InlayError(
                f"{self.name} cannot be logged to: {first_line(error)}. Set it up, use its offline mode, or leave it "
                "out of --log-to."
            ) from error

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Hand the metrics on."""
        self._tell("on_log", args, state, control, logs=logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close what was opened here."""
        self._tell("on_train_end", args, state, control)
        if self._opened and self.name == WANDB:
            importlib.import_module(WANDB).finish()
        elif self._opened and self.name == MLFLOW:
            importlib.import_module(MLFLOW).end_run()
        self._opened = False

    def _open(self) -> None:
        """Begin the run of a service that would otherwise record the command, the machine and what is printed; one
        that the caller has begun is taken as it is."""
        if self.name == WANDB and (wandb := importlib.import_module(WANDB)).run is None:
            quiet = {"x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True}
            settings = wandb.Settings(console="off", disable_git=True, disable_code=True, save_code=False, **quiet)
            where = os.environ.get("WANDB_DIR", str(self.folder))
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            wandb.init(project=project, name=self.folder.name, dir=where, settings=settings)
            self._opened = True
        elif self.name == MLFLOW and (mlflow := importlib.import_module(MLFLOW)).active_run() is None:
            told = {"mlflow.source.name": PROJECT, "mlflow.user": PROJECT}  # otherwise a path and a login
            if experiment := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
                mlflow.set_experiment(experiment)
            mlflow.start_run(run_name=self.folder.name, tags=told)
            self._opened = True

    def _tell(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> None:
        told = Told(args, self.facts, self.folder.name)
        with redirect_stdout(sys.stderr):  # what is printed on standard output is the command's result
            getattr(self.inner, event)(told, state, control, model=None, **more)


def facts_of(spec: Spec) -> dict[str, Any]:
    """What may be told of a run: its spec without paths; a model of a folder goes by the folder's own name."""
    facts = {name: value for name, value in spec.to_json().items() if name not in UNTOLD and value is not None}
    if not spec.model.startswith(embedded.PREFIX) and Path(spec.model).expanduser().exists():
        facts["model"] = Path(spec.model).resolve().name
    return facts
