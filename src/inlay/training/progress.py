"""How far a run has come, beside what Transformers keeps: plain data, part of every checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from inlay.records.atomic import append_line, write_text


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
