"""From a spec to a task: the data found, labels numbered, rows divided, everything counted into one digest."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from inlay.errors import InlayError, unknown
from inlay.records.spec import Spec
from inlay.tasks import catalogue, chat_rows, images, kinds, labels, sources, splits, targets, templates, user_data
from inlay.tasks.conversations import FIELD, NUMBER, read_source
from inlay.tasks.image_text import check_template
from inlay.tasks.places import Places
from inlay.tasks.rows import number_labels
from inlay.tasks.schema import TaskSchema, UndividedTask
from inlay.tasks.task import EncodedFiles, Task, dataset

PROTOCOLS = ("full", "vtab-1k")
# The test rows are a property of the data: the same for every seed, so that seeds and methods are compared on them.
TEST_SEED = 0
JOINED = "prompt and answer are joined by one blank, unless white space stands there already"


def load(spec: Spec, *, need_train: bool = True, writes: Callable[[], bool] | None = None) -> Task:
    """The task that a spec names, or the one that its own data makes.

    `need_train=False` accepts data that has only a test split (to evaluate a model as it is). `writes` says whether
    the model writes texts, and is asked once the data are read: labels of which hardly two rows share one are then
    texts to write.
    """
    if spec.protocol is not None and spec.protocol not in PROTOCOLS:
        raise unknown("protocol", spec.protocol, PROTOCOLS)
    found = _find(spec, writes)
    spec = spec.with_(**found.decided)
    schema = found.schema
    if spec.augment is not None and schema.modality != "image":
        raise InlayError(
            f"augment={spec.augment!r} is for images, and {schema.name!r} is of kind {schema.kind!r}. Leave it out."
        )
    if schema.chat and spec.template is not None:
        schema = replace(schema, chat_template=read_source(spec.template))
    elif spec.template is not None:
        schema = schema.with_template(spec.template)
    if schema.has_captions and schema.label_names:
        check_template(schema.full_template)
        _ = schema.captions  # each class has one of its own
    elif schema.chat:
        pass  # its template is a program, which says for itself what it reads
    elif schema.modality == "text" and schema.kind not in (kinds.TOKENS, kinds.EMBEDDING, kinds.QUESTION_ANSWERING):
        templates.check(schema.full_template, kinds.fields_of(schema.kind, schema.fields))
    elif spec.template is not None:
        raise InlayError(f"A template has no meaning for kind {schema.kind!r}; leave --template out.")
    found = replace(
        found, schema=schema, notes=(*found.notes, *([JOINED] if schema.answers and not schema.two_parts else []))
    )
    try:
        parts = {split: _Part.of(rows, found, split) for split, rows in found.splits.items()}
        divided, notes = _divide(parts, found, spec, need_train)
    except InlayError as error:
        if not found.doubts:
            raise
        raise InlayError(f"{error} This may be why: {'. '.join(found.doubts)}.") from None
    return _task(divided, replace(found, notes=(*found.notes, *notes)), spec)


def _find(spec: Spec, writes: Callable[[], bool] | None) -> UndividedTask:
    if spec.data is not None:
        return user_data.load(spec, writes=writes)
    assert spec.task is not None
    if not catalogue.is_named(spec.task) and "/" in spec.task:
        return user_data.load_hub_id(spec, writes=writes)
    card = catalogue.describe(spec.task)
    if spec.kind not in (None, card.kind):
        raise InlayError(f"Task {card.name!r} is of kind {card.kind!r}; kind={spec.kind!r} is only for --data.")
    for option in ("text", "label", "image", "test_data"):
        if getattr(spec, option):
            raise InlayError(
                f"--{option.replace('_', '-')} is only for data of your own (--data), not for a named task."
            )
    return sources.load(card, spec.data_dir)


# -------------------------------------------------------------------------------------------------- parts of data


class _Part:
    """Rows of one split, with where they stood and with what draws look at: hashes of the whole row and of its input,
    the class, the group."""

    def __init__(self, data: Any, rows: splits.RowKeys, places: Places) -> None:
        self.data = data
        self.rows = rows
        self.places = places

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def classes(self) -> list[int]:
        """The class of each row; empty where rows have none."""
        return list(self.rows.strata or ())

    @classmethod
    def of(cls, data: Any, task: UndividedTask, split: str) -> _Part:
        """The rows of a split with their labels as numbers."""
        schema = task.schema
        if isinstance(data, list):
            data = number_labels(schema, data, f"{schema.name} ({split})")
            rows = [_named(row) for row in data]
            classes = targets.strata(schema, data)
            groups = _groups(data, rows, task.group) if task.group else None
        elif schema.chat:
            return cls(data, _chat_keys(data), task.places.get(split) or Places.of(split, data[NUMBER]))
        else:
            classes, groups = list(data["label"]), None
            encoded = zip(EncodedFiles(data), classes, strict=True)
            rows = [_named({"image": image, "label": label}) for image, label in encoded]
        inputs = [_hash({name: row[name] for name in schema.fields}) for row in rows]
        places = task.places.get(split) or Places.of(split, range(1, len(rows) + 1))
        return cls(data, splits.RowKeys([_hash(row) for row in rows], classes, groups, inputs), places)

    def take(self, indices: np.ndarray) -> _Part:
        data = [self.data[i] for i in indices] if isinstance(self.data, list) else self.data.select(indices)
        return _Part(data, self.rows.take(indices), self.places.take(indices))

    def and_(self, other: _Part) -> _Part:
        """Both parts as one."""
        if isinstance(self.data, list):
            data = self.data + other.data
        else:
            from datasets import concatenate_datasets

            data = concatenate_datasets([self.data, other.data])
        mine, theirs = self.rows, other.rows
        return _Part(
            data,
            splits.RowKeys(
                [*mine.keys, *theirs.keys],
                None if mine.strata is None else [*mine.strata, *(theirs.strata or ())],
                None if mine.groups is None else [*mine.groups, *(theirs.groups or ())],
                None if mine.inputs is None else [*mine.inputs, *(theirs.inputs or ())],
            ),
            self.places.and_(other.places),
        )


def _chat_keys(data: Any) -> splits.RowKeys:
    """Of conversations: where one stood in its file is no part of it, and all of it is what the model reads."""
    keys = [_hash({FIELD: row[FIELD]}) for row in chat_rows.read(data)]
    return splits.RowKeys(keys, None, None, keys)


def _named(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with a hash of its bytes for an image, wherever they lie."""
    if "image" not in row:
        return row
    content = hashlib.sha256(images.raw_bytes(row["image"]) or b"").hexdigest()
    return {name: value for name, value in row.items() if name in ("label", "text")} | {"image": content}


