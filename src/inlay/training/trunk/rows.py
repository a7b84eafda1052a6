"""Where the trunk's output is kept: on the accelerator, in memory, or in a memory-mapped file of the run's folder.

Each row is laid down as it lay in memory when it was computed, and comes back with the same strides: a kernel may round
another layout of the same numbers differently.

The file has a name that every start of the run sweeps away (`records.atomic.TEMPORARY`), so that what a killed process
left is never read: a resumed run computes its rows again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.records.atomic import TEMPORARY

Where = Literal["device", "memory", "file"]
FILE = f"{TEMPORARY}trunk"
LIMIT = "INLAY_TRUNK_MEMORY"
SHARE = 0.25  # of what is free may be taken where nobody set a limit
WORTH = 0.25  # of the blocks must be saved for a file that memory could not hold, read from disk in every epoch
CGROUPS = Path("/sys/fs/cgroup")
# The limit, the usage, and in `memory.stat` the part of it that is given up when memory is asked for: versions 2 and 1.
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class NoRoom(Exception):
    """There is no place for the rows; the message says why."""


def memory_limit() -> int | None:
    """The most bytes to keep in memory, where the environment says so: `INLAY_TRUNK_MEMORY=4GiB`; 0 is a file."""
    given = os.environ.get(LIMIT, "").strip()
    if not given:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", given, re.IGNORECASE)
    if found is None:
        raise InlayError(f"{LIMIT}={given!r} is no size. Give bytes, or a number with a unit: 500MiB, 4GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def available_memory(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process can still take: of the machine's, and of its container's where that has a limit."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups(root, own)]))


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    """What is left in this process's control group and in those around it. In a container its own group is the root."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, name in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            for limit, usage, reclaimed in CGROUP_FILES:
                try:
                    most, used = (int((folder / file).read_text()) for file in (limit, usage))
                    spare = re.search(rf"^{reclaimed} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                except (OSError, ValueError):  # no such group, or no limit: "max"
                    continue
                yield most - used + (int(spare[1]) if spare else 0)


class Rows:
    """Room for `count` rows like those of `example`, a batch of the trunk's output.

    `share` is how much of the model they stand for. Raises `NoRoom` where they fit nowhere; without a `folder` they are
    not put into a file.
    """

    def __init__(self, example: Tensor, count: int, device: torch.device, folder: Path | None, share: float) -> None:
        self._shape, self._strides = example.shape, example.stride()
        order = sorted(range(1, example.ndim), key=lambda dimension: -example.stride(dimension))
        self._order = (0, *order)
        self._dense = example.permute(self._order).is_contiguous()
        values = example[0].numel()
        self.bytes = count * values * example.element_size()
        self.path = None if folder is None else folder / FILE
        self.where = self._place(device, share)
        if self.path is not None and self.where == "file":
            self._reserve(self.path)
            flat = torch.from_file(str(self.path), shared=True, size=count * values, dtype=example.dtype)
            self.kept = flat.view(count, values)
        else:
            home = device if self.where == "device" else torch.device("cpu")
            self.kept = torch.empty((count, values), dtype=example.dtype, device=home)

    def _place(self, device: torch.device, share: float) -> Where:
        limit, free = memory_limit(), available_memory()
        if device.type == "cuda":
            room = torch.cuda.mem_get_info(device)[0] * SHARE
            if self.bytes <= (room if limit is None else min(room, limit)):
                return "device"
        if self.bytes <= (free * SHARE if limit is None else limit):
            return "memory"
        if self.path is None:
            raise NoRoom(f"its {size(self.bytes)} do not fit into memory")
        if self.bytes > free and share < WORTH:
            raise NoRoom(
                f"its {size(self.bytes)} fit into no memory, and reading them from disk would take longer than it saves"
            )
        return "file"

    def _reserve(self, path: Path) -> None:
        """Take the disk space now: a memory-mapped file that runs out of it later kills the process."""
        try:
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:  # not through a link that was laid there
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self.bytes)
                else:
                    file.truncate(self.bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise NoRoom(f"there is no room for its {size(self.bytes)} on disk ({error.strerror})") from None

    def put(self, start: int, rows: Tensor) -> None:
        """Keep rows from number `start` on; what is past the end is left out."""
        flat = (rows.permute(self._order) if self._dense else rows).reshape(len(rows), -1)
        kept = self.kept[start : start + len(rows)]
        kept.copy_(flat[: len(kept)])

    def pick(self, indices: Tensor) -> Tensor:
        """The rows with these numbers, in a layout like that of the example."""
        flat = self.kept.index_select(0, indices)
        shape = (len(indices), *self._shape[1:])
        if self._dense:
            return flat.as_strided(shape, (flat.stride(0), *self._strides[1:]))
        rows = flat.view(shape)
        if self._strides[0] < max(self._strides) and len(indices) != self._shape[0]:
            return rows  # the batch is not outermost: the strides are those of a batch of another size
        return torch.empty_strided(shape, self._strides, dtype=rows.dtype, device=rows.device).copy_(rows)

    def close(self) -> None:
        """Let go of the rows, and of the file."""
        self.kept = self.kept.new_empty(0)
        if self.path is not None and self.where == "file":
            self.path.unlink(missing_ok=True)


def size(number: float) -> str:
    """Bytes as people say them."""
    for step, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= step:
            return f"{number / step:.3g} {unit}"
    return f"{number:.0f} B"
