"""One model, in parts on several processes (FSDP2), as `accelerate launch --use_fsdp --fsdp_version 2` asks for it.

What is frozen is nearly all of a model, and is never changed: every process keeps a part of each block, and the whole
block only while it computes. What is trained is small and stays whole in every process; its gradients are added up once
an update. So an optimiser, a checkpoint and an adapter are those of one process, and a run can be resumed by another
number of processes. Where everything trains (`full`), parameters, gradients and the optimiser's state lie in parts too,
and are put together to be written.

To gather a block takes all processes: each must run the model as often as the others. See `Filler` in shares.py.

Accelerate itself would divide the adapter as well and round by a policy of its own. It is told of several processes and
no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from inlay.anatomy import anatomy
from inlay.backbones.devices import pick_device, pick_dtype
from inlay.errors import InlayError
from inlay.methods.plain import base_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from inlay.records.spec import Spec

_FSDP = "ACCELERATE_USE_FSDP"
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported. To divide the model, use FSDP2: `accelerate launch "
    "--use_fsdp --fsdp_version 2`.",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported. To divide the model, use FSDP2: `accelerate launch "
    "--use_fsdp --fsdp_version 2`.",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Tensor, context and sequence parallelism (--use_parallelism_config) are not "
    "supported. Leave it out.",
}
_REFUSED_OF_FSDP = {
    "FSDP_OFFLOAD_PARAMS": "--fsdp_offload_params is not supported. Leave it out, and use more processes or a smaller "
    "batch.",
    "FSDP_ACTIVATION_CHECKPOINTING": "--fsdp_activation_checkpointing is not supported. Give `--gradient-checkpointing`"
    " to inlay instead: it is the same.",
}


class Alone(InlayError):
    """Another process of the run has ended."""


def is_alone(error: RuntimeError) -> bool:
    """Whether an error says that another process is gone, by the words of gloo or of NCCL."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)


@dataclass(frozen=True)
class Sharding:
    """How a model is divided among processes. `reshard` gives up a block after its forward pass, and gathers it once
    more for its backward pass."""

    reshard: bool = True

    def divide(self, model: nn.Module, device: torch.device, *, whole: bool) -> None:
        """Divide what is frozen, or all of a model that trains as a `whole`, among the processes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        kept = set() if whole else {parameter for parameter in model.parameters() if parameter.requires_grad}
        for parameter in kept:
            parameter.data = parameter.data.to(device)
        for unit in units(model):
            fully_shard(unit, mesh=mesh, ignored_params=kept, reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh, ignored_params=kept)
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")


def asked(spec: Spec | None = None) -> Sharding | None:
    """How the launcher asks for the model to be divided; None: every process holds all of it. An error where it asks
    for what cannot be, or the run does."""
    for name, why in _REFUSED.items():
        if _on(name):
            raise InlayError(why)
    if not _on(_FSDP):
        return None
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise InlayError(
            f"fsdp_version={version} is not supported: give `accelerate launch --use_fsdp --fsdp_version 2`."
        )
    for name, why in _REFUSED_OF_FSDP.items():
        if _on(name):
            raise InlayError(why)
    if spec is not None and spec.quantize is not None:
        raise InlayError(
            f"quantize={spec.quantize!r} cannot be divided by FSDP: leave it out, or leave --use_fsdp out, and every "
            "process holds the whole quantised model."
        )
    if spec is not None and pick_dtype(spec.precision, pick_device()) is torch.float16:
        raise InlayError("precision float16 is not supported with FSDP. Give --precision bfloat16 or float32.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    return Sharding(reshard=_on("FSDP_RESHARD_AFTER_FORWARD", "true"))


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, Accelerate and Transformers do not see that FSDP is asked for: they would divide the model themselves,
    and load it in the first process alone."""
    given = os.environ.pop(_FSDP, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[_FSDP] = given


def _on(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true", "yes")


def units(model: nn.Module) -> list[nn.Module]:
    """What is gathered and given up together: the blocks, of the decoder as well where there is one. What lies in
    another one comes before it."""
    base = base_of(model)
    alike = set(getattr(base, "_no_split_modules", None) or ())
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    found = {part for parts in lists for part in parts if type(part).__name__ in alike}
    with suppress(InlayError):  # an architecture that is not known has the layers that it says itself, if any
        found.update(block.module for block in anatomy(base).blocks)
    return [module for module in reversed(list(base.modules())) if module in found]


# ---- tensors in parts


def is_divided(model: nn.Module) -> bool:
    """Whether a model lies in parts, so that every process must run it as often as the others."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together, if it lies in parts. All processes must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def put_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors put together, in the memory of the CPU where they lay in parts. All processes must ask for it; those that
    do not write keep nothing."""
    writes = int(os.environ.get("RANK", "0")) == 0
    found: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}  # what is tied has two names, and is one tensor
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor") and id(tensor) not in made:
            full = tensor.full_tensor()
            made[id(tensor)] = full.detach().cpu() if writes else full.new_empty(0)
        found[name] = made.get(id(tensor), tensor)
    return found


@contextmanager
def whole_state(model: nn.Module) -> Iterator[None]:
    """Inside, the first process sees the model's tensors put together, as a checkpoint has them. All must enter."""
    if not is_divided(model):
        yield
        return
    state = put_together(model.state_dict(keep_vars=True))
    model.__dict__["state_dict"] = lambda *args, **kwargs: state
    try:
        yield
    finally:
        del model.__dict__["state_dict"]


def like(saved: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, divided as another one is."""
    if not hasattr(tensor, "full_tensor") or saved.shape != tensor.shape:
        return saved
    from torch.distributed.tensor import distribute_tensor

    # Every process has read the same file: nothing need be sent.
    return distribute_tensor(saved.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """An optimiser's state, put together."""
    state = optimizer.state_dict()
    return state | {"state": {index: put_together_values(entries) for index, entries in state["state"].items()}}


def put_together_values(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors among values put together."""
    tensors = put_together({name: value for name, value in entries.items() if isinstance(value, Tensor)})
    return {**entries, **tensors}


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimiser a state that `state_of` put together."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    divided = {
        index: {n: like(v, parameters[index]) if isinstance(v, Tensor) else v for n, v in entries.items()}
        for index, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": divided})


# ---- what every process holds whole


def add_up(own: Tensor) -> Tensor:
    """The sum over the processes."""
    distributed.all_reduce(own)
    return own


def average(tensors: Iterable[Tensor]) -> None:
    """Give every process the mean of what all have, of whole numbers the part before the point."""
    for tensor in tensors:
        mean = add_up(tensor.double()) / distributed.get_world_size()
        tensor.copy_(mean)


def add_up_gradients(parameters: Sequence[nn.Parameter], device: torch.device, share: float = 1.0) -> None:
    """Let every process have the sum of all gradients, times `share`. A parameter that no process has a gradient of
    keeps none."""
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    moved = [p for p, anywhere in zip(parameters, add_up(there).tolist(), strict=True) if anywhere]
    for dtype in dict.fromkeys(p.dtype for p in moved):
        own = [p for p in moved if p.dtype is dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in own])
        summed = add_up(flat) * share if share != 1.0 else add_up(flat)
        for p, gradient in zip(own, summed.split([p.numel() for p in own]), strict=True):
            p.grad = gradient.view_as(p)
