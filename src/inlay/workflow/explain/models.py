"""Explanations that only look: how alike the layers of two models are, and how far attention reaches.

The activation-prompt paper's figure 5. The examples are drawn from a split by the seed, and go through each model with
its own processor or tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from inlay.errors import InlayError, check_keywords
from inlay.records.spec import Spec
from inlay.workflow.explain.explanation import Value, model_name
from inlay.workflow.progress import Bar
from inlay.workflow.tune import DEFAULT_OUT, Say

if TYPE_CHECKING:
    import torch

    from inlay.anatomy import Anatomy
    from inlay.tasks import Task

# An explanation trains nothing; a spec must say something.
NO_METHOD = "none"


class Surroundings(TypedDict, total=False):
    """Where finished runs are (`runs`), and how progress and notes are shown."""

    runs: Path | str
    progress: bool
    say: Say | None


@dataclass(frozen=True)
class Subject:
    """A model, with or without a finished run's adapter, and the processor that makes its inputs."""

    name: str
    model: Any
    processor: Any
    parts: Anatomy
    source: str
    run: str | None = None

    @property
    def label(self) -> str:
        """Its name, for people."""
        return self.name if self.run is None else f"{self.name} + {self.run}"

    def facts(self) -> dict[str, Any]:
        """What is recorded of it."""
        return {"name": self.name, "source": self.source, "adapter": self.run, "blocks": len(self.parts.blocks)}


@dataclass(frozen=True)
class Similarity:
    """CKA of the layers of two models: `values[i][j]`, layer 0 the stem, then the output of every block.

    `alone`: the two are one and the same. `outlying` has the layers of either whose features are the mean over their
    usual tokens, as others drown them.
    """

    spec: Spec
    first: str
    second: str
    values: list[list[float]]
    examples: int
    features: str
    split: str
    alone: bool
    about: dict[str, Any]
    outlying: tuple[tuple[int, ...], ...] = ()

    what = "cka"
    columns = ("layer", "other_layer", "cka")

    def rows(self) -> list[tuple[Value, ...]]:
        """A row a pair."""
        return [(i, j, value) for i, line in enumerate(self.values) for j, value in enumerate(line)]

    def details(self) -> dict[str, Any]:
        """What was compared, and on what."""
        return self.about | {"examples": self.examples, "features": self.features, "split": self.split}

    @property
    def sentence(self) -> str:
        """What the table shows, and where tokens were left out."""
        return " ".join([self._shown(), *self.warnings])

    @property
    def warnings(self) -> list[str]:
        """A sentence for each model that has outlier tokens."""
        from inlay.explain.features import OUTLIER

        return [
            f"Layers {', '.join(map(str, layers))} of {name} have tokens more than {OUTLIER:g} times as large as the "
            "median, which would drown the others: there the mean over the other tokens is compared (--features flat "
            "compares all)."
            for name, layers in zip((self.first, self.second), self.outlying, strict=False)
            if layers
        ]

    def _shown(self) -> str:
        table = np.array(self.values)
        if self.alone:
            steps = np.diagonal(table, offset=1)
            turn = int(np.nanargmin(steps))
            return (
                f"Neighbouring layers of {self.first} have CKA {np.nanmean(steps):.2f} on average; the largest change "
                f"is from layer {turn} to {turn + 1} ({steps[turn]:.2f}), and the first and the last have "
                f"{table[0, -1]:.2f}."
            )
        last, match = len(table) - 1, int(np.nanargmax(table[-1]))
        best = np.unravel_index(np.nanargmax(table), table.shape)
        return (
            f"The last layer of {self.first} ({last}) is most like layer {match} of {self.second}'s "
            f"{table.shape[1] - 1} (CKA {table[-1, match]:.2f}). The closest pair is {best[0]} and {best[1]} "
            f"({table[best]:.2f})."
        )


