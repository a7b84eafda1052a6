"""Run the notebooks from start to end, and keep them with their outputs in build/notebooks/.

    python scripts/run_notebooks.py [NAME ...]        # INLAY_NOTEBOOKS=small: few rows, few steps

Each runs in a kernel and an empty folder of its own. The first error ends this, with the cell and its traceback.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from site_notebooks import EXECUTED, read, sources

LIMIT = 1800
"""Seconds for one cell: for machines that are busy, and for models that are fetched first."""


def run(source: Path) -> float:
    """Run one; the seconds of processor time that it took."""
    folder = EXECUTED / source.stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    notebook = read(source)
    notebook.metadata["inlay"] = {"small": os.environ.get("INLAY_NOTEBOOKS") == "small"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=LIMIT,
        startup_timeout=LIMIT,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": folder}},
    ).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    nbformat.write(notebook, EXECUTED / f"{source.stem}.ipynb")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(names: list[str]) -> int:
    """Run those named, or all."""
    known = {source.stem: source for source in sources()}
    if unknown := [name for name in names if name not in known]:
        print(f"There is no notebook {unknown[0]!r}. There are: {', '.join(known)}.", file=sys.stderr)
        return 2
    for name in names or known:
        print(f"{name}: ", end="", flush=True)
        try:
            spent = run(known[name])
        except CellExecutionError as error:
            print(f"failed\n{error}", file=sys.stderr)
            return 1
        print(f"{spent:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
