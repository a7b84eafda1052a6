"""Which worker works on which GPU, and how much of its memory is its own."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.errors import InlayError


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
