"""Heads of mixed batches: one for each task, of different sizes, run together.

PEFT keeps a head for each adapter, runs those of a mixed batch one after another and stacks what comes out, which must
be of one size. Here the rows of each task are put side by side, as many for every task, and all heads run together: one
with fewer outputs than the widest has -inf in their place. Where a task has fewer rows than another, one of its own is
repeated, and what comes of it dropped: a row that is not a number stays with its task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from inlay.errors import InlayError, first_line
from inlay.methods.mixing import BASE
from inlay.methods.mixture.rows import Routing, TaskRows
from inlay.methods.mixture.switch import Switch
from inlay.methods.plain import base_of, plain_modules

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def seed_of(*parts: object) -> int:
    """A seed that follows from these parts alone."""
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class TaskHead(Switch, ModulesToSaveWrapper):
    """PEFT's wrapper around a head or another new part, made to run several tasks' at once; none is ever frozen by
    choosing another. PEFT makes its own kind, which `adopt` turns into this one."""

    routing: Routing
    lacking_is_base = False  # whether rows of a task without a head here have the base model's

    @classmethod
    def adopt(cls, wrapper: ModulesToSaveWrapper, routing: Routing) -> TaskHead:
        """The same wrapper, of this kind."""
        wrapper.__class__ = cls
        assert isinstance(wrapper, cls)
        wrapper.routing = routing
        return wrapper

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose the head where a batch names no tasks. Freezes nothing, unless it is for inference."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if len(names) > 1:
            raise InlayError(
                f"One head is in use at a time, not {', '.join(names)}: name the tasks of the rows instead."
            )
        for name in names:
            if name not in self.modules_to_save:
                raise ValueError(f"Adapter {name} not found in {sorted(self.modules_to_save)}")
            self.modules_to_save[name].requires_grad_(not inference_mode)
        self._active_adapter = names[0] if names else []

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        """The one task among these that has a head here; None where none has."""
        own = [] if isinstance(adapter_name, str) else [name for name in adapter_name if name in self.modules_to_save]
        if len(own) > 1:
            raise InlayError(f"One head is in use at a time, not {', '.join(own)}: name the tasks of the rows instead.")
        found: str | None = super().check_set_adapter(adapter_name)
        return found

    def enable_adapters(self, enabled: bool) -> None:
        """Switch all tasks' heads on or off."""
        self.switch(enabled, self.modules_to_save.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The rows' own heads, or the active one where the pass names no tasks."""
        rows = self.routing.rows
        if rows is None or self.disable_adapters:
            return super().forward(*args, **kwargs)
        known: Any = self.modules_to_save._modules  # a ModuleDict's own look-ups take long for many tasks
        heads = [known[task] if task in known else self._head(task) for task in rows.tasks]
        if not rows.mixed:
            return heads[0](*args, **kwargs)
        return run_heads(heads[0], lambda name: _parameters(heads, name), rows, args, kwargs)

    def _head(self, task: str) -> nn.Module:
        if task == BASE or (self.lacking_is_base and task not in self.modules_to_save):
            return self.original_module
        if task not in self.modules_to_save:
            raise InlayError(f"Task {task!r} has no head of its own. It has: {', '.join(self.modules_to_save)}.")
        return self.modules_to_save[task]


def run_heads(
    like: nn.Module, of_tasks: Callable[[str], Sequence[Tensor]], rows: TaskRows, args: Sequence[Any], kwargs: Any
) -> Tensor:
    """What a module gives for rows of several tasks, each with its task's own parameters: `of_tasks` has, of a name,
    that of each task."""
    x, *others = args
    if len(x) != rows.count or any(isinstance(value, Tensor) for value in (*others, *kwargs.values())):
        raise InlayError(
            f"{type(like).__name__} cannot be run for several tasks at once: it was given {len(x)} rows of features "
            f"for {rows.count} names, or more than features. Run one task at a time."
        )
    if isinstance(like, nn.Linear) and not others and not kwargs:
        return _linear(of_tasks("weight"), None if like.bias is None else of_tasks("bias"), x, rows)
    return _together(like, of_tasks, x, rows, tuple(others), kwargs)


def _linear(weights: Sequence[Tensor], biases: Sequence[Tensor] | None, x: Tensor, rows: TaskRows) -> Tensor:
    """`x W_i^T + b_i` for the rows of each task i."""
    weight, sizes = _stacked(weights, rows)
    grouped = _grouped(x, rows)
    flat = grouped.reshape(len(weights), -1, x.shape[-1])
    if biases is None:
        found = torch.bmm(flat, weight.mT.to(flat.dtype))
    else:
        bias, _ = _stacked(biases, rows)
        found = torch.baddbmm(bias.unsqueeze(1).to(flat.dtype), flat, weight.mT.to(flat.dtype))
    return _cut(_in_order(found.view(*grouped.shape[:-1], found.shape[-1]), rows), sizes, rows)


def _together(
    like: nn.Module,
    of_tasks: Callable[[str], Sequence[Tensor]],
    x: Tensor,
    rows: TaskRows,
    others: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Heads of any kind: the same computation for each task's rows, with that task's parameters."""
    if any(True for _ in like.buffers()):
        raise InlayError(f"{type(like).__name__} has buffers, which cannot be mixed. Run one task at a time.")
    stacked = {key: _stacked(of_tasks(key), rows) for key, _ in like.named_parameters()}
    sizes = next((sizes for _, sizes in stacked.values() if sizes is not None), None)

    like = apart(like)

    def run(parameters: dict[str, Tensor], own: Tensor) -> Tensor:
        return torch.func.functional_call(like, parameters, (own, *others), kwargs)

    parameters = {key: value for key, (value, _) in stacked.items()}
    try:
        found = torch.func.vmap(run, randomness="different")(parameters, _grouped(x, rows))
    except RuntimeError as error:
        if "Batching rule" not in str(error):
            raise
        raise InlayError(
            f"{type(like).__name__} cannot be run for several tasks at once ({first_line(error)}). Run one task at "
            "a time."
        ) from error
    return _cut(_in_order(found, rows), sizes, rows)


def apart(module: nn.Module) -> nn.Module:
    """The same module with look-ups of its own and no hooks: `functional_call` writes into them for as long as it runs,
    and another thread may be in the module itself."""
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers"):
        found.__dict__[name] = dict(module.__dict__[name])
    for name in HOOKS:
        found.__dict__[name] = type(module.__dict__[name])()
    found.__dict__["_modules"] = {name: inner and apart(inner) for name, inner in module._modules.items()}
    return found


def _parameters(heads: Sequence[nn.Module], name: str) -> list[Tensor]:
    """The parameter of this name of each head; `get_parameter` would take longer than what is computed with them."""
    *path, last = name.split(".")
    modules: list[Any] = [*heads]
    for part in path:
        modules = [module._modules[part] for module in modules]
    found = [module._parameters.get(last) for module in modules]
    return [getattr(module, last) if each is None else each for module, each in zip(modules, found, strict=True)]


def _grouped(x: Tensor, rows: TaskRows) -> Tensor:
    """Each task's rows, (tasks, as many as any task has, ...)."""
    index = rows.kept("groups", x.device, lambda: torch.tensor(rows.groups()))
    return x.index_select(0, index.view(-1)).view(*index.shape, *x.shape[1:])


def _in_order(found: Tensor, rows: TaskRows) -> Tensor:
    """What came of the rows, in their own order again."""

    def places() -> Tensor:
        groups = rows.groups()
        first = {row: i for i, row in reversed(list(enumerate(row for own in groups for row in own)))}
        return torch.tensor([first[row] for row in range(len(first))])

    return found.flatten(0, 1).index_select(0, rows.kept("in order", found.device, places))


def _stacked(tensors: Sequence[Tensor], rows: TaskRows) -> tuple[Tensor, tuple[int, ...] | None]:
    """The tasks' tensors as one. Where they differ in their first axis, the last of the shorter is repeated, and their
    lengths are given too: `_cut` takes away what comes of it."""
    joined = torch.cat(list(tensors))
    sizes = tuple(tensor.shape[0] for tensor in tensors)
    if len(set(sizes)) == 1:
        return joined.view(len(tensors), *tensors[0].shape), None

    def places() -> Tensor:
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0).unsqueeze(1)
        return starts + torch.arange(max(sizes)).minimum(torch.tensor(sizes).unsqueeze(1) - 1)

    return joined[rows.kept(("places", sizes), joined.device, places)], sizes


def _cut(logits: Tensor, sizes: tuple[int, ...] | None, rows: TaskRows) -> Tensor:
    """-inf where a row's own head has no output."""
    if sizes is None:
        return logits

    def inside() -> Tensor:
        return torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)

    slots = rows.slots(logits.device)
    assert slots is not None
    kept = rows.kept(("inside", sizes), logits.device, inside).index_select(0, slots)
    kept = kept.view(len(logits), *[1] * (logits.ndim - 2), logits.shape[-1])
    return torch.where(kept, logits, -torch.inf)


