"""Several tasks trained together: batches that mix them, and each task trained as it would be alone.

The loss of an update is the sum over tasks of the mean over that task's own labels in it. A task that has no row in an
update moves neither its parameters nor its optimiser's moments; gradients are clipped for each task by itself. A task
whose loss or gradient is not finite stops before that update, and the others go on. With early stopping each task ends
by its own metric, returns to its own best state and gives up its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from inlay.errors import InlayError
from inlay.methods.mixed_loss import NO_LABEL, check_labels, task_losses
from inlay.records.steps import BEST_OF_TASK
from inlay.training.padding import ALONG, parts
from inlay.training.progress import Progress
from inlay.training.trainer import InlayTrainer, NotFinite

NAMES = "adapter_names"
ALMOST_NOTHING = 1e-6  # as torch's own clipping adds to a norm


class JointRows(Dataset[dict[str, Any]]):
    """The training rows of several tasks, one after another; each says whose it is."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.sizes = [len(part) for part in self.parts.values()]
        self._places = [(task, i) for task, part in self.parts.items() for i in range(len(part))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, place = self._places[index]
        return {NAMES: task, **self.parts[task][place]}


class JointCollator:
    """A batch of rows of several tasks, with the task of each."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [{key: value for key, value in item.items() if key != NAMES} for item in items]
        if any(isinstance(row.get("labels"), float) for row in rows):  # values among classes
            rows = [row | {"labels": float(row["labels"])} for row in rows]
        common = set.intersection(*(set(row) for row in rows))
        batch = self.collate([{key: row[key] for key in rows[0] if key in common} for row in rows])
        return batch | {NAMES: [item[NAMES] for item in items]}


class JointSampler(Sampler[int]):
    """The order of an epoch, as many rows as there are in all; it follows from the seed and the epoch alone.

    Each task gets its share of them, p_i ~ n_i^(1 / temperature): 1 is proportional, where every row comes once, and
    infinity uniform. A task that gets more than it has begins anew, in another order.
    """

    def __init__(self, sizes: Sequence[int], seed: int, temperature: float = 1.0) -> None:
        self.sizes, self.seed, self.epoch = list(sizes), seed, 0
        self.counts = shares(sizes, temperature)

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        rows: list[int] = []
        for start, size, count in zip(
            itertools.accumulate([0, *self.sizes[:-1]]), self.sizes, self.counts, strict=True
        ):
            turns = [torch.randperm(size, generator=generator) for _ in range(math.ceil(count / size))]
            rows += (torch.cat(turns)[:count] + start).tolist() if turns else []
        return (rows[i] for i in torch.randperm(len(rows), generator=generator).tolist())


def shares(sizes: Sequence[int], temperature: float) -> list[int]:
    """How many rows of an epoch each task gets; together as many as there are rows, and at least one each."""
    power = [(size / max(sizes)) ** (1 / temperature) for size in sizes]  # of a low temperature, too large otherwise
    exact = [sum(sizes) * each / sum(power) for each in power]
    counts = [max(1, math.floor(each)) for each in exact]
    left = sum(sizes) - sum(counts)
    for i in sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])[: max(0, left)]:
        counts[i] += 1
    return counts


@dataclass
class JointProgress(Progress):
    """`tasks`: of each its best state (step, value, metrics, file), how many evaluations ago that was, at which step it
    ended if it has, why it failed if it did, and whether its last parameters are the cause."""

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)


class JointTrainer(InlayTrainer):
    """Trains several tasks. `values` are those tasks whose labels are values; `watch` gives the metric of each to
    select by, and whether more of it is better."""

    def __init__(
        self, *, values: set[str], watch: Mapping[str, tuple[str, bool]], temperature: float, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.tasks = list(watch)
        self.values, self.watch = values, watch
        self.progress: JointProgress = JointProgress(tasks={task: {"waited": 0} for task in self.tasks})
        self._sampler: Any = JointSampler(self.train_dataset.sizes, self.args.seed, temperature)
        self._totals = torch.zeros(len(self.tasks), dtype=torch.long)
        self._task_losses: Tensor | None = None
        self._outputs = {task: self.model.peft_config[task].num_labels for task in self.tasks}
        self._owned = self.owned({name: p for name, p in self.model.named_parameters() if p.requires_grad})

    def owned(self, trained: Mapping[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
        """Each task's own among the parameters that are trained."""
        strangers = [name for name in trained if not any(f".{task}." in name for task in self.tasks)]
        if strangers:
            raise InlayError(f"{strangers[0]} would be trained and belongs to no task: it cannot be trained jointly.")
        return {task: [p for name, p in trained.items() if f".{task}." in name] for task in self.tasks}

    def training(self, task: str) -> bool:
        """Whether a task is still being trained."""
        return self.progress.tasks[task].get("ended") is None

    # ---- one update

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one update; how many labels each task has in them."""
        found = list(itertools.islice(epoch_iterator, num_batches))
        self._task_losses = self._update_loss = None
        self._statistics_before = {name: tensor.clone() for name, tensor in self._statistics.items()}
        self._update_examples = sum(len(batch[NAMES]) for batch in found)
        self._totals = torch.zeros(len(self.tasks), dtype=torch.long)
        for batch in found:
            labels = batch["labels"].cpu()
            counted = labels[:, 1:] if self._shifted else labels
            check_labels(labels, batch[NAMES], self._outputs)
            items = counted.ne(NO_LABEL).view(len(labels), -1).sum(dim=1)
            self._totals.index_add_(0, torch.tensor([self.tasks.index(name) for name in batch[NAMES]]), items)
        return found, None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch, in parts of about the same length; rows of tasks that have ended are
        left out."""
        if self._in_eval_mode:
            self.modes.train()
            self._in_eval_mode = False
        names = inputs[NAMES]
        kept = [i for i, name in enumerate(names) if self.training(name)]
        if not kept:
            return torch.zeros((), device=self.args.device)
        tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        if len(kept) < len(names):
            tensors = {key: value[kept] for key, value in tensors.items()}
            names = [names[i] for i in kept]
        along: tuple[str, ...] = ALONG
        if tensors["labels"].ndim > 1 and not getattr(self.model.config, "is_encoder_decoder", False):
            along = (*ALONG, "labels")  # one for each token that is read
        total = torch.zeros((), device=self.args.device)
        for rows, part in parts(tensors, self.args.device, along):
            part = self._prepare_inputs(part)
            labels, own = part.pop("labels"), [names[row] for row in rows]
            each = self._losses(model(**part, **{NAMES: own})["logits"], labels, own)
            self.accelerator.backward(each.sum())
            each = each.detach()
            self._task_losses = each if self._task_losses is None else self._task_losses + each
            total += torch.where(torch.isfinite(each), each, 0.0).sum()
        return total

    def _losses(self, logits: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
        """Each task's part of the update's loss."""
        device = logits.device
        slots = torch.tensor([self.tasks.index(name) for name in names], device=device)
        values = None
        if self.values.intersection(names):
            values = torch.tensor([name in self.values for name in names], device=device)
        sums, _ = task_losses(logits, labels, slots, len(self.tasks), regression=values, causal=self._shifted)
        return sums / self._totals.clamp(min=1).to(device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip each task's gradients by their own norm; a task whose loss or gradient is not finite ends here."""
        pairs = [(i, p.grad) for i, task in enumerate(self.tasks) for p in self._owned[task] if p.grad is not None]
        device = self.args.device
        squares = torch.zeros(len(self.tasks), device=device)
        if not pairs:
            return squares.sum()
        gradients = [gradient for _, gradient in pairs]
        owners = torch.tensor([i for i, _ in pairs], device=device)
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        norms = squares.index_add(0, owners, norms**2).sqrt()
        losses = self._task_losses if self._task_losses is not None else squares
        good = torch.isfinite(norms) & torch.isfinite(losses)
        share = (self.args.max_grad_norm / (norms + ALMOST_NOTHING)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(share.index_select(0, owners).unbind()))
        for task, fine, loss in zip(self.tasks, good.tolist(), losses.tolist(), strict=True):
            if not fine:
                self._fail(
                    task, f"the loss or its gradient is not a finite number at step {self.state.global_step + 1}"
                )
                for parameter in self._owned[task]:
                    parameter.grad = None
            elif self._totals[self.tasks.index(task)]:
                for name, value in ((task, loss), (f"{task} steps", 1.0)):
                    self._parts[name] = self._parts.get(name, 0.0) + value
        return torch.where(good, norms, 0.0).norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm

    def _fail(self, task: str, why: str, spoilt: bool = False) -> None:
        """End a task that cannot go on; the others do. The parameters are those from before, unless they are `spoilt`:
        then it is they that give what is not a number."""
        self.progress.tasks[task] |= {"ended": self.state.global_step, "failed": why, "spoilt": spoilt}
        if all("failed" in self.progress.tasks[each] for each in self.tasks):
            raise NotFinite(
                f"Of every task {why}, at a learning rate of {self._get_learning_rate():.3g}. Try a lower one, for "
                f"example {self.plan.lower_rate}."
            )
        self._end_if_all_have()

    def _end_if_all_have(self) -> None:
        if not any(self.training(task) for task in self.tasks):
            self.progress.stopped = self.control.should_training_stop = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The training loss over time, and each task's, over the updates that it had rows in."""
        if "loss" in logs:
            parts = {
                f"{task}_loss": round(float(self._parts[task]) / float(self._parts[f"{task} steps"]), 6)
                for task in self.tasks
                if task in self._parts
            }
            self._parts, self._parts_since = {}, self.state.global_step
            logs |= parts
            self.note({name: logs[name] for name in ("loss", *parts, "learning_rate", "grad_norm") if name in logs})
            self.callback_handler.on_log(self.args, self.state, self.control, logs)

    # ---- each task's best

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Keep each task's best state; end a task that has not beaten it for as many evaluations as the patience."""
        better = False
        for task, (metric, greater) in self.watch.items():
            entry, value = self.progress.tasks[task], metrics.get(f"eval_{task}/{metric}")
            if self.patience is None or value is None or not self.training(task):
                continue
            best = entry.get("best")
            if best is None or (value > best["value"] if greater else value < best["value"]):
                better = True
                own = {n: v for n, v in metrics.items() if n.startswith(f"eval_{task}/")}
                entry["waited"] = 0
                entry["best"] = {
                    "step": self.state.global_step,
                    "value": value,
                    "metrics": {name.partition("/")[2]: each for name, each in own.items()},
                    **self._write_best_of(task),
                }
                continue
            entry["waited"] += 1
            if entry["waited"] >= self.patience:
                entry["ended"] = self.state.global_step
                self._load_best_of(task)
        self._end_if_all_have()
        return better

    def _tensors_of(self, task: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.modes.trained_tensors().items() if f".{task}." in name}

    def _write_best_of(self, task: str) -> dict[str, str]:
        needed = [name for each, entry in self.progress.tasks.items() if each != task for name in _best_file(entry)]
        start = f"{BEST_OF_TASK}{task}-"
        return self.store.write_best(self.state.global_step, self._tensors_of(task), needed=needed, start=start)

    def _load_best_of(self, task: str) -> None:
        best = self.progress.tasks[task].get("best")
        if best is not None:
            self.store.load_best(best, self._tensors_of(task))

    def load_best(self) -> None:
        """Go back to the best state of every task."""
        for task in self.tasks:
            self._load_best_of(task)


def _best_file(entry: Mapping[str, Any]) -> list[str]:
    return [entry["best"]["file"]] if "best" in entry else []
