"""What a person sees of a training run: a bar in a terminal, otherwise plain lines now and then; and log.txt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from inlay.console import WrittenProgress, can_redraw, visible
from inlay.records.atomic import append_line
from inlay.records.store import now


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
