"""What a person sees of a training run: a bar in a terminal, otherwise one plain line an evaluation."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Display(TrainerCallback):
    """Writes to stderr, so that a command's result on stdout can be piped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bar: Any = None
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar, where there is a terminal to show it."""
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=self.name,
                unit="step",
                leave=False,
                file=sys.stderr,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update()

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
        line = f"{self.name}: step {state.global_step}/{state.max_steps}  {training}validation: {scores}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
