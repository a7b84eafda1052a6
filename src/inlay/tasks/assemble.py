"""From a spec to a task: the data found, labels numbered, rows divided, everything counted into one digest."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inlay.errors import InlayError, unknown
from inlay.records.spec import Spec
from inlay.tasks import catalogue, images, kinds, labels, own, sources, splits, templates
from inlay.tasks.draft import Draft, Row
from inlay.tasks.schema import TaskSchema
from inlay.tasks.task import Pictures, Task

PROTOCOLS = ("full", "vtab-1k")
# The test rows are a property of the data: the same for every seed, so that seeds and methods are compared on them.
TEST_SEED = 0
JOINED = "prompt and answer are joined by one blank, unless white space stands there already"


def load(spec: Spec, *, need_train: bool = True) -> Task:
    """The task that a spec names, or the one that its own data makes.

    `need_train=False` accepts data that has only a test split (to evaluate a model as it is).
    """
    if spec.protocol is not None and spec.protocol not in PROTOCOLS:
        raise unknown("protocol", spec.protocol, PROTOCOLS)
    draft = _draft(spec)
    if draft.target is not None:
        draft.notes.append(JOINED)
    if spec.augment is not None and draft.kind != kinds.IMAGES:
        raise InlayError(
            f"augment={spec.augment!r} is for pictures, and {draft.name!r} is of kind {draft.kind!r}. Leave it out."
        )
    if spec.template is not None:
        draft.template = draft.prompt_template = spec.template
    if draft.kind not in (kinds.IMAGES, kinds.TOKENS):
        templates.check(draft.template or templates.default(draft.fields), kinds.fields_of(draft.kind, draft.fields))
    elif spec.template is not None:
        raise InlayError(f"A template has no meaning for kind {draft.kind!r}; leave --template out.")
    try:
        parts = {split: _Part.of(rows, draft, split) for split, rows in draft.splits.items()}
        divided = _divide(parts, draft, spec, need_train)
    except InlayError as error:
        if not draft.doubts:
            raise
        raise InlayError(f"{error} This may be why: {'. '.join(draft.doubts)}.") from None
    return _task(divided, draft)


def _draft(spec: Spec) -> Draft:
    if spec.data is not None:
        return own.load(spec)
    assert spec.task is not None
    if not catalogue.is_named(spec.task) and "/" in spec.task:
        return own.load_hub_id(spec)
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
    """Rows of one split, with what draws look at: hashes of the whole row and of its input, the class, the group."""

    def __init__(self, data: Any, rows: splits.Rows) -> None:
        self.data = data
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def classes(self) -> list[int]:
        """The class of each row; empty where rows have none."""
        return list(self.rows.strata or ())

    @classmethod
    def of(cls, data: Any, draft: Draft, split: str) -> _Part:
        """The rows of a draft with their labels as numbers."""
        if isinstance(data, list):
            data = _numbered(data, draft, split)
            rows = [_named(row) for row in data]
            classes = [row["label"] for row in data] if draft.kind in kinds.ONE_LABEL else None
            groups = [str(row[draft.group]) for row in data] if draft.group else None
        else:
            classes, groups = list(data["label"]), None
            pictures = zip(Pictures(data), classes, strict=True)
            rows = [_named({"image": picture, "label": label}) for picture, label in pictures]
        inputs = [_hash({name: row[name] for name in draft.fields}) for row in rows]
        return cls(data, splits.Rows([_hash(row) for row in rows], classes, groups, inputs))

    def take(self, indices: np.ndarray) -> _Part:
        data = [self.data[i] for i in indices] if isinstance(self.data, list) else self.data.select(indices)
        return _Part(data, self.rows.take(indices))

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
            splits.Rows(
                [*mine.keys, *theirs.keys],
                None if mine.strata is None else [*mine.strata, *(theirs.strata or ())],
                None if mine.groups is None else [*mine.groups, *(theirs.groups or ())],
                None if mine.inputs is None else [*mine.inputs, *(theirs.inputs or ())],
            ),
        )


def _numbered(rows: list[Row], draft: Draft, split: str) -> list[Row]:
    """Class names and tags as numbers."""
    names = draft.label_names or ()
    where = f"{draft.name} ({split})"
    if draft.kind in kinds.ONE_LABEL:
        numbers = labels.number([row["label"] for row in rows], names, where)
        return [{**row, "label": number} for row, number in zip(rows, numbers, strict=True)]
    if draft.kind == kinds.TOKENS:
        return [{**row, "label": labels.number(row["label"], names, where)} for row in rows]
    return rows


def _named(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with a hash of its bytes for a picture, wherever they lie."""
    if "image" not in row:
        return row
    content = hashlib.sha256(images.raw_bytes(row["image"]) or b"").hexdigest()
    return {"image": content, "label": row["label"]}


