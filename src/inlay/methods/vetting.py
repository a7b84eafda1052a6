"""A folder from somebody else, looked at before it is obeyed.

A note beside the weights says what they hash to, and anybody can write one: it finds damage, not ill will. So nothing
that a folder says is done before it is known to end: its files are plain files, its numbers are finite and no larger
than its tensors and the base model account for, its patterns can be matched, and its type runs no code.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.allowance import size_of
from inlay.methods.folder import check_hash, is_present
from inlay.methods.patterns import check_patterns

NOTES = logging.getLogger("inlay.notes")
LARGEST_FILE, OF_MODEL = 256 << 20, 8  # bytes, and times the base model's
LEAST_BOUND = 4096  # whole numbers up to here are taken without a tensor that has them
LARGEST_FLOAT = 1e9
SEEDS = ("seed", "prng")
SCALES = ("alpha",)  # factors, which no tensor is as large as
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# What PEFT does with a folder of these types is more than to read its tensors.
REFUSED = {
    "BOFT": "PEFT compiles code for it where there is a GPU",
    "MULTITASK_PROMPT_TUNING": "its settings name a file that PEFT unpickles",
    "XLORA": "its settings name other adapters that PEFT loads",
    "SHADOW": "its settings name another model that PEFT fetches and loads",
}


# ---- files


def read_shapes(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by what its header says of them: without their values, on the device `meta`."""
    if not is_present(path):
        raise InlayError(f"{path} is not there.")
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                entry = file.get_slice(name)
                dtype = DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise InlayError(
                        f"{path} holds {name} as {entry.get_dtype()}, which is not read: {', '.join(DTYPES)} are."
                    )
                found[name] = torch.empty(entry.get_shape(), dtype=dtype, device="meta")
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        if isinstance(error, InlayError):
            raise
        raise InlayError(f"{path} cannot be read: it is truncated or damaged ({error}).") from error
    return found


def read_tensors(path: Path, note: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file: finite, and what the note beside them says, where there is one."""
    read_shapes(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InlayError(f"{path} cannot be read: it is truncated or damaged ({error}).") from error
    check_hash(path, note)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InlayError(f"{path} holds values that are not finite, in {name}. Train it again.")
    return tensors


def check_size(paths: list[Path], model: nn.Module) -> int:
    """How many bytes these files have; an error for more than could belong to this model."""
    size = sum(path.stat().st_size for path in paths if is_present(path))
    most = LARGEST_FILE + OF_MODEL * size_of(model)
    if size > most:
        raise InlayError(
            f"{paths[0].parent} holds {size / 2**20:,.0f} MiB of weights; what belongs to {type(model).__name__} "
            f"has at most {most / 2**20:,.0f} MiB."
        )
    return size


def check_kinds(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: Path) -> None:
    """An error for whole numbers where the model computes with floating-point numbers, and the other way round."""
    for name in sorted(found.keys() & expected.keys()):
        have, need = found[name].dtype, expected[name].dtype
        if have.is_floating_point != need.is_floating_point or have.is_complex != need.is_complex:
            raise InlayError(f"{place}: {name} holds {_name(have)} numbers, the model needs {_name(need)}.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def say_unvouched(note: Path) -> None:
    """A word on a folder whose weights nobody answers for."""
    NOTES.warning(
        "%s has no %s, so nothing vouches for it: whether its weights are whole and belong to this base model is not "
        "known.",
        note.parent,
        note.name,
    )


# ---- settings


def check_settings(
    path: Path, settings: Mapping[str, Any], held: Mapping[str, Tensor], model: nn.Module, vouched: bool = False
) -> None:
    """An error for settings that run code, or that no tensors like these and no model like this account for.

    `vouched`: there is a note beside them, so that they were trained with.
    """
    check_type(path, settings)
    check_patterns(settings, [name for name, _ in model.named_modules()], str(path), trained=vouched)
    tensors = [*(tensor for tensor in held.values() if tensor.numel()), *model.parameters()]
    bound = max([LEAST_BOUND, *(size for tensor in tensors for size in tensor.shape)])
    for name, value in numbers(settings):
        if any(word in name for word in SEEDS):
            continue
        if isinstance(value, int) and not any(word in name for word in SCALES) and abs(value) > bound:
            raise InlayError(
                f"{path} has {name}={_shown(value)}: no tensor of the adapter or the base model has a size above "
                f"{bound:,}. It does not belong to these weights."
            )
        if abs(value) > max(bound, LARGEST_FLOAT):
            raise InlayError(f"{path} has {name}={_shown(value)}, beyond any setting there is.")
    _check_replication(path, settings.get("layer_replication"), held)


def check_type(path: Path, settings: Mapping[str, Any]) -> None:
    """An error for a type of adapter for which PEFT would do more than read tensors."""
    kind = settings.get("peft_type")
    if isinstance(kind, str) and kind in REFUSED:
        raise InlayError(f"{path} has peft_type={kind!r}, which is not loaded: {REFUSED[kind]}.")
    if settings.get("megatron_config"):
        raise InlayError(f"{path} has megatron_config, which is not loaded: PEFT would import a module that it names.")


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number in settings, with the names of the settings that it stands in."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _check_replication(path: Path, replication: Any, held: Mapping[str, Tensor]) -> None:
    """PEFT makes as many layers as this says: each must have its tensors."""
    if not replication:
        return
    try:
        total = sum(max(0, end - begin) for begin, end in replication)
    except (TypeError, ValueError):
        raise InlayError(f"{path} has layer_replication={_shown(replication)}: pairs of layers are expected.") from None
    known = 1 + max((int(number) for name in held for number in re.findall(r"\.(\d{1,6})(?=\.)", name)), default=-1)
    if total > known:
        raise InlayError(f"{path} has layer_replication with {total:,} layers; the tensors beside it have {known}.")


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**60 else "a number of over 60 digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