@dataclass(frozen=True)
class AttentionDistance:
    """The mean distance that each head attends over: lists by block, then by head.

    `weighted` and `largest` are in `unit` (pixels for images, tokens for texts), `steps` in tokens: the paper's
    arg-max form as printed. `uniform` is what attention to all patches alike would give, by block; None for texts.
    """

    spec: Spec
    model: str
    unit: str
    weighted: list[list[float]]
    largest: list[list[float]]
    steps: list[list[float]]
    uniform: list[float] | None
    examples: int
    split: str
    about: dict[str, Any]

    what = "attention-distance"

    @property
    def columns(self) -> tuple[str, ...]:
        """The CSV's columns; in a text the arg-max form in tokens is one and the same."""
        return ("layer", "head", f"weighted_{self.unit}", f"argmax_{self.unit}", "argmax_tokens")

    def rows(self) -> list[tuple[Value, ...]]:
        """A row a head, both counted from 1."""
        return [
            (layer, head, *values)
            for layer, heads in enumerate(zip(self.weighted, self.largest, self.steps, strict=True), start=1)
            for head, values in enumerate(zip(*heads, strict=True), start=1)
        ]

    def details(self) -> dict[str, Any]:
        """What was measured, and on what."""
        more = {"examples": self.examples, "split": self.split, "unit": self.unit, "uniform": self.uniform}
        return self.about | more

    @property
    def sentence(self) -> str:
        """What the distances show."""
        means = [float(np.mean(heads)) for heads in self.weighted]
        far, near = int(np.argmax(means)), int(np.argmin(means))
        half = len(means) // 2
        told = (
            f"Heads reach farthest in block {far + 1} ({means[far]:.1f} {self.unit} on average) and least in block "
            f"{near + 1} ({means[near]:.1f})"
        )
        if half:
            told += f"; the early half averages {np.mean(means[:half]):.1f}, the late half {np.mean(means[-half:]):.1f}"
        if self.uniform:
            told += f". Attention to everything alike would give {np.mean(self.uniform):.1f}"
        return told + "."


def cka(
    spec: Spec,
    other: str | None = None,
    *,
    examples: int = 500,
    split: str = "test",
    features: str | None = None,
    adapter: str | None = None,
    other_adapter: str | None = None,
    **around: Unpack[Surroundings],
) -> Similarity:
    """How alike the layers of `spec.model` and `other` are on a task's examples; `other` None is the model itself.

    `features`: all positions in a row ("flat", None for images), their mean ("mean", None for texts, whose positions
    are other words in every example), or the class token ("cls"). With None, layers of images' features that have
    outlier tokens are compared by the mean over their other tokens. `adapter` and `other_adapter` are finished runs.
    `spec.batch_size` is the size of a minibatch: smaller ones need less memory and give noisier estimates.
    """
    import torch

    from inlay import backbones
    from inlay.explain.cka import SMALLEST, MinibatchCKA
    from inlay.explain.features import check_reduction

    reads = [
        backbones.modality(name, spec.revision if name == spec.model else None)
        for name in (spec.model, other or spec.model)
    ]
    if reads[0] != reads[1]:
        raise InlayError(
            f"{spec.model!r} reads {reads[0]}s and {other!r} reads {reads[1]}s: CKA compares two models on the same "
            "examples. Choose two of one kind."
        )
    task = draw_examples(spec, split, examples, smallest=SMALLEST)
    size = len(task.split(split))
    parts = minibatches(spec, size)
    if size // parts < SMALLEST:
        raise InlayError(
            f"The unbiased CKA needs minibatches of {SMALLEST} examples at least: batch_size={spec.amount()[1]} parts "
            f"{size} examples into {parts}. Give a larger --batch-size."
        )
    how = features or ("flat" if reads[0] == "image" else "mean")
    first = load_subject(spec.model, task, spec, adapter, **around)
    alone = (other is None or other == spec.model) and other_adapter == adapter
    if alone:
        second = first
    else:
        revision = spec.revision if other in (None, spec.model) else None
        second = load_subject(other or spec.model, task, spec.with_(revision=revision), other_adapter, **around)
    for one in (first, second):
        check_reduction(how, one.parts, one.model)
    table = MinibatchCKA()
    with Bar(parts, "cka", "batches", show=around.get("progress", True)) as bar:
        both = (first,) if alone else (first, second)
        chosen = features is None and how == "flat"
        outlying = [find_outlying(one, task, split, spec) if chosen else set() for one in both]
        streams = [grams(one, task, split, spec, how, own) for one, own in zip(both, outlying, strict=True)]
        for found in zip(*streams, strict=True):
            table.update(found[0], found[-1].to(found[0].device))
            bar.advance()
    values = table.value()
    if not bool(torch.isfinite(values).any()):
        raise InlayError("Every layer gives the same features for every example: there is nothing to compare.")
    about = {"first": first.facts(), "second": second.facts(), "task": task.source, "batches": parts}
    left = tuple(tuple(sorted(own)) for own in outlying)
    about |= {"outlying_layers": {one.label: list(own) for one, own in zip(both, left, strict=True) if own}}
    return Similarity(spec, first.label, second.label, values.tolist(), size, how, split, alone, about, left)


