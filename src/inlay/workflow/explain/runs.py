"""Explanations that train: accuracy by layer, by training-set size, and against the norm of the trained prompt.

The activation-prompt paper's figures 2, 4, 7, A1 and A2 (layers), 6 and A3 (training-set size), and the prompt norm of
theorem 1's discussion. All three are the same thing: ordinary runs over a few settings, made by `tune`, found again
when they were made before, resumed when they were cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.workflow.comparison import upwards
from inlay.workflow.explain.explanation import Value
from inlay.workflow.explain.found import of_its_own_accord
from inlay.workflow.explain.norms import norm_of, prompt_in
from inlay.workflow.planning import seed_numbers
from inlay.workflow.progress import Bar, bars_aside
from inlay.workflow.statistics import half_width
from inlay.workflow.tune import DEFAULT_OUT, Say, check_modality, check_settings, tune

# Where a layer 0, the pixels, means something.
FROM_PIXELS = ("activation-prompt",)
LINEAR_PROBE = "linear-probe"
COLUMNS = (
    "method",
    "layer",
    "training_examples",
    "learning_rate",
    "seeds",
    "test_mean",
    "test_interval",
    "validation_mean",
    "validation_interval",
    "trained_parameters",
    "prompt_norm",
    "prompt_norm_per_position",
)


@dataclass(frozen=True)
class Cell:
    """One setting to run over the seeds; None leaves what the spec says."""

    method: str
    layer: int | None = None
    shots: int | None = None
    rate: float | None = None

    def spec(self, base: Spec, seed: int) -> Spec:
        """The run of this cell with this seed."""
        settings = dict(base.settings) if self.method == base.method else {}
        if self.layer is not None:
            settings["layers"] = [self.layer]
        rate = base.learning_rate if self.method == base.method else None
        return base.with_(
            method=self.method,
            seed=seed,
            shots=base.shots if self.shots is None else self.shots,
            learning_rate=rate if self.rate is None else self.rate,
            settings=settings,
        )

    def __str__(self) -> str:
        parts = [self.method]
        parts += [f"layer {self.layer}"] if self.layer is not None else []
        parts += [f"{self.shots:,} examples"] if self.shots is not None else []
        parts += [f"learning rate {self.rate:g}"] if self.rate is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Point:
    """One cell's runs: the task's first metric, a value a seed, on the test and on the validation split.

    `norm` is the mean over seeds of the trained prompt's Euclidean norm, and `norm_per_position` that of its root mean
    square over positions; None for methods that train no prompt. `rate` is None where only the loaded model could say
    which is the method's own.
    """

    method: str
    layer: int | None
    examples: int
    rate: float | None
    seeds: tuple[int, ...]
    test: tuple[float, ...]
    validation: tuple[float, ...]
    trained: int
    norms: tuple[float, ...]
    norms_per_position: tuple[float, ...]
    runs: tuple[str, ...]

    @property
    def label(self) -> str:
        """What tells this curve from others."""
        return self.method if self.layer is None else f"{self.method}, layer {self.layer}"

    def mean(self, split: str = "test") -> float | None:
        """The mean over seeds."""
        values = getattr(self, split)
        return fmean(values) if values else None

    def interval(self, split: str = "test") -> float | None:
        """Half of the 95 % confidence interval of the mean; None for a single seed."""
        return half_width(getattr(self, split))

    @property
    def norm(self) -> float | None:
        return fmean(self.norms) if self.norms else None

    @property
    def norm_per_position(self) -> float | None:
        return fmean(self.norms_per_position) if self.norms_per_position else None

    def row(self) -> tuple[Value, ...]:
        """The point as a row of the CSV."""
        scores = (self.mean(), self.interval(), self.mean("validation"), self.interval("validation"))
        cost = (self.trained, self.norm, self.norm_per_position)
        return (self.method, self.layer, self.examples, self.rate, len(self.seeds), *scores, *cost)


@dataclass(frozen=True)
class Sweep:
    """Finished points, and what did not finish. `depth` is the number of the model's blocks.

    `tried`, where each layer's learning rate was chosen: all rates, with the one seed that decided.
    """

    what: str
    spec: Spec
    metric: str
    greater_is_better: bool
    depth: int
    points: list[Point]
    baselines: list[Point] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    tried: list[Point] = field(default_factory=list)

    columns = COLUMNS

    def rows(self) -> list[tuple[Value, ...]]:
        """The CSV's rows: points, then baselines."""
        return [point.row() for point in (*self.points, *self.baselines)]

    def details(self) -> dict[str, Any]:
        """The values of every seed, and the runs that they are from."""
        return {
            "metric": self.metric,
            "blocks": self.depth,
            "points": [asdict(point) for point in self.points],
            "baselines": [asdict(point) for point in self.baselines],
            "rates_tried": [asdict(point) for point in self.tried],
            "failures": self.failures,
        }

    @property
    def sentence(self) -> str:
        """What the numbers show."""
        from inlay.workflow.explain import words

        say = {"layers": words.of_layers, "samples": words.of_samples, "prompt-norm": words.of_norms}
        return say[self.what](self)


