"""The most memory that training needed.

CUDA: the allocator's own maximum. CPU: the process's greatest resident set (VmHWM, which the kernel keeps and lets a
process reset through /proc/self/clear_refs; elsewhere a thread samples the resident set), less that of the idle
process. The model is loaded before the measurement begins, so the idle process is the resident set at that moment less
the model's own tensors, every page of which is touched first: weights mapped from a file are resident only once read.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PERIOD = 0.02  # seconds between samples where the kernel keeps no resettable maximum
PAGE = 4096  # bytes


class PeakMemory:
    """Measures from `start` to `stop`. Collect garbage before: an earlier run's would count as idle.

    `kept` are tensors that the run made before `start` and holds on to: they are part of what it needs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.kept: list[torch.Tensor] = []
        self.peak = 0
        self._idle = 0
        self._started = False
        self._sampler: _Sampler | None = None

    def start(self) -> None:
        """Begin: set the kernel's maximum back to what is resident now."""
        self._started = True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _give_back()
        own = {
            tensor.untyped_storage().data_ptr(): _touch(tensor)
            for tensor in (*self.model.parameters(), *self.model.buffers(), *self.kept)
        }
        self._idle = psutil.Process().memory_info().rss - sum(own.values())
        if not _reset_maximum():
            self._sampler = _Sampler()
            self._sampler.start()

    def stop(self, seen: int = 0) -> dict[str, Any]:
        """End, and tell the maximum in bytes and how it was measured; `seen` is that of the run's earlier process."""
        self.peak = max(seen, self.now())
        how = "allocator" if self.device.type == "cuda" else "sampled" if self._sampler else "resident set"
        if self._sampler:
            self._sampler.stop()
            self._sampler = None
        return {"bytes": self.peak, "device": self.device.type, "how": how}

    def now(self) -> int:
        """The maximum so far, in bytes."""
        if not self._started:
            return 0
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        highest = self._sampler.highest if self._sampler else _maximum()
        return max(0, highest - self._idle)


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True, name="inlay-memory")
        self.highest = 0
        self._process = psutil.Process()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.highest = max(self.highest, self._process.memory_info().rss)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _touch(tensor: torch.Tensor) -> int:
    """Read one element of every page of a tensor's storage; the storage's bytes."""
    if tensor.device.type != "cpu":
        return 0
    step = max(1, PAGE // tensor.element_size())
    tensor.detach().flatten()[::step].sum()
    return tensor.untyped_storage().nbytes()


def _give_back() -> None:
    """Hand memory that was freed, but kept by the C library for reuse, back to the system: an earlier run's would
    otherwise count as idle and hide what this one needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_maximum() -> bool:
    try:
        CLEAR.write_text("5")
        return _maximum() > 0
    except OSError:
        return False


def _maximum() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
