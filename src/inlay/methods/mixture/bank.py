"""Where the low-rank factors of many tasks lie while tasks are mixed: side by side, so that a pass fetches its rows'
own at once.

Fetched layer by layer, the factors of a batch take more kernels than what is computed with them. So the parameters of
all tasks at several layers, those of one shape, are pieces of one tensor, a bank. A kernel that is told each row's slot
reads them there (`slots`); for torch's own products they are fetched (`fetch`). A parameter is still a parameter:
whatever writes to it, an optimiser, loading, or someone who goes by `.data`, writes to the bank, and there is no copy
that could be out of date.
What gives a parameter other memory (`.to()`, say) takes it out; the next pass sees that and puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.methods.mixture.rows import TaskRows

LAYERS = 16  # of a bank: what is fetched at once takes memory for each row
WEIGHT, MEMORY = itemgetter("weight"), Tensor.data_ptr
TASKS_KNOWN = 64  # lists of tasks of which is kept what they are known by
NOBODY = 0  # the slot of rows without a task: always zero
LOCK = threading.Lock()  # for passes of several threads, which share where the factors lie


class TaskWeights:
    """A place in the model where a task may have one weight: a factor of a layer. `pieces` are the modules that hold
    them, by task. Each weight lies in the bank of its shape."""

    def __init__(self, pieces: nn.ModuleDict) -> None:
        self.pieces = pieces
        self.banks: dict[torch.Size, tuple[Bank, int]] = {}  # and the place's number there

    @property
    def factors(self) -> dict[str, Any]:
        """The modules by task: a ModuleDict's own look-ups would take longer than the products do."""
        found: dict[str, Any] = self.pieces._modules
        return found

    def of_shape(self, task: str, shape: torch.Size) -> Any:
        """A task's piece, where it has one of this shape."""
        piece = self.factors.get(task)
        return piece if _is_of(piece, shape) else None


class TaskSlot(NamedTuple):
    """Where a task lies in a bank, and what it is known by.

    A parameter, or its memory, may be changed by anybody at any place, and each is looked at in every pass. The module
    that holds it comes and goes with its task, at all places at once: of these one is looked at.
    """

    slot: int
    pieces: dict[str, Any]  # of one place, by task
    piece: nn.Module  # that of this task
    numbers: list[int]  # of the places that it adapts
    holders: list[dict[str, Any]]  # of the parameters there
    pointers: list[int]
    scales: tuple[float, ...]

    @property
    def weights(self) -> list[Tensor]:
        """The parameters, or what stands in for one while a function is called."""
        return [*map(WEIGHT, self.holders)]


class KnownTasks:
    """Tasks that come together in a batch, and what they are known by, in one list for all."""

    def __init__(
        self, tasks: Sequence[str], found: Sequence[TaskSlot | None], places: Sequence[TaskWeights], shape: torch.Size
    ) -> None:
        self.found = found
        here = [(task, kept) for task, kept in zip(tasks, found, strict=True) if kept is not None]
        self.pieces: list[tuple[dict[str, Any], str, Any]] = [(kept.pieces, task, kept.piece) for task, kept in here]
        absent = [task for task, kept in zip(tasks, found, strict=True) if kept is None]
        # Of other shapes, or none: one of this shape does not lie here yet, and one of a shape that came after
        # the banks were put together lies in none. Neither is what is expected.
        others = [(place, task, place.factors.get(task)) for task in absent for place in places]
        self.pieces += [
            (place.factors, task, None if _is_of(piece, shape) or not _has_bank(piece, place) else piece)
            for place, task, piece in others
        ]
        self.holders = [holder for _, kept in here for holder in kept.holders]
        self.pointers = [pointer for _, kept in here for pointer in kept.pointers]

    def stand(self) -> bool:
        """Whether all of them is as it was: asked in every pass, of every parameter."""
        for pieces, task, piece in self.pieces:
            if pieces.get(task) is not piece:
                return False
        try:
            return [*map(MEMORY, map(WEIGHT, self.holders))] == self.pointers
        except (KeyError, RuntimeError, TypeError):  # a parameter is gone, or is one that has no memory
            return False


