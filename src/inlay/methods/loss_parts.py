"""The parts of a loss in any Trainer's log, for methods whose loss has parts (InfoPrompt's `L`, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from inlay.methods.protocol import layers_of


class LossParts(TrainerCallback):
    """Logs each part by name, as `task_loss`, `head_loss` and `representation_loss`, beside the loss itself.

        Trainer(model, args, ..., callbacks=[inlay.LossParts()])

    What is logged is the mean over the passes since the last log, in this process. A step is not waited for: values
    are added up where they are. `inlay tune` has its own way and needs none of this.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._passes = 0

    @torch.no_grad()
    def _add(self, model: Any) -> None:
        found = [layer.loss_parts for layer in layers_of(model) if layer.loss_parts]
        for parts in found:
            for name, value in parts.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._passes += bool(found)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._add(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._add(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or not self._passes:
            return
        told = {f"{name}_loss": float(total) / self._passes for name, total in self._sums.items()}
        logs.update(told)
        state.log_history[-1].update(told)  # the Trainer's own copy, made before
        self._sums, self._passes = {}, 0
