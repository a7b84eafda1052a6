"""How much a task has, in one line for people: rows, classes, splits."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from inlay.tasks.catalogue import SPLITS

if TYPE_CHECKING:
    from inlay.tasks.task import Task


def count(task: Task) -> str:
    """As in "210 images, 7 classes (30 each): 151 / 17 / 42 for training, validation, test"; of a draw of them, as in
    "210 images; used: 69 images, 7 classes (9 to 10 each): 10 / 17 / 42 for training, validation, test"."""
    sizes = [len(task.split(split)) for split in SPLITS]
    parted = " / ".join(f"{size:,}" for size in sizes)
    rows = sum(sizes)
    used = f"{_counted(task, rows)}{_classes(task)}: {parted} for {', '.join(SPLITS).replace('train', 'training')}"
    return f"{_counted(task, rows + task.unused)}; used: {used}" if task.unused else used


def _counted(task: Task, rows: int) -> str:
    return f"{rows:,} {_noun(task).removesuffix('s' if rows == 1 else '')}"


def _noun(task: Task) -> str:
    if task.modality == "image":
        return "images"
    if task.schema.chat:
        return "conversations"
    return task.schema.lm or "rows"  # of running text: lines, documents


def _classes(task: Task) -> str:
    """The classes with how many rows they have, over all splits; of several labels or values a row, how many there
    are."""
    several = {"labels": "labels", "values": "values", "shares": "classes"}.get(task.schema.predicts)
    if several is not None:
        return f", {len(task.schema.label_names or ())} {several}"
    if task.schema.predicts not in ("class", "rank"):
        return ""
    found: Counter[int] = Counter()
    for split in SPLITS:
        rows = task.split(split)
        found.update(rows["label"] if len(rows) else ())
    fewest, most = min(found.values()), max(found.values())
    each = f"{fewest:,} each" if fewest == most else f"{fewest:,} to {most:,} each"
    return f", {len(found)} class{'es' * (len(found) != 1)} ({each})"
