"""Whose turn it is: rows of many clients in a queue that no client can have for itself.

A client is an address, and at one address a connection. Addresses take turns, and so do the connections of one address;
the rows of one connection stay in order. A client that sends a thousand rows waits for them, and one row of another
waits for a few of them at most.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Client(NamedTuple):
    """Who sent a row; all that comes from Python itself is one client."""

    address: str = ""
    connection: int = 0


HERE = Client()


class NamedRow(Protocol):
    """What is to be answered: a row of a task."""

    @property
    def task(self) -> str:
        """The name of its task, or what stands for one."""


@dataclass(frozen=True, eq=False)
class QueuedRow:
    """A row that waits for its answer; equal to itself alone. `load` is the part of a batch that it fills."""

    request: NamedRow
    client: Client = HERE
    load: float = 0.0
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    came: float = field(default_factory=time.monotonic)


class FairQueue:
    """Rows in the order in which they are served. It has no lock of its own."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[str, OrderedDict[int, deque[QueuedRow]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueuedRow]:
        return (row for lanes in self._addresses.values() for lane in lanes.values() for row in lane)

    def append(self, row: QueuedRow) -> None:
        """A row behind those of its own connection."""
        lanes = self._addresses.setdefault(row.client.address, OrderedDict())
        lanes.setdefault(row.client.connection, deque()).append(row)
        self._size += 1

    @property
    def first(self) -> QueuedRow:
        """The row whose turn it is."""
        return next(iter(next(iter(self._addresses.values())).values()))[0]

    def popleft(self) -> QueuedRow:
        """Take the row whose turn it is: the next turn is another address's, and there another connection's."""
        address, lanes = next(iter(self._addresses.items()))
        connection, lane = next(iter(lanes.items()))
        row = lane.popleft()
        self._size -= 1
        _to_the_end(lanes, connection, keep=bool(lane))
        _to_the_end(self._addresses, address, keep=bool(lanes))
        return row

    def discard(self, row: QueuedRow) -> bool:
        """Take out a row wherever it stands; whether it was there."""
        lanes = self._addresses.get(row.client.address, OrderedDict())
        lane = lanes.get(row.client.connection, deque())
        if row not in lane:
            return False
        lane.remove(row)
        self._size -= 1
        if not lane:
            del lanes[row.client.connection]
        if not lanes:
            del self._addresses[row.client.address]
        return True

    def oldest(self) -> float:
        """When the row came that has waited longest."""
        return min(lane[0].came for lanes in self._addresses.values() for lane in lanes.values())


def _to_the_end(queue: OrderedDict, key: object, keep: bool) -> None:
    if keep:
        queue.move_to_end(key)
    else:
        del queue[key]