class Bank:
    """The weights of one shape at these places: `whole` is (places, slots, *shape).

    A task has the same slot at every place, and where it has no weight of this shape there are zeros. Where a task does
    not lie here, all are put into another tensor: someone may still hold the parameters of one that was deleted, and
    write to them.
    """

    def __init__(self, places: Sequence[TaskWeights], shape: torch.Size) -> None:
        self.places, self.shape = tuple(places), shape
        self.whole: Tensor | None = None
        self.by_place: list[tuple[Tensor, Tensor]] = []  # each place's part of it, and its slots' scales
        self.kept: dict[str, TaskSlot] = {}
        self.known: dict[tuple[str, ...], KnownTasks] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has parameters of its own, and puts them into a bank of its own."""
        return {**self.__dict__, "whole": None, "by_place": [], "kept": {}, "known": {}}

    def slots(self, rows: TaskRows) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """For each place its weights (slots, *shape), the slots' scales, 0 where a task has none there, and each row's
        slot. None: as of `fetch`."""
        with LOCK:
            tasks = self._slots_of(rows.tasks)
            if tasks is None or self.whole is None:
                return None
            own = rows.spread(tuple(NOBODY if task is None else task.slot for task in tasks), self.whole.device)
            return [(*place, own) for place in self.by_place]

    def fetch(
        self, rows: TaskRows, dtype: torch.dtype | None, tracked: bool
    ) -> list[tuple[Tensor, float] | None] | None:
        """For each place each row's weight, (rows, *shape), and what the product is multiplied by; None where no task
        of the rows has one of this shape there.

        `tracked`: so that autograd finds the way back to the parameters. None: the weights cannot be kept here, since
        they are not ordinary parameters or belong to someone else's memory.
        """
        with LOCK:
            tasks = self._slots_of(rows.tasks)
            if tasks is None:
                return None
            adapted = {number for task in tasks if task is not None for number in task.numbers}
            if not adapted:
                return [None] * len(self.places)
            assert self.whole is not None
            dtype = dtype or self.whole.dtype
            alpha = 1.0
            if tracked:
                weights = [weight for task in tasks if task is not None for weight in task.weights]
                found = _Fetch.apply(self, tasks, rows, dtype, *weights)
            else:
                together, alpha = self._by_row(tasks, rows, dtype)
                found = together.unbind()
            return [(own, alpha) if number in adapted else None for number, own in enumerate(found)]

    @torch.no_grad()
    def _by_row(self, tasks: Sequence[TaskSlot | None], rows: TaskRows, dtype: torch.dtype) -> tuple[Tensor, float]:
        """(places, rows, *shape), and the scale of all, or 1 where it has been multiplied in."""
        assert self.whole is not None
        slots, device = tuple(NOBODY if task is None else task.slot for task in tasks), self.whole.device
        scale = self._scale(tasks, rows)
        alike = isinstance(scale, float)
        if alike and self.whole.dtype == dtype:
            return self.whole.index_select(1, rows.spread(slots, device)), scale
        # Rounded and scaled once for each task.
        each = self.whole.index_select(1, rows.kept(("slots", slots), device, lambda: torch.tensor(slots))).to(dtype)
        if not alike:
            each *= scale.to(dtype)
        return each.index_select(1, rows.slots(device)), scale if alike else 1.0

    def _scale(self, tasks: Sequence[TaskSlot | None], rows: TaskRows) -> Any:
        """That of all tasks at all places; where they differ, (places, tasks, 1, ...)."""
        different = {task.scales for task in tasks if task is not None}
        first = next(iter(different), (1.0,))[0]
        if all(scale == first for scales in different for scale in scales):
            return first
        assert self.whole is not None
        nobody = (1.0,) * len(self.places)
        scales = tuple(nobody if task is None else task.scales for task in tasks)
        kept = rows.kept(("scales", scales), self.whole.device, lambda: torch.tensor(scales, dtype=torch.float64).T)
        return kept.view(*kept.shape, *[1] * len(self.shape))

    # ---- taking in

    def _slots_of(self, tasks: tuple[str, ...]) -> Sequence[TaskSlot | None] | None:
        """Where each task lies, None for one without a weight here; None: some cannot be kept here."""
        known = self.known.get(tasks) or self._note(tasks)
        if not known.stand():
            if not self._take_in():
                return None
            known = self._note(tasks)
        return known.found

    def _note(self, tasks: tuple[str, ...]) -> KnownTasks:
        if len(self.known) >= TASKS_KNOWN:
            self.known.clear()
        found = self.known[tasks] = KnownTasks(tasks, [*map(self.kept.get, tasks)], self.places, self.shape)
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_in(self) -> bool:
        """Put the weights of every task into a new tensor; False where some cannot be, or lie in no bank."""
        names = dict.fromkeys(name for place in self.places for name in place.factors)
        if any(_shape(piece) not in place.banks for place in self.places for piece in place.factors.values()):
            for place in self.places:
                place.banks = {}
            return False
        pieces = {name: [place.of_shape(name, self.shape) for place in self.places] for name in names}
        pieces = {name: own for name, own in pieces.items() if any(piece is not None for piece in own)}
        weights = [piece._parameters.get("weight") for own in pieces.values() for piece in own if piece is not None]
        if not all(map(self._is_free, weights)) or len({(w.device, w.dtype) for w in weights}) > 1:
            return False
        refuse_capture(weights[0].device if weights else None)
        self.kept, self.known = {}, {}
        if weights:
            self.whole = weights[0].new_zeros(len(self.places), 1 + len(pieces), *self.shape)
            for slot, (name, own) in enumerate(pieces.items(), start=1):
                self.kept[name] = self._settle(slot, own)
            by_task = [[0.0 if piece is None else _scale(piece) for piece in own] for own in pieces.values()]
            scales = torch.tensor([[0.0] * len(self.places), *by_task], dtype=torch.float32).T
            # Each place's at a multiple of 16 bytes, as kernels want them.
            padded = pad(scales, (0, -(1 + len(pieces)) % 4)).contiguous().to(self.whole.device)
            self.by_place = [*zip(self.whole.unbind(), padded.unbind(), strict=True)]
        return True

    def _settle(self, slot: int, pieces: Sequence[Any]) -> TaskSlot:
        """Give a task's parameters the memory of a slot."""
        assert self.whole is not None
        numbers = [number for number, piece in enumerate(pieces) if piece is not None]
        memory = self.whole[:, slot].unbind()
        for number in numbers:
            memory[number].copy_(pieces[number].weight)
            pieces[number].weight.data = memory[number]
        shown = numbers[slot % len(numbers)]
        scales = tuple(_scale(pieces[shown] if piece is None else piece) for piece in pieces)
        holders = [pieces[number]._parameters for number in numbers]
        pointers = [memory[number].data_ptr() for number in numbers]
        return TaskSlot(slot, self.places[shown].factors, pieces[shown], numbers, holders, pointers, scales)

    def _is_free(self, weight: Any) -> bool:
        """Whether a parameter may be given other memory: it has its own, or lies here. What distributes a model keeps
        parameters as pieces of its own."""
        if type(weight) is not nn.Parameter or weight.is_meta:
            return False
        memory = weight.untyped_storage()
        here = self.whole is not None and memory.data_ptr() == self.whole.untyped_storage().data_ptr()
        return here or memory.nbytes() == weight.numel() * weight.element_size()


