"""What a run costs: parameters, bytes on disk, peak memory, time and throughput, measured from the run itself.

Peak memory. CUDA: the allocator's own maximum. CPU: the process's greatest resident set (VmHWM, which the kernel keeps
and lets a process reset through /proc/self/clear_refs; elsewhere a thread samples the resident set), less that of the
idle process. The model is loaded before the measurement begins, so the idle process is the resident set at that moment
less the model's own tensors, every page of which is touched first: weights mapped from a file are resident only once
read.

Throughput is measured in blocks of the run itself, so that nothing is run twice to be timed. A run's updates fall into
a fixed number of equal blocks; each block is one repetition. What is told is all examples by all seconds, with the
spread of the blocks. The first update (allocations, caches, kernels chosen) is
left out where there are others.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from inlay.backbones.quantised import count, parts

SHADOWED = "original_module"  # PEFT keeps the untrained original beside the copy that it trains and uses
BLOCKS = 10
IN_USE, BY_OTHERS = 0.9, 0.1  # shares of all processors from which on others count as in the way
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PERIOD = 0.02  # seconds between samples where the kernel keeps no resettable maximum
PAGE = 4096  # bytes


def count_parameters(model: nn.Module) -> dict[str, Any]:
    """Trained and total parameters of an adapted model; a tied tensor counts once, a head that a trained copy has
    replaced does not count."""
    used = {id(parameter): parameter for name, parameter in model.named_parameters() if SHADOWED not in name.split(".")}
    total = sum(count(parameter) for parameter in used.values())
    trained = sum(parameter.numel() for parameter in used.values() if parameter.requires_grad)
    return {"trained": trained, "total": total, "share": trained / total if total else 0.0}


def count_bytes(folder: Path, but: Collection[str] = ()) -> int:
    """Bytes on disk of everything saved in `folder`, but for files of these names."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name not in but)


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
            for whole in (*self.model.parameters(), *self.model.buffers(), *self.kept)
            for tensor in parts(whole)
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


class Machine:
    """How busy the machine was since this was made, and with whom: measured times depend on it."""

    def __init__(self) -> None:
        self._clock, self._own, self._all = time.perf_counter(), _processor_seconds(), _busy_seconds()

    def portrait(self) -> dict[str, Any]:
        """For the record: processors, the load average, the seconds that passed, and how many processor-seconds this
        process (with those it started) and all others took in them."""
        seconds = time.perf_counter() - self._clock
        own, whole = _processor_seconds() - self._own, _busy_seconds() - self._all
        return {
            "cores": psutil.cpu_count() or 1,
            "load": psutil.getloadavg()[0],
            "seconds": seconds,
            "processor_seconds": own,
            "others_processor_seconds": max(0.0, whole - own),
        }


def _processor_seconds() -> float:
    times = psutil.Process().cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "system", "children_user", "children_system"))


def _busy_seconds() -> float:
    """Processor-seconds of all processes of the machine since it was started."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle


def was_contended(machine: Mapping[str, Any] | None) -> bool:
    """Whether others took processors that a run may have wanted: nearly all were in use, and not by it alone. False
    where it is not on record."""
    if not machine or not machine["seconds"]:
        return False
    whole = machine["cores"] * machine["seconds"]
    others = machine["others_processor_seconds"]
    return (machine["processor_seconds"] + others) / whole >= IN_USE and others / whole >= BY_OTHERS


class Speed:
    """Counts examples and seconds per block; plain data, so that a resumed run counts on."""

    def __init__(self, total_steps: int, blocks: dict[str, list[float]] | None = None) -> None:
        self.total_steps = total_steps
        self.blocks = dict(blocks or {})

    def add(self, step: int, examples: int, seconds: float) -> None:
        """Count one update: `step` from 1."""
        if step == 1 and self.total_steps > 1:
            return
        block = self.blocks.setdefault(str((step - 1) * BLOCKS // self.total_steps), [0.0, 0.0])
        block[0] += examples
        block[1] += seconds

    def seconds(self) -> float:
        """Seconds in all, but for the first update."""
        return sum(seconds for _, seconds in self.blocks.values())


def summarise(blocks: Iterable[Sequence[float]], rows: int | None = None) -> dict[str, Any] | None:
    """Examples per second over blocks of examples and seconds; with `rows`, the seconds of so many examples. None for
    no blocks.

    `mean` is that of the whole: all examples by all seconds, so that the two agree. `spread` is the standard deviation
    of the single blocks, `repetitions` their number, and `weight` what the mean of several runs is weighted by.
    """
    known = [(examples, seconds) for examples, seconds in blocks if examples > 0 and seconds > 0]
    if not known:
        return None
    examples, seconds = (sum(column) for column in zip(*known, strict=True))
    each = [e / s if rows is None else rows * s / e for e, s in known]
    return {
        "mean": examples / seconds if rows is None else rows * seconds / examples,
        "spread": statistics.stdev(each) if len(each) > 1 else None,
        "repetitions": len(each),
        "weight": seconds if rows is None else examples,
    }
