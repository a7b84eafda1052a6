"""How far a run has come: what checkpoints and metrics.jsonl keep of it, what a person sees, and a wish to stop.

A person sees a bar in a terminal, otherwise plain lines now and then; log.txt has the lines. Ctrl-C and SIGTERM are
answered at the next moment when nothing is half-done.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from inlay.console import WrittenProgress, can_redraw, visible
from inlay.records.atomic import append_line, write_text
from inlay.records.store import now


@dataclass
class Progress:
    """Metrics over time, the best of them, and the sums that are still open."""

    history: list[dict[str, Any]] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)  # at the last evaluation
    best: dict[str, Any] | None = None  # step, value, metrics, file
    waited: int = 0  # evaluations since the best
    stopped: bool = False  # by early stopping
    evaluation_due: bool = False  # interrupted before the evaluation that belongs to this step
    open_loss: float = 0.0  # summed since it was last logged
    open_parts: dict[str, float] = field(default_factory=dict)  # the same of its parts, by name
    logged_step: int = 0
    speed: dict[str, list[float]] = field(default_factory=dict)
    inference: list[list[float]] = field(default_factory=list)  # examples and seconds of each evaluation
    peak_memory: int = 0
    # Of several tasks each one's best, how many evaluations ago that was (waited), the step at which it ended if it
    # has, why it failed if it did, and whether its last parameters are the cause (spoilt).
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found = dataclasses.asdict(self)
        return found if self.tasks else {name: value for name, value in found.items() if name != "tasks"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From what `to_json` made."""
        return cls(**data)


class Journal:
    """metrics.jsonl: one line an event, flushed as it happens. Nothing is written by a journal without a path."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def restart(self, history: list[dict[str, Any]]) -> None:
        """Begin with this history: what an earlier process wrote after its last checkpoint happens again."""
        if self.path is not None:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in history))

    def add(self, entry: dict[str, Any]) -> None:
        """Add a line."""
        if self.path is not None:
            append_line(self.path, json.dumps(entry))


class Display(TrainerCallback):
    """Writes to stderr, so that a command's result on stdout can be piped. `log` is a file to write to as well."""

    def __init__(self, name: str, *, show: bool, log: Path | None) -> None:
        self.name = visible(name)
        self.show = show
        self.log = log
        self._bar: Any = None
        self._pace: WrittenProgress | None = None
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar, where there is a terminal to show it."""
        done = state.global_step
        if self.show and not can_redraw(sys.stderr):
            self._pace = WrittenProgress(state.max_steps, "steps", done=done)
        elif self.show:
            self._bar = tqdm(total=state.max_steps, initial=done, desc=self.name, unit="step", leave=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar, or say how far it is."""
        if self._bar is not None:
            self._bar.update()
        elif self._pace is not None and (line := self._pace.line(state.global_step)):
            self._tell(line + ("" if self._loss is None else f", training loss {self._loss:.4f}"))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Show the loss."""
        if logs and "loss" in logs:
            self._loss = logs["loss"]
            if self._bar is not None:
                self._bar.set_postfix_str(f"loss {self._loss:.4f}")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """One line an evaluation."""
        scores = "  ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in (metrics or {}).items())
        training = "" if self._loss is None else f"training loss {self._loss:.4f}  "
        self.say(f"step {state.global_step}/{state.max_steps}  {training}validation: {scores}")

    def say(self, text: str) -> None:
        """Show and log one line."""
        if self.show:
            self._tell(text)
        if self.log is not None:
            append_line(self.log, f"{now()} {text}")

    def _tell(self, text: str) -> None:
        tqdm.write(f"{self.name}: {visible(text)}", file=sys.stderr)  # this run's bar may be there, or one around it

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, has saved a checkpoint and can be resumed."""


class Interrupts:
    """While entered, the first signal is only noted (`wanted`); a second one interrupts at once.

    Signals can be handled in the main thread only: elsewhere nothing is changed. `also` is asked whenever it could
    stop: a run may have another reason to end early, such as a time that is up.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, also: Callable[[], bool] | None = None) -> None:
        self._signalled = False
        self._also = also
        self._earlier: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> bool:
        """Whether the run should stop."""
        return self._signalled or (self._also is not None and self._also())

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
