"""Backbones whose frozen linear layers are held in 4 or 8 bits, by bitsandbytes or torchao.

Every linear layer of the trunk is quantised when it is loaded, one after the other. What is trained is not: the head, a
pooler that the checkpoint may lack. Neither are embeddings and norms, which are kept in the precision of the run.

A quantised base belongs to the checkpoint it came from. So its fingerprint is that of the full weights, which are
hashed as they pass by: an adapter moves freely between the two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.backbones.devices import pick_device
from inlay.backbones.new_parts import DIGESTS, digest, may_be_new, trunk
from inlay.errors import InlayError, unknown
from inlay.records.spec import QUANTISATIONS

PACKAGES = {"4bit": "bitsandbytes", "8bit": "bitsandbytes", "int8": "torchao", "int4": "torchao"}
DEVICES = ("cpu", "cuda")  # of both packages
LEAST_GPU = {"4bit": (6, 0), "8bit": (7, 5)}  # compute capability that bitsandbytes asks for
GROUP = 32
"""Weights that share a scale in int4."""
_BY_WEIGHT = {"Params4bit": "4bit", "Int8Params": "8bit", "Int8Tensor": "int8", "IntxUnpackedToInt8Tensor": "int4"}


def check(kind: str, device: torch.device | None = None) -> None:
    """An error where a quantisation cannot be had here, which says what can."""
    if kind not in PACKAGES:
        raise unknown("quantize", kind, QUANTISATIONS)
    package, device = PACKAGES[kind], device or pick_device()
    if device.type not in DEVICES:
        raise InlayError(
            f"quantize={kind!r}: no quantisation runs on {device.type}. All ({', '.join(QUANTISATIONS)}) run on a "
            "CPU (ACCELERATE_USE_CPU=1) and on CUDA; or leave it out."
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_GPU.get(kind, (0, 0)):
        able = [each for each in PACKAGES if torch.cuda.get_device_capability(device) >= LEAST_GPU.get(each, (0, 0))]
        raise InlayError(
            f"quantize={kind!r} needs a GPU of compute capability {'.'.join(map(str, LEAST_GPU[kind]))}, and this one "
            f"has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}. It can do: {', '.join(able)}."
        )
    if find_spec(package) is None:
        there = [each for each, name in PACKAGES.items() if find_spec(name) is not None]
        raise InlayError(
            f"quantize={kind!r} needs {package}: `pip install 'inlay[quantize]'`"
            + (f", or take {' or '.join(there)}." if there else ".")
        )


def quantisation(model: nn.Module) -> str | None:
    """How a model's linear layers are quantised, whoever did it; None: they are not."""
    return next((kind for module in model.modules() if (kind := kind_of(module)) is not None), None)


def kind_of(module: nn.Module) -> str | None:
    """How a linear layer is quantised; None: it is not."""
    weight = module._parameters.get("weight")
    return None if weight is None else kind_of_weight(weight)


def kind_of_weight(weight: Tensor) -> str | None:
    """How a weight is quantised; None: it is not."""
    return _BY_WEIGHT.get(type(weight).__name__)


def count(weight: Tensor) -> int:
    """How many numbers a weight stands for: 4-bit ones lie two in a byte."""
    if kind_of_weight(weight) == "4bit":
        return math.prod(weight.quant_state.shape)
    return weight.numel()


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that lie in memory for one: those that a weight of torchao's is made of, this process's part of one
    that lies in parts on several, otherwise itself."""
    if hasattr(tensor, "to_local"):
        return [tensor.to_local()]
    if PACKAGES.get(kind_of_weight(tensor) or "") != "torchao":
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def full_weight(module: Any) -> Tensor:
    """The weight of a quantised linear layer, as its numbers are when it multiplies; of any other, its weight."""
    kind = kind_of(module)
    if kind is None:
        return module.weight
    if PACKAGES[kind] == "torchao":
        return module.weight.dequantize()
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(module).data


def settings(kind: str, dtype: torch.dtype, keep: Sequence[str]) -> Any:
    """What Transformers' `from_pretrained` takes as `quantization_config`. `keep` names modules that stay whole."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "4bit":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=list(keep),
        )
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(keep))
    import torchao.quantization as ao

    if kind == "int8":
        made: Any = ao.Int8WeightOnlyConfig(version=2)
    else:
        # torchao's packed int4 has no backward pass. This one has, and holds every number in a byte of its own.
        made = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(GROUP))
    return TorchAoConfig(made, modules_to_not_convert=list(keep))


