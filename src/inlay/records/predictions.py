"""A run's predictions on disk: a Parquet file for each task, in the folder `predictions`, whole or absent.

What the columns are is said where they are made, in `inlay.tasks.kept`. A run from before has no such folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import InlayError, first_line
from inlay.records.atomic import write_folder

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "predictions"
MOST_ROWS = 50_000_000
MOST_BYTES = 4 * 2**30  # of a file when it is unpacked


def write(folder: Path, tables: Mapping[str, pa.Table]) -> None:
    """Put the tables of a run's tasks into its folder, all of them or none."""
    import pyarrow.parquet as parquet

    def fill(into: Path) -> None:
        for name, table in tables.items():
            parquet.write_table(table, into / f"{name}.parquet", compression="zstd")

    write_folder(folder / FOLDER, fill)


def files(folder: Path) -> dict[str, Path]:
    """The files in a run's folder by the names of their tasks."""
    return {path.stem: path for path in sorted((folder / FOLDER).glob("*.parquet")) if path.is_file()}


def read(path: Path, columns: list[str] | None = None) -> pa.Table:
    """One task's table, or those of its `columns` that it has; a clear error where it is no such table."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            told = file.metadata
            groups = [told.row_group(i) for i in range(told.num_row_groups)]
            if told.num_rows > MOST_ROWS or sum(group.total_byte_size for group in groups) > MOST_BYTES:
                raise InlayError(f"{path} is too large for a run's predictions ({told.num_rows:,} rows): not read.")
            known = file.schema_arrow.names
            if lacking := [name for name in ("split", "row") if name not in known]:
                raise InlayError(f"{path} is not a run's predictions: it has no column {lacking[0]!r}.")
            return file.read([name for name in columns if name in known] if columns is not None else None)
    except (OSError, pa.ArrowException) as error:
        raise InlayError(
            f"Cannot read {path}: {first_line(error)} Remove the run with `inlay runs rm {path.parent.parent.name}` "
            "and run it again."
        ) from None