def _shape(piece: Any) -> torch.Size:
    found: torch.Size = weight_of(piece).shape
    return found


def _is_of(piece: Any, shape: torch.Size) -> bool:
    return piece is not None and _shape(piece) == shape


def _has_bank(piece: Any, place: TaskWeights) -> bool:
    return piece is None or _shape(piece) in place.banks


def _scale(piece: Any) -> float:
    """What a task's products are multiplied by, where its module says that."""
    return float(getattr(piece, "scale", 1.0))


def weight_of(piece: Any) -> Tensor:
    """A module's weight, looked up where it nearly always is: a pass asks for that of every task in every layer."""
    found = piece._parameters.get("weight")
    return piece.weight if found is None else found


class _Fetch(torch.autograd.Function):
    """Each place's and row's weight with its scale, (rows, *shape); the gradient of a task's is the sum over its rows:

        F[l, i] = scale[l, t] B_t[l],    dL/dB_t[l] = scale[l, t] * sum over the rows i of task t of dL/dF[l, i].

    One for all places of a bank, so that what a layer adds to it is torch's own product, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, bank: Bank, tasks: Sequence[TaskSlot | None], rows: TaskRows, dtype: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        found, alpha = bank._by_row(tasks, rows, dtype)
        # Not the rows, which keep the result.
        ctx.given = tasks, rows.slots(found.device), bank._scale(tasks, rows), weights[0].dtype
        ctx.set_materialize_grads(False)  # a layer that took no part has none
        return (found if alpha == 1 else found.mul_(alpha)).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tasks, slots, scale, dtype = ctx.given
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        by_task: dict[int, Sequence[Tensor]] = {}
        if there:
            by_row = torch.stack([gradients[number] for number in there]).to(dtype)
            sums = by_row.new_zeros(len(there), len(tasks), *by_row.shape[2:])
            sums.index_add_(1, slots, by_row)
            own = scale
            if isinstance(scale, Tensor):  # by numbers from the host only where it must be: a GPU would wait for them
                own = (scale if len(there) == len(gradients) else scale[there]).to(sums.dtype)
            by_task = dict(zip(there, (each.unbind() for each in (sums * own).unbind()), strict=True))
        found = [
            by_task[number][place] if number in by_task else None
            for place, task in enumerate(tasks)
            if task is not None
            for number in task.numbers
        ]
        wanted = ctx.needs_input_grad[4:]
        of_weights = (each if needed else None for each, needed in zip(found, wanted, strict=True))
        return None, None, None, None, *of_weights


def refuse_capture(device: torch.device | None) -> None:
    """An error where a CUDA graph is being captured: what is allocated or moved now would be done in its replays."""
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InlayError(
            "A pass with adapter_names is captured in a CUDA graph before it was run: run it once with the same names, "
            "and then capture it."
        )


def put_together(places: Iterable[TaskWeights]) -> None:
    """Give the weights that have no bank one, neighbours of one shape together."""
    alike: dict[Any, list[TaskWeights]] = {}
    with LOCK:
        for place in places:
            weights = {(weight.shape, weight.device): None for weight in map(weight_of, place.factors.values())}
            for shape, device in weights:
                if shape not in place.banks:
                    alike.setdefault((shape, device), []).append(place)
        for (shape, _), group in alike.items():
            for begin in range(0, len(group), LAYERS):
                bank = Bank(group[begin : begin + LAYERS], shape)
                for number, place in enumerate(bank.places):
                    place.banks[shape] = (bank, number)
