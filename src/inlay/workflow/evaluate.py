"""Score a finished run on labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from inlay.records.atomic import write_json
from inlay.records.store import Run
from inlay.workflow.loaded import Evaluation, open_run
from inlay.workflow.predict import LoadOptions, check_writable


def evaluate(
    run: Run | Path | str,
    data: Any,
    output: Path | str | None = None,
    *,
    task: str | None = None,
    label: str | None = None,
    **how: Unpack[LoadOptions],
) -> Evaluation:
    """The run's own metrics on labelled rows: a file like the one it was trained on, or rows of Python.

    `label` names the column of the labels where it is not the one of training; of a run of several tasks, `task` the
    one to score. With `output` the result is also written there, as JSON. For `run` and the rest (`model`, `out`,
    `trust_remote_code`, `say`) see `inlay.load`.
    """
    if output is not None:
        check_writable(Path(output))
    found = open_run(run, task=task, **how).evaluate(data, label=label)
    if output is not None:
        write_json(Path(output), found.to_json())
    return found
