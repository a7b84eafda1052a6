"""Raw runs as one Parquet file: a row a run, for analyses of one's own and for publishing.

`COLUMNS` says what each column is; the fields of a run's spec, its metrics and its versions have columns by their own
names. Texts name no folder of the disk that the runs were made on: absolute paths are cut as on the page.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.records.atomic import write_bytes, writing
from inlay.records.spec import Spec
from inlay.report.collect import Collected, Result, Unfinished
from inlay.report.paths import cutter
from inlay.report.subjects import family, kind, reads

if TYPE_CHECKING:
    import pyarrow as pa

ENDING = ".parquet"
COLUMNS: Mapping[str, tuple[str, str]] = {
    "run": ("string", "the run's name"),
    "status": ("string", "finished, failed, interrupted or running"),
    "error": ("string", "why it failed"),
    "family": (
        "string",
        "what the method trains: head, prompt, prefix, adapter, low-rank, scale and shift, whole model",
    ),
    "task_kind": ("string", "the kind of task, as the data showed it"),
    "reads": ("string", "texts or images"),
    "chosen": ("bool", "whether its settings are those that validation selected for its method, task, model and size"),
    "metric": ("string", "the task's main metric"),
    "greater_is_better": ("bool", "which way the main metric improves"),
    "validation": ("double", "the main metric on the validation split"),
    "test": ("double", "the main metric on the test split"),
    "examples_train": ("int64", "rows trained on"),
    "examples_validation": ("int64", "rows of the validation split"),
    "examples_test": ("int64", "rows of the test split"),
    "data_digest": ("string", "digest of the data and its splits; of several tasks as JSON"),
    "model_fingerprint": ("string", "digest of the frozen weights"),
    "parameters_trained": ("int64", "trained parameters"),
    "parameters_total": ("int64", "parameters of the adapted model"),
    "saved_bytes": ("int64", "size of the adapter on disk"),
    "peak_memory_bytes": ("int64", "the most memory that training took"),
    "seconds": ("double", "time of the whole run: loading, training, evaluation"),
    "seconds_per_epoch": ("double", "time of an epoch of training"),
    "train_examples_per_second": ("double", "examples trained on per second"),
    "inference_examples_per_second": ("double", "examples predicted per second"),
    "steps": ("int64", "updates made"),
    "best_step": ("int64", "the update that was kept, where one was selected"),
    "device": ("string", "cpu or cuda"),
    "created": ("string", "when the run began, UTC"),
    "finished": ("string", "when it ended, UTC"),
    "command": ("string", "the command that makes the run again"),
}
"""The columns that are the same for every folder of runs: their type, and what they hold."""
TYPES = {"int": "int64", "float": "double", "bool": "bool"}


def write_parquet(found: Collected, out: Path) -> int:
    """Write the file; the number of its columns comes back."""
    import pyarrow.parquet as parquet

    check_parquet(out)
    held = table(found)
    buffer = io.BytesIO()
    parquet.write_table(held, buffer, compression="zstd")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, buffer.getvalue())
    return int(held.num_columns)


def check_parquet(out: Path) -> None:
    """Refuse before the work what cannot be the file's place."""
    if out.is_dir():
        raise InlayError(f"{str(out)!r} is a folder: give the name of a file in it, such as {out / 'runs.parquet'}.")
    if out.suffix.lower() != ENDING:
        raise InlayError(f"{str(out)!r} does not end in {ENDING}: say --output runs{ENDING}.")


def table(found: Collected) -> pa.Table:
    """All runs as a table, the finished ones first; what the columns are is in its metadata, under `inlay_columns`."""
    import pyarrow as pa

    chosen = {id(result): row.chosen for row in found.rows for result in row.results}
    rows = [_finished(result, chosen[id(result)]) for result in found.results]
    rows += [_unfinished(run) for run in found.unfinished]
    spec = {each.name: TYPES.get(str(each.type).partition(" | ")[0], "string") for each in dataclasses.fields(Spec)}
    types = {name: kind for name, (kind, _) in COLUMNS.items()}
    types = {"run": types.pop("run"), **spec, **types}
    types |= {name: "double" for row in rows for name in row if name.startswith(("validation_", "test_"))} | {
        name: "string" for row in rows for name in row if name.startswith("version_")
    }
    types |= {name: spec[name] for name in spec}  # a spec's own name stands, whatever it begins with
    cut = cutter(found.specs)
    columns = [pa.array([_plain(row.get(name), kind, cut) for row in rows], kind) for name, kind in types.items()]
    about = {name: told for name, (_, told) in COLUMNS.items()} | {name: f"{name} of the run's spec" for name in spec}
    told = {b"inlay_columns": json.dumps({name: about.get(name, name.replace("_", " ", 1)) for name in types}).encode()}
    return pa.Table.from_arrays(columns, names=list(types)).replace_schema_metadata(told)


def _plain(value: Any, kind: str, cut: Callable[[Any], Any]) -> Any:
    """A value as a cell: lists and objects as JSON, texts without paths of a disk."""
    if value is None:
        return None
    if kind != "string":
        return {"int64": int, "double": float, "bool": bool}[kind](value)
    return cut(value if isinstance(value, str) else json.dumps(value))


def _finished(result: Result, chosen: bool) -> dict[str, Any]:
    record, portrait = result.record, result.run.portrait
    splits = ("train", "validation", "test")
    measured = ("seconds_per_epoch", "train_examples_per_second", "inference_examples_per_second")
    tasks = record.get("tasks") or {"": record.get("task") or {}}
    digests = {name: task.get("digest") for name, task in tasks.items()}
    metrics = result.run.metrics
    return {
        **result.spec.to_json(),
        "run": result.run.id,
        "status": "finished",
        "family": family(result.spec.method),
        "task_kind": kind(result),
        "reads": reads(result),
        "chosen": chosen,
        "metric": result.metric,
        "greater_is_better": result.of.greater,
        **{split: metrics.get(split, {}).get(result.metric) for split in ("validation", "test")},
        **{
            f"{split}_{name}": value
            for split in ("validation", "test")
            for name, value in metrics.get(split, {}).items()
            if isinstance(value, int | float)
        },
        **{f"examples_{split}": (record.get("examples") or {}).get(split) for split in splits},
        "data_digest": next(iter(digests.values())) if len(digests) == 1 else digests,
        "model_fingerprint": (record.get("backbone") or {}).get("fingerprint"),
        "parameters_trained": portrait["parameters"].get("trained"),
        "parameters_total": portrait["parameters"].get("total"),
        "saved_bytes": portrait.get("saved_bytes"),
        "peak_memory_bytes": (portrait.get("peak_memory") or {}).get("bytes"),
        **{name: (portrait.get(name) or {}).get("mean") for name in measured},
        **{name: record.get(name) for name in ("seconds", "steps", "best_step", "created", "finished")},
        "device": portrait.get("device"),
        **{f"version_{name}": value for name, value in (record.get("versions") or {}).items() if value is not None},
        "command": result.command,
    }


def _unfinished(run: Unfinished) -> dict[str, Any]:
    spec = run.spec.to_json()
    told = {"run": run.id, "status": run.status, "error": run.error, "family": family(run.spec.method)}
    return {**spec, **told, "command": run.command}
