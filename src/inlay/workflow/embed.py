"""Vectors of texts, by a run that was trained for them or by a model as it is."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from inlay.errors import InlayError, unknown
from inlay.records.atomic import write_bytes
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.tasks import TaskSchema, kinds, tables
from inlay.tasks.cells import as_text, is_null, reach
from inlay.tasks.rows import as_rows, is_path
from inlay.workflow.notes import Say, or_log
from inlay.workflow.predict import check_writable, format_lines
from inlay.workflow.tune import DEFAULT_OUT

if TYPE_CHECKING:
    import numpy as np

BATCH = 64
ID, TEXT = "id", "text"
LINES = ".txt"


class FrozenOptions(TypedDict, total=False):
    """How a model as it is gives vectors: see `frozen_model`."""

    trust_remote_code: bool
    pooling: str
    max_length: int | None
    revision: str | None
    precision: str


class EmbedOptions(FrozenOptions, total=False):
    """What `embed` takes beside the texts: see there."""

    out: Path | str


class VectorSource(Protocol):
    """What vectors are made with: a loaded run, or a model as it is."""

    schema: TaskSchema
    spec: Spec

    @property
    def model(self) -> Any:
        """The model, which gives the vectors as its `logits`."""

    @property
    def processor(self) -> Any:
        """Its tokenizer."""


@dataclass
class FrozenModel:
    """A model as it is, which gives vectors; loaded when it is first needed."""

    spec: Spec
    schema: TaskSchema

    @cached_property
    def backbone(self) -> Any:
        """The loaded model and what belongs to it."""
        from inlay import backbones

        return backbones.load_for(self.spec, self.schema)

    @property
    def model(self) -> Any:
        return self.backbone.model

    @property
    def processor(self) -> Any:
        return self.backbone.processor


@dataclass(frozen=True)
class Texts:
    """Texts to embed, in order, and what each is called, where the rows say."""

    texts: list[str]
    ids: list[Any] | None = None


@dataclass(frozen=True)
class Embedded:
    """Vectors of texts, N x D in float32, and what each is called, where the rows say."""

    vectors: np.ndarray
    ids: list[Any] | None = None


def frozen_model(
    model: str,
    *,
    pooling: str = "auto",
    max_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    precision: str = "auto",
) -> FrozenModel:
    """A model by its name (hub id, folder, `embedded:<name>`) that gives vectors without training."""
    from inlay import backbones

    chosen = backbones.settle_pooling(model, kinds.EMBEDDING, pooling, revision)
    spec = Spec(
        model=model,
        method="full",
        data=TEXT,
        kind=kinds.EMBEDDING,
        pooling=chosen,
        max_length=max_length,
        revision=revision,
        trust_remote_code=trust_remote_code,
        precision=precision,
    )
    return FrozenModel(spec, TaskSchema(TEXT, kinds.EMBEDDING, (TEXT,), (), max_length=max_length))


def embed(
    texts: Any,
    output: Path | str | None = None,
    *,
    run: Run | Path | str | None = None,
    model: str | None = None,
    text: str | None = None,
    id: str | None = None,
    batch_size: int = BATCH,
    say: Say | None = None,
    **how: Unpack[EmbedOptions],
) -> Embedded:
    """A vector of length 1 for each text, in order.

    `run` is one of kind embedding (by itself, its folder, or its name under `out`); without it `model` gives the
    vectors as it is, for which `how` may have `pooling`, `max_length`, `revision` and `precision`. With a run, `model`
    is where its base model is now. `trust_remote_code` lets code run that comes with the model. `texts` are a path
    (a table, or one text a line), or rows as `inlay.load(...).predict` takes them; `text` and `id` name their columns.
    With `output` they are also written there: .npy, .parquet, .safetensors or .jsonl.
    """
    from inlay.workflow.loaded import open_run

    say, out = or_log(say), how.pop("out", DEFAULT_OUT)
    if output is not None:
        check_output(Path(output))
    if run is None and model is None:
        raise InlayError("Give a run that was trained for vectors (run=, --run), or a model (model=, --model).")
    found = read_texts(texts, text, id)
    source: VectorSource
    if run is None:
        source = frozen_model(str(model), **how)  # type: ignore[misc]
    else:
        trust = how.pop("trust_remote_code", False)
        if given := [f"{name}={value!r}" for name, value in how.items() if value not in (None, "auto")]:
            raise InlayError(f"{given[0]} is of a model without a run: a run has its own. Leave it out.")
        source = open_run(run, model=model, out=out, trust_remote_code=trust, say=say)
    vectors = make_vectors(source, found.texts, batch_size, say)
    if output is not None:
        write_vectors(Path(output), vectors, found.ids)
    return Embedded(vectors, found.ids)


def make_vectors(source: VectorSource, texts: Sequence[str], batch_size: int | None, say: Say) -> np.ndarray:
    """The vectors of texts, N x D in float32; `batch_size` is how many are read at a time, None: as in training."""
    import numpy as np

    from inlay.training import predict

    if source.schema.predicts != "vector":
        raise InlayError(
            f"The run is of kind {source.schema.kind!r}, which gives no vectors. Train one with --kind "
            f"{kinds.EMBEDDING}, or give --model alone for those of a model as it is."
        )
    spec = source.spec
    if batch_size is not None:
        spec = spec.with_(batch_size=batch_size, gradient_accumulation=1)
    if not texts:
        return np.empty((0, source.model.config.hidden_size), np.float32)
    rows = [{TEXT: text} for text in texts]
    vectors, encoded = predict(source.model, source.schema, rows, source.processor, spec)
    if cut := encoded.cut:
        say(f"{cut:,} of {len(texts):,} texts are longer than {max(encoded.lengths)} tokens and were cut")
    if not np.isfinite(vectors).all():
        bad = int(np.argmin(np.isfinite(vectors).all(axis=1)))
        raise InlayError(f"The vector of text {bad + 1} is not finite: {texts[bad][:40]!r}. Try precision float32.")
    return np.asarray(vectors, np.float32)


# ------------------------------------------------------------------------------------------------------- texts


def read_texts(source: Any, text: str | None = None, id: str | None = None) -> Texts:
    """The texts of a path or of rows of Python, and their ids where they have some."""
    if is_path(source):
        path = Path(os.fspath(source)).expanduser()
        if path.is_dir():
            raise InlayError(f"{str(path)!r} is a folder; give a table ({', '.join(tables.TABLES)}) or {LINES}.")
        if tables.suffix(path) == LINES:
            if text is not None or id is not None:
                raise InlayError(f"{path.name!r} has one text a line and no columns: leave --text and --id out.")
            table = tables.read_lines(path, TEXT)
        else:
            table = tables.read_table(path)
        name, rows = repr(path.name), list(table.numbered)
    else:
        listed = list(source) if not isinstance(source, Mapping) and not hasattr(source, "columns") else source
        given = as_rows(listed, TaskSchema(TEXT, kinds.EMBEDDING, (TEXT,), ()))
        name, rows = "'rows'", list(enumerate(given, start=1))
    if not rows:
        return Texts([])
    column = text or _text_column(name, rows[0][1])
    ids = id or (ID if ID in rows[0][1] and column != ID else None)
    texts = []
    for wanted in filter(None, (text, id)):
        if _value(rows[0][1], wanted) is None and wanted not in rows[0][1]:
            raise unknown(f"column of {name}", wanted, rows[0][1])
    for number, row in rows:
        for wanted in filter(None, (column, ids)):
            if is_null(_value(row, wanted)):
                raise InlayError(
                    f"{name}, row {number}: there is nothing in the column {wanted!r}. Fill it in, or remove the row."
                )
        texts.append(as_text(_value(row, column), column, f"{name}, row {number}"))
    return Texts(texts, None if ids is None else [_value(row, ids) for _, row in rows])


def _value(row: Mapping[str, Any], column: str) -> Any:
    return row[column] if column in row else reach(row, column)


def _text_column(name: str, row: Mapping[str, Any]) -> str:
    """The one column there is, but for an id; or the one that is called text."""
    others = [column for column in row if column != ID]
    if TEXT in row:
        return TEXT
    if len(others) == 1:
        return others[0]
    raise InlayError(f"{name}: no column is plainly the text. Name it with --text (columns: {', '.join(row)}).")


# ----------------------------------------------------------------------------------------------------- vectors


def check_output(path: Path) -> None:
    """An error for a file of a form that vectors are not written in, or that cannot be written."""
    if path.suffix.lower() not in FORMS:
        raise InlayError(f"{str(path)!r}: vectors are written as {', '.join(FORMS)}. Give a name with such an ending.")
    check_writable(path)


def write_vectors(path: Path, vectors: np.ndarray, ids: Sequence[Any] | None) -> None:
    """Write vectors whole or not at all, in the form that the file's ending says; ids where the form has room."""
    write_bytes(path, FORMS[path.suffix.lower()](vectors, ids))