def _hash(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- dividing


def _divide(parts: dict[str, _Part], draft: Draft, spec: Spec, need_train: bool) -> dict[str, _Part | None]:
    """Training, selection and test, however much of the division the data brings."""
    notes = draft.notes
    if draft.resplit is not None and spec.protocol != "vtab-1k":
        return _resplit(parts, draft.resplit, spec)
    train = parts.get("all") or parts.get("train")
    validation, test = parts.get("validation"), parts.get("test")
    if train is None and validation is not None:
        train, validation = validation, None
        notes.append("there is no training split here: the validation split is trained on")
    if train is None:
        if need_train:
            raise InlayError(
                f"{draft.name!r} has only a test split in {draft.source}: there is nothing to train on. Add a training "
                "split, or train on another task and evaluate on this one."
            )
        return {"train": None, "validation": None, "test": test}
    if draft.kind in kinds.ONE_LABEL:
        notes += labels.check_classes(train.classes, draft.label_names or (), draft.name)
    if test is None:
        train, test = _hold_out(train, splits.test_size(len(train)), TEST_SEED, "test", draft)
        notes.append(f"no test split: {len(test):,} rows held out of training for it, the same for every seed")
    if spec.protocol == "vtab-1k":
        pool = train if validation is None else train.and_(validation)
        chosen, selected = splits.draw_vtab(pool.rows, spec.seed)
        train, validation = pool.take(chosen), pool.take(selected)
        notes.append("VTAB-1k: 800 training and 200 selection examples drawn by the seed (not VTAB's own list)")
    elif validation is None:
        size = splits.validation_size(len(train))
        train, validation = _hold_out(train, size, spec.seed, "validation", draft)
        notes.append(f"no validation split: {len(validation):,} rows held out of training for selection")
    if spec.shots is not None:
        train = train.take(splits.draw_shots(train.rows, spec.shots, spec.seed))
        if draft.kind in kinds.ONE_LABEL:
            labels.check_classes(train.classes, draft.label_names or (), f"a draw of {spec.shots}")
            absent = len(draft.label_names or ()) - len(set(train.classes))
            if absent:
                notes.append(f"{absent} of {len(draft.label_names or ())} classes have no example among {spec.shots}")
    if draft.lm is None:
        notes += _leaks({"training": train, "validation": validation, "test": test})
    return {"train": train, "validation": validation, "test": test}


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


def _hold_out(part: _Part, size: int, seed: int, purpose: str, draft: Draft) -> tuple[_Part, _Part]:
    if draft.lm == "lines":
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


def _task(parts: Mapping[str, _Part | None], draft: Draft) -> Task:
    mean, deviation = 0.0, 1.0
    train = parts["train"]
    if draft.standardise and train is not None:
        values = np.asarray([row["label"] for row in train.data])
        mean, deviation = float(values.mean()), float(values.std())
        if deviation == 0:
            raise InlayError(f"{draft.name!r}: every training row has the value {mean:g}; there is nothing to learn.")
    schema = TaskSchema(
        name=draft.name,
        kind=draft.kind,
        fields=draft.fields,
        metrics=draft.metrics,
        label_names=draft.label_names,
        template=draft.template,
        prompt_template=draft.prompt_template,
        cue=draft.cue,
        words=draft.words,
        prepare=draft.prepare,
        columns=draft.columns,
        answers=draft.target is not None,
        lm=draft.lm,
        max_new_tokens=draft.max_new_tokens or (128 if draft.kind in kinds.LANGUAGE_MODELS else None),
        mean=mean,
        deviation=deviation,
    )
    used = {split: part.rows.keys if part else [] for split, part in parts.items()}
    what = [draft.kind, draft.fields, draft.label_names, used]
    return Task(
        schema=schema,
        train=_dataset(train, draft, expand=True),
        validation=_dataset(parts["validation"], draft),
        test=_dataset(parts["test"], draft),
        source=draft.source,
        digest=hashlib.sha256(json.dumps(what, ensure_ascii=True).encode()).hexdigest(),
        notes=tuple(draft.notes),
    )


def _dataset(part: _Part | None, draft: Draft, *, expand: bool = False) -> Any:
    """The rows as a `datasets.Dataset`."""
    data = [] if part is None else part.data
    return dataset(data, draft.kind, draft.fields, expand=expand) if isinstance(data, list) else data


def dataset(rows: list[Row], kind: str, fields: Sequence[str], *, expand: bool = False) -> Any:
    """Normalised rows of a kind as a `datasets.Dataset`; `expand`ed, each reference of a text is a row."""
    import datasets

    if not rows:
        return datasets.Dataset.from_dict({name: [] for name in fields})
    if kind == kinds.DATA_TO_TEXT:
        rows = _one_reference_each(rows) if expand else _one_source_each(rows)
    if kind == kinds.IMAGES:
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        columns = {name: [row[name] for row in rows] for name in features}
        return datasets.Dataset.from_dict(columns, features=features)
    return datasets.Dataset.from_list(rows)


def _one_reference_each(rows: Sequence[Row]) -> list[Row]:
    """To train on, every reference is an example."""
    return [
        {"source": row["source"], "target": text, "references": [text]} for row in rows for text in row["references"]
    ]


def _one_source_each(rows: Sequence[Row]) -> list[Row]:
    """To score, every source is an example with all its references."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["source"], []).extend(row["references"])
    return [{"source": source, "target": texts[0], "references": texts} for source, texts in found.items()]
