"""How much information prompts carry: InfoPrompt's figure 1.

The distribution over texts of the bound on I(P; Z | X) for prompts from different sources, the critic refitted for each
with the prompts frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.store import Run, Store
from inlay.workflow.explain import Bar, Value
from inlay.workflow.tune import DEFAULT_OUT, Say

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.methods.infoprompt.layer import InfoPromptLayer

RANDOM = "random"
SPLITS = ("validation", "test")
FULL = 0.97  # of log K: where a bound has nothing more to tell
DRAWS = 8  # samples of Z over which a text's bound is averaged


@dataclass(frozen=True)
class Source:
    """Prompts of one origin: the bound of each text, in nats, and the run they are from, if any."""

    name: str
    values: tuple[float, ...]
    run: str | None = None


@dataclass(frozen=True)
class Information:
    """The bounds on I(P; Z | X) of several sources, on the same texts."""

    spec: Spec
    sources: list[Source]
    negatives: int
    examples: int
    steps: int

    what = "information"
    columns = ("source", "text", "information_nats")

    def rows(self) -> list[tuple[Value, ...]]:
        """One row a source and text."""
        return [(source.name, i, value) for source in self.sources for i, value in enumerate(source.values)]

    def details(self) -> dict[str, Any]:
        """Means by source, and how they were measured."""
        return {
            "means": {source.name: fmean(source.values) for source in self.sources},
            "runs": {source.name: source.run for source in self.sources},
            "K": self.negatives,
            "texts": self.examples,
            "critic_steps": self.steps,
        }

    @property
    def sentence(self) -> str:
        """Which source carries most, and least."""
        ranked = sorted(self.sources, key=lambda source: -fmean(source.values))
        told = ", ".join(f"{source.name} {fmean(source.values):.3f}" for source in ranked)
        end = f"at most log {self.negatives} = {self.most:.3f}"
        said = f"Information of prompts about the state, nats a text ({end}): {told}."
        if min(fmean(source.values) for source in self.sources) < FULL * self.most:
            return said
        return f"{said} All are at the end of the bound, which tells no difference between them."

    @property
    def most(self) -> float:
        """Where the bound ends: log K."""
        return math.log(self.negatives)


def information(
    spec: Spec,
    runs: Sequence[str],
    *,
    words: Sequence[str] = (),
    examples: int = 256,
    steps: int = 300,
    store: Path | str = DEFAULT_OUT,
    progress: bool = True,
    say: Say | None = None,
) -> Information:
    """The bound on I(P; Z | X) of the prompts of finished runs, of words, and of random words.

    For each source a critic is fitted to `examples` validation texts with the prompts frozen, `steps` updates long, and
    the bound measured on as many test texts. The texts and the template are those of the first run, `spec`'s.
    """
    found = [prompted(Store(store).get(name)) for name in runs]
    sources: list[Source] = []
    jobs: list[tuple[str, Run | None, str | None]] = [(_label(run, found), run, None) for run in found]
    jobs += [(f"'{phrase}'", None, phrase) for phrase in words] + [(RANDOM, None, None)]
    negatives = 0
    with Bar(len(jobs), "information", "source", show=progress, lines=True) as bar:
        for name, run, phrase in jobs:
            bar.begin(name)
            layer, splits = _states(found[0], run, phrase, examples)
            negatives = next(iter(layer.inlay_infoprompt_pieces.values())).site.it.config.num_negatives
            values = fitted_bounds(layer, splits["validation"], splits["test"], steps, negatives)
            sources.append(Source(name, tuple(values), None if run is None else run.id))
            bar.advance()
    return Information(found[0].spec, sources, negatives, len(sources[0].values), steps)


def prompted(run: Run) -> Run:
    """A finished run of a method with prompts in the text; otherwise an error that says which those are."""
    able = [name for name, method in registry.all_methods().items() if _has_prompts(method)]
    if run.spec.method not in able:
        raise InlayError(
            f"The run {run.id} is of method {run.spec.method!r}, which has no prompts in the text. Give runs of "
            f"{', '.join(able)}."
        )
    run.verify()
    return run


def _has_prompts(method: registry.Method) -> bool:
    return method.peft_type == "INLAY_INFOPROMPT"


def _label(run: Run, all_runs: Sequence[Run]) -> str:
    """The method, with what tells its run from the others of that method."""
    if sum(other.spec.method == run.spec.method for other in all_runs) == 1:
        return run.spec.method
    settings = ", ".join(f"{key}={value}" for key, value in sorted(run.spec.settings.items()))
    return f"{run.spec.method} ({settings or 'defaults'}, seed {run.spec.seed})"


def _loaded(run: Run) -> tuple[Any, Any, Any]:
    """The run's backbone, its task and the schema with its template."""
    from inlay import backbones, tasks
    from inlay.tasks import TaskSchema

    task = tasks.load(run.spec)
    task.schema = TaskSchema.from_json(run.record["task"]["schema"])
    backbone = backbones.load(
        run.spec.model,
        kind=task.kind,
        num_labels=task.num_labels,
        label_names=task.label_names,
        revision=run.spec.revision,
        seed=run.spec.seed,
    )
    return backbone, task, task.schema


