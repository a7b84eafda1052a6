"""Vectors of texts, and of images, by a run that was trained for them or by a model as it is."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from inlay.errors import InlayError, unknown
from inlay.records.atomic import write_bytes
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.tasks import TaskSchema, kinds, tables
from inlay.tasks.cells import as_text, is_null, reach
from inlay.tasks.given_rows import as_rows
from inlay.tasks.images import name_of
from inlay.tasks.new_rows import holds_images, is_path, read
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
    image: str | None


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
    """Texts to embed, in order, and what each is called, where the rows say; or `images`."""

    texts: list[Any]
    ids: list[Any] | None = None
    images: bool = False


@dataclass(frozen=True)
class Embedded:
    """Vectors of texts or images, N x D in float32, and what each is called, where the rows say."""

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
    from inlay.backbones import locate

    both = locate.find(model, revision).model_type in locate.heads(kinds.TOWERS.name)
    kind = kinds.IMAGE_TEXT if both else kinds.EMBEDDING
    chosen = backbones.settle_pooling(model, kind, pooling, revision)
    spec = Spec(
        model=model,
        method="full",
        data=TEXT,
        kind=kind,
        pooling=chosen,
        max_length=max_length,
        revision=revision,
        trust_remote_code=trust_remote_code,
        precision=precision,
    )
    fields = kinds.get(kind).fields or (TEXT,)
    return FrozenModel(spec, TaskSchema(TEXT, kind, fields, (), max_length=max_length))


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
    """A vector of length 1 for each text, in order; of a model that compares images with texts, for each of either.

    `run` is one of kind embedding (by itself, its folder, or its name under `out`); without it `model` gives the
    vectors as it is, for which `how` may have `pooling`, `max_length`, `revision` and `precision`. With a run, `model`
    is where its base model is now. `trust_remote_code` lets code run that comes with the model. `texts` are a path
    (a table, or one text a line; of images also a folder), or rows as `inlay.load(...).predict` takes them; `text`,
    `image` and `id` name their columns.
    With `output` they are also written there: .npy, .parquet, .safetensors or .jsonl.
    """
    from inlay.workflow.loaded import open_run

    say, out, image = or_log(say), how.pop("out", DEFAULT_OUT), how.pop("image", None)
    if output is not None:
        check_output(Path(output))
    if run is None and model is None:
        raise InlayError("Give a run that was trained for vectors (run=, --run), or a model (model=, --model).")
    source: VectorSource
    if run is None:
        source = frozen_model(str(model), **how)  # type: ignore[misc]
    else:
        trust = how.pop("trust_remote_code", False)
        if given := [f"{name}={value!r}" for name, value in how.items() if value not in (None, "auto")]:
            raise InlayError(f"{given[0]} is of a model without a run: a run has its own. Leave it out.")
        source = open_run(run, model=model, out=out, trust_remote_code=trust, say=say)
    found = read_things(source.schema, texts, text, image, id)
    vectors = make_vectors(source, found, batch_size, say)
    if output is not None:
        write_vectors(Path(output), vectors, found.ids)
    return Embedded(vectors, found.ids)


def make_vectors(source: VectorSource, found: Texts, batch_size: int | None, say: Say) -> np.ndarray:
    """The vectors of texts, or images, N x D in float32; `batch_size` is how many are read at a time, None: as in
    training."""
    import numpy as np

    from inlay.backbones.towers import without_captions
    from inlay.training import predict

    schema, texts = as_vectors(source.schema), found.texts
    if schema.predicts != "vector":
        raise InlayError(
            f"The run is of kind {source.schema.kind!r}, which gives no vectors. Train one with --kind "
            f"{kinds.EMBEDDING}, or give --model alone for those of a model as it is."
        )
    spec = source.spec
    if batch_size is not None:
        spec = spec.with_(batch_size=batch_size, gradient_accumulation=1)
    config = source.model.config
    if not texts:
        size = config.hidden_size if not schema.has_captions else getattr(config, "projection_dim", None)
        return np.empty((0, size or config.text_config.projection_size), np.float32)
    rows = [{"image" if found.images else TEXT: each} for each in texts]
    with without_captions(source.model):
        vectors, encoded = predict(source.model, schema, rows, source.processor, spec)
    if cut := encoded.cut:
        most = source.processor.length if schema.has_captions else max(encoded.lengths)
        say(f"{cut:,} of {len(texts):,} texts are longer than {most} tokens and were cut")
    if not np.isfinite(vectors).all():
        bad = int(np.argmin(np.isfinite(vectors).all(axis=1)))
        what, shown = ("image", name_of(texts[bad])) if found.images else ("text", texts[bad][:40])
        raise InlayError(f"The vector of {what} {bad + 1} is not finite: {shown!r}. Try precision float32.")
    return np.asarray(vectors, np.float32)


def as_vectors(schema: TaskSchema) -> TaskSchema:
    """The schema; of classes that are texts, that of the vectors they are compared by."""
    if not schema.has_captions or schema.pairs_images:
        return schema
    columns = {name: column for name, column in schema.columns.items() if name == "image"}
    kind = kinds.get(kinds.IMAGE_TEXT)
    return TaskSchema(schema.name, kind.name, kind.fields, (), columns=columns)


# ------------------------------------------------------------------------------------------------------- texts


def read_things(
    schema: TaskSchema, source: Any, text: str | None = None, image: str | None = None, id: str | None = None
) -> Texts:
    """Texts, or images where a model reads both and there are some: a folder, an image, a column of paths."""
    if not schema.has_captions:
        if image is not None:
            raise InlayError(f"image={image!r}: this model reads texts alone. Leave --image out.")
        return read_texts(source, text, id)
    if text is not None and image is not None:
        raise InlayError(f"Give --text ({text}) or --image ({image}): each gives vectors of its own.")
    if isinstance(source, Iterator):
        source = list(source)  # it is looked at first, and read then
    if text is None and (image is not None or _are_images(source)):
        return _read_images(schema, source, image, id)
    return read_texts(source, text, id)


def _are_images(source: Any) -> bool:
    """Whether what was given holds images, and no column that is called text."""
    if is_path(source):
        path = Path(os.fspath(source)).expanduser()
        if path.is_dir() or tables.is_image(path):
            return True
        if tables.suffix(path) == LINES:
            return False
        rows: Any = tables.read_table(path).rows
    else:
        rows = as_rows(source, TaskSchema("image", kinds.IMAGE_TEXT_CLASSES, ("image",), ()))
    first: Mapping[str, Any] = next(iter(rows), {})
    return TEXT not in first and any(holds_images([value]) for value in first.values())


def _read_images(schema: TaskSchema, source: Any, image: str | None, id: str | None) -> Texts:
    plain = replace(schema, kind=kinds.IMAGE_TEXT_CLASSES, fields=("image",), columns={"image": image or "image"})
    found = read(plain, source)
    given, listed = found.given, [row["image"] for row in found.rows]
    if id is not None and given and id not in given[0]:
        raise unknown("column", id, given[0])
    if (name := id or (ID if given and ID in given[0] else None)) is not None:
        return Texts(listed, [row[name] for row in given], images=True)
    of_files = is_path(source) and (path := Path(os.fspath(source)).expanduser()).is_dir()
    ids = [str(Path(each).relative_to(path)) for each in listed] if of_files else None
    return Texts(listed, ids, images=True)


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