def resize(heads: Sequence[TaskHead], model: nn.Module, name: str, num_labels: int | None, seed: int) -> None:
    """Give a task's head as many outputs as the task has labels; the new output layer follows from the seed and
    their number alone: not from the task's name, nor from which tasks came before it."""
    base = base_of(model)
    has = getattr(getattr(base, "config", None), "num_labels", None)
    if num_labels is None or num_labels == has:
        return
    for wrapper in reversed(heads):
        head = wrapper.modules_to_save[name]
        place = output_layer(dict(head.named_modules()), base)
        if place is None:
            continue
        new = _new_layer(base, head.get_submodule(place), num_labels, seed_of(seed, "head", num_labels))
        if place:
            parent, _, last = place.rpartition(".")
            setattr(head.get_submodule(parent), last, new)
        else:
            wrapper.modules_to_save[name] = new
        return
    raise InlayError(
        f"num_labels={num_labels}: {type(base).__name__} has no new head with {has} outputs that task {name!r} could "
        "have one of its own of. Name the head in modules_to_save, or load the base model with a new one."
    )


def output_layer(modules: Mapping[str, nn.Module], base: nn.Module) -> str | None:
    """The name, among modules of a head, of the layer that gives its outputs: the last with as many as the base has
    labels. A layer of features before it may come later in the alphabet."""
    labels = getattr(getattr(base, "config", None), "num_labels", None)
    found = [
        name for name, module in modules.items() if isinstance(module, nn.Linear) and module.out_features == labels
    ]
    return found[-1] if found else None


def outputs_in(model: nn.Module, heads: Mapping[str, Tensor]) -> int | None:
    """How many outputs a saved head has, by the layer that gives the base model's own."""
    base = base_of(model)
    name = output_layer({name: module for name, module in plain_modules(base) if f"{name}.weight" in heads}, base)
    return None if name is None else len(heads[f"{name}.weight"])


def _new_layer(base: nn.Module, old: nn.Module, outputs: int, seed: int) -> nn.Linear:
    assert isinstance(old, nn.Linear)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = nn.Linear(old.in_features, outputs, bias=old.bias is not None)
        if hasattr(base, "_init_weights"):
            base._init_weights(new)
    return new.to(old.weight.device, old.weight.dtype).requires_grad_(old.weight.requires_grad)