def find_outlying(one: Subject, task: Task, split: str, spec: Spec) -> set[int]:
    """The layers of a subject that have outlier tokens, by the first minibatch: all are then reduced alike."""
    import torch

    from inlay.explain import features
    from inlay.training.batches import Placement

    if one.parts.kind == "convolutional":
        return set()
    place = Placement.of(spec)
    batch = next(iter(batch_examples(one, task, split, spec, place)))
    with torch.no_grad(), place.autocast():
        return features.find_outlying(one.model, batch)


def grams(
    one: Subject, task: Task, split: str, spec: Spec, how: str, outlying: Set[int] = frozenset()
) -> Iterator[torch.Tensor]:
    """A subject's Gram matrices, minibatch by minibatch."""
    import torch

    from inlay.explain.features import watching
    from inlay.training.batches import Placement

    place = Placement.of(spec)
    for batch in batch_examples(one, task, split, spec, place):
        with watching(one.model, how, outlying) as seen, torch.no_grad(), place.autocast():
            seen.mask = batch.get("attention_mask")
            one.model(**batch)
            found = seen.take()
        yield found


def attention_distance(
    spec: Spec,
    *,
    examples: int = 64,
    split: str = "test",
    adapter: str | None = None,
    **around: Unpack[Surroundings],
) -> AttentionDistance:
    """How far each head of each block reaches on a task's examples; `adapter` is a finished run to look at with it."""
    import torch

    from inlay.explain import attention
    from inlay.training.batches import Placement

    task = draw_examples(spec, split, examples, smallest=1)
    one = load_subject(spec.model, task, spec, adapter, **around)
    parts = attention.check_attention(one.model)
    attention.check_order(one.model)
    place = Placement.of(spec)
    size = len(task.split(split))
    sums: dict[int, dict[str, torch.Tensor]] = {}
    batch: dict[str, torch.Tensor] = {}

    def take(index: int, weights: torch.Tensor) -> None:
        found = attention.reach(weights, parts, batch, index)
        kept = sums.setdefault(index, {})
        for name, values in vars(found).items():
            total = values.sum(0).cpu()
            kept[name] = kept[name] + total if name in kept else total

    with Bar(minibatches(spec, size), "attention distance", "batches", show=around.get("progress", True)) as bar:
        for each in batch_examples(one, task, split, spec, place):
            batch = each
            with attention.reading(one.model, take), torch.no_grad(), place.autocast():
                one.model(**each, **attention.arguments(parts))
            bar.advance()
    means = {
        name: [(sums[index][name] / size).tolist() for index in sorted(sums)]
        for name in ("weighted", "largest", "steps", "uniform")
    }
    uniform = [float(value) for value in means.pop("uniform")] if parts.modality == "image" else None
    means.pop("uniform", None)
    about = {"subject": one.facts(), "task": task.source}
    return AttentionDistance(
        spec, one.label, attention.unit(parts), **means, uniform=uniform, examples=size, split=split, about=about
    )


