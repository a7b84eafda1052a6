"""The frozen part of a model before its first trained piece, cut off, so that its output can be computed once.

Visual Prompting Reimagined, section 3, trains a prompt at one layer: nothing before it depends on what is trained, and
for the same picture it gives the same features in every epoch. The same holds for a linear probe and for every method
whose first trained piece is not at the input.

Where to cut is found by a dry run, for any architecture. The last moment is sought at which a module is entered, no
tensor requires a gradient yet, no random number has been drawn and no statistic has moved, such that all that comes
after depends on the first tensor entering that module and on nothing else from before. That is tried, not derived:
everything computed before is replaced by placeholders, the tensor is put in, in a batch of another size than that of
the dry run, and two things are asked for. Loss, logits and gradients must be the same. And none of them may have been
computed from a placeholder: whatever an operation makes of one is followed to the end (`_Follows`), whether it is made
of floats, which are NaN, or of integers and booleans, which have no NaN. A residual that passes the cut by, a head that
reads an earlier hidden state, a mask or a route that was chosen before: all of it is seen, and an earlier cut is tried.

What holds for the modes of this dry run need not hold in others: a model may read more in eval mode. And a trunk may
still let the rows of a batch depend on each other. Who keeps rows checks both: data.py and training/evaluation.py.

In a replay the modules that finish before the cut return placeholders that take no memory and no time, and the module
behind the cut receives the rows that were kept. No module is replaced, as models read attributes of theirs, and all
hooks stay: only `forward` is shadowed on those that are skipped, and given back exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.training.seeds import random_state, undisturbed

PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)
MOST_TRIES = 24
# Operations that take nothing from a tensor but its shape, type and device.
SHAPE_ALONE = {
    *(getattr(torch.ops.aten, f"{kind}_like") for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(getattr(torch.ops.aten, f"new_{kind}") for kind in ("empty", "zeros", "ones", "full", "empty_strided")),
}
AT_THE_INPUT = "the first trained part is at the input or in the first block"
RANDOM = "random numbers (dropout) are drawn before the first trained part"
MOVING = "batch statistics move before the first trained part"
BOUND = "what comes before the first trained part cannot be cut off: more than one of its results is used later"

Batch = Mapping[str, Any]


class NotReached(InlayError):
    """The model, in the mode it is in, does not pass the place where it was cut."""


class _Cut(Exception):
    """Ends a forward pass where the trunk ends."""


@dataclass
class _Moment:
    """The entry into a module: what was finished by then, and whether the way there was deterministic."""

    module: nn.Module
    finished: list[tuple[nn.Module, Any]]
    random: bool
    moving: bool


@dataclass
class TrunkCache:
    """Where a model can be cut, and how it is run without its trunk. Made by `find`; false where there is no cut.

    `reason` says why there is none. `blocks_skipped` of `blocks` are before the cut (None for an architecture that
    `inlay.anatomy` does not know). `compute` runs the trunk alone, `replay` everything but the trunk:

        trunk = TrunkCache.find(model, batch)
        rows = trunk.compute(batch)
        with trunk.replay(rows):
            model(**trunk.placeholders(len(rows)), labels=labels).loss.backward()
    """

    model: nn.Module
    reason: str | None = None
    blocks_skipped: int | None = None
    blocks: int | None = None
    _at: nn.Module | None = field(default=None, repr=False)
    _skipped: dict[nn.Module, Any] = field(default_factory=dict, repr=False)
    _recorded: int = 0
    _inputs: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=dict, repr=False)
    _trees: dict[int, dict[nn.Module, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def find(cls, model: nn.Module, batch: Batch) -> TrunkCache:
        """Look for the cut with two rows of `batch`, the model in the modes, and under the autocast, of its training.

        Labels must be among them where the loss is to be the same. Nothing is changed: neither the model, its gradients
        and statistics, nor the random state.
        """
        if all(parameter.requires_grad for parameter in model.parameters()):
            return cls(model, reason=AT_THE_INPUT)
        example = {name: _rows(value, (0, 1)) for name, value in batch.items()}
        other = {name: _rows(value, (1, 0, 1)) for name, value in batch.items()}
        blocks = _blocks(model)
        with unmoved(model), undisturbed(), torch.enable_grad():
            moments = _dry_run(model, example, set(blocks))
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            expected: list[Tensor | None] = []
            reason = AT_THE_INPUT
            for moment in list(reversed(moments))[:MOST_TRIES]:
                inside = {inner for module, _ in moment.finished for inner in module.modules()}
                skipped = sum(block in inside for block in blocks)
                if blocks and not skipped:
                    break
                if moment.random or moment.moving:
                    reason = RANDOM if moment.random else MOVING
                    continue
                trunk = cls(
                    model,
                    blocks_skipped=skipped if blocks else None,
                    blocks=len(blocks) or None,
                    _at=moment.module,
                    _skipped={module: _stand_ins(output, 2, 2) for module, output in moment.finished},
                    _recorded=2,
                    _inputs=_inputs_of(example),
                )
                expected = expected or outcome(model, other, trained)
                if trunk._holds(other, example, trained, expected):
                    return trunk
                reason = BOUND if reason == AT_THE_INPUT else reason
        return cls(model, reason=reason, blocks=len(blocks) or None)

    @property
    def inputs(self) -> list[str]:
        """The names of what the trunk reads, for which placeholders stand in."""
        return list(self._inputs)

    def __bool__(self) -> bool:
        return self.reason is None

    def placeholders(self, rows: int) -> dict[str, Tensor]:
        """Stand-ins, which take no memory, for the inputs of so many rows."""
        return {
            name: _placeholder((rows, *shape), dtype, device) for name, (shape, dtype, device) in self._inputs.items()
        }

    def compute(self, batch: Batch) -> Tensor:
        """The trunk's output for a batch: the forward pass ends where the trunk does. Not for training through it."""
        self._check()
        assert self._at is not None
        found: list[Tensor] = []

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_first(args, kwargs))

        def stop(module: nn.Module, args: Any) -> None:
            raise _Cut

        # Taken before any other hook (a prompt) acts; ended after all of them, whose other half is always called.
        handles = [
            self._at.register_forward_pre_hook(take, with_kwargs=True, prepend=True),
            self._at.register_forward_pre_hook(stop),
        ]
        try:
            with torch.no_grad():
                self.model(**batch)
        except _Cut:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            raise NotReached(
                f"{type(self.model).__name__} does not enter the module behind the cut in the modes it is in. Look for "
                "the trunk again in these modes."
            )
        return found[0]

    @contextmanager
    def replay(self, rows: Tensor) -> Iterator[None]:
        """Inside, the model does not run its trunk: `rows` are put in where it ends.

        With gradient checkpointing the backward pass must be inside too, as it runs the first block once more.
        """
        self._check()
        assert self._at is not None
        outputs = self._outputs(len(rows))

        def put(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return _with_first(args, kwargs, rows)

        earlier = [(module, module.__dict__.get("forward")) for module in outputs]
        handle = self._at.register_forward_pre_hook(put, with_kwargs=True, prepend=True)
        try:
            for module, output in outputs.items():
                module.forward = partial(_return, output)
            yield
        finally:
            handle.remove()
            for module, forward in earlier:
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = forward

    def _check(self) -> None:
        if self.reason is not None:
            raise InlayError(f"This model has no trunk to keep: {self.reason}.")

    def _outputs(self, rows: int) -> dict[nn.Module, Any]:
        if rows not in self._trees:
            self._trees[rows] = {
                module: _stand_ins(output, self._recorded, rows) for module, output in self._skipped.items()
            }
        return self._trees[rows]

    def _holds(self, batch: Batch, example: Batch, trained: list[nn.Parameter], expected: list[Tensor | None]) -> bool:
        """Whether a replay comes to what the whole model comes to, and takes nothing else from the trunk."""
        if not all(
            isinstance(leaf, (Tensor, *PLAIN)) for output in self._skipped.values() for leaf in tree_leaves(output)
        ):
            return False
        rows = self.compute(batch)
        if len(rows) != len(next(iter(batch.values()))):
            return False
        self.compute(example)  # what a module remembers of its last pass must not be what the replay needs
        others = {name: value for name, value in batch.items() if name not in self._inputs}
        inputs = self.placeholders(len(rows))
        follows = _Follows(tree_leaves((inputs, list(self._outputs(len(rows)).values()))))
        try:
            with self.replay(rows), follows:
                found = outcome(self.model, inputs | others, trained)
        except Exception:  # whatever the model's own code makes of placeholders: they do not suit it
            return False
        return not follows.reached(found) and len(found) == len(expected) and all(map(same, found, expected))


class _Follows(TorchDispatchMode):
    """Follows what is computed from placeholders, by the memory it lies in, so that views and changes in place count.

    Values that are read as Python numbers cannot be followed any further: that ends the pass.
    """

    def __init__(self, placeholders: Iterable[Any]) -> None:
        super().__init__()
        self._held: dict[int, torch.UntypedStorage] = {}  # held, so that no other memory gets its number
        self._hold(placeholders)

    def _hold(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._held[storage._cdata] = storage

    def reached(self, leaves: Iterable[Any]) -> bool:
        """Whether any of these was computed from a placeholder."""
        return any(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._held for leaf in leaves)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket not in SHAPE_ALONE and self.reached(tree_leaves((args, kwargs))):
            results = tree_leaves(output)
            if not all(isinstance(leaf, (Tensor, type(None))) for leaf in results):
                raise ValueError(f"{func} reads the value of a placeholder")
            self._hold(results)
        return output


def _dry_run(model: nn.Module, batch: Batch, blocks: set[nn.Module]) -> list[_Moment]:
    """Every entry into a module, but for those inside of blocks, until a tensor requires a gradient."""
    inner = {module for block in blocks for module in block.modules()} - blocks
    calls: dict[nn.Module, int] = {}
    finished: list[tuple[nn.Module, Any]] = []
    open_calls: list[int] = []  # for each call that is under way, how much was finished when it began
    moments: list[_Moment] = []
    started = False
    random_before, versions = random_state(), _versions(model)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal started
        calls[module] = calls.get(module, 0) + 1
        open_calls.append(len(finished))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        started = started or any(tensor.requires_grad for tensor in given)
        if not started and module not in inner and given and finished:
            random, moving = random_state() != random_before, _versions(model) != versions
            moments.append(_Moment(module, list(finished), random, moving))
        started = started or any(parameter.requires_grad for parameter in module.parameters(recurse=False))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal started
        began = open_calls.pop()
        started = started or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        if not started:
            del finished[began:]
            finished.append((module, output))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    # A module that is called again later cannot be silenced.
    for moment in moments:
        moment.finished = [(module, output) for module, output in moment.finished if calls[module] == 1]
    return [moment for moment in moments if calls[moment.module] == 1]


def outcome(model: nn.Module, batch: Batch, trained: list[nn.Parameter]) -> list[Tensor | None]:
    """The outputs and the gradients, always with the same random numbers."""
    with undisturbed():
        output = model(**batch)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        loss = output["loss"] if isinstance(output, Mapping) and output.get("loss") is not None else None
        if loss is None:
            loss = torch.stack([tensor.float().sum() for tensor in tensors if tensor.is_floating_point()]).sum()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
    return [*(tensor.detach() for tensor in tensors), *gradients]


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.device.type == "cpu" or not found.is_floating_point():
        return torch.equal(found, expected)
    # Accelerators add in no fixed order. A placeholder that got through would be NaN.
    scale = float(expected.abs().amax()) if expected.numel() else 0.0
    return torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.05 * scale)


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Statistics that forward passes in train mode move are put back."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _versions(model: nn.Module) -> list[int]:
    return [buffer._version for buffer in model.buffers()]


def _blocks(model: nn.Module) -> list[nn.Module]:
    try:
        return [block.module for block in anatomy(model).blocks]
    except InlayError:
        return []


def _inputs_of(batch: Batch) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {
        name: (value.shape[1:], value.dtype, value.device)
        for name, value in batch.items()
        if isinstance(value, Tensor) and name != "labels"
    }


def _rows(value: Any, indices: tuple[int, ...]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[[min(index, len(value) - 1) for index in indices]]


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    fill = float("nan") if dtype.is_floating_point else 0
    return torch.full((1,), fill, dtype=dtype, device=device).expand(shape)


def _stand_ins(output: Any, recorded: int, rows: int) -> Any:
    """An output of so many rows, with placeholders for its tensors; `recorded` is how many it has."""

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        batched = leaf.ndim > 0 and len(leaf) == recorded
        return _placeholder((rows, *leaf.shape[1:]) if batched else tuple(leaf.shape), leaf.dtype, leaf.device)

    return tree_map(stand_in, output)


def _return(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves, structure = tree_flatten((args, kwargs))
    at = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return tree_unflatten([*leaves[:at], rows, *leaves[at + 1 :]], structure)
