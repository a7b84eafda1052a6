"""A process of the local engine: reads jobs, one a line, does them, and says how it goes, one line of JSON a word.

local.py starts it with a descriptor and its settings as JSON. The descriptor is one end of a socket; the parent has the
other. What libraries print does not get in the way there. A worker whose parent is gone stops at the next moment at
which its run can be resumed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from inlay.engines.job import Job, until, work
from inlay.errors import InlayError


def main(descriptor: str, given: str) -> None:
    """Work until the parent closes its end."""
    settings = json.loads(given)
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("r", encoding="utf-8") as jobs:
        try:
            prepare(settings)
        except InlayError as error:
            tell(channel, {"refused": str(error)})
            return
        tell(channel, {"ready": True})
        for line in jobs:
            order = json.loads(line)
            do(channel, Job.from_json(order["job"]), order["seconds"], settings["parent"])


def prepare(settings: dict[str, Any]) -> None:
    """Take this worker's part of the machine, and import what every run needs while nobody waits for it."""
    import torch

    torch.set_num_threads(settings["threads"])
    apply(share_of(settings["index"], settings["workers"], settings["gpus"], torch.cuda.device_count()))
    import peft  # noqa: F401

    import inlay.training.fitting  # noqa: F401


def apply(share: GpuShare) -> None:
    """See just one GPU, or none, and leave the others' part of its memory alone.

    Nothing has touched CUDA in this process yet, so that what is visible can still be changed.
    """
    import torch

    if share.device is None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), share.device)
    torch.cuda.set_per_process_memory_fraction(share.memory, 0)


def do(channel: socket.socket, job: Job, seconds: float | None, parent: int) -> None:
    """One job, and its outcome to the parent."""
    late = until(None if seconds is None else time.monotonic() + seconds)
    outcome = work(
        job,
        step=lambda done, total: tell(channel, {"step": [done, total]}),
        say=lambda line: tell(channel, {"say": line}),
        stop=lambda: os.getppid() != parent or late(),
        opened=lambda name: tell(channel, {"opened": name}),
        signals_stop=True,
    )
    tell(channel, {"end": outcome.to_json()})


def tell(channel: socket.socket, word: dict[str, Any]) -> None:
    """One line to the parent; one that is gone is noticed by `stop`, between two updates."""
    try:
        channel.sendall(json.dumps(word).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return


# ------------------------------------------------------------------------------------------- its part of the GPUs


@dataclass(frozen=True)
class GpuShare:
    """A worker's GPU, by number (None: the processor), and the share of its memory that it may take."""

    device: int | None
    memory: float = 1.0


def check(workers: int, gpus: float | None, devices: int) -> None:
    """A clear error where more is asked of the GPUs than there is."""
    if not gpus:
        return
    if not 0 < gpus <= 1:
        raise InlayError(
            f"gpus={gpus:g}: a run takes one GPU or a part of one. One run on several is for `accelerate launch`."
        )
    if devices == 0:
        raise InlayError(
            f"gpus={gpus:g}: there is no GPU here that torch can use. Leave --gpus out, or give 0, to train on the "
            "processor."
        )
    most = devices * int(1 / gpus + 1e-9)
    if workers > most:
        raise InlayError(
            f"{workers} workers with {gpus:g} of a GPU each do not fit on {devices} GPU{'s' * (devices > 1)}: give "
            f"--workers {most}, or --gpus {devices / workers:.2g} to share."
        )


def share_of(index: int, workers: int, gpus: float | None, devices: int) -> GpuShare:
    """The share of worker number `index`. Workers are spread evenly; those on one GPU have equal parts of its memory.

    `gpus` is what each run asks for: None is whatever there is, 0 the processor.
    """
    check(workers, gpus, devices)
    if gpus == 0 or devices == 0:
        return GpuShare(None)
    device = index % devices
    beside = len(range(device, workers, devices))
    return GpuShare(device, gpus or 1 / beside)


def visible(already: str | None, device: int) -> str:
    """What CUDA_VISIBLE_DEVICES is to be for one GPU of those that are visible `already`."""
    listed = [name.strip() for name in (already or "").split(",") if name.strip()]
    return listed[device] if listed else str(device)
