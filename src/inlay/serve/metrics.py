"""What the service counts, in the text format that Prometheus reads."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """A number that only grows, for each value of its labels."""

    kind = "counter"

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        self._lock = threading.Lock()

    def add(self, *labels: str, by: float = 1) -> None:
        """Count."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + by

    def value(self, *labels: str) -> float:
        """The count so far."""
        return self._values.get(labels, 0)

    @property
    def total(self) -> float:
        """The count over all labels."""
        with self._lock:
            return sum(self._values.values())

    def lines(self) -> Iterator[str]:
        """One line for each value of the labels."""
        with self._lock:
            found = sorted(self._values.items())
        for values, count in found:
            yield f"{self.name}{_shown(dict(zip(self.labels, values, strict=True)))} {_number(count)}"


class Gauge:
    """A number that is asked for when it is wanted."""

    kind = "gauge"

    def __init__(self, name: str, about: str, ask: Callable[[], float]) -> None:
        self.name, self.about, self.ask = name, about, ask

    def lines(self) -> Iterator[str]:
        """The line."""
        yield f"{self.name} {_number(self.ask())}"


class Histogram:
    """How many observations were at most so large, for a few bounds."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Take note of one."""
        with self._lock:
            self._counts[bisect.bisect_left(self.bounds, value)] += 1
            self._sum += value

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self._counts)

    def lines(self) -> Iterator[str]:
        """The cumulative counts, the sum and the count."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        so_far = 0
        for bound, count in zip((*self.bounds, None), counts, strict=True):
            so_far += count
            shown = "+Inf" if bound is None else _number(bound)
            yield f"{self.name}_bucket{_shown({'le': shown})} {so_far}"
        yield f"{self.name}_sum {_number(total)}"
        yield f"{self.name}_count {so_far}"


class Metrics:
    """All that the service counts."""

    def __init__(self) -> None:
        self.responses = Counter("inlay_responses_total", "Responses, by path and status.", ("path", "status"))
        self.errors = Counter(
            "inlay_errors_total", "Requests answered with an error, by status; in a list, each of its own.", ("status",)
        )
        self.rows = Counter("inlay_rows_total", "Rows answered, by task.", ("task",))
        self.failed = Counter("inlay_rows_failed_total", "Rows that were taken on and could not be answered.")
        self.refused = Counter("inlay_rows_refused_total", "Rows refused because the queue was full.")
        self.cancelled = Counter("inlay_rows_cancelled_total", "Rows whose client went away or ran out of time.")
        self.batch_rows = Histogram("inlay_batch_rows", "Rows in a batch.", ROWS)
        self.batch_seconds = Histogram("inlay_batch_seconds", "Time that a batch took.", SECONDS)
        self.wait_seconds = Histogram("inlay_wait_seconds", "Time that a row waited for its batch.", SECONDS)
        self.gauges: list[Gauge] = []

    def text(self) -> str:
        """Everything, as Prometheus reads it."""
        found = [value for value in vars(self).values() if isinstance(value, Counter | Histogram)]
        parts: list[str] = []
        for metric in [*found, *self.gauges]:
            parts += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        return "\n".join(parts) + "\n"


def _shown(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
