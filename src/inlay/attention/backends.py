"""Which backend computes a call: the first that can, or the one named.

A backend has a `name`, says by `refuses` why it cannot do a call, and computes `with_lse` and `joined`. Of the exact
ones `plain` comes last and refuses nothing. A kernel for another device is one more `Fused` with its own `Kernel`,
placed before `plain`. Approximate backends are used where they are named, and are neither chosen nor suggested.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from inlay.attention.call import Call
from inlay.attention.cpu import Cpu
from inlay.attention.cuda import Cuda
from inlay.attention.features import FeatureMap
from inlay.attention.plain import Plain
from inlay.attention.taylor import TaylorAttention
from inlay.attention.term import State
from inlay.errors import InlayError, unknown


class Backend(Protocol):
    name: str

    def refuses(self, call: Call) -> str | None:
        """Why this backend cannot do the call; None if it can."""

    def with_lse(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, without the call's prefix."""

    def joined(self, call: Call, features: FeatureMap | None, state: State | None) -> Tensor:
        """T of join.py."""


EXACT: tuple[Backend, ...] = (Cpu(), Cuda(), Plain())
APPROXIMATE: tuple[Backend, ...] = (TaylorAttention(2), TaylorAttention(4))
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (*EXACT, *APPROXIMATE)}


def choose(name: str | None, call: Call) -> Backend:
    """The backend of that name, or the first exact one that takes the call."""
    if name is None:
        return next(backend for backend in EXACT if backend.refuses(call) is None)
    if name not in BACKENDS:
        raise unknown("attention backend", name, BACKENDS, "Leave it out to have one chosen.")
    backend = BACKENDS[name]
    if (reason := backend.refuses(call)) is not None:
        fit = [other.name for other in EXACT if other.refuses(call) is None]
        raise InlayError(
            f"The attention backend {name!r} cannot do this: {reason}. Backends that can: {', '.join(fit)}. "
            "Leave it out to have one chosen."
        )
    return backend
