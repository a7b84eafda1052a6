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
from inlay.tasks.prompts import ends_in_a_place
from inlay.workflow.explain.explanation import Value
from inlay.workflow.progress import Bar
from inlay.workflow.tune import DEFAULT_OUT

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.methods.infoprompt.config import InfoPromptConfig
    from inlay.methods.infoprompt.layer import InfoPromptLayer
    from inlay.methods.infoprompt.phi import PhiCache
    from inlay.tasks.task import Task

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
        if not self.full:
            return said
        return f"{said} All are at the end of the bound, which tells no difference between them."

    @property
    def full(self) -> bool:
        """Whether all sources are at the end of the bound."""
        return min(fmean(source.values) for source in self.sources) >= FULL * self.most

    @property
    def most(self) -> float:
        """Where the bound ends: log K."""
        return math.log(self.negatives)


def information(
    runs: Sequence[str],
    *,
    words: Sequence[str] = (),
    examples: int = 256,
    steps: int = 300,
    negatives: int | None = None,
    store: Path | str = DEFAULT_OUT,
    progress: bool = True,
) -> Information:
    """The bound on I(P; Z | X) of the prompts of finished runs, of words, and of random words.

    For each source a critic is fitted to `examples` validation texts with the prompts frozen, `steps` updates long, and
    the bound measured on as many test texts. All sources have the texts of the first run, drawn by its seed,
    and the same K, `negatives`: the first run's, unless it is given. Runs of another model or with other texts, and
    those that read Z elsewhere, are refused. Words stand in the first run's template.
    """
    from inlay import backbones

    found = list({run.id: run for run in (prompted(Store(store).get(name)) for name in runs)}.values())
    settings = [_settings(run) for run in found]
    task = _common_task(found, settings)
    negatives = settings[0].num_negatives if negatives is None else negatives
    if negatives < 2:
        raise InlayError(f"negatives={negatives}: K counts the positive and its negatives, give at least 2.")
    sources: list[Source] = []
    jobs: list[tuple[str, Run | None, str | None]] = [(_label(run, found), run, None) for run in found]
    jobs += [(f"'{phrase}'", None, phrase) for phrase in words] + [(RANDOM, None, None)]
    backbone = backbones.load_for(found[0].spec.with_(trust_remote_code=False), task)
    kept: dict[tuple[str, str], PhiCache] = {}
    with Bar(len(jobs), "information", "sources", show=progress, lines=True) as bar:
        for name, run, phrase in jobs:
            bar.begin(name)
            layer, splits = _states(backbone, found[0], settings[0], task, run, phrase, examples, kept)
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
    alike = [other for other in all_runs if other.spec.method == run.spec.method]
    if len(alike) == 1:
        return run.spec.method
    told = [", ".join(f"{key}={value}" for key, value in sorted(one.spec.settings.items())) for one in alike]
    mine = told[alike.index(run)] or "defaults"
    same = told.count(told[alike.index(run)]) > 1
    return f"{run.spec.method} ({mine}, {run.id})" if same else f"{run.spec.method} ({mine}, seed {run.spec.seed})"


def _settings(run: Run) -> InfoPromptConfig:
    """The settings that a run's adapter was trained with, what the model said among them."""
    from inlay.methods.infoprompt.config import InfoPromptConfig

    return InfoPromptConfig.from_pretrained(str(run.adapter))


def _common_task(runs: Sequence[Run], settings: Sequence[InfoPromptConfig]) -> Task:
    """The first run's task, where all runs are of one model, of the same texts, and read Z in the same place."""
    from inlay import tasks

    first, state = runs[0], settings[0].state
    task = tasks.load(first.spec)
    for run, own in zip(runs[1:], settings[1:], strict=True):
        what = ""
        if run.record["backbone"]["fingerprint"] != first.record["backbone"]["fingerprint"]:
            what = f"is of another model, {run.spec.model}; that one has {first.spec.model}"
        elif own.state != state:
            what = f"reads Z elsewhere, at the {own.state}; that one at the {state}"
        elif state == settings[0].phi == "last" and _at_a_prompt(own) != _at_a_prompt(settings[0]):  # in a decoder
            what = "reads Z at a prompt and that one at a word, or the other way round: see the ends of their templates"
        elif run.record["task"]["digest"] != first.record["task"]["digest"]:
            other = tasks.load(run.spec)
            if other.fields != task.fields or any(
                task.split(split).to_dict() != other.split(split).to_dict() for split in SPLITS
            ):
                what = f"has other validation or test texts: {_texts(run)}; that one {_texts(first)}"
        if what:
            raise InlayError(
                f"The run {run.id} cannot be compared with {first.id}: it {what}. Give runs of one model, task, data "
                "and seed."
            )
    return task


