"""Let a finished run answer for new data."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.atomic import write_text, writing
from inlay.records.store import Run, Store
from inlay.workflow.tune import DEFAULT_OUT


def predict(
    run: Run | Path | str,
    input: Path | str,
    output: Path | str | None = None,
    *,
    model: str | None = None,
    out: Path | str = DEFAULT_OUT,
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """Predictions of a run for the rows of a file or the images of a folder, one dict a row, in order.

    `run` is a run, the path of its folder, or its name (or an unambiguous part of it) under `out`. With `output` they
    are also written there, as JSON lines, all or nothing. `model` names the base model where it has moved since; it
    must hold the same weights. `trust_remote_code` lets code run that comes with the model: a run never allows it by
    itself.
    """
    run = run if isinstance(run, Run) else Store(out).get(str(run))
    run.verify()
    if run.spec.tasks:
        raise InlayError(
            f"The run {run.id} has several tasks: name the one of each row in a file of JSON lines, and give "
            f"--adapter {run.adapter} and that file."
        )
    if output is not None:
        check_writable(Path(output))
    from inlay.tasks import TaskSchema
    from inlay.training import predict as infer

    schema = TaskSchema.from_json(run.record["task"]["schema"])
    rows = schema.read_inputs(input)
    if not rows:
        raise InlayError(f"There is nothing to predict in {str(input)!r}: it has no rows.")
    adapted, processor = restored(run, schema, model, trust_remote_code=trust_remote_code)
    predictions, encoded = infer(adapted, schema, rows, processor, run.spec)
    answers = [joined(row, answer) for row, answer in zip(rows, schema.decode(predictions, encoded), strict=True)]
    if output is not None:
        write_text(Path(output), "".join(lines(answers)))
    return answers


def restored(run: Run, schema: Any, model: str | None = None, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A finished run's adapted model and its processor. `model` names the base model where it has moved since."""
    from inlay import backbones
    from inlay.methods import attach

    check_trust(run.spec.trust_remote_code, trust_remote_code, f"The run {run.id}")
    spec = run.spec.with_(model=model or run.spec.model, trust_remote_code=trust_remote_code)
    backbone = backbones.load_for(spec, schema)
    method = registry.get(run.spec.method)
    adapted = attach.restore(backbone.model, method, run.adapter, fingerprint=backbone.fingerprint)
    return adapted, backbone.processor


def check_trust(trained_with: bool, trust_remote_code: bool, what: str) -> None:
    """An error where a model's own code is needed and nobody here has allowed it.

    A file says what was allowed where it was written, by whoever wrote it. That is no permission here.
    """
    if trained_with and not trust_remote_code:
        raise InlayError(
            f"{what} was trained on a model that brings its own Python code. Read it, and if you trust it give "
            "--trust-remote-code (trust_remote_code=True)."
        )


def joined(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """A row's own fields (but the bytes of a picture) and the answer to it; a field that an answer's name would hide
    keeps its name, and the answer's becomes `predicted_<name>`."""
    shown = {key: value for key, value in row.items() if not _holds_bytes(value)}
    return shown | {f"predicted_{key}" if key in shown else key: value for key, value in answer.items()}


def _holds_bytes(value: Any) -> bool:
    """Whether this is a picture as tables hold them: its file's bytes, or a mapping with them."""
    return isinstance(value, bytes) or (isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes))


def check_writable(path: Path) -> None:
    """Find out before the work, not after it, that the result could not be written."""
    if path.is_dir():
        raise InlayError(f"{str(path)!r} is a folder: give the name of a file to write, such as predictions.jsonl.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def lines(answers: list[dict[str, Any]]) -> Iterator[str]:
    """The answers as JSON lines."""
    for answer in answers:
        yield json.dumps(answer, ensure_ascii=False) + "\n"