def layers(
    spec: Spec,
    layers: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    baselines: Sequence[str] = (LINEAR_PROBE,),
    rates: Sequence[float] | None = None,
    progress: bool = True,
    say: Say | None = None,
) -> Sweep:
    """How well `spec.method` does at every single layer of the model, with other methods beside it for reference.

    `layers` are blocks counted from 1, and 0 for the pixels; None is all of them. A baseline runs with its own learning
    rate and settings. With `rates` each layer first runs with all of them and the first seed, and then with every seed
    at the one that did best on validation; otherwise all layers run at the spec's.
    """
    check_settings(spec)
    depth, images = survey(spec)
    chosen = check_layers(spec.method, layers, depth, images=images)
    others = [registry.get(name).name for name in dict.fromkeys(baselines)]
    numbers = seed_numbers(seeds)
    run = partial(sweep, "layers", spec, out=out, depth=depth, progress=progress, say=once(say))
    cells, first = [Cell(spec.method, layer) for layer in chosen], None
    if rates is not None:
        first = run(
            [Cell(spec.method, layer, rate=rate) for layer in chosen for rate in dict.fromkeys(rates)], numbers[:1]
        )
        cells = best_rates(first)
    found = run(cells + [Cell(name) for name in others], numbers)
    if first is None:
        return found
    return replace(found, tried=first.points, failures=first.failures | found.failures)


def best_rates(found: Sweep) -> list[Cell]:
    """Each layer with the learning rate that did best there on validation, which every training task has."""
    from inlay.workflow.explain.words import selected

    by_layer: dict[int | None, list[Point]] = {}
    for point in found.points:
        by_layer.setdefault(point.layer, []).append(point)
    best = [selected(found, points)[0] for points in by_layer.values()]
    return [Cell(point.method, point.layer, rate=point.rate) for point in best]


def samples(
    spec: Spec,
    methods: Sequence[str],
    sizes: Sequence[int],
    layers: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    progress: bool = True,
    say: Say | None = None,
) -> Sweep:
    """How well methods do as the training set grows; a method that takes layers has a curve for each of `layers`.

    `spec.method` is ignored; its settings and learning rate go to every method.
    """
    for name in dict.fromkeys(methods):
        check_settings(spec, name)
    depth, images = survey(spec)
    curves: list[tuple[str, int | None]] = []
    for name in dict.fromkeys(methods):
        method = registry.get(name)
        if layers is not None and method.takes("layers"):
            curves += [(name, layer) for layer in check_layers(name, layers, depth, images=images)]
        else:
            curves.append((name, None))
    if layers is not None and all(layer is None for _, layer in curves):
        check_layers(curves[0][0] if curves else spec.method, layers, depth, images=images)
    if not curves or not sizes:
        raise InlayError(
            f"Nothing to run: methods={list(methods)!r}, sizes={list(sizes)!r}. Give one of each at least."
        )
    if bad := [size for size in sizes if size < 1]:
        raise InlayError(
            f"sizes={list(sizes)!r}: {bad[0]} is no number of training examples. Give whole numbers from 1."
        )
    cells = [Cell(name, layer, size) for name, layer in curves for size in sorted(set(sizes))]
    return sweep("samples", spec, cells, seeds, out, depth, shared=True, progress=progress, say=say)


def prompt_norm(
    spec: Spec,
    layers: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    progress: bool = True,
    say: Say | None = None,
) -> Sweep:
    """How accuracy goes with the norm of the trained prompt, over layers and learning rates.

    `layers` None is the method's own choice of layer; `rates` None is the grid that the method suggests.
    """
    method = registry.get(spec.method)
    if prompt_in(method.name) is None:
        able = ", ".join(name for name in registry.all_methods() if prompt_in(name))
        raise InlayError(f"{method.name!r} trains no prompt, so there is no norm to look at. Methods that do: {able}.")
    check_settings(spec)
    depth, images = survey(spec)
    chosen: list[int | None] = [None]
    if layers is not None:
        chosen = list(check_layers(method.name, layers, depth, images=images))
    grid = list(rates) if rates is not None else list(method.grid)
    cells = [Cell(method.name, layer, rate=rate) for layer in chosen for rate in grid]
    return sweep("prompt-norm", spec, cells, seeds, out, depth, progress=progress, say=say)