def _at_a_prompt(settings: InfoPromptConfig) -> bool:
    """Whether the last token of a text is a prompt."""
    return settings.template is not None and ends_in_a_place(settings.template)


def _texts(run: Run) -> str:
    return f"task {run.record['task']['schema']['name']}, seed {run.spec.seed}"


def _states(
    backbone: Any,
    first: Run,
    settings: InfoPromptConfig,
    task: Task,
    run: Run | None,
    phrase: str | None,
    examples: int,
    kept: dict[tuple[str, str], PhiCache],
) -> tuple[InfoPromptLayer, dict[str, tuple[Tensor, ...]]]:
    """P, Z and Z' of validation and test texts: of a run's prompts, of a phrase's words, or of random ones.

    The model is as it was afterwards. `kept` has Z', which the prompts have no part in, for the next source: by where
    `Phi(X)` and Z' are read.
    """
    import torch

    from inlay.methods import attach
    from inlay.methods.infoprompt.task import for_task
    from inlay.tasks import TaskSchema

    schema = TaskSchema.from_json((run or first).record["task"]["schema"])
    if run is not None:
        method = registry.get(run.spec.method)
        model = attach.restore(backbone.model, method, run.adapter, fingerprint=backbone.fingerprint)
    else:
        torch.manual_seed(first.spec.seed)
        given: dict[str, Any] = {"encoder": "static", "beta": 0.0, "gamma": 0.0, "template": schema.prompt_template}
        given |= {"num_prompt_tokens": settings.num_prompt_tokens, "state": settings.state, "phi": settings.phi}
        given |= {"initial_words": phrase} if phrase else {}
        given, schema, _ = for_task(given, schema, backbone.processor, backbone.model)
        model = attach.attach(
            backbone.model,
            "warp",
            settings=given,
            newly_initialised=backbone.newly_initialised,
            task_kind=task.kind,
        )
    own = task.with_schema(schema)
    layer = layer_of(model)
    (pieces,) = layer.pieces.values()
    pieces.cache = kept.setdefault((pieces.site.phi, pieces.site.state), pieces.cache)
    found = {name: observe(model, own, backbone, name, examples, first) for name in SPLITS}
    model.unload()
    return layer, found


def layer_of(model: Any) -> InfoPromptLayer:
    """The layer that puts prompts into a model."""
    from inlay.methods.infoprompt.layer import InfoPromptLayer

    return next(module for module in model.modules() if isinstance(module, InfoPromptLayer))


def observe(model: Any, task: Any, backbone: Any, split: str, examples: int, run: Run) -> tuple[Tensor, ...]:
    """P, Z and Z' of texts that the run's seed draws from a split of the task, in single precision."""
    import torch
    from torch.utils.data import Subset

    from inlay.training.batches import Placement, batches

    place = Placement.of(run.spec)
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

    from inlay.methods.infoprompt import losses as info
    from inlay.methods.infoprompt.pieces import RepresentationCritic

    (pieces, *_) = layer.pieces.values()
    site = replace(pieces.site, config=replace(pieces.site.config, units=True))
    size, width = (float(part.square().mean().sqrt().clamp(min=1e-12)) for part in (known[0], known[2]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = RepresentationCritic(site, 1.0, 1.0)
        optimizer = torch.optim.Adam(critic.parameters(), lr=rate)

        def nce(texts: tuple[Tensor, ...]) -> Tensor:
            prompts, z, without = texts[0] / size, texts[1] / width, texts[2] / width
            mine, others = info.gaussian(*critic(z)), info.gaussian(*critic(without))
            drawn = info.sample(*mine), info.sample(*others, negatives - 1)
            return info.nce(info.representation_scores(prompts.mean(1), *drawn, critic.w2()))

        for _ in range(steps):
            optimizer.zero_grad()
            (-nce(known).mean()).backward()
            optimizer.step()
        with torch.no_grad():
            drawn = torch.stack([nce(fresh) for _ in range(DRAWS)]).mean(0)
            return information_bound(drawn, negatives=negatives - 1).tolist()


def information_bound(nce: Tensor, valid: Tensor | None = None, negatives: int | None = None) -> Tensor:
    """The lower bound `log K + L_NCE` of each example's information, in nats; K counts the positive too.

    `valid` marks the negatives that counted (B x N), or `negatives` says how many there were for everyone.
    """
    import torch

    count = nce.new_full(nce.shape, negatives or 0) if valid is None else valid.sum(1).to(nce.dtype)
    return torch.log1p(count) + nce