def format_vectors(vectors: np.ndarray, ids: Sequence[Any] | None) -> list[str]:
    """JSON lines: `id` where there is one, and `embedding`."""
    named: list[dict[str, Any]] = [{} if ids is None else {ID: each} for each in ids or range(len(vectors))]
    return list(format_lines({**row, "embedding": v.tolist()} for row, v in zip(named, vectors, strict=True)))


def _as_numpy(vectors: np.ndarray, ids: Sequence[Any] | None) -> bytes:
    import numpy as np

    held = io.BytesIO()
    np.save(held, vectors, allow_pickle=False)
    return held.getvalue()


def _as_parquet(vectors: np.ndarray, ids: Sequence[Any] | None) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {} if ids is None else {ID: pa.array(list(ids))}
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    held = io.BytesIO()
    pq.write_table(pa.table(columns), held)
    return held.getvalue()


def _as_safetensors(vectors: np.ndarray, ids: Sequence[Any] | None) -> bytes:
    from safetensors.numpy import save

    told = None if ids is None else {"ids": json.dumps(list(ids), ensure_ascii=False, default=str)}
    return save({"embeddings": vectors}, metadata=told)


def _as_lines(vectors: np.ndarray, ids: Sequence[Any] | None) -> bytes:
    return "".join(format_vectors(vectors, ids)).encode()


FORMS: Mapping[str, Callable[[np.ndarray, Sequence[Any] | None], bytes]] = {
    ".npy": _as_numpy,
    ".parquet": _as_parquet,
    ".safetensors": _as_safetensors,
    ".jsonl": _as_lines,
}
