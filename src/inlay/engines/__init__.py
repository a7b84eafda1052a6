"""Where runs are made: on this machine, one or several at a time, or on a Ray cluster. Same jobs, same records.

An engine knows nothing of comparisons: it is given independent jobs, does them in any order, and says what came of
each.
"""

from __future__ import annotations

from inlay.engines.job import Engine, Job, JobOutcome, Listener
from inlay.errors import InlayError, unknown

__all__ = ["ENGINES", "Engine", "Job", "JobOutcome", "Listener", "make"]

ENGINES = ("local", "ray")


def make(
    name: str = "local",
    *,
    workers: int | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    address: str | None = None,
) -> Engine:
    """The engine of this name. `cpus` and `gpus` are what each run is given; None: what suits.

    `workers` is for `local`, `address` for `ray`: of a cluster (`auto` is the one of this machine), or None for a
    small one that lives as long as the command.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if cpus is not None and cpus <= 0:
        raise InlayError(f"cpus={cpus:g}: give more than 0, the cores of each run.")
    if gpus is not None and gpus < 0:
        raise InlayError(f"gpus={gpus:g}: give 0 or more, the GPUs of each run.")
    if name == "ray":
        if workers is not None:
            raise InlayError("workers is for the local engine: on Ray, cpus and gpus say how many runs fit at once.")
        from inlay.engines.on_ray import RayEngine

        return RayEngine(address, cpus=cpus or 1.0, gpus=gpus)
    if address is not None:
        raise InlayError(f"address={address!r} is for the engine ray, and this is local. Say --engine ray.")
    from inlay.engines.local import LocalEngine

    if cpus is not None and cpus != int(cpus):
        raise InlayError(f"cpus={cpus:g}: the local engine gives whole cores.")
    return LocalEngine(1 if workers is None else workers, None if cpus is None else int(cpus), gpus)