def survey(spec: Spec) -> tuple[int, bool]:
    """How many blocks the model has, and whether it reads images; after a look whether it fits the task at all."""
    from inlay import backbones, tasks
    from inlay.anatomy import anatomy

    check_modality(spec)
    task = tasks.load(spec)
    backbone = backbones.load_for(spec, task)
    parts = anatomy(backbone.model)
    return len(parts.blocks), parts.modality == "image"


def check_layers(name: str, layers: Sequence[int] | None, depth: int, *, images: bool) -> list[int]:
    """The layers to run, in order and once each; an error for a method without layers, and for one out of range."""
    method = registry.get(name)
    if not method.takes("layers"):
        able = [other.name for other in registry.all_methods().values() if other.takes("layers")]
        raise InlayError(f"{name!r} cannot be put at a single layer. Methods that can: {', '.join(able)}.")
    first = 0 if images and name in FROM_PIXELS else 1
    if layers is None:
        return list(range(first, depth + 1))
    if not layers:
        raise InlayError(f"No layer was given. {name!r} can be put at {first} to {depth} in this model.")
    for layer in layers:
        if not first <= layer <= depth:
            raise InlayError(
                f"There is no layer {layer} for {name!r} in this model: give {first} to {depth}"
                + (" (0 is the pixels)." if first == 0 else ".")
            )
    return sorted(set(layers))


def sweep(
    what: str,
    spec: Spec,
    cells: Sequence[Cell],
    seeds: int | Sequence[int],
    out: Path | str,
    depth: int,
    *,
    shared: bool = False,
    progress: bool = True,
    say: Say | None = None,
) -> Sweep:
    """Run every cell with every seed. `shared`: all methods get the spec's settings and learning rate.

    One run that fails is noted and does not stop the rest.
    """
    numbers = seed_numbers(seeds)
    if not numbers or not cells:
        raise InlayError(f"Nothing to run: {len(cells)} settings, seeds={seeds!r}. Give one of each at least.")
    say_once = once(say)
    failures: dict[str, str] = {}
    done: list[tuple[Cell, list[Run]]] = []
    with Bar(len(cells) * len(numbers), what, "runs", show=progress, lines=True) as bar:
        for cell in cells:
            runs = []
            for seed in numbers:
                bar.begin(f"{cell}, seed {seed}")
                base = spec.with_(method=cell.method) if shared else spec
                try:
                    each = cell.spec(base, seed)
                    known = of_its_own_accord(each, out) if cell.layer is not None else None
                    runs.append(known or tune(each, out, progress=progress, say=say_once))
                except InlayError as error:
                    failures[f"{cell}, seed {seed}"] = str(error)
                    say_once(f"{cell}, seed {seed}: {error}")
                bar.advance()
            if runs:
                done.append((cell, runs))
    points = [point_of(cell, runs) for cell, runs in done]
    wanted = [point for (cell, _), point in zip(done, points, strict=True) if _is_wanted(what, cell)]
    if not wanted:
        raise InlayError(f"No run finished. {next(iter(failures.values()))}")
    record = done[0][1][0].record
    metric = record["metric"]
    others = [point for point in points if point not in wanted]
    return Sweep(what, spec, metric, upwards(record, metric), depth, wanted, others, failures)


def once(say: Say | None) -> Say:
    """Say every line but once, beside the progress bars, and of a run that was made before say nothing."""
    told: set[str] = set()

    def say_once(line: str) -> None:
        if say is not None and line not in told and not line.startswith("already done"):
            told.add(line)
            with bars_aside():
                say(line)

    return say_once


def _is_wanted(what: str, cell: Cell) -> bool:
    """Whether a cell is on the curve, or a line of reference beside it."""
    return what != "layers" or cell.layer is not None


def point_of(cell: Cell, runs: Sequence[Run]) -> Point:
    """One cell's runs, put together."""
    metric = runs[0].record["metric"]
    norms = [norm for run in runs if (norm := norm_of(run)) is not None]
    return Point(
        method=cell.method,
        layer=cell.layer,
        examples=runs[0].record["examples"]["train"],
        rate=runs[0].spec.learning_rate,
        seeds=tuple(run.spec.seed for run in runs),
        test=_values(runs, "test", metric),
        validation=_values(runs, "validation", metric),
        trained=runs[0].portrait["parameters"]["trained"],
        norms=tuple(total for total, _ in norms),
        norms_per_position=tuple(each for _, each in norms),
        runs=tuple(run.id for run in runs),
    )


def _values(runs: Sequence[Run], split: str, metric: str) -> tuple[float, ...]:
    return tuple(run.metrics[split][metric] for run in runs if split in run.metrics)
