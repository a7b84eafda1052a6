"""Where randomness comes from, and that it can be put away and taken up again.

On a CPU the same spec gives the same bits on the same machine with the same number of threads: deterministic kernels
are asked for (where there are none, PyTorch's default is used). On CUDA the seeds are the same, but atomic additions in
some kernels make results differ in the last digits.
"""

from __future__ import annotations

import base64
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic kernels on a CPU, and the earlier choice afterwards."""
    if device.type != "cpu":
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A safety net against reading uninitialised memory, at the price of filling every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn)
            torch.utils.deterministic.fill_uninitialized_memory = fill


def random_state() -> dict[str, Any]:
    """The state of every source of randomness, as plain data."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _text(torch.random.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Take up what `random_state` put away."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.random.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever randomness is drawn inside leaves no trace outside: how often a model is evaluated does not change how
    it is trained."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
