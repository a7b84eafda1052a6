"""The columns of every table of runs: what each is called, how it is read, how it is shown, which way is better.

`inlay compare` with its comparison.csv, `inlay runs`, the page with its plots, and the CSV, LaTeX and Markdown tables
read one list, `COLUMNS`: a new column is one entry there. The method, the result and the seeds, which every table has,
are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from inlay.workflow.comparison import Measurement

Record = Mapping[str, Any]  # of a finished run, as record.json has it
Value = Any  # a number, a `Measurement`, a text, or None where there is none
# `inlay compare`; `inlay tune` and `runs show`; `runs list`; the page's table; its plot of the metric against cost;
# LaTeX and Markdown; CSV.
Place = Literal["compare", "run", "list", "page", "plot", "table", "csv"]


@dataclass(frozen=True)
class Column:
    """One column. `read` gives its value from the records of a row's runs: all seeds of a method, or a single run.

    `key` names it in the page's data, and `titles` in each place that shows it. `unit` is for a single run, where there
    is room for it; `detail` replaces the text there, and `cell` the one in `inlay compare`, where the value alone says
    too little. A `log` column begins with a logarithmic axis in the page's plot.
    """

    key: str
    titles: Mapping[Place, str]
    read: Callable[[Sequence[Record]], Value]
    kind: Literal["count", "bytes", "number", "duration", "text"]
    about: str
    better: Literal["less", "more"] | None = None
    unit: str = ""
    log: bool = False
    cell: Callable[[Sequence[Record]], str] | None = None
    detail: Callable[[Record], str] | None = None

    def value(self, records: Sequence[Record]) -> float | str | None:
        """The bare value, for CSV and the page: of a measurement the mean."""
        found = self.read(records)
        return getattr(found, "mean", found)

    def spread(self, records: Sequence[Record]) -> float | None:
        """The standard deviation of a measurement's repetitions; None of what has none."""
        return getattr(self.read(records), "spread", None)

    def text(self, records: Sequence[Record]) -> str:
        """The value for a table at a terminal."""
        return self.cell(records) if self.cell else self._short(self.read(records))

    def described(self, record: Record) -> str:
        """The value of one run, with all there is to say of it."""
        if self.detail:
            return self.detail(record)
        value = self.read([record])
        repeated = f" (n = {value.repetitions})" if hasattr(value, "repetitions") else ""
        return self._short(value) + (f" {self.unit}{repeated}" if self.unit and value is not None else "")

    def exact(self, records: Sequence[Record]) -> str:
        """The value for LaTeX and Markdown, without a unit, which the title has: bytes are in MiB."""
        value = self.value(records)
        if value is None or isinstance(value, str):
            return value or "-"
        return {"count": f"{value:,}", "bytes": f"{value / 2**20:,.0f}"}.get(self.kind) or figure(value)

    def _short(self, value: Value) -> str:
        if value is None or isinstance(value, str):
            return value or "-"
        if self.kind in ("count", "bytes", "duration"):
            return {"count": count, "bytes": size, "duration": duration}[self.kind](value)
        spread = getattr(value, "spread", None)
        return figure(getattr(value, "mean", value)) + ("" if spread is None else f" ± {figure(spread, 2)}")


def columns_in(place: Place) -> list[Column]:
    """The columns that a place shows."""
    return [column for column in COLUMNS if place in column.titles]


def everywhere(title: str) -> dict[Place, str]:
    """The same title in every place but `runs list`, which is short."""
    return {"compare": title, "run": title, "page": title, "plot": title, "table": title, "csv": title}


# ----------------------------------------------------------------------------------------------- how values are written


def count(number: float) -> str:
    """A number of parameters as people say it."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def size(number: float | None) -> str:
    """Bytes as people say them."""
    if number is None:
        return "-"
    for step, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= step:
            return f"{number / step:.3g} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """A time as people say it."""
    for step, unit in ((3600, "h"), (60, "min")):
        if seconds >= step:
            return f"{seconds / step:.3g} {unit}"
    return f"{seconds:.3g} s"


def figure(value: float | None, digits: int = 3) -> str:
    """A measurement to a few significant digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


# -------------------------------------------------------------------------------------------------- how values are read


def mean(*path: str) -> Callable[[Sequence[Record]], Value]:
    """The mean of an entry of the record over the runs that have it; the entry itself where it is the same in all."""

    def read(records: Sequence[Record]) -> Value:
        known = [value for record in records if (value := _entry(record, path)) is not None]
        return known[0] if len(set(known)) == 1 else fmean(known) if known else None

    return read


