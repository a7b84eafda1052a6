"""The surface on which prompts are trained: InfoPrompt's figure 2.

The task's loss and the representation loss over the top two principal components of the word embeddings, with the path
that the first steps of training took.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.methods import registry
from inlay.papers.infoprompt.explain.information import layer_of
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.workflow.explain.explanation import Value
from inlay.workflow.progress import Bar


@dataclass(frozen=True)
class Path2D:
    """Where the mean prompt stood after each step, in the plane of the two components, and the losses there; the
    representation loss by the critic as it then was."""

    name: str
    steps: tuple[int, ...]
    points: tuple[tuple[float, float], ...]
    task: tuple[float, ...]
    representation: tuple[float, ...] = ()


@dataclass(frozen=True)
class Landscape:
    """Losses over a plane of prompts, `values[loss][i][j]` at (`x[j]`, `y[i]`), and the paths of training."""

    spec: Spec
    x: list[float]
    y: list[float]
    values: dict[str, list[list[float]]]
    paths: list[Path2D]
    examples: int
    shares: tuple[float, float]  # of the embeddings' variance
    failures: dict[str, str] = field(default_factory=dict)

    what = "landscape"
    columns = ("kind", "loss_or_path", "step", "component_1", "component_2", "value")

    def rows(self) -> list[tuple[Value, ...]]:
        """The surfaces point by point, then the paths step by step."""
        found: list[tuple[Value, ...]] = [
            ("surface", loss, None, x, y, table[i][j])
            for loss, table in self.values.items()
            for i, y in enumerate(self.y)
            for j, x in enumerate(self.x)
        ]
        for path in self.paths:
            for step, (x, y), value in zip(path.steps, path.points, path.task, strict=True):
                found.append(("path", path.name, step, x, y, value))
        return found

    def details(self) -> dict[str, Any]:
        """How many texts, and how much of the embeddings the plane holds."""
        return {"texts": self.examples, "variance_of_components": list(self.shares)}

    @property
    def sentence(self) -> str:
        """How rough the surfaces are, and how far each path went down."""
        rough = ", ".join(f"{name} {roughness(table):.3f}" for name, table in self.values.items())
        down = "; ".join(f"{path.name}: {path.task[0]:.3f} to {path.task[-1]:.3f}" for path in self.paths)
        return f"Roughness (mean curvature over range): {rough}. Task loss along the path: {down}."


def roughness(table: Sequence[Sequence[float]]) -> float:
    """The mean absolute second difference of a surface, as a part of its range: 0 for a plane."""
    import numpy as np

    values = np.asarray(table)
    bends = [np.abs(np.diff(values, n=2, axis=axis)).mean() for axis in (0, 1)]
    return float(np.mean(bends) / max(float(np.ptp(values)), 1e-12))


def landscape(
    spec: Spec,
    *,
    examples: int = 20,
    steps: int = 500,
    grid: int = 21,
    reach: float = 4.0,
    progress: bool = True,
) -> Landscape:
    """The losses over the plane of the two principal components of the word embeddings, and the first steps' paths.

    Trained anew from the spec with one prompt token, as the paper does, once as it is and, where it has a head loss
    (WARP and IDPG have none), once without.
    The surfaces are those of the first one's class vectors and critic after the last step, averaged over `examples`
    training texts; `reach` is how far they go, in standard deviations of the embeddings along each component.
    """
    variants = {f"gamma = {gamma(spec):g}": {}, "gamma = 0": {"gamma": 0.0}}
    walks: dict[str, _Walk] = {}
    with Bar(len(variants) + grid, "landscape", "pieces", show=progress) as bar:
        for name, changed in variants.items():
            bar.begin(name)
            walks[name] = _Walk(
                spec.with_(settings={**spec.settings, **changed, "num_prompt_tokens": 1}), examples, steps
            )
            bar.advance()
        first, *_ = walks.values()
        points = [point for walk in walks.values() for point in walk.points]
        x, y, values = _surface(first, points, grid, reach, bar)
    paths = [
        Path2D(name, tuple(walk.at), tuple(walk.points), tuple(walk.losses), tuple(walk.representation))
        for name, walk in walks.items()
    ]
    return Landscape(spec, x, y, values, paths, examples, first.shares)


def spec_of(run: Run, *, trust_remote_code: bool = False) -> Spec:
    """What a run is trained again by. Its file does not allow a model's own code to run: `trust_remote_code` does."""
    from inlay.workflow.predict import check_trust

    check_trust(run.spec.trust_remote_code, trust_remote_code, f"The run {run.id}")
    return run.spec.with_(trust_remote_code=trust_remote_code)


def gamma(spec: Spec) -> float:
    """The weight of the head loss: the spec's, its method's, or the default."""
    from inlay.methods.infoprompt.config import InfoPromptConfig

    return float({**registry.get(spec.method).settings, **spec.settings}.get("gamma", InfoPromptConfig.gamma))


class _Enough(Exception):
    """Ends a training that is only watched."""


