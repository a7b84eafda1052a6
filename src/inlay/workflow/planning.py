"""Plan a comparison as independent specs: methods x seeds x sizes of the training set x learning rates.

Nothing is run here, and no model is loaded. Which methods fit a model was found by probing
(`inlay.methods.capabilities`). A method that does not fit is left out, with the reason, before it has a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inlay.errors import InlayError, did_you_mean, unknown
from inlay.methods import registry
from inlay.methods.capabilities import misfits
from inlay.records.spec import MOST_SEEDS, Spec
from inlay.tasks import kinds
from inlay.workflow.notes import Say
from inlay.workflow.settle import (
    check_modality,
    check_settings,
    load_task,
    pick_learning_rate,
    reads_states,
    select_task,
)

ALL = "all"
DEFAULT, GRID = "default", "grid"
Rates = str | Sequence[float]


@dataclass(frozen=True)
class Planned:
    """One comparison: its specs, and the methods that were left out, with the reason.

    `asked` are the methods left out that were named one by one, not by `all`: to leave those out is a failure.
    """

    specs: tuple[Spec, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()

    @property
    def methods(self) -> list[str]:
        """The methods that will run, in order."""
        return list(dict.fromkeys(spec.method for spec in self.specs))


def seed_numbers(seeds: int | Sequence[int]) -> list[int]:
    """The seeds themselves, each once: 0, 1, ... where their number is given."""
    many = seeds if isinstance(seeds, int) else len(seeds)
    if many > MOST_SEEDS:
        raise InlayError(f"seeds={many}: give {MOST_SEEDS:,} at most. Seeds are runs: 3 to 10 are usual.")
    return list(dict.fromkeys(range(seeds) if isinstance(seeds, int) else seeds))


def plan(
    spec: Spec,
    methods: Sequence[str],
    seeds: int | Sequence[int] = 3,
    *,
    shots: Sequence[int | None] = (None,),
    rates: Rates = DEFAULT,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    say: Say | None = None,
) -> Planned:
    """All runs of `spec` with every method, seed, size and learning rate; its own method and seed are replaced.

    `rates`: `default` is each method's own; `grid` each method's own grid; or numbers for all. `settings` are those of
    single methods, in addition to the spec's, which go to every one. `methods` may be `["all"]`.
    """
    check_modality(spec)
    numbers = seed_numbers(seeds)
    sizes = list(dict.fromkeys(shots)) or [None]
    everything = list(methods) == [ALL]
    if ALL in methods and not everything:
        raise InlayError(f"methods={list(methods)!r}: `all` is all of them: give it alone.")
    named = list(registry.all_methods()) if everything else [registry.get(name).name for name in dict.fromkeys(methods)]
    if not named or not numbers:
        raise InlayError(f"Nothing to compare: methods={list(methods)!r}, seeds={seeds!r}. Give one of each at least.")
    for name, given in (settings or {}).items():
        if registry.get(name).name not in named:
            raise InlayError(f"There are settings for {name!r}, which is not among the methods: {', '.join(named)}.")
        check_settings(spec.with_(method=name, settings=given))
    if rates != DEFAULT and spec.learning_rate is not None:
        raise InlayError(
            f"learning_rate={spec.learning_rate:g} and learning_rates={rates!r} contradict each other: give one."
        )
    left_out = {name: why for name in named if (why := refusal(spec, name)) is not None}
    if len(left_out) < len(named):
        left_out |= unfit_methods(spec, [name for name in named if name not in left_out])
    made = [
        with_own_layers(spec.with_(method=name, settings={**spec.settings, **(settings or {}).get(name, {})}), say)
        for name in named
        if name not in left_out
    ]
    if not made:
        first = next(iter(left_out))
        raise InlayError(
            f"None of {', '.join(left_out)} fits. Of {first}: {left_out[first]}. `inlay methods` says more."
        )
    # Seeds on the outside: where time runs out, methods have been tried equally often.
    specs = tuple(
        each.with_(seed=seed, shots=spec.shots if size is None else size, learning_rate=rate)
        for seed in numbers
        for size in sizes
        for each in made
        for rate in rates_of(each, rates)
    )
    return Planned(specs, left_out, frozenset() if everything else frozenset(left_out))


def check_baseline(baseline: str | None, plans: Sequence[Planned]) -> None:
    """An error, before anything starts, where no comparison has the baseline."""
    methods = list(dict.fromkeys(name for planned in plans for name in planned.methods))
    if baseline is None or baseline in methods:
        return
    why = next((planned.left_out[baseline] for planned in plans if baseline in planned.left_out), None)
    if why is None:
        raise unknown("baseline", baseline, methods, "It must be one of the methods that are compared.")
    raise InlayError(f"baseline={baseline!r} {why}. Take one that runs: {', '.join(methods)}.")


def refusal(spec: Spec, name: str) -> str | None:
    """Why a method cannot run the spec, as far as the method alone can say: no data is read and no model loaded.

    A choice of layers is for the methods that have any.
    """
    if spec.tasks and not registry.get(name).mixes_tasks:
        return "trains one task at a time"
    if spec.tasks and (why := registry.get(name).why_alone(spec.settings)) is not None:
        return f"cannot train several tasks with these settings: {why}"
    if spec.pooling == "pooler" and reads_states(name):
        return "has class vectors on the tokens' states and reads no pooler"
    try:
        check_settings(with_own_layers(spec.with_(method=name)))
    except InlayError as error:
        return f"cannot have these settings: {str(error).removesuffix('.')}"
    return None


def rates_of(spec: Spec, rates: Rates) -> Sequence[float | None]:
    """The learning rates to try with a spec's method; None is the method's default."""
    if rates == DEFAULT:
        return [spec.learning_rate]
    if rates == GRID:
        return sorted({*registry.get(spec.method).grid, *filter(None, [pick_learning_rate(spec)])})
    if isinstance(rates, str):
        hint = did_you_mean(rates, (DEFAULT, GRID))
        raise InlayError(f"learning_rates={rates!r}: give {DEFAULT}, {GRID}, or numbers as in 1e-3,3e-3.{hint}")
    if not rates or not all(rate > 0 for rate in rates):
        raise InlayError(f"learning_rates={list(rates)!r}: give numbers greater than 0.")
    return sorted({float(rate) for rate in rates})


def unfit_methods(spec: Spec, names: Sequence[str]) -> dict[str, str]:
    """The methods that the probes found not to work on this model for this kind of task, with the reason."""
    from inlay.anatomy import kind_of as built
    from inlay.backbones.locate import find

    place = find(spec.model, spec.revision)
    task = kinds.get(kind_of(spec)).head.probed_as
    why = f"does not work on {place.model_type} models for {task} of {place.modality}s, as probing found"
    unfit = misfits(names, place.model_type, task, lambda: (built(place.model_type), place.modality))
    return dict.fromkeys(unfit, why)


def kind_of(spec: Spec) -> str:
    """The kind of a spec's task, or of the first of several: from the catalogue where it is named there, else from the
    data."""
    from inlay import tasks

    first = select_task(spec, spec.tasks[0]) if spec.tasks else spec
    if first.task is not None and tasks.is_named(first.task):
        return tasks.describe(first.task).kind
    return load_task(first).kind


def with_own_layers(spec: Spec, say: Say | None = None) -> Spec:
    """The spec without a choice of layers where its method has none: the choice is for the others."""
    if "layers" not in spec.settings or registry.get(spec.method).takes("layers"):
        return spec
    if say is not None:
        say(f"layers={spec.settings['layers']!r} is ignored by {spec.method}, which has no layers to choose")
    return spec.with_(settings={key: value for key, value in spec.settings.items() if key != "layers"})