# ---------------------------------------------------------------------------------------------- models and examples


def draw_examples(spec: Spec, split: str, examples: int, *, smallest: int) -> Task:
    """The task with one split narrowed to `examples` rows, drawn by the seed and in random order.

    The order matters: rows that come sorted by class would make minibatches of one class.
    """
    from inlay.workflow.settle import check_modality, load_task

    if examples < smallest:
        raise InlayError(f"examples={examples} is too few: {smallest} at least are needed, and hundreds are better.")
    check_modality(spec)
    task = load_task(spec, need_train=split == "train")
    there = len(task.split(split))
    if there < smallest:
        sizes = ", ".join(f"{name} {len(task.split(name)):,}" for name in ("train", "validation", "test"))
        raise InlayError(f"The split {split!r} has {there} examples, and {smallest} are needed. There are: {sizes}.")
    order = np.random.default_rng(spec.seed).permutation(there)[:examples]
    return dataclasses.replace(task, **{split: task.split(split).select(order.tolist())})


def load_subject(
    name: str, task: Task, spec: Spec, adapter: str | None = None, **around: Unpack[Surroundings]
) -> Subject:
    """The model called `name`, ready for the task's rows; with `adapter`, as that finished run left it."""
    from inlay import backbones
    from inlay.anatomy import anatomy
    from inlay.methods import attach, registry
    from inlay.records.store import Store
    from inlay.tasks import TaskSchema, kinds
    from inlay.training.batches import Placement

    check_keywords("load_subject", around, Surroundings)
    schema, run = task.schema, None
    if adapter is not None:
        run = Store(around.get("runs", DEFAULT_OUT)).get(adapter)
        run.verify()
        if run.spec.tasks:
            raise InlayError(f"The run {run.id} has several tasks, and one is explained at a time: give another run.")
        schema = TaskSchema.from_json(run.record["task"]["schema"])
        if schema.modality != task.schema.modality:
            raise InlayError(
                f"The run {run.id} is about {schema.modality}s, and the task about {task.schema.modality}s."
            )
    reads = backbones.modality(name, spec.revision)
    if reads != kinds.modality(task.kind):
        raise InlayError(
            f"The model {name!r} reads {reads}s, and the data are {kinds.modality(task.kind)}s. Choose one that fits."
        )
    own = {} if run is None else {key: getattr(run.spec, key) for key in ("seed", "pooling", "image_size")}
    made = spec.with_(**own)
    backbone = backbones.load_for(made.with_(model=name), schema)
    if say := around.get("say"):
        say(f"model: {backbone.source}")
    model = backbone.model
    if run is not None:
        model = attach.restore(model, registry.get(run.spec.method), run.adapter, fingerprint=backbone.fingerprint)
    model.to(Placement.of(spec).device).eval()
    found = None if run is None else f"{run.spec.method} ({run.id})"
    return Subject(model_name(name), model, backbone.processor, anatomy(model), backbone.source, found)


def minibatches(spec: Spec, size: int) -> int:
    """How many minibatches so many examples make."""
    _, batch_size = spec.amount()
    return -(-size // batch_size)


def batch_examples(one: Subject, task: Task, split: str, spec: Spec, place: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The split in minibatches of at most `spec.batch_size`, as nearly equal as can be: none is a small remainder."""
    from inlay.training.batches import settle_length

    length = settle_length(one.model, task, one.processor, spec.max_length)
    encoded = task.encode(split, one.processor, length, model_config=one.model.config)
    collate = task.collator(one.processor, one.model)
    for part in np.array_split(np.arange(len(encoded)), minibatches(spec, len(encoded))):
        batch = collate([encoded[int(i)] for i in part])
        if one.run is not None:
            # Labels are the task's own; the run's head may know others, and no loss is wanted.
            batch = {name: value for name, value in batch.items() if name != "labels"}
        yield {name: value.to(place.device) for name, value in batch.items()}
