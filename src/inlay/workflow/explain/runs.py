"""Explanations that train: accuracy by layer, by training-set size, and against the norm of the trained prompt.

The activation-prompt paper's figures 2, 4, 7, A1 and A2 (layers), 6 and A3 (training-set size), and the prompt norm of
theorem 1's discussion. All three are ordinary runs over a few settings: found if they were made before, resumed if they
were cut short.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.folder import CONFIG, read_json
from inlay.records.spec import Spec
from inlay.records.store import Run, load, name
from inlay.workflow.compare import make_runs
from inlay.workflow.comparison import improves_upwards
from inlay.workflow.explain.explanation import Value
from inlay.workflow.explain.norms import norm_of
from inlay.workflow.notes import Say
from inlay.workflow.planning import seed_numbers
from inlay.workflow.settle import check, check_modality, check_settings, load_task, settle
from inlay.workflow.statistics import half_width
from inlay.workflow.tune import DEFAULT_OUT

COLUMNS = (
    *("method", "layer", "training_examples", "learning_rate", "seeds"),
    *("test_mean", "test_interval", "validation_mean", "validation_interval"),
    *("trained_parameters", "prompt_norm", "prompt_norm_per_position"),
)


@dataclass(frozen=True)
class Variant:
    """One setting to run over the seeds; None leaves what the spec says.

    A method other than the spec's runs with its own learning rate and settings, unless `shared`.
    """

    method: str
    layer: int | None = None
    shots: int | None = None
    rate: float | None = None
    shared: bool = False

    def spec(self, base: Spec, seed: int) -> Spec:
        """The run of this variant with this seed."""
        same = self.shared or self.method == base.method
        settings = dict(base.settings) if same else {}
        if self.layer is not None:
            settings["layers"] = [self.layer]
        rate = base.learning_rate if same else None
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
    """One variant's runs: the task's first metric on the test and on the validation set, a value for each seed.

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
        """The name of its curve."""
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
class Curves:
    """Finished points, and what did not finish. `depth` is the number of the model's blocks.

    `tried`: where a learning rate was selected for each layer, all rates, with the one seed that decided.
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
        """What the curves show."""
        from inlay.workflow.explain import words

        say = {"layers": words.of_layers, "samples": words.of_samples, "prompt-norm": words.of_norms}
        return say[self.what](self)


@dataclass(frozen=True)
class Study:
    """The runs of one explanation: the spec that they vary, and where they are made."""

    what: str
    spec: Spec
    depth: int
    out: Path | str = DEFAULT_OUT
    progress: bool = True
    say: Say | None = None

    def run(self, variants: Sequence[Variant], seeds: Sequence[int]) -> Curves:
        """Run every variant with every seed. A run that fails is recorded and does not stop the rest."""
        if not seeds or not variants:
            raise InlayError(f"Nothing to run: {len(variants)} settings, seeds={seeds!r}. Give one of each at least.")
        wanted = [(variant, variant.spec(self.spec, seed)) for variant in variants for seed in seeds]
        known = [None if variant.layer is None else find_free_choice(spec, self.out) for variant, spec in wanted]
        todo = [
            (f"{variant}, seed {spec.seed}", spec)
            for (variant, spec), run in zip(wanted, known, strict=True)
            if run is None
        ]
        outcomes = make_runs(todo, self.out, retry_failed=True, progress=self.progress, say=self.say)
        made = dict(zip((label for label, _ in todo), outcomes, strict=True))
        failures = {label: each.error or each.status for label, each in made.items() if each.status != "finished"}
        runs: dict[Variant, list[Run]] = {}
        for (variant, spec), run in zip(wanted, known, strict=True):
            label = f"{variant}, seed {spec.seed}"
            if label not in failures:
                runs.setdefault(variant, []).append(run or load(Path(self.out) / str(made[label].run)))
        # Over layers, methods without a layer are baselines: lines of reference.
        of_curve = {variant: self.what != "layers" or variant.layer is not None for variant in runs}
        points = {variant: point_of(variant, own) for variant, own in runs.items()}
        if not any(of_curve.values()):
            raise InlayError(f"No run finished. {next(iter(failures.values()))}")
        record = next(iter(runs.values()))[0].record
        metric = record["metric"]
        return Curves(
            self.what,
            self.spec,
            metric,
            improves_upwards(record, metric),
            self.depth,
            [point for variant, point in points.items() if of_curve[variant]],
            [point for variant, point in points.items() if not of_curve[variant]],
            failures,
        )


def layers(
    spec: Spec,
    layers: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    baselines: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    progress: bool = True,
    say: Say | None = None,
) -> Curves:
    """How well `spec.method` does at every single layer of the model, with other methods for reference.

    `layers` are blocks counted from 1, and 0 for the pixels; None is all of them. A baseline runs with its own learning
    rate and settings; None is the new head alone. With `rates` each layer first runs with all of them and the first
    seed, and then with every seed at the one that did best on the validation set; otherwise all layers run at the
    spec's.
    """
    check_settings(spec)
    depth, images = survey(spec)
    chosen = check_layers(spec.method, layers, depth, images=images)
    named = registry.of_form("head") if baselines is None else dict.fromkeys(baselines)
    others = [Variant(registry.get(each).name) for each in named]
    numbers = seed_numbers(seeds)
    study = Study("layers", spec, depth, out, progress, say)
    if rates is None:
        return study.run([Variant(spec.method, layer) for layer in chosen] + others, numbers)
    grid = [Variant(spec.method, layer, rate=rate) for layer in chosen for rate in dict.fromkeys(rates)]
    first = study.run(grid, numbers[:1])
    found = study.run(best_rates(first) + others, numbers)
    return replace(found, tried=first.points, failures=first.failures | found.failures)


def best_rates(found: Curves) -> list[Variant]:
    """Each layer with the learning rate that did best there on the validation set, which every training task has."""
    from inlay.workflow.explain.words import select_best

    by_layer: dict[int | None, list[Point]] = {}
    for point in found.points:
        by_layer.setdefault(point.layer, []).append(point)
    best = [select_best(found, points)[0] for points in by_layer.values()]
    return [Variant(point.method, point.layer, rate=point.rate) for point in best]


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
) -> Curves:
    """How well methods do as the training set grows; a method that takes layers has a curve for each of `layers`.

    `spec.method` is ignored; its settings and learning rate go to every method.
    """
    names = list(dict.fromkeys(methods))
    for each in names:
        check_settings(spec, each)
    depth, images = survey(spec)
    curves: list[tuple[str, int | None]] = []
    for each in names:
        takes = layers is not None and registry.get(each).takes("layers")
        own: Sequence[int | None] = check_layers(each, layers, depth, images=images) if takes else [None]
        curves += [(each, layer) for layer in own]
    if layers is not None and all(layer is None for _, layer in curves):
        check_layers(names[0] if names else spec.method, layers, depth, images=images)
    if not curves or not sizes:
        raise InlayError(
            f"Nothing to run: methods={list(methods)!r}, sizes={list(sizes)!r}. Give one of each at least."
        )
    if bad := [size for size in sizes if size < 1]:
        raise InlayError(
            f"sizes={list(sizes)!r}: {bad[0]} is no number of training examples. Give whole numbers from 1."
        )
    variants = [Variant(each, layer, size, shared=True) for each, layer in curves for size in sorted(set(sizes))]
    return Study("samples", spec, depth, out, progress, say).run(variants, seed_numbers(seeds))


def prompt_norm(
    spec: Spec,
    layers: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    progress: bool = True,
    say: Say | None = None,
) -> Curves:
    """How accuracy varies with the norm of the trained prompt, over layers and learning rates.

    `layers` None is the method's own choice of layer; `rates` None is the grid that the method suggests.
    """
    method = registry.get(spec.method)
    if method.prompt_parameter is None:
        able = ", ".join(registry.names_where(lambda method: method.prompt_parameter))
        raise InlayError(f"{method.name!r} trains no prompt, so there is no norm to look at. Methods that do: {able}.")
    check_settings(spec)
    depth, images = survey(spec)
    chosen: Sequence[int | None] = [None]
    if layers is not None:
        chosen = check_layers(method.name, layers, depth, images=images)
    grid = method.grid if rates is None else rates
    variants = [Variant(method.name, layer, rate=rate) for layer in chosen for rate in grid]
    return Study("prompt-norm", spec, depth, out, progress, say).run(variants, seed_numbers(seeds))


def survey(spec: Spec) -> tuple[int, bool]:
    """How many blocks the model has, and whether it reads images; an error where it does not fit the task."""
    from inlay import backbones
    from inlay.anatomy import anatomy

    check_modality(spec)
    task = load_task(spec)
    backbone = backbones.load_for(spec, task)
    parts = anatomy(backbone.model)
    return len(parts.blocks), parts.modality == "image"


def check_layers(name: str, layers: Sequence[int] | None, depth: int, *, images: bool) -> list[int]:
    """The layers to run, in order and once each; an error for a method without layers, and for one out of range."""
    method = registry.get(name)
    if not method.takes("layers"):
        able = registry.names_where(lambda method: method.takes("layers"))
        raise InlayError(f"{name!r} cannot be put at a single layer. Methods that can: {', '.join(able)}.")
    first = method.first_layer if images else 1
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


def find_free_choice(spec: Spec, out: Path | str) -> Run | None:
    """The finished run in which the method itself chose the layers that `spec` asks for, if there is one.

    A comparison makes such runs, and they trained the same. The saved adapter says which layers were chosen.
    """
    with contextlib.suppress(InlayError):  # of what cannot be run, the run itself says why
        free = check(spec.with_(settings={key: value for key, value in spec.settings.items() if key != "layers"}))
        alike: list[Run] = []
        for folder in Path(out).glob(f"{name(free, '')}-*"):
            with contextlib.suppress(InlayError):  # a damaged neighbour is no reason to pass over a good run
                alike += [load(folder)] if (folder / "spec.json").is_file() else []
        # Compared first, because it reads no data, which decide the epochs, the batch size and the pooling.
        known = {"epochs": free.epochs, "batch_size": free.batch_size, "pooling": free.pooling}
        if all(run.spec.with_(**known) != free for run in alike):
            return None
        settled = settle(free)
        run = settled.find(out, settled.spec)
        if run is None or run.status != "finished":
            return None
        try:
            run.verify()
            saved = run.adapter / CONFIG["peft"]
            found = read_json(saved).get("layers") if saved.is_file() else None
        except InlayError as error:
            logging.getLogger("inlay.notes").warning(
                "%s is damaged and is not used; its layers are run anew: %s", run.id, error
            )
            return None
        return run if found == spec.settings["layers"] else None
    return None


def point_of(variant: Variant, runs: Sequence[Run]) -> Point:
    """One variant's runs, put together."""
    metric = runs[0].record["metric"]
    norms = [norm for run in runs if (norm := norm_of(run)) is not None]

    def values(split: str) -> tuple[float, ...]:
        return tuple(run.metrics[split][metric] for run in runs if split in run.metrics)

    return Point(
        method=variant.method,
        layer=variant.layer,
        examples=runs[0].record["examples"]["train"],
        rate=runs[0].spec.learning_rate,
        seeds=tuple(run.spec.seed for run in runs),
        test=values("test"),
        validation=values("validation"),
        trained=runs[0].portrait["parameters"]["trained"],
        norms=tuple(total for total, _ in norms),
        norms_per_position=tuple(each for _, each in norms),
        runs=tuple(run.id for run in runs),
    )
