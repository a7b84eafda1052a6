"""Layers that look on while a model runs: attached for a few passes, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from inlay.methods.attention_interface import AttentionLayer

Watcher = TypeVar("Watcher", bound=AttentionLayer)


@contextmanager
def watching(watchers: Sequence[Watcher]) -> Iterator[Sequence[Watcher]]:
    """Let the watchers take part in their hosts' attention; afterwards the model is as it was."""
    attached: list[Watcher] = []
    try:
        for watcher in watchers:
            setattr(watcher.host, watcher.child, watcher)
            attached.append(watcher)
            watcher.attach()
        yield watchers
    finally:
        for watcher in attached:
            watcher.detach()
            delattr(watcher.host, watcher.child)
