"""Score a finished run on labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inlay.records.atomic import write_json
from inlay.records.store import Run
from inlay.workflow.loaded import Evaluation, opened
from inlay.workflow.notes import Say
from inlay.workflow.predict import check_writable
from inlay.workflow.tune import DEFAULT_OUT


def evaluate(
    run: Run | Path | str,
    data: Any,
    output: Path | str | None = None,
    *,
    label: str | None = None,
    model: str | None = None,
    out: Path | str = DEFAULT_OUT,
    trust_remote_code: bool = False,
    say: Say | None = None,
) -> Evaluation:
    """The run's own metrics on labelled rows: a file like the one it was trained on, or rows of Python.

    `label` names the column of the labels where it is not the one of training. With `output` the result is also written
    there, as JSON. For the rest see `inlay.load`.
    """
    if output is not None:
        check_writable(Path(output))
    loaded = opened(run, model=model, out=out, trust_remote_code=trust_remote_code, say=say)
    found = loaded.evaluate(data, label=label)
    if output is not None:
        write_json(Path(output), found.to_json())
    return found