def _groups(data: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    """What each row stays with. One image may lie in several files: the first of their names stands for all of them, so
    that data without copies are divided as they always were."""
    names: dict[str, str] = {}
    for given, row in zip(data, rows, strict=True):
        name = str(given[field])
        names[row[field]] = min(name, names.get(row[field], name))
    return [names[row[field]] for row in rows]


def _hash(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- dividing


def _divide(
    parts: dict[str, _Part], task: UndividedTask, spec: Spec, need_train: bool
) -> tuple[dict[str, _Part | None], list[str]]:
    """Training, selection and test, however much of the division the data brings, and notes."""
    notes: list[str] = []
    schema, classes = task.schema, task.schema.label_names or ()
    if task.resplit is not None and spec.protocol != "vtab-1k":
        return _resplit(parts, task.resplit, spec), notes
    train = parts.get("all") or parts.get("train")
    validation, test = parts.get("validation"), parts.get("test")
    if train is None and validation is not None:
        train, validation = validation, None
        notes.append("there is no training split here: the validation split is trained on")
    if train is None:
        if need_train:
            raise InlayError(
                f"{schema.name!r} has only a test split in {task.source}: there is nothing to train on. Add a training "
                "split, or train on another task and evaluate on this one."
            )
        return {"train": None, "validation": None, "test": test}, notes
    if schema.predicts in ("class", "rank"):
        notes += labels.check_classes(train.classes, classes, schema.name)
    if test is None:
        train, test = _hold_out(train, splits.test_size(len(train)), TEST_SEED, "test", schema.lm)
        notes.append(f"no test split: {len(test):,} rows held out of training for it, the same for every seed")
    if spec.protocol == "vtab-1k":
        pool = train if validation is None else train.and_(validation)
        chosen, selected = splits.draw_vtab(pool.rows, spec.seed)
        train, validation = pool.take(chosen), pool.take(selected)
        notes.append("VTAB-1k: 800 training and 200 selection examples drawn by the seed (not VTAB's own list)")
    elif validation is None:
        size = splits.validation_size(len(train))
        train, validation = _hold_out(train, size, spec.seed, "validation", schema.lm)
        notes.append(f"no validation split: {len(validation):,} rows held out of training for validation")
    if spec.shots is not None:
        train = train.take(splits.draw_shots(train.rows, spec.shots, spec.seed))
        if schema.predicts in ("class", "rank"):
            labels.check_classes(train.classes, classes, f"a draw of {spec.shots}")
            absent = len(classes) - len(set(train.classes))
            if absent:
                notes.append(f"{absent} of {len(classes)} classes have no example among {spec.shots}")
    if schema.lm is None:
        notes += _leaks({"training": train, "validation": validation, "test": test})
    return {"train": train, "validation": validation, "test": test}, notes


def _leaks(parts: Mapping[str, _Part]) -> list[str]:
    """How many rows of one split have the input of a row in an earlier one, for every two of them."""
    notes = []
    for (earlier, known), (later, part) in itertools.combinations(parts.items(), 2):
        seen, whole = set(known.rows.shown), set(known.rows.keys)
        again = [key for key, shown in zip(part.rows.keys, part.rows.shown, strict=True) if shown in seen]
        if again:
            other = sum(key not in whole for key in again)
            notes.append(
                f"{len(again):,} {later} rows also occur in {earlier}"
                + (f", {other:,} of them only with another label" if other else ", label and all")
            )
    return notes


def _hold_out(part: _Part, size: int, seed: int, purpose: str, lm: str | None) -> tuple[_Part, _Part]:
    if lm == "lines":
        # Running text is divided once, at its end: lines drawn from the middle would tear it.
        cut = len(part) - size
        return part.take(np.arange(cut)), part.take(np.arange(cut, len(part)))
    rest, held = splits.hold_out(part.rows, size, seed, purpose)
    return part.take(rest), part.take(held)


def _resplit(parts: dict[str, _Part], shares: Sequence[float], spec: Spec) -> dict[str, _Part | None]:
    """All rows divided anew in fixed shares, the same for every seed."""
    pool, *others = parts.values()
    for other in others:
        pool = pool.and_(other)
    rest, test = splits.hold_out(pool.rows, round(len(pool) * shares[2]), TEST_SEED, "test")
    inner = pool.take(rest)
    size = round(len(pool) * shares[1])
    train, validation = splits.hold_out(inner.rows, size, TEST_SEED, "validation")
    chosen = inner.take(train)
    if spec.shots is not None:
        chosen = chosen.take(splits.draw_shots(chosen.rows, spec.shots, spec.seed))
    return {"train": chosen, "validation": inner.take(validation), "test": pool.take(test)}


# ------------------------------------------------------------------------------------------------------- finishing


def _task(parts: Mapping[str, _Part | None], found: UndividedTask, spec: Spec) -> Task:
    schema, train = found.schema, parts["train"]
    if found.standardise and train is not None:
        schema = _standardised(schema, [row["label"] for row in train.data])
    used = {split: part.rows.keys if part else [] for split, part in parts.items()}
    unused = sum(map(len, found.splits.values())) - sum(map(len, used.values()))
    what = [schema.kind, schema.fields, schema.label_names, used]
    weights, notes = _class_weights(spec, schema, train)
    if schema.predicts in ("class", "rank") and (test := parts["test"]) is not None:
        notes += labels.find_untested(test.classes, schema.label_names or (), "test split")
    if schema.predicts == "labels" and train is not None:
        notes += labels.check_sets([row["label"] for row in train.data], schema.label_names or (), schema.name)
    if schema.chat_template is not None:
        what.append(schema.chat_template)  # its file's path is in the spec, and not what it says
    made = {
        split: part.data
        if part is not None and not isinstance(part.data, list)
        else dataset([] if part is None else part.data, schema.kind, schema.fields, expand=split == "train")
        for split, part in parts.items()
    }
    most = schema.max_new_tokens or (128 if schema.writes_text else None)
    return Task(
        schema=replace(schema, max_new_tokens=most, class_weights=weights),
        **made,
        source=found.source,
        digest=hashlib.sha256(json.dumps(what, ensure_ascii=True).encode()).hexdigest(),
        notes=(*found.notes, *notes),
        spelled_out=found.spelled_out,
        decided=found.decided,
        places={split: _places(part, schema.kind) for split in ("validation", "test") if (part := parts[split])},
        unused=unused,
    )


def _places(part: _Part, kind: str) -> Places:
    """Where the examples of a held-out split stood: of several references of one source, where the first did."""
    if kind != kinds.DATA_TO_TEXT:
        return part.places
    first: dict[str, int] = {}
    for i, row in enumerate(part.data):
        first.setdefault(row["source"], i)
    return part.places.take(list(first.values()))


def _standardised(schema: TaskSchema, rows: Sequence[Any]) -> TaskSchema:
    """The schema with the mean and the spread of its values, column by column, over the training rows."""
    values = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    means, spreads = values.mean(0).tolist(), values.std(0).tolist()
    names = schema.label_names or ("",)
    for name, mean, spread in zip(names, means, spreads, strict=True):
        if spread == 0:
            about = f"{schema.name!r}" + (f", {name!r}" if name else "")
            raise InlayError(f"{about}: every training row has the value {mean:g}; there is nothing to learn.")
    if schema.predicts == "value":
        return replace(schema, mean=means[0], deviation=spreads[0])
    return replace(schema, means=tuple(means), deviations=tuple(spreads))


def _class_weights(spec: Spec, schema: TaskSchema, train: _Part | None) -> tuple[tuple[float, ...] | None, list[str]]:
    """What each class counts in the loss, of mean 1 over the training rows, and a note."""
    if spec.class_weights is None:
        return None, []
    if schema.predicts != "class":
        raise InlayError(
            f"class_weights={spec.class_weights!r} is for tasks of one class a row, and {schema.name!r} is of kind "
            f"{schema.kind!r}. Leave --class-weights out."
        )
    if train is None:
        return None, []
    names = schema.label_names or ()
    weights = labels.weigh(spec.class_weights, names, train.classes)
    shown = ", ".join(f"{name} {weight:.3g}" for name, weight in list(zip(names, weights, strict=True))[:10])
    return weights, [f"class weights in the loss: {shown}" + (", ..." if len(names) > 10 else "")]