def _entry(record: Value, path: Sequence[str]) -> Value:
    for key in path:
        record = (record or {}).get(key)
    return record


def measured(entry: str) -> Callable[[Sequence[Record]], Measurement | None]:
    """A measurement of the portrait: its repetitions, pooled over the runs."""

    def read(records: Sequence[Record]) -> Measurement | None:
        from inlay.workflow.comparison import Measurement, pooled

        known = [record["portrait"][entry] for record in records if record["portrait"].get(entry)]
        if len(known) == 1:  # as it is on record, to the last digit
            return Measurement(known[0]["mean"], known[0]["spread"], known[0]["repetitions"])
        return pooled([record["portrait"] for record in records], entry)

    return read


def _trained(record: Record) -> str:
    parameters = record["portrait"]["parameters"]
    return f"{parameters['trained']:,} of {parameters['total']:,} ({parameters['share']:.3%})"


def _memory(record: Record) -> str:
    peak = record["portrait"]["peak_memory"]
    return f"{size(peak['bytes'])} ({peak['how']})"


def _epoch(records: Sequence[Record]) -> str:
    """Seconds of an epoch, and of the first one where that alone computes the frozen trunk."""
    (column,) = (column for column in COLUMNS if column.key == "seconds")
    first = mean("portrait", "trunk", "first_epoch_seconds")(records)
    return column._short(column.read(records)) + ("" if first is None else f" (first {figure(first)})")


def _repetitions(records: Sequence[Record]) -> str:
    timed = [measured(f"{what}_examples_per_second")(records) for what in ("train", "inference")]
    return " ".join("-" if value is None else str(value.repetitions) for value in timed)


COLUMNS = (
    Column(
        key="trained",
        titles=everywhere("trained parameters") | {"compare": "trained", "list": "trained", "page": "Parameters"},
        read=mean("portrait", "parameters", "trained"),
        kind="count",
        about="Parameters that are trained, a new head included.",
        better="less",
        log=True,
        detail=_trained,
    ),
    Column(
        key="saved",
        titles={"compare": "saved", "run": "saved", "page": "Saved", "plot": "size on disk", "csv": "saved bytes"},
        read=mean("portrait", "saved_bytes"),
        kind="bytes",
        about="Size on disk of what was trained.",
        better="less",
        log=True,
    ),
    Column(
        key="memory",
        titles=everywhere("peak memory") | {"page": "Peak memory", "table": "peak MiB", "csv": "peak memory bytes"},
        read=mean("portrait", "peak_memory", "bytes"),
        kind="bytes",
        about="The most memory that training took.",
        better="less",
        detail=_memory,
    ),
    Column(
        key="seconds",
        titles=everywhere("s/epoch")
        | {"run": "time per epoch", "page": "s / epoch", "plot": "time per epoch", "csv": "seconds per epoch"},
        read=measured("seconds_per_epoch"),
        kind="number",
        about="Seconds of an epoch of training.",
        better="less",
        unit="s",
        cell=_epoch,
    ),
    Column(
        key="time",
        titles={"page": "Time", "csv": "seconds of the run"},
        read=mean("seconds"),
        kind="duration",
        about="Time of a whole run: loading, training, evaluation.",
        better="less",
    ),
    Column(
        key="rate",
        titles={"page": "Rate"},
        read=mean("spec", "learning_rate"),
        kind="number",
        about="Learning rate. Of several that were tried, the one selected on the validation set is marked chosen.",
    ),
    Column(
        key="train_rate",
        titles={"compare": "train/s", "run": "training", "csv": "train examples per second"},
        read=measured("train_examples_per_second"),
        kind="number",
        about="Examples trained on per second.",
        better="more",
        unit="examples/s",
    ),
    Column(
        key="infer_rate",
        titles={
            "compare": "infer/s",
            "run": "inference",
            "page": "Infer / s",
            "plot": "inference, examples per second",
            "csv": "inference examples per second",
        },
        read=measured("inference_examples_per_second"),
        kind="number",
        about="Examples predicted per second.",
        better="more",
        unit="examples/s",
    ),
    Column(
        key="n",
        titles={"compare": "n"},
        read=_repetitions,
        kind="text",
        about="How often training and inference were timed.",
    ),
)