class _Walk:
    """One training from a spec, watched for its first steps: where the mean prompt of some texts stands."""

    def __init__(self, spec: Spec, examples: int, steps: int) -> None:
        import torch
        from transformers import TrainerCallback

        from inlay import backbones, tasks
        from inlay.methods.infoprompt.pieces import embedded
        from inlay.training import FitOptions, fit
        from inlay.training.objectives import adapt_task

        task = tasks.load(spec)
        backbone = backbones.load_for(spec, task)
        _, watched, _ = adapt_task(spec.settings, registry.get(spec.method), task, backbone)
        self.at: list[int] = []
        self.points: list[tuple[float, float]] = []
        self.losses: list[float] = []
        self.representation: list[float] = []
        self.batch: dict[str, Any] = {}
        words = backbone.model.get_input_embeddings()
        table = embedded(words, range(len(words.weight))).float().cpu()
        self.centre = table.mean(0)
        _, spread, axes = torch.linalg.svd(table - self.centre, full_matrices=False)
        self.axes, self.deviations = axes[:2], spread[:2] / len(table) ** 0.5
        variance = spread.square()
        self.shares = (float(variance[0] / variance.sum()), float(variance[1] / variance.sum()))
        walk = self

        class Watch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                walk.look(model, state.global_step, watched, backbone, examples, spec)
                if state.global_step >= steps:
                    raise _Enough

            def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                walk.look(model, state.global_step, watched, backbone, examples, spec)
                raise _Enough

        with tempfile.TemporaryDirectory() as folder:
            quiet = spec.with_(evaluations=1)
            method = registry.get(spec.method)
            with suppress(_Enough):
                fit(backbone, task, method, quiet, Path(folder), FitOptions(progress=False, watchers=[Watch()]))

    def look(self, model: Any, step: int, task: Any, backbone: Any, examples: int, spec: Spec) -> None:
        """Note where the mean prompt stands."""
        import torch

        from inlay.training.batches import settle_length

        if self.at and self.at[-1] == step:
            return
        self.model = model
        if not self.batch:
            length = settle_length(model, task, backbone.processor, spec.max_length)
            encoded = task.encode("train", backbone.processor, length, model_config=model.config)
            order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(spec.seed))[:examples]
            rows = task.collator(backbone.processor, model)([encoded[i] for i in order.tolist()])
            device = next(model.parameters()).device
            self.batch = {name: value.to(device) for name, value in rows.items()}
        found = self.losses_at(None)
        prompt = found["prompt"].mean((0, 1)).float().cpu() - self.centre
        self.at.append(step)
        self.points.append((float(prompt @ self.axes[0]), float(prompt @ self.axes[1])))
        self.losses.append(float(found["task"]))
        if "representation" in found:
            self.representation.append(float(found["representation"]))

    def losses_at(self, instead: Any) -> dict[str, Any]:
        """The task's loss and the representation loss with a given prompt; training and its random state go on as
        if nobody had looked."""
        import torch

        from inlay.methods.infoprompt import losses as info
        from inlay.training.seeds import undisturbed

        layer = layer_of(self.model)
        modes = [(module, module.training) for module in self.model.modules()]
        with undisturbed(), torch.no_grad(), layer.observing() as seen:
            torch.manual_seed(0)
            self.model.eval()
            seen.instead = instead
            found: dict[str, Any] = {"task": self.model(**self.batch).loss, "prompt": seen.prompts[0]}
            (pieces, *_) = layer.pieces.values()
            if pieces.critic is not None:
                count = pieces.site.config.num_negatives - 1
                mine, others = (info.gaussian(*pieces.critic(part[0])) for part in (seen.z, seen.without))
                drawn = info.sample(*mine), info.sample(*others, count)
                nce = info.nce(info.representation_scores(seen.prompts[0].mean(1), *drawn, pieces.critic.w2()))
                found["representation"] = -nce.mean()
            for module, mode in modes:
                module.training = mode
        return found


def _surface(
    walk: _Walk, points: Sequence[tuple[float, float]], grid: int, reach: float, bar: Bar
) -> tuple[list[float], list[float], dict[str, list[list[float]]]]:
    """The losses on a grid around the mean embedding, wide enough for the paths."""
    import torch

    widest = [max(abs(point[axis]) for point in points) for axis in (0, 1)]
    spans = [max(reach * float(walk.deviations[axis]), 1.2 * widest[axis]) for axis in (0, 1)]
    x, y = (torch.linspace(-span, span, grid).tolist() for span in spans)
    device = next(walk.model.parameters()).device
    values: dict[str, list[list[float]]] = {}
    for b in y:
        bar.begin("surface")
        lines: dict[str, list[float]] = {}
        for a in x:
            prompt = walk.centre + a * walk.axes[0] + b * walk.axes[1]
            for name, value in walk.losses_at(prompt.to(device)).items():
                if name != "prompt":
                    lines.setdefault(name, []).append(float(value))
        for name, line in lines.items():
            values.setdefault(name, []).append(line)
        bar.advance()
    return x, y, values