def _states(
    first: Run, run: Run | None, phrase: str | None, examples: int
) -> tuple[InfoPromptLayer, dict[str, tuple[Tensor, ...]]]:
    """P, Z and Z' of validation and test texts: of a run's prompts, of a phrase's words, or of random ones."""
    import torch

    from inlay.methods import attach
    from inlay.methods.infoprompt.config import InfoPromptConfig

    backbone, task, schema = _loaded(run or first)
    if run is not None:
        method = registry.get(run.spec.method)
        model = attach.restore(backbone.model, method, run.adapter, fingerprint=backbone.fingerprint)
    else:
        torch.manual_seed(first.spec.seed)
        given: dict[str, Any] = {"encoder": "static", "beta": 0.0, "gamma": 0.0, "template": schema.prompt_template}
        given |= {"num_prompt_tokens": schema.prompt_tokens or 4}
        given |= {"initial_words": phrase} if phrase else {}
        given, task.schema, _ = InfoPromptConfig.for_task(given, schema, backbone.processor, backbone.model)
        model = attach.attach(
            backbone.model,
            "warp",
            settings=given,
            newly_initialised=backbone.newly_initialised,
            task_kind=task.kind,
        )
    return layer_of(model), {name: observe(model, task, backbone, name, examples, run or first) for name in SPLITS}


def layer_of(model: Any) -> InfoPromptLayer:
    """The layer that puts prompts into a model."""
    from inlay.methods.infoprompt.layer import InfoPromptLayer

    return next(module for module in model.modules() if isinstance(module, InfoPromptLayer))


def observe(model: Any, task: Any, backbone: Any, split: str, examples: int, run: Run) -> tuple[Tensor, ...]:
    """P, Z and Z' of texts that the run's seed draws from a split, in single precision."""
    import torch
    from torch.utils.data import Subset

    from inlay.training.place import Place, batches

    place = Place.of(run.spec)
    model.to(place.device)
    encoded = task.encode(split, backbone.processor, task.schema.max_length, model_config=model.config)
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(run.spec.seed))[:examples]
    chosen: Any = Subset(encoded, sorted(order.tolist()))
    with layer_of(model).observing() as seen, torch.no_grad():
        for batch in batches(model, chosen, task.collator(backbone.processor, model), place, None):
            model(**batch)
    return tuple(torch.cat(part).float() for part in (seen.prompts, seen.z, seen.without))


def fitted_bounds(
    layer: InfoPromptLayer,
    known: tuple[Tensor, ...],
    fresh: tuple[Tensor, ...],
    steps: int,
    negatives: int,
    rate: float = 2e-2,
) -> list[float]:
    """Fit f_mu, f_sigma and W_2 to some texts' P, Z and Z', and give other texts' bounds `log K + L_NCE`.

    P and the states are first divided by their sizes, which W_2 could undo: sources of any scale are fitted alike.
    """
    import torch

    from inlay.methods.infoprompt.pieces import RepresentationCritic
    from inlay.training import information as info

    (pieces, *_) = layer.inlay_infoprompt_pieces.values()
    site = replace(pieces.site.it, config=replace(pieces.site.it.config, units=True))
    size, width = (float(part.square().mean().sqrt().clamp(min=1e-12)) for part in (known[0], known[2]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = RepresentationCritic(site, 1.0, 1.0)
        optimizer = torch.optim.Adam(critic.parameters(), lr=rate)

        def nce(texts: tuple[Tensor, ...]) -> Tensor:
            prompts, z, without = texts[0] / size, texts[1] / width, texts[2] / width
            mine, others = info.gaussian(*critic(z)), info.gaussian(*critic(without))
            return info.representation_nce(
                prompts, info.sample(*mine), info.sample(*others, negatives - 1), critic.w2()
            )

        for _ in range(steps):
            optimizer.zero_grad()
            (-nce(known).mean()).backward()
            optimizer.step()
        with torch.no_grad():
            drawn = torch.stack([nce(fresh) for _ in range(DRAWS)]).mean(0)
            return info.information(drawn, negatives=negatives - 1).tolist()
