"""Which rows of a batch belong to which task, and how the layers learn of it.

One `Routing` belongs to a base model. During a forward pass it holds that pass's `Rows`, or nothing where all rows
belong to the active adapter; a thread sees its own passes alone, and one thread at a time trains. A layer that is
recomputed in the backward pass, by gradient checkpointing, finds the rows of the forward pass that it belongs to: each
call of the model's checkpointing function carries its own. Whatever else recomputes layers does not, and would take the
active adapter for all rows: `refuse_lost_rows` knows, of a backward pass, which tasks the forward passes in it had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods import low_rank
from inlay.methods.mixing import check_names
from inlay.methods.mixture.bank import LOCK, put_together, refuse_capture
from inlay.methods.plain import plain_modules

if TYPE_CHECKING:
    from inlay.methods.mixture.bank import Bank, TaskWeights
    from inlay.methods.mixture.heads import TaskHead

BACKWARD_PASSES = 16  # that may be under way at once, one within another
NAMES_KEPT = 32  # lists of names whose rows' places are kept
ROUTING = "_inlay_mixture_routing"


class TaskRows:
    """The tasks of a batch, each once, and each row's place among them; without places all rows are the only task's.

    `labels` waits here while the base model runs without them: see hooks.py.
    """

    def __init__(self, tasks: Sequence[str], places: Sequence[int] | None = None) -> None:
        self.tasks = tuple(tasks)
        self.count = None if places is None else len(places)
        self.copies = 1  # of each row, where a text is continued by several beams
        self.counted = False  # whether the batch was seen to have as many rows as there are names
        self.labels: Tensor | None = None
        self.items: Any = None  # labels of the whole update, where a trainer says so
        self._places = None if places is None or len(self.tasks) == 1 else tuple(places)
        self.mixed = self._places is not None  # whether rows of several tasks are in the batch
        self.places: dict[Any, tuple[int, Tensor]] = {}  # small tensors, and the stream that each was moved in
        self._fetched: dict[Any, tuple[Bank, Any]] = {}  # of each shape what one bank gave
        self._located: dict[Bank, Any] = {}
        self._having: dict[Bank, Tensor] = {}  # the rows that have a weight in a bank
        self._unwatched: bool | None = None

    @classmethod
    def of(cls, names: Sequence[str], known: Sequence[str]) -> Self:
        """The rows that these names, one a row, stand for."""
        tasks = list(dict.fromkeys(check_names(names, known, "task")))
        place = {task: i for i, task in enumerate(tasks)}
        return cls(tasks, [place[name] for name in names])

    def check(self, tensor: Tensor, *, first: bool = False) -> None:
        """An error where a layer's rows cannot be divided among the names; with channels `first`, are not as many."""
        given, count = tensor.shape[0], self.count or 1
        if not self.mixed or given == count:
            return
        if not (self.counted or given == count * self.copies) or given % count or first:
            raise InlayError(
                f"adapter_names has {count} names, and a layer was given {given} rows that they cannot be divided "
                "among. Give one name for each row; a layer whose one input all rows share cannot be mixed."
            )

    def by_row(self, tensor: Tensor, first: bool = False) -> Tensor:
        """As (rows, tokens, channels), or with channels first (rows, channels, pixels).

        The tokens of a row may lie in several leading axes, as windows and beams do: they follow one another there.
        """
        if first:
            self.check(tensor, first=True)
            return tensor.flatten(2)
        if self.mixed and not (tensor.ndim == 3 and tensor.shape[0] == self.count):
            self.check(tensor)
            return tensor.reshape(self.count or 1, -1, tensor.shape[-1])
        return tensor

    def names(self, count: int) -> list[str]:
        """The task of each of so many rows."""
        return [self.tasks[0]] * count if self._places is None else [self.tasks[place] for place in self._places]

    def without(self, tasks: Sequence[str]) -> list[int]:
        """The rows of other tasks than these."""
        return [row for row, place in enumerate(self._places or ()) if self.tasks[place] not in tasks]

    def groups(self) -> list[list[int]]:
        """The rows of each task, as many for every one: where a task has fewer than another, its first again."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for row, place in enumerate(self._places or ()):
            found[place].append(row)
        most = max(map(len, found))
        return [own + own[:1] * (most - len(own)) for own in found]

    def slots(self, device: torch.device) -> Tensor | None:
        """Each row's place among the tasks, on a device; None: all rows belong to the only one."""
        return None if self._places is None else self.spread(tuple(range(len(self.tasks))), device)

    def spread(self, of_task: tuple[int, ...], device: torch.device) -> Tensor:
        """For each row the number of its task, on a device."""
        return self.kept(("rows", of_task), device, lambda: torch.tensor([of_task[i] for i in self._places or ()]))

    def fetched(
        self, weights: TaskWeights, routing: Routing, dtype: torch.dtype | None, tracked: bool
    ) -> list[tuple[Tensor, float]] | None:
        """Each row's weight at a place, (rows, *shape), and what the product is multiplied by: one of each shape that
        tasks of the rows have there. None where their banks do not have them. `dtype`: None is their own.

        `tracked`: as autograd needs them. Of each shape those of one bank are kept: the layers ask in order, forward
        and backward.
        """
        if not weights.banks:
            put_together(routing.weights())
        found: list[tuple[Tensor, float]] = []
        for bank, number in tuple(weights.banks.values()):
            how = bank.shape, dtype, tracked
            before = self._fetched.get(how)
            if before is None or before[0] is not bank:
                before = self._fetched[how] = bank, bank.fetch(self, dtype, tracked)
            if before[1] is None:
                return None
            own = before[1][number]
            if own is not None:
                found.append(own)
        return found

    def located(self, weights: TaskWeights, routing: Routing) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where each row's weight lies at a place whose tasks' all have one shape: see `Bank.slots`."""
        if not weights.banks:
            put_together(routing.weights())
        if len(weights.banks) != 1:
            return None
        bank, number = next(iter(weights.banks.values()))
        found = self._slots_in(bank)
        return None if found is None else found[number]

    def gathered(self, weights: TaskWeights, routing: Routing, axis: int) -> Tensor | None:
        """Each row's weight at one place, (rows, *shape), zeros where it has none; with zeros up to the largest of its
        rows' in this axis. None where the banks do not have them."""
        if not weights.banks:
            put_together(routing.weights())
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for bank, number in tuple(weights.banks.values()):
            slots = self._slots_in(bank)
            if slots is None:
                return None
            whole, _, own = slots[number]
            having = self._having.get(bank)
            if having is None:
                having = self._having[bank] = own.nonzero().view(-1)
            found.append((whole, own, having))
        found = [each for each in found if len(each[2])]
        if len(found) == 1 and len(found[0][2]) == len(found[0][1]):
            whole, own, _ = found[0]
            return whole.index_select(0, own)
        if not found:
            return None
        largest = max((whole for whole, _, _ in found), key=lambda whole: whole.shape[1 + axis])
        made = largest.new_zeros(len(found[0][1]), *largest.shape[1:])
        for whole, own, having in found:
            part = made.narrow(1 + axis, 0, whole.shape[1 + axis])
            part[having] = whole.index_select(0, own[having])
        return made

    def _slots_in(self, bank: Bank) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Asked once in a pass."""
        found = self._located.get(bank, self)
        if found is self:
            found = self._located[bank] = bank.slots(self)
        return found

    def unwatched(self, output: Tensor) -> bool:
        """Whether layers of this pass may write to their outputs: see `low_rank.unwatched`. Asked once in a pass, but
        for gradients, which a model may switch on and off within."""
        if torch.is_grad_enabled():
            return False
        if self._unwatched is None:
            self._unwatched = low_rank.unwatched(output)
        return self._unwatched

    def kept(self, key: Any, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """A small tensor that many layers ask for, moved to their device once; the key says all that it depends on
        beside the names. Another stream than it was moved in has its own, since nothing says that it is there by then.
        A CUDA graph takes what passes before it have moved, and it is never let go."""
        before, stream, traced = self.places.get((key, device)), 0, torch.compiler.is_compiling()
        if device.type == "cuda" and not traced:
            if before is None:
                refuse_capture(device)
            elif torch.cuda.is_current_stream_capturing():
                CAPTURED.add(before[1])
                return before[1]
            stream = torch.cuda.current_stream(device).cuda_stream
        if before is None or before[0] != stream:
            with nullcontext() if traced else torch.inference_mode(False):  # a later pass may train
                before = self.places[key, device] = stream, make().to(device, non_blocking=True)
        return before[1]


CAPTURED: set[Tensor] = set()  # what CUDA graphs read, for as long as they may be replayed


Rows = TypeVar("Rows", bound=TaskRows)


class _Pass(threading.local):
    """The rows of the forward pass that a thread is in."""

    rows: TaskRows | None = None

    def __reduce__(self) -> tuple[type[_Pass], tuple[()]]:
        """A copy of a model is in no pass."""
        return _Pass, ()


class Routing:
    """What the layers, the heads and the tuner of one base model share."""

    def __init__(self) -> None:
        self._pass = _Pass()
        self._trainer: threading.Thread | None = None  # that runs the model with gradients
        self.layers: dict[str, Any] = {}  # by the plain name of their host
        self.heads: dict[str, TaskHead] = {}  # by their plain name
        self.reasons: dict[str, str] = {}  # why adapters cannot be mixed
        self.handles: list[Any] = []  # of the hooks on the base model
        self.fused: set[str] | None = None  # projections of queries, keys and values together; None: not looked up
        self.looked_up: set[str] = set()  # names among modules_to_save that were looked for in the model
        self.selections: dict[str, dict[str, Any]] = {}  # what a config's words were found to mean in this model
        self.taken: frozenset[str] | None = None  # names that no task can have; None: not looked up
        self.checkpointed: list[nn.Module] = []  # may recompute; whether they do is asked in every pass
        self._in_backward: dict[int, set[tuple[str, ...]]] = {}  # of a backward pass, its forward passes' tasks
        self._places: dict[tuple[str, ...], dict[Any, tuple[int, Tensor]]] = {}  # of passes with these names

    @classmethod
    def of(cls, model: nn.Module) -> Routing:
        """The base model's own; made where it has none."""
        found = model.__dict__.get(ROUTING)
        if found is None:
            found = cls()
            found.checkpointed = [m for _, m in plain_modules(model) if hasattr(m, "gradient_checkpointing")]
            setattr(model, ROUTING, found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has been run by nobody."""
        return {**self.__dict__, "_trainer": None, "_places": {}}

    def weights(self) -> list[TaskWeights]:
        """Of all layers, in the order of the model."""
        return [weights for layer in self.layers.values() for weights in layer.weights]

    @property
    def rows(self) -> TaskRows | None:
        """Those of the forward pass that this thread is in."""
        return self._pass.rows

    def rows_of(self, names: Sequence[str], known: Sequence[str]) -> TaskRows:
        """The rows of a pass with these names."""
        return self.with_places(TaskRows.of(names, known), names)

    def with_places(self, rows: Rows, names: Sequence[str]) -> Rows:
        """These rows, with what earlier passes with the same names have moved to their devices."""
        if not torch.compiler.is_compiling():
            key = tuple(names)
            with LOCK:
                self._places[key] = rows.places = self._places.pop(key, rows.places)  # the last used come last
                if len(self._places) > NAMES_KEPT:
                    del self._places[next(iter(self._places))]
        return rows

    def refuse_second_trainer(self) -> None:
        """An error where two threads run the model with gradients: torch may then wait for itself, for ever.

        What is recomputed in a backward pass is computed by a thread of torch's own.
        """
        own = threading.current_thread()
        if self._trainer is own or torch._C._current_graph_task_id() >= 0:
            return
        with LOCK:
            if self._trainer is not None and self._trainer.is_alive():
                raise InlayError(
                    f"Two threads run this model with gradients, {self._trainer.name!r} and {own.name!r}: one thread "
                    "at a time trains a model. Run this pass under torch.no_grad(), train a copy of the model, or let "
                    "the other thread end first."
                )
            self._trainer = own

    @contextmanager
    def forward(self, rows: TaskRows | None) -> Iterator[None]:
        """One forward pass, of these rows."""
        own = self._pass
        before, own.rows = own.rows, rows
        try:
            yield
        finally:
            own.rows = before

    @contextmanager
    def remembering(self, rows: TaskRows | None) -> Iterator[None]:
        """One forward pass whose checkpointed layers will find its rows again when they are recomputed."""
        layers = [module for module in self.checkpointed if torch.is_grad_enabled() and module.gradient_checkpointing]
        functions = [module._gradient_checkpointing_func for module in layers]
        try:
            for module, function in zip(layers, functions, strict=True):
                module._gradient_checkpointing_func = self._carrying(function)
            with self.forward(rows):
                yield
        finally:
            for module, function in zip(layers, functions, strict=True):
                module._gradient_checkpointing_func = function

    @property
    def recomputing(self) -> bool:
        """Whether some layer recomputes its activations in the backward pass."""
        return any(module.gradient_checkpointing for module in self.checkpointed)

    def _carrying(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            rows = self.rows

            def again(*inputs: Any, **named: Any) -> Any:
                with self.forward(rows):
                    return compute(*inputs, **named)

            return function(again, *args, **kwargs)

        return checkpoint

    def follow(self, outputs: Iterable[Tensor]) -> None:
        """Of what a pass gives: note its tasks when a backward pass reaches it, which is before its layers."""
        rows, layer = self.rows, next(iter(self.layers.values()), None)
        acts = () if layer is None or layer.disable_adapters else tuple(layer.active_adapters)
        tasks = acts if rows is None or not acts else rows.tasks

        def reached(_: Tensor) -> None:
            number = torch._C._current_graph_task_id()
            with LOCK:
                self._in_backward.setdefault(number, set()).add(tasks)
                while len(self._in_backward) > BACKWARD_PASSES:
                    del self._in_backward[next(iter(self._in_backward))]

        for output in outputs:
            output.register_hook(reached)

    def refuse_lost_rows(self, layer: Any) -> None:
        """An error where a layer is recomputed by means that do not carry the rows along, and would take others."""
        passes = self._in_backward.get(torch._C._current_graph_task_id()) if self._in_backward else None
        if not passes or layer.merged_adapters:
            return
        acts = layer.running()
        for tasks in tuple(passes):  # a backward pass on several devices adds to them meanwhile
            if [task for task in tasks if task in layer.factors] != acts or (len(tasks) > 1 and tasks != tuple(acts)):
                raise InlayError(
                    f"A layer is recomputed in the backward pass and no longer knows which rows belong to which task: "
                    f"there were {', '.join(tasks) or 'none'}, and now {', '.join(acts) or 'none'} would act on all. "
                    "Use the model's own gradient_checkpointing_enable(), or make the only task of each batch, and of "
                    "each backward pass, the active one."
                )
