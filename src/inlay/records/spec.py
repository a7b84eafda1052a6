"""What a run is to do, as plain data: the same spec is the same run.

A spec's identity is a hash over its fields in canonical JSON, with what it points at on disk (the user's data, a local
model) replaced by digests of the contents: moving a file changes nothing, editing it makes another run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.records.spec_values import fitting, shown
from inlay.records.task_fields import PATHS, read_fields


@dataclass(frozen=True)
class Spec:
    """One run: this model, this data, this method, these settings, this seed.

    None means "the default that suits": the method's learning rate, the task's length, the epochs and the batch size
    for so many examples (`amount`; where one of these or `max_steps` is given, the rest is the usual). Exactly one of
    `task` (a name), `tasks` (several names, trained together) and `data` (a path of the user's own) is given. What one
    of several tasks has of its own, such as its data, is in `task_fields` (`inlay.records.task_fields`). Of several
    tasks, `sampling` says how often each has a row in a batch: as often as it has rows in its data (proportional),
    equally (uniform), or by its rows to the power of 1 / `temperature`. `group_by_length` makes the training batches of
    texts that are about equally long: less is padded, and the order is less random. `pack` puts the texts of a
    training batch into as few rows as hold them: less is padded, and what is learnt is the same.

    `gradient_checkpointing` computes activations again in the backward pass and does not keep them; None: where a large
    language model learns to write on a GPU (`inlay.workflow.writing`). It does not change what is learnt, and None and
    False are one identity.

    `similarity_temperature` divides the cosines of texts to embed before their softmax; None: 0.05.

    `pooling` is what a text classifier's head reads. own: what its architecture has it read, whatever the checkpoint
    says. auto: what the checkpoint was made for, written in before the run has its name; where it says nothing, own.
    `max_eval` bounds evaluations during training: so many rows of each validation split, drawn once by the seed.
    `quantize` is how the frozen linear layers are held: 4bit, 8bit (bitsandbytes), int8, int4 (torchao); None: whole.
    `class_weights` is how much each class counts in the loss: balanced, or "rare=3,common=1"; None: all alike.
    `label_separator` stands between the labels in a cell where a row has several. `classes` are the names of ordered
    classes, the lowest first, or of those whose probabilities are given as lists. `init_adapter` is an
    adapter to begin with: a run, or a folder. `calibrate` chooses a temperature for the probabilities of classes on the
    validation split at the end (`inlay.tasks.calibration`). `towers` says which part of a model that compares images
    with texts is adapted: image, text or both. `image_size` is the side of the images in pixels; None: the model's own.
    """

    model: str
    method: str
    task: str | None = None
    data: str | None = None
    text: tuple[str, ...] = ()
    label: str | None = None
    image: str | None = None
    kind: str | None = None
    template: str | None = None
    data_dir: str | None = None
    test_data: str | None = None
    shots: int | None = None
    protocol: str | None = None
    seed: int = 0
    epochs: float | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    gradient_accumulation: int = 1
    learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup: float = 0.06
    schedule: str = "linear"
    clip: float = 1.0
    early_stopping: int | None = None
    evaluations: int | None = None
    max_length: int | None = None
    precision: str = "auto"
    gradient_checkpointing: bool | None = None
    trunk_cache: str = "auto"
    augment: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False
    tasks: tuple[str, ...] = ()
    sampling: str = "proportional"
    temperature: float = 1.0
    similarity_temperature: float | None = None
    pooling: str = "auto"
    group_by_length: bool = False
    task_fields: Mapping[str, Any] = field(default_factory=dict)
    quantize: str | None = None
    max_eval: int | None = None
    class_weights: str | None = None
    pack: bool = False
    label_separator: str | None = None
    classes: tuple[str, ...] = ()
    init_adapter: str | None = None
    calibrate: bool = False
    towers: str = "both"
    image_size: int | None = None

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            object.__setattr__(self, entry.name, fitting(entry, getattr(self, entry.name)))
        if [self.task is None, self.data is None, not self.tasks].count(False) != 1:
            raise InlayError(
                f"Give either a task by name or data of your own, not both or neither (task={self.task!r}, "
                f"data={self.data!r}); or several tasks (tasks={list(self.tasks)!r}). `inlay tasks` lists the names."
            )
        object.__setattr__(self, "task_fields", read_fields(Spec, self.tasks, self.task_fields))
        if self.tasks and self.test_data is not None and any("data" in own for own in self.task_fields.values()):
            raise InlayError(
                f"test_data={self.test_data!r} would be that of every task: give each its own (task_fields, or "
                "test_data in a file of tasks)."
            )
        if self.tasks and self.group_by_length:
            raise InlayError("group_by_length is for a run of one task: batches of several are drawn by the task.")
        for name in ("class_weights", "label_separator", "classes") if self.tasks else ():
            if (value := getattr(self, name)) not in (None, ()):
                raise InlayError(
                    f"{name}={value!r} is for a run of one task: leave it out, or train that task by itself."
                )
        if self.tasks and self.pack:
            raise InlayError("pack is for a run of one task: the rows of several belong to their adapters.")
        if self.tasks and self.calibrate:
            raise InlayError("calibrate is for a run of one task: leave it out, or train that task by itself.")
        if self.tasks and self.init_adapter is not None:
            raise InlayError(f"init_adapter={self.init_adapter!r} is for a run of one task: leave it out.")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name in ("augment", "quantize") and value is None):
                raise unknown(name, value, choices)
        if self.temperature != 1.0 and self.sampling != "temperature":
            raise InlayError(
                f"temperature={self.temperature!r} says nothing to {self.sampling} sampling: leave it out."
            )
        paths = [(name, getattr(self, name)) for name in ("model", *PATHS)]
        paths += [(name, own.get(name)) for own in self.task_fields.values() for name in PATHS]
        for name, path in paths:
            if any(len(part.encode()) > LONGEST_NAME for part in Path(path or "").parts):
                raise InlayError(f"{name}={shown(path)} is longer than a file's name can be.")
        positive = ("gradient_accumulation", "clip", "temperature")
        optional = ("epochs", "batch_size", "max_steps", "shots", "max_length", "learning_rate", "early_stopping")
        for name in (*positive, *optional, "evaluations", "max_eval", "similarity_temperature", "image_size"):
            value = getattr(self, name)
            if value is None and name not in positive:
                continue
            if not value > 0:
                raise InlayError(f"{name}={value!r} must be greater than 0.")
        if not 0 <= self.warmup < 1:
            raise InlayError(f"warmup={self.warmup!r} is the share of steps to warm up over: give 0 <= warmup < 1.")
        if not 0 <= self.seed < 2**32:
            raise InlayError(f"seed={self.seed!r} must be a whole number from 0 to {2**32 - 1}.")
        if self.weight_decay < 0:
            raise InlayError(f"weight_decay={self.weight_decay!r} must not be negative.")
        if (self.epochs, self.batch_size, self.max_steps) != (None, None, None):
            object.__setattr__(self, "epochs", EPOCHS if self.epochs is None else self.epochs)
            object.__setattr__(self, "batch_size", BATCH if self.batch_size is None else self.batch_size)
        # 3 and 3.0 are the same number and must be the same run.
        for name in (
            "epochs",
            "learning_rate",
            "weight_decay",
            "warmup",
            "clip",
            "temperature",
            "similarity_temperature",
        ):
            if isinstance(getattr(self, name), int):
                object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def subject(self) -> str:
        """What is learnt, for people: a task by its name, several joined by plus signs, or the path of the data."""
        return self.task or " + ".join(self.tasks) or str(self.data)

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON-ready data."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        """A spec from what `to_json` made, now or by an earlier inlay; whatever else it is given is an `InlayError`."""
        if not isinstance(data, Mapping):
            raise InlayError(f"A run's spec is an object with its fields, not {shown(data)}.")
        names = {entry.name for entry in dataclasses.fields(cls)}
        for key in data:
            if key not in names:
                raise unknown("field of a run's spec", str(key), names)
        for name in ("model", "method"):
            if name not in data:
                raise InlayError(f"A run's spec lacks {name!r}: it is not whole.")
        return cls(**data)

    def with_(self, **changes: Any) -> Spec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def amount(self, examples: int | None = None) -> tuple[float, int]:
        """The epochs, and how many examples an update sees: as given, or as suits a training set of this size.

        The usual 3 epochs of 32 would hardly move a method on a few dozen examples: those get 30 epochs of 8 (or the
        next number that accumulation can part), as few-shot studies train. None is a size that is not known.
        """
        if self.epochs is not None and self.batch_size is not None:
            return self.epochs, self.batch_size
        if examples is None or updates(examples, EPOCHS, BATCH) >= FEW_UPDATES:
            return EPOCHS, BATCH
        return FEW_SHOT_EPOCHS, math.lcm(FEW_SHOT_BATCH, self.gradient_accumulation)

    def digest(self, contents: Mapping[str, Any] | None = None) -> str:
        """Identity of the run: 64 hex digits. `contents` maps fields that name files to digests of what is in them."""
        own = self.to_json()
        if own["settings"].get("target_modules", "") is None:  # the method's default, spelled out
            del own["settings"]["target_modules"]
        own["gradient_checkpointing"] = bool(own["gradient_checkpointing"])  # None came after False
        fields = {name: value for name, value in own.items() if name not in LATER or value not in LATER[name]}
        fields |= dict(contents or {})
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()


def updates(examples: int, epochs: float, batch_size: int) -> int:
    """How many updates so much training makes."""
    return max(1, math.ceil(epochs * math.ceil(examples / batch_size)))


MOST_SEEDS = 10_000  # of a comparison
LONGEST_NAME = 255  # bytes of a file's name, on any file system in use
EPOCHS, BATCH = 3.0, 32
FEW_UPDATES = 50  # fewer than that are few
FEW_SHOT_EPOCHS, FEW_SHOT_BATCH = 30.0, 8
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
SCHEDULES = ("linear", "cosine", "constant")
TRUNK_CACHES = ("auto", "on", "off")
AUGMENTS = ("flip", "crop", "crop-flip")
SAMPLINGS = ("proportional", "temperature", "uniform")
QUANTISATIONS = ("4bit", "8bit", "int8", "int4")
POOLINGS = ("auto", "own", "mean", "first", "last", "pooler")
TOWERS = ("both", "image", "text")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "sampling": SAMPLINGS,
    "precision": PRECISIONS,
    "schedule": SCHEDULES,
    "trunk_cache": TRUNK_CACHES,
    "pooling": POOLINGS,
    "augment": AUGMENTS,
    "quantize": QUANTISATIONS,
    "towers": TOWERS,
}
# What a run did, of whose spec a field is absent: it was made before there was a choice.
BEFORE: Mapping[str, Any] = {"pooling": "own"}
# Fields that came after the first runs were made, and the values that mean what those did. These do not count: the
# runs keep their identity.
LATER: Mapping[str, tuple[Any, ...]] = {
    "trunk_cache": ("auto",),
    "augment": (None, ""),
    "tasks": ([],),
    "sampling": ("proportional",),
    "temperature": (1.0,),
    "similarity_temperature": (None,),
    "pooling": ("own", "auto"),  # what auto finds in a checkpoint is written in before
    "group_by_length": (False,),
    "task_fields": ({},),
    "quantize": (None,),
    "max_eval": (None,),
    "class_weights": (None,),
    "pack": (False,),
    "label_separator": (None,),
    "classes": ([],),
    "init_adapter": (None,),
    "calibrate": (False,),
    "towers": ("both",),
    "image_size": (None,),
}
