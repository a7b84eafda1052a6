"""Switching tasks off and on: what is off does not train, and what trained before trains again when it is on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Switch:
    """For a layer or a head with one piece for each task. Every task that was added trains, whichever is active: PEFT
    would turn on the active one's gradients alone."""

    _disable_adapters: bool
    _paused: tuple[nn.Module, ...] = ()

    def switch(self, enabled: bool, pieces: Iterable[nn.Module]) -> None:
        """Turn the pieces' gradients off, or those on again that were turned off here."""
        pieces = tuple(pieces)
        if enabled:
            back = tuple(piece for piece in self._paused if any(piece is other for other in pieces))
            self._paused = ()
        else:
            back = tuple(piece for piece in pieces if any(weight.requires_grad for weight in piece.parameters()))
            self._paused += back
        for piece in back:
            piece.requires_grad_(enabled)
        self._disable_adapters = not enabled
