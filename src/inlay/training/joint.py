"""Several tasks trained together: one adapter a task on one base, batches that mix them, one folder for all.

The loss of an update is the sum over tasks of the mean over that task's own labels in it. A task that has no row in an
update moves neither its parameters nor its optimiser's moments; gradients are clipped for each task by itself. A task
whose loss or gradient is not finite stops before that update, and the others go on. With early stopping each task ends
by its own metric, returns to its own best state and gives up its rows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import Sampler

from inlay.backbones.locate import portable
from inlay.backbones.pooled import installed
from inlay.errors import InlayError
from inlay.methods import attach
from inlay.methods.card import About, write_card
from inlay.methods.folder import write_tasks
from inlay.methods.mixed_loss import NO_LABEL, check_labels, task_losses
from inlay.methods.protocol import Method
from inlay.records.atomic import write_folder
from inlay.records.spec import Spec
from inlay.records.steps import BEST_OF_TASK
from inlay.tasks import Task, kinds
from inlay.tasks.metrics import LOWER_IS_BETTER
from inlay.training.batches import Placement, Stop, gather, is_main, shift_labels
from inlay.training.evaluation import NotFinitePredictions, Scored, score, shifts_labels, write
from inlay.training.mixed_batches import ALONG, NAMES, JointCollator, JointRows, JointSampler, split_batch
from inlay.training.objectives import Metrics, Objective
from inlay.training.plan import Plan
from inlay.training.seeds import undisturbed
from inlay.training.sharding import add_up, add_up_gradients
from inlay.training.shares import Filler
from inlay.training.trainer import InlayTrainer, NotFinite

if TYPE_CHECKING:
    from inlay.backbones.loading import Backbone

ALMOST_NOTHING = 1e-6  # as torch's own clipping adds to a norm
AVERAGE = "average"


class SeveralTasks(Objective):
    """The sum of the tasks' losses, each the mean over its own labels."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        super().__init__(tasks)
        self.names = list(self.tasks)
        self.temperature = 1.0
        self._totals = torch.zeros(len(self.names), dtype=torch.long)
        self._losses_so_far: Tensor | None = None

    @property
    def title(self) -> str:
        return f"{len(self.tasks)} tasks"

    def attach(self, backbone: Backbone, method: Method, settings: Mapping[str, Any], seed: int) -> nn.Module:
        return attach_tasks(backbone, self.tasks, method, settings, seed)

    @property
    def held_out(self) -> int:
        return sum(self.bounded.get(name, len(task.validation)) for name, task in self.tasks.items())

    def join_rows(self, parts: Mapping[str, Any]) -> JointRows:
        return JointRows(parts)

    def collator(self, processor: Any, model: nn.Module) -> Callable[[Any], Any]:
        self._collate = super().collator(processor, model)
        return JointCollator(self._collate)

    def check(self, spec: Spec, plan: Plan) -> Plan:
        plan = super().check(spec, plan)
        self.temperature = {"proportional": 1.0, "temperature": spec.temperature, "uniform": math.inf}[spec.sampling]
        if plan.dtype is not torch.float16:
            return plan
        if spec.precision == "float16":
            raise InlayError(
                "precision='float16' scales the loss of all tasks alike: one that overflows would hold up the others. "
                "Use float32, or bfloat16 where the device has it."
            )
        return dataclasses.replace(plan, dtype=None)  # a device without bfloat16, and no wish

    def make_sampler(self, rows: Any, seed: int, update: int, lengths: np.ndarray | None) -> Sampler[int]:
        return JointSampler(rows.sizes, seed, self.temperature)

    def begin(self, trainer: InlayTrainer) -> None:
        super().begin(trainer)
        model: Any = self.setup.model
        trainer.progress.tasks = {name: {"waited": 0} for name in self.names}
        self._shifted = shifts_labels(model, self.first.kind)
        self._values = {name for name, task in self.tasks.items() if task.kind == kinds.REGRESSION}
        self._outputs = {name: model.base_model.outputs_of(name) for name in self.names}
        self.owned = self.divide({name: p for name, p in model.named_parameters() if p.requires_grad})

    def divide(self, trained: Mapping[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
        """Each task's own among the parameters that are trained."""
        strangers = [name for name in trained if not any(belongs(name, task) for task in self.names)]
        if strangers:
            raise InlayError(f"{strangers[0]} would be trained and belongs to no task: it cannot be trained jointly.")
        return {task: [p for name, p in trained.items() if belongs(name, task)] for task in self.names}

    def is_trained(self, task: str) -> bool:
        """Whether a task is still being trained."""
        return self.trainer.progress.tasks[task].get("ended") is None

    # ---- one update

    def begin_update(self, batches: Sequence[dict[str, Any]], device: torch.device) -> tuple[int, Tensor | None]:
        """Count how many labels each task has in the micro-batches of an update."""
        self._losses_so_far = None
        self._totals = torch.zeros(len(self.names), dtype=torch.long)
        for batch in batches:
            if isinstance(batch, Filler):
                continue
            labels = batch["labels"].cpu()
            counted = labels[:, 1:] if self._shifted else labels
            check_labels(labels, batch[NAMES], self._outputs)
            items = counted.ne(NO_LABEL).view(len(labels), -1).sum(dim=1)
            self._totals.index_add_(0, torch.tensor([self.names.index(name) for name in batch[NAMES]]), items)
        if self.setup.plan.world > 1:
            self._totals = add_up(self._totals.to(device)).cpu()
        return sum(len(batch[NAMES]) for batch in batches) * self.setup.plan.world, None

    def step(self, model: nn.Module, batch: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """In parts of about the same length; rows of tasks that have ended are left out.

        Processes have other numbers of parts, and of other tasks: their gradients are added up once, before they are
        clipped, and not by what the model is wrapped in.
        """
        trainer, device = self.trainer, self.trainer.args.device
        world, model = self.setup.plan.world, self.setup.model if self.setup.plan.world > 1 else model
        counts = not isinstance(batch, Filler)
        kept = [i for i, name in enumerate(batch[NAMES]) if counts and self.is_trained(name)]
        total = torch.zeros((), device=device)
        parts = list(self._parts_of(batch, kept)) if kept else []
        fillers = self._count_fillers(len(parts)) if trainer.sharding is not None else 0
        for part, own in parts:
            labels = part.pop("labels")
            each = self.task_losses(model(**part, **{NAMES: own})["logits"], labels, own)
            trainer.accelerator.backward(each.sum())
            each = each.detach()
            self._losses_so_far = each if self._losses_so_far is None else self._losses_so_far + each
            total += torch.where(torch.isfinite(each), each, 0.0).sum()
        for _ in range(fillers):
            self._keep_step(model, batch)
        return total * world  # of which the Trainer logs the mean over processes

    def _parts_of(self, batch: dict[str, Any], kept: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """These rows of a batch in parts, on the device, and whose they are."""
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        names = [batch[NAMES][i] for i in kept]
        if len(kept) < len(batch[NAMES]):
            tensors = {key: value[kept] for key, value in tensors.items()}
        along: tuple[str, ...] = ALONG
        schema: Any = getattr(self.first, "schema", self.first)  # a task of one's own may have none
        writes_apart = tensors["labels"].ndim > 1 and getattr(schema, "two_parts", False)
        if tensors["labels"].ndim > 1 and not writes_apart:
            along = (*ALONG, "labels")  # one for each token that is read
        for rows, part in split_batch(tensors, self.trainer.args.device, along):
            part = self.trainer._prepare_inputs(part)
            if writes_apart:
                part["decoder_input_ids"] = shift_labels(self.setup.model, part["labels"])
            yield part, [names[row] for row in rows]

    def _count_fillers(self, parts: int) -> int:
        """How many parts more than this process another one has."""
        most = torch.tensor(parts, device=self.trainer.args.device)
        distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
        return int(most) - parts

    def _keep_step(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Run the model forwards and backwards as the others do, and forget what comes of it."""
        ((part, own),) = self._parts_of(batch, [0])
        part.pop("labels")
        logits = model(**part, **{NAMES: own})["logits"]
        trained = [parameter for task in self.names for parameter in self.owned[task]]
        torch.autograd.grad(logits.float().sum(), trained, allow_unused=True)

    def task_losses(self, logits: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
        """Each task's part of the update's loss."""
        device = logits.device
        slots = torch.tensor([self.names.index(name) for name in names], device=device)
        values = None
        if self._values.intersection(names):
            values = torch.tensor([name in self._values for name in names], device=device)
        sums, _ = task_losses(logits, labels, slots, len(self.names), regression=values, causal=self._shifted)
        return sums / self._totals.clamp(min=1).to(device)

    def clip(self) -> Tensor:
        """Clip each task's gradients by their own norm; a task whose loss or gradient is not finite ends here."""
        if self.setup.plan.world > 1:
            self._add_up()
        pairs = [(i, p.grad) for i, task in enumerate(self.names) for p in self.owned[task] if p.grad is not None]
        device = self.trainer.args.device
        squares = torch.zeros(len(self.names), device=device)
        if not pairs:
            return squares.sum()
        gradients = [gradient for _, gradient in pairs]
        owners = torch.tensor([i for i, _ in pairs], device=device)
        norms = torch.stack(torch._foreach_norm(gradients))
        norms = norms.to(torch.promote_types(norms.dtype, squares.dtype))
        norms = squares.to(norms.dtype).index_add(0, owners, norms**2).sqrt()
        losses = self._losses_so_far if self._losses_so_far is not None else squares
        good = torch.isfinite(norms) & torch.isfinite(losses)
        share = (self.trainer.args.max_grad_norm / (norms + ALMOST_NOTHING)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(share.index_select(0, owners).unbind()))
        for task, fine, loss in zip(self.names, good.tolist(), losses.tolist(), strict=True):
            if not fine:
                step = self.trainer.state.global_step + 1
                self.fail(task, f"the loss or its gradient is not a finite number at step {step}")
                for parameter in self.owned[task]:
                    parameter.grad = None
            elif self._totals[self.names.index(task)]:
                self.trainer.add_part(task, loss)
                self.trainer.add_part(f"{task} steps", 1.0)
        return torch.where(good, norms, 0.0).norm()

    def _add_up(self) -> None:
        """Let every process have the losses and gradients of all. A parameter that no process has a gradient of keeps
        none: its task had no row."""
        device = self.trainer.args.device
        add_up_gradients([p for task in self.names for p in self.owned[task]], device)
        losses = self._losses_so_far
        losses = torch.zeros(len(self.names), device=device) if losses is None else losses
        self._losses_so_far = add_up(losses.double())

    def fail(self, task: str, why: str, spoilt: bool = False) -> None:
        """End a task that cannot go on; the others do. The parameters are those from before, unless they are `spoilt`:
        then it is they that give what is not a number."""
        trainer = self.trainer
        trainer.progress.tasks[task] |= {"ended": trainer.state.global_step, "failed": why, "spoilt": spoilt}
        if all("failed" in trainer.progress.tasks[each] for each in self.names):
            raise NotFinite(
                f"Of every task {why}, at a learning rate of {trainer._get_learning_rate():.3g}. Try a lower one, for "
                f"example {self.setup.plan.lower_rate}."
            )
        self._end_if_all_have()

    def _end_if_all_have(self) -> None:
        if not any(self.is_trained(task) for task in self.names):
            self.trainer.progress.stopped = self.trainer.control.should_training_stop = True

    def mean_parts(self, parts: Mapping[str, float], steps: int) -> dict[str, float]:
        """Each task's loss over the updates that it had rows in."""
        return {f"{task}_loss": round(parts[task] / parts[f"{task} steps"], 6) for task in self.names if task in parts}

    # ---- between updates

    def validate(self, stop: Stop) -> Scored:
        """Each task with its own adapter; one whose predictions are not finite ends."""
        begin, examples = time.perf_counter(), 0
        found: dict[str, dict[str, float]] = {}
        for name, encoded in self.watched.items():
            try:
                found[name] = self._score(name, encoded, stop).metrics
                examples += len(encoded)
            except NotFinitePredictions as error:
                self.fail(name, str(error), spoilt=True)
        return Scored(flatten_metrics(found, self.tasks, self.failed), None, examples, time.perf_counter() - begin)

    def _score(self, name: str, encoded: Any, stop: Stop) -> Scored:
        model, place = self.setup.model, self.setup.place
        return score(model, self.tasks[name], encoded, self._collate, place, stop, partial(_named, name))

    def judge(self, metrics: Mapping[str, float]) -> bool:
        """Keep each task's best state; end a task that has not beaten it for as many evaluations as the patience."""
        better, patience, step = False, self.setup.spec.early_stopping, self.trainer.state.global_step
        for name, task in self.tasks.items():
            entry, value = self.trainer.progress.tasks[name], metrics.get(f"eval_{name}/{task.selection_metric}")
            if patience is None or value is None or not self.is_trained(name):
                continue
            best = entry.get("best")
            if best is None or (value > best["value"] if task.greater_is_better() else value < best["value"]):
                better = True
                own = {n: v for n, v in metrics.items() if n.startswith(f"eval_{name}/")}
                entry["waited"] = 0
                entry["best"] = {
                    "step": step,
                    "value": value,
                    "metrics": {metric.partition("/")[2]: each for metric, each in own.items()},
                    **self._write_best(name),
                }
                continue
            entry["waited"] += 1
            if entry["waited"] >= patience:
                entry["ended"] = step
                self._load_best(name)
        self._end_if_all_have()
        return better

    def _tensors_of(self, task: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.setup.modes.trained_tensors().items() if belongs(name, task)}

    def _write_best(self, task: str) -> dict[str, str]:
        others = [entry for name, entry in self.trainer.progress.tasks.items() if name != task]
        needed = [entry["best"]["file"] for entry in others if "best" in entry]
        start, step = f"{BEST_OF_TASK}{task}-", self.trainer.state.global_step
        store, tensors = self.trainer.store, self._tensors_of(task)
        made = store.write_best(step, tensors, needed=needed, start=start) if is_main() else None
        found: dict[str, str] = gather(made)[0]
        return found

    def _load_best(self, task: str) -> None:
        best = self.trainer.progress.tasks[task].get("best")
        if best is not None:
            self.trainer.store.load_best(best, self._tensors_of(task))

    def load_best(self) -> None:
        for task in self.names:
            self._load_best(task)

    # ---- at the end

    def final_metrics(self) -> Metrics:
        """Task by task, with the average over tasks."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        with undisturbed():
            for name, task in self.tasks.items():
                if not len(task.test):
                    self.keep_predictions(name, None, None, None)
                for split in ("validation", "test"):
                    if len(task.split(split)) and (own := self._final(name, split)) is not None:
                        found.setdefault(split, {})[name] = own
        return {split: flatten_metrics(each, self.tasks, self.failed) for split, each in found.items()}

    def _final(self, name: str, split: str) -> dict[str, float] | None:
        """A task's metrics on a split in the end; None where it fails there."""
        task, setup, trainer = self.tasks[name], self.setup, self.trainer
        model: Any = setup.model
        encoded: Any = None
        outputs: np.ndarray | None = None
        texts: Sequence[str] | None = None
        if split == "validation" and name not in self.bounded:
            own = self._validated(name)
        else:
            encoded = self.validation[name] if split == "validation" else setup.encode(name, split)
            try:
                scored = self._score(name, encoded, trainer.check_interrupt)
            except NotFinitePredictions as error:
                trainer.progress.tasks[name] |= {"failed": str(error), "spoilt": True}
                return None
            own, outputs = scored.metrics, scored.predictions
            if scored.seconds:
                trainer.progress.inference.append([scored.examples, scored.seconds])
            if split == "test" and task.kind in kinds.ONE_LABEL:
                self.classes_predicted[name] = len(np.unique(scored.predictions.argmax(-1)))
        if task.generates:
            model.set_adapter(name, inference_mode=True)
            processor, stop = setup.backbone.processor, trainer.check_interrupt
            written = write(model, task, split, processor, setup.spec, setup.place, stop)
            own, texts = own | written.metrics, written.predictions
            model.set_adapter(name)
        if split == "test":
            self.keep_predictions(name, encoded, outputs, texts)
        return own

    def _validated(self, name: str) -> dict[str, float]:
        """A task's metrics on validation when it was best, or last."""
        best = self.trainer.progress.tasks[name].get("best")
        if best is not None:
            return dict(best["metrics"])
        known = self.trainer.progress.validation or {}
        return {metric.partition("/")[2]: value for metric, value in known.items() if metric.startswith(f"{name}/")}

    def save(self, target: Path, metrics: Metrics | None = None) -> None:
        setup = self.setup
        save_tasks(setup.model, self.tasks, setup.method, setup.backbone, setup.spec, target, self.failed, metrics)

    @property
    def failed(self) -> dict[str, str]:
        """The tasks that could not be trained to the end: why, and what is kept of them."""
        found = {}
        for name, entry in self.trainer.progress.tasks.items():
            if "failed" in entry:
                best = entry.get("best")
                kept = "those from before that" if best is None else f"its best, of step {best['step']}"
                if entry.get("spoilt") and best is None:
                    kept = "those that give it: do not use them"
                found[name] = f"{entry['failed']}; its parameters are {kept}"
        return found

    def notes(self, metrics: Metrics) -> list[str]:
        failed = self.failed
        notes = [f"{name} failed: {why}" for name, why in failed.items()]
        for name, entry in self.trainer.progress.tasks.items():
            best = entry.get("best")
            if name not in failed and entry.get("ended") is not None and best is not None:
                notes.append(f"{name} stopped at step {entry['ended']}; best at step {best['step']}")
        for split, own in metrics.items():
            counted = select_averaged(own, self.tasks, failed)
            out = [name for name, task in self.tasks.items() if len(task.split(split)) and name not in counted]
            if out:
                why = {name: f"{self.tasks[name].metrics[0]}, of which less is better" for name in out}
                why |= {name: "not scored" for name in out if f"{name}/{self.tasks[name].metrics[0]}" not in own}
                why |= {name: "failed" for name in out if name in failed}
                listed = ", ".join(f"{name} ({why[name]})" for name in out)
                notes.append(f"the average on {split} leaves out {listed}")
        return notes

    def count_parameters(self) -> dict[str, Any]:
        model: Any = self.setup.model
        return super().count_parameters() | {"shared": model.base_model.counted_parameters()["shared"]}


def belongs(parameter: str, task: str) -> bool:
    """Whether a parameter, by its name, is of a task's adapter or head."""
    return task in parameter.split(".")


@contextmanager
def _named(name: str, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield batch | {NAMES: [name] * len(batch["labels"])}


def attach_tasks(
    backbone: Any, tasks: Mapping[str, Any], method: Method, settings: Mapping[str, Any], seed: int = 0
) -> nn.Module:
    """The backbone with an adapter and a head for each task.

    What a method draws is drawn from `seed` for each task anew: a task begins as in a run of its own, whichever others
    there are. So is a head of another size than the backbone's; of the same size, all begin as the backbone's.
    """
    if "num_labels" in settings:
        raise InlayError("num_labels is each task's own when several are trained: leave it out.")
    if (why := method.why_alone(settings)) is not None:
        raise InlayError(f"Several tasks cannot be trained in one run of {method.name} with these settings: {why}.")
    model: Any = None
    config: Any = None
    for name, task in tasks.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if model is None:
                model = attach.attach(
                    backbone.model,
                    method,
                    settings=settings,
                    adapter_name=name,
                    newly_initialised=backbone.newly_initialised,
                    task_kind=task.kind,
                )
                model = method.mixed(model)
                config = copy.deepcopy(model.peft_config[name])
            else:
                attach.check_adapter_name(model, name)
                model.add_adapter(name, copy.deepcopy(config))  # PEFT adds to its lists
        model.base_model.size_head(name, task.num_labels, seed)
    return model


def flatten_metrics(
    found: Mapping[str, Mapping[str, float]], tasks: Mapping[str, Any], failed: Collection[str] = ()
) -> dict[str, float]:
    """All tasks' metrics under one roof, and the average of the first metric of each over the tasks that did not
    fail."""
    metrics = {f"{name}/{metric}": value for name, own in found.items() for metric, value in own.items()}
    firsts = [metrics[first] for first in select_averaged(metrics, tasks, failed).values()]
    return metrics | {AVERAGE: sum(firsts) / len(firsts) if firsts else math.nan}


def greater_is_better(tasks: Mapping[str, Any]) -> bool:
    """Which way the average improves: downwards where less of every task's first metric is better. It is said by the
    tasks alone, so that it is the same on every split and with every seed, whatever could be scored."""
    return any(task.metrics[0] not in LOWER_IS_BETTER for task in tasks.values())


def select_averaged(
    metrics: Mapping[str, float], tasks: Mapping[str, Any], failed: Collection[str] = ()
) -> dict[str, str]:
    """What the average is over: of each task its first metric, if there is one. Where more of some and less of others
    is better, those of which more is: an error and an accuracy have no mean. A task that failed has no say: its
    metrics are those of what it was when it did."""
    up = greater_is_better(tasks)
    firsts = {n: f"{n}/{t.metrics[0]}" for n, t in tasks.items() if (t.metrics[0] not in LOWER_IS_BETTER) == up}
    return {name: first for name, first in firsts.items() if first in metrics and name not in failed}


def save_tasks(
    model: nn.Module,
    tasks: Mapping[str, Any],
    method: Method,
    backbone: Any,
    spec: Spec,
    target: Path,
    failed: Mapping[str, str] | None = None,
    metrics: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """One folder: an adapter for each task, and what predicting needs of all; with the tasks that `failed`, and why."""
    facts = {
        "method": method.name,
        "model": portable(spec.model),
        "revision": spec.revision,
        "pooling": installed(model) or "own",
        "trust_remote_code": spec.trust_remote_code,
        "max_length": spec.max_length,
        "precision": spec.precision,
        "image_size": spec.image_size,
        "batch_size": Placement.of(spec).batch_size,
        "tasks": {name: task.to_json() for name, task in tasks.items()},
        "failed": dict(failed or {}),
    }

    def own(name: str) -> dict[str, dict[str, float]]:
        start = f"{name}/"
        return {
            split: {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
            for split, found in (metrics or {}).items()
        }

    abouts = {name: About.of(backbone, task, spec.seed, own(name)) for name, task in tasks.items()}

    def fill(folder: Path) -> None:
        for name in tasks:
            attach.save(
                model,
                method,
                folder,
                adapter_name=name,
                base_model_name=backbone.address,
                fingerprint=backbone.fingerprint,
                about=abouts[name],
            )
        write_card(folder, method, abouts)
        write_tasks(folder, facts)

    write_folder(target, fill)
