"""Let a finished run answer for new data."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.folder import DEFAULT
from inlay.records.atomic import write_text, writing
from inlay.records.store import Run
from inlay.tasks.new_rows import is_path
from inlay.workflow.notes import Say
from inlay.workflow.tune import DEFAULT_OUT

if TYPE_CHECKING:
    import torch

    from inlay.backbones.loading import Backbone
    from inlay.records.spec import Spec
    from inlay.tasks import TaskSchema


class LoadOptions(TypedDict, total=False):
    """Where a run and its base model are, and who is told: see `inlay.load`."""

    model: str | None
    out: Path | str
    trust_remote_code: bool
    say: Say | None
    labels: Sequence[str] | None
    template: str | None


def predict(
    run: Run | Path | str,
    input: Any,
    output: Path | str | None = None,
    *,
    task: str | None = None,
    probabilities: bool = False,
    top_k: int | None = None,
    skip_unreadable: bool = False,
    **how: Unpack[LoadOptions],
) -> list[dict[str, Any]]:
    """Predictions of a run, one dict a row, in order: the row's own columns and what the model says.

    `input` is the path of a file or of a folder of images, or rows of Python: see `inlay.workflow.loaded.LoadedRun`,
    which also answers many times once it is loaded. Of a run of several tasks `task` names the one to answer for;
    without it `input` is a file of JSON lines, each of which names its task. With `output` the predictions are also
    written there, as JSON lines, all or nothing. `probabilities` adds those of all classes, `top_k` the likeliest;
    `skip_unreadable` leaves out what cannot be read, and says so at the end. For `run` and the rest
    (`model`, `out`, `trust_remote_code`, `say`, `labels`, `template`) see `inlay.load`.
    """
    from inlay.workflow.loaded import find_run, open_run

    if output is not None:
        check_writable(Path(output))
    found = find_run(run, how.get("out", DEFAULT_OUT))
    if found.spec.tasks and task is None and is_path(input):
        from inlay.workflow.answer import answer

        if top_k is not None or skip_unreadable:
            raise InlayError("top_k and skip_unreadable are of one task: choose it by --task (task=).")
        if how.pop("labels", None) is not None or how.pop("template", None) is not None:
            raise InlayError("labels and template are of a model that compares images with texts: leave them out.")
        how.pop("out", None)
        return answer(found.folder, input, output, probabilities=probabilities, **how)  # type: ignore[misc]
    loaded = open_run(found, task=task, **how)
    answers = loaded.predict(input, probabilities=probabilities, top_k=top_k, skip_unreadable=skip_unreadable)
    if output is not None:
        write_text(Path(output), "".join(format_lines(answers)))
    return answers


def restore(
    run: Run, schema: Any, model: str | None = None, *, task: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A finished run's adapted model and its processor; of a run of several tasks, with the adapter of `task`.

    `model` names the base model where it has moved since.
    """
    check_trust(run.spec.trust_remote_code, trust_remote_code, f"The run {run.id}")
    spec = run.spec.with_(model=model or run.spec.model, trust_remote_code=trust_remote_code)
    names = [task if task is not None and run.spec.tasks else DEFAULT]
    adapted, backbone = restore_adapters(spec, schema, run.adapter, names)
    return adapted, backbone.processor


def restore_adapters(
    spec: Spec,
    schema: TaskSchema,
    folder: Path,
    names: Sequence[str],
    *,
    mixed: bool = False,
    held: torch.dtype | None = None,
) -> tuple[Any, Backbone]:
    """The spec's model with the adapters of these names from a folder; and the backbone that it is. `mixed`: so that
    their rows can share batches. For `held` see `inlay.backbones.load`."""
    from inlay import backbones
    from inlay.console import quiet
    from inlay.methods import attach

    backbone = backbones.load_for(spec, schema, held)
    adapted: Any = backbone.model
    with quiet():  # PEFT warns of every further adapter in one model
        for name in names:
            adapted = attach.restore(
                adapted,
                registry.get(spec.method),
                folder,
                adapter_name=name,
                fingerprint=backbone.fingerprint,
                mixed=mixed,
            )
    return adapted, backbone


def check_trust(trained_with: bool, trust_remote_code: bool, what: str) -> None:
    """An error where a model's own code is needed and nobody here has allowed it.

    A file says what was allowed where it was written, by whoever wrote it. That is no permission here.
    """
    if trained_with and not trust_remote_code:
        raise InlayError(
            f"{what} was trained on a model that brings its own Python code. Read it, and if you trust it give "
            "--trust-remote-code (trust_remote_code=True)."
        )


def join(row: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A row's own fields (but for images) and the answer to it; a field that an answer's name would hide keeps its
    name, and the answer's becomes `predicted_<name>`."""
    shown = {key: value for key, value in row.items() if not _is_image(value)}
    return shown | {f"predicted_{key}" if key in shown else key: value for key, value in answer.items()}


def _is_image(value: Any) -> bool:
    """Whether this is an image itself, not its path: its file's bytes, a mapping with them, Pillow's, or an array."""
    if isinstance(value, bytes) or (isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)):
        return True
    return type(value).__module__.startswith("PIL.") or (type(value).__module__ == "numpy" and value.ndim > 1)


def check_writable(path: Path) -> None:
    """Find out before the work, not after it, that the result could not be written."""
    if path.is_dir():
        raise InlayError(f"{str(path)!r} is a folder: give the name of a file to write, such as predictions.jsonl.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def format_lines(answers: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The answers as JSON lines. What JSON has no form for is written as text: a date as ISO 8601 has it."""
    for answer in answers:
        line = json.dumps(_sayable(answer), ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:  # half a character, in a column that nobody reads
            line = json.dumps(_sayable(answer))
        yield line + "\n"


def _sayable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _sayable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_sayable(each) for each in value]
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
