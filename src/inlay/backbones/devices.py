"""Where a model runs, and in which precision."""

from __future__ import annotations

import os

import torch

from inlay.errors import InlayError


def pick_device() -> torch.device:
    """This process's accelerator, or the CPU."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(precision: str, device: torch.device, *, strict: bool = True) -> torch.dtype | None:
    """The type for mixed precision: on CUDA bfloat16, or float16 where that is missing; elsewhere only if asked for.

    A type that the device lacks is an error, or if not `strict` float32, which can do all that the others can.
    """
    if precision == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if precision == "float16" and device.type != "cuda":
        if not strict:
            return None
        raise InlayError(f"precision='float16' needs a CUDA device, and this is {device.type}. Use auto or bfloat16.")
    return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