def left_whole(model: nn.Module) -> list[str]:
    """The names of the linear layers of a model (on the device `meta`, say) that are not quantised: all around the
    trunk, and a pooler, which a checkpoint may lack."""
    inside = f"{trunk(model)}."
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (not name.startswith(inside) or may_be_new(name) or module is output)
    ]


@contextmanager
def loading(kind: str, dtype: torch.dtype, model: nn.Module, digests: dict[str, bytes]) -> Iterator[dict[str, Any]]:
    """Further arguments for `from_pretrained` of a model like this one. While it loads, `digests` is filled: what every
    weight that is quantised hashes to before."""
    device = pick_device()
    check(kind, device)
    keep = left_whole(model)
    taken = (nn.Linear, Conv1D) if PACKAGES[kind] == "bitsandbytes" else (nn.Linear,)
    linear = {name: module for name, module in model.named_modules() if type(module) in taken and name not in keep}
    if not linear:
        raise InlayError(
            f"quantize={kind!r}: {type(model).__name__} has no linear layers to quantise in its trunk. Leave it out."
        )
    if kind == "int4" and (odd := [name for name, module in linear.items() if module.in_features % GROUP]):
        raise InlayError(
            f"quantize='int4' takes {GROUP} numbers at a time, and {linear[odd[0]].in_features} enter {odd[0]}. Take "
            "int8, 4bit or 8bit."
        )
    arguments: dict[str, Any] = {"quantization_config": settings(kind, dtype, keep)}
    if device.type == "cuda":
        arguments["device_map"] = {"": device}
    with _hashing(kind, digests):
        yield arguments


@contextmanager
def _hashing(kind: str, digests: dict[str, bytes]) -> Iterator[None]:
    """Hash what Transformers is about to quantise. It keeps none of it, and a second reading would take the whole
    model's memory."""
    from transformers.integrations import bitsandbytes, torchao

    place: Any = torchao.TorchAoQuantize
    if PACKAGES[kind] == "bitsandbytes":
        place = bitsandbytes.Bnb4bitQuantize if kind == "4bit" else bitsandbytes.Bnb8bitQuantize
    own = place.convert

    def convert(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            full = kwargs.get("full_layer_name") or name
            digests[full] = digest(full, weight.to(torch.float32))
        return own(self, input_dict, *args, **kwargs)

    place.convert = convert
    try:
        yield
    finally:
        place.convert = own


def finish(model: nn.Module, digests: dict[str, bytes], dtype: torch.dtype, new: Sequence[str]) -> None:
    """Make a model that was just loaded fit to be trained beside, in `dtype` but for the modules called `new`."""
    fresh = tuple(f"{name}." for name in new)
    modules = dict(model.named_modules())
    tensors = {
        name: tensor
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        if tensor.is_floating_point() and tensor.dtype != dtype and name not in digests and not name.startswith(fresh)
    }
    held = {name: digest(name, tensor) for name, tensor in tensors.items()}  # as they were
    for tensor in tensors.values():
        tensor.data = tensor.data.to(dtype)
    keep_gradients(model)
    for module in modules.values():
        if kind_of(module) == "4bit":
            layer: Any = module
            layer.weight.quant_state.dtype = dtype
    setattr(model, DIGESTS, digests | held)
    # It says at every product that it rounds to float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def keep_gradients(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in eval mode, in which frozen layers stay while others train: its
    kernels for some CPUs have no backward pass."""
    for module in model.modules():
        if kind_of(module) == "4bit":
            module.support_avx512bf16_for_cpu = False


@contextmanager
def as_adapted(model: Any) -> Iterator[None]:
    """Inside, Transformers takes a quantised model for one that may be trained.

    Its Trainer lets only PEFT's models train, and only with quantisations that it knows to have gradients. Ours have
    been tried, and a new head trains without PEFT.
    """
    with ExitStack() as stack:
        if getattr(model, "is_quantized", False):
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model
            before = inner.__dict__.get("_hf_peft_config_loaded")
            inner._hf_peft_config_loaded = True
            stack.callback(_put_back, inner, before)
        yield


def _put_back(model: Any, before: bool | None) -> None:
    if before is None:
        del model._hf_peft_config_loaded
    else:
        model._hf_peft_config_loaded = before
