"""The data of a named task, from the first place that has it.

In order: the folder given as --data-dir, the user's cache (both in one layout), the hub, an installed package, a
pinned wheel of the package index. `UndividedTask.source` says which it was. The layout of a folder:

    text/<folder>/<split>.jsonl.gz     one object a line (or any other table)
    images/<folder>.parquet            columns image, label, split; class names in the metadata key class_names
    images/<folder>/<split>/<class>/   or class folders, of images

The folders `text` and `images` themselves may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.fetch import cache_root, fetch_wheel, hub_reachable, quiet_hub
from inlay.tasks import folders, kinds, labels, prepare, tables
from inlay.tasks.catalogue import SPLITS, Hub, TaskCard
from inlay.tasks.cells import as_text, as_words, is_null
from inlay.tasks.folders import SPLIT_NAMES
from inlay.tasks.schema import UndividedTask

Row = dict[str, Any]

_IMAGE_COLUMNS = ("image", "img", "webp", "jpg", "png")
_HIDDEN = -1  # how the hub writes a label that is not given out


def load(card: TaskCard, data_dir: str | None = None) -> UndividedTask:
    """The task's data, from the first source that has it."""
    folders = [(Path(data_dir).expanduser(), "the data folder")] if data_dir else []
    if folders and not folders[0][0].is_dir():
        raise InlayError(f"--data-dir {data_dir!r} is not a folder.")
    for root, what in (*folders, (cache_root() / "data", "the cache")):
        found = find_local(card, root)
        if found is not None:
            splits, names = _read_local(found)
            return replace(_undivided(card, splits, f"{what}: {found}", names), resplit=None)
    faults: list[str] = []
    sources: list[tuple[bool, Callable[[TaskCard], UndividedTask]]] = [
        (card.hub is not None, _from_hub),
        (card.installed is not None, _from_installed),
        (card.package is not None, _from_package),
    ]
    for offered, source in sources:
        if offered:
            try:
                return source(card)
            except _Unavailable as error:
                faults.append(str(error))
    raise InlayError(_not_found(card, data_dir, faults))


class _Unavailable(Exception):
    """A source that has nothing now; the next one is tried."""


def _not_found(card: TaskCard, data_dir: str | None, faults: Sequence[str]) -> str:
    """Everything that was tried, and what to put where."""
    is_image = card.modality == "image"
    place = f"images/{card.folder}.parquet" if is_image else f"text/{card.folder}/train.jsonl.gz and test.jsonl.gz"
    tried = [f"{data_dir} (no {card.folder} there)"] if data_dir else []
    tried += [f"the cache {cache_root() / 'data'}", *faults]
    why = f" {card.local[0].upper()}{card.local[1:]}." if card.local else ""
    how = ""
    if card.hub:
        given = {"data_dir": card.hub.data_dir, "revision": card.hub.revision}
        options = [repr(card.hub.path), *([repr(card.hub.config)] if card.hub.config else [])]
        options += [f"{key}={value!r}" for key, value in given.items() if value]
        how = f" On a machine with a network, `datasets.load_dataset({', '.join(options)})` gets it."
    return (
        f"No data for the task {card.name!r}. Tried: {'; '.join(tried)}.{why}{how} Put it into a folder DIR as {place} "
        f"and pass --data-dir DIR, or put it into {str(cache_root() / 'data')!r}."
    )


# ------------------------------------------------------------------------------------------------- local folders


def find_local(card: TaskCard, root: Path) -> Path | None:
    """Where a folder in the layout above has the task's data."""
    for base in (root / ("images" if card.modality == "image" else "text"), root):
        for name in dict.fromkeys((card.folder, card.name, *card.aliases)):
            if card.modality == "image" and (base / f"{name}.parquet").is_file():
                return base / f"{name}.parquet"
            folder = base / name
            if folder.is_dir() and any(folder.iterdir()):
                return folder
    return None


def _read_local(found: Path) -> tuple[dict[str, list[Row]], list[str] | None]:
    """The rows of each split, and the class names where the file brings them."""
    if found.is_file():
        parts = folders.by_split(tables.read_table(found))
    else:
        named = folders.split_tables(found)
        parts = {split: tables.read_table(found / name) for split, name in named.items()} or folders.read_folder(found)
    names = next(iter(parts.values())).class_names
    for table in parts.values():
        for row in table.rows if names is not None else ():
            if names and isinstance(row.get("label"), int) and row["label"] >= 0:
                row["label"] = names[row["label"]]
    return {split: list(table.rows) for split, table in parts.items()}, names


# ------------------------------------------------------------------------------------------------------- the hub


def _from_hub(card: TaskCard) -> UndividedTask:
    assert card.hub is not None
    whole = load_hub(card.hub)
    return _undivided(card, _hub_splits(card.hub, whole), f"the hub: {card.hub}")


def load_hub(hub: Hub) -> Any:
    """The `DatasetDict` of a data set on the hub (or a local folder in the hub's layout)."""
    import datasets

    options = {"data_dir": hub.data_dir, "revision": hub.revision}
    given = {key: value for key, value in options.items() if value is not None}
    away = not Path(hub.path).exists() and not hub_reachable()
    try:
        with quiet_hub():
            return datasets.load_dataset(hub.path, hub.config, **given)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = "no network, or the hub does not answer" if away else str(error).strip().split("\n")[0]
        raise _Unavailable(f"the hub, {hub} ({reason})") from error


def load_unnamed(hub: Hub) -> Any:
    """As `load_hub`, for a data set that only the hub has: classes by name, images undecoded."""
    import datasets

    try:
        whole = load_hub(hub)
    except _Unavailable as error:
        raise InlayError(
            f"Cannot get the data set: {error}. Download it elsewhere and pass the files with --data PATH."
        ) from error
    for split, data in whole.items():
        for column, feature in data.features.items():
            if isinstance(feature, datasets.Image):
                data = data.cast_column(column, datasets.Image(decode=False))
            elif names := getattr(feature, "names", None):
                values = [names[value] if value is not None and value >= 0 else None for value in data[column]]
                data = data.remove_columns(column).add_column(column, values)
        whole[split] = data
    return whole


def _hub_splits(hub: Hub, whole: Any) -> dict[str, Any]:
    """Our splits of the hub's, under their names there; one that serves as another is not used twice."""
    chosen = {split: name for split, name in hub.splits.items() if name in whole}
    for split in SPLITS:
        usual = [name for name, meaning in SPLIT_NAMES.items() if meaning == split and name in whole]
        if split not in chosen and usual and usual[0] not in chosen.values():
            chosen[split] = usual[0]
    if "train" not in chosen and "test" not in chosen:
        raise InlayError(f"The hub's {hub} has the splits {', '.join(whole)}; none of them is train or test.")
    return {split: whole[name] for split, name in chosen.items()}


# ------------------------------------------------------------------------------------------------------ packages


def _from_installed(card: TaskCard) -> UndividedTask:
    return _undivided(card, {"all": _INSTALLED[card.installed or ""]()}, "scikit-learn, as installed")


def _digits() -> list[Row]:
    """scikit-learn's digits: grey levels 0 to 16 as 8-bit PNG images."""
    import io

    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = []
    for image, label in zip(data.images, data.target, strict=True):
        stream = io.BytesIO()
        Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(stream, "PNG")
        rows.append({"image": stream.getvalue(), "label": int(label)})
    return rows


_INSTALLED: Mapping[str, Callable[[], list[Row]]] = {"digits": _digits}


def _from_package(card: TaskCard) -> UndividedTask:
    package = card.package
    assert package is not None
    into = cache_root() / "packages" / f"{package.name}-{package.version}"
    try:
        folder = fetch_wheel(package.name, package.version, package.sha256, package.members, into)
    except InlayError as error:
        raise _Unavailable(f"the package index ({error})") from error
    if package.reader == "class folders":
        # A few old stories are not in UTF-8.
        rows = folders.class_folders(folder, otherwise="cp1252").rows
    else:
        (path,) = (p for p in folders.visible(folder) if tables.suffix(p) in tables.TABLES)
        rows = tables.read_table(path).rows
    rows = [row for row in rows if all(row[key] == value for key, value in package.where.items())]
    for row in rows:
        row["label"] = package.rename.get(row["label"], row["label"])
        if str(row["label"]).isdigit():
            row["label"] = int(row["label"])
    return _undivided(card, {"all": rows}, f"the package index: {package.name} {package.version} (checked by its hash)")


# --------------------------------------------------------------------------------------------------- normalising


def _undivided(
    card: TaskCard, splits: Mapping[str, Any], source: str, class_names: Sequence[str] | None = None
) -> UndividedTask:
    notes: list[str] = []
    made: dict[str, Any] = {}
    names = card.schema.label_names or (tuple(class_names) if class_names else None)
    for split, data in splits.items():
        if card.modality == "image" and not isinstance(data, list):
            made[split], names = _hub_images(card, data)
        else:
            rows = [row for raw in _as_rows(data, card) for row in _normalise(card, raw, source)]
            rows = _with_texts(rows, card, split, notes)
            made[split] = rows if card.schema.writes_text else _labelled(rows, card, split, notes)
    made = {split: rows for split, rows in made.items() if len(rows)}
    if not made:
        raise InlayError(f"The data of {card.name!r} from {source} has no row that can be used. {' '.join(notes)}")
    if names is None and card.kind in (*kinds.ONE_LABEL, kinds.TOKENS):
        names = tuple(labels.in_order(_all_names(made.get("train") or next(iter(made.values())), card)))
    return UndividedTask(
        schema=replace(card.schema, label_names=names),
        splits=made,
        source=source,
        group=card.group or ("source" if card.kind == kinds.DATA_TO_TEXT else None),
        resplit=card.resplit,
        notes=tuple(notes),
    )


def _all_names(rows: Iterable[Row], card: TaskCard) -> Iterable[str]:
    for row in rows:
        yield from row["label"] if card.schema.predicts == "tags" else (row["label"],)


def _as_rows(data: Any, card: TaskCard) -> list[Row]:
    """Plain rows; the hub's numbers of classes become names where they can be the card's names."""
    if isinstance(data, list):
        return data
    rows = data.to_list()
    for column, feature in data.features.items():
        names = getattr(feature, "names", None)
        inner = getattr(getattr(feature, "feature", None), "names", None)
        if names and (card.schema.label_names is None or set(names) == set(card.schema.label_names)):
            for row in rows:
                row[column] = names[row[column]] if row[column] is not None and row[column] >= 0 else None
        elif inner:
            for row in rows:
                row[column] = [inner[value] for value in row[column]]
    return rows


def _normalise(card: TaskCard, raw: Mapping[str, Any], source: str) -> Iterable[Row]:
    """A row with the card's columns, through its preparation."""
    row = dict(raw)
    for name, candidates in card.columns.items():
        found = next((c for c in candidates if c in row), None)
        if found is not None and found != name:
            row[name] = row.pop(found)
    for each in prepare.PREPARE[card.schema.prepare](row) if card.schema.prepare else (row,):
        made = {name: each[name] for name in (*card.fields, "start", "end") if name in each}
        missing = [name for name in card.fields if name not in made]
        if missing:
            raise InlayError(
                f"The data of {card.name!r} from {source} lacks {', '.join(map(repr, missing))}; it has "
                f"{', '.join(map(repr, each))}."
            )
        if "references" in each:
            made["references"] = each["references"]
        if card.target and card.target in each and card.kind == kinds.CAUSAL_LM:
            made["target"] = as_text(each[card.target], card.target, f"The data of {card.name!r}")
        label = next((each[name] for name in card.label if name in each), None)
        yield made | ({} if card.schema.writes_text else {"label": label})


def _with_texts(rows: list[Row], card: TaskCard, split: str, notes: list[str]) -> list[Row]:
    """The rows in which no text is missing, with every field as text."""
    if card.modality == "image":
        return rows
    read = as_words if card.schema.predicts == "tags" else as_text
    kept = [(i, row) for i, row in enumerate(rows, start=1) if not any(is_null(row[name]) for name in card.fields)]
    if len(kept) < len(rows):
        notes.append(f"{split}: {len(rows) - len(kept):,} of {len(rows):,} rows dropped for want of a text")
    return [
        {**row, **{name: read(row[name], name, f"{card.name} ({split}), row {i}") for name in card.fields}}
        for i, row in kept
    ]


def _labelled(rows: list[Row], card: TaskCard, split: str, notes: list[str]) -> list[Row]:
    """The rows that have a label, as a name or a value. A split whose labels are not given out is left away."""
    kept = []
    for row in rows:
        label = row["label"]
        if label is None or label == _HIDDEN:
            continue
        if card.schema.predicts == "tags":
            kept.append({**row, "label": [_name(tag, card) for tag in label]})
        else:
            kept.append({**row, "label": float(label) if card.schema.predicts == "value" else _name(label, card)})
    if not kept:
        notes.append(f"the labels of {split} are not given out: that split is not used")
    elif len(kept) < len(rows):
        notes.append(f"{split}: {len(rows) - len(kept):,} of {len(rows):,} rows dropped for want of a label")
    return kept


def _name(value: Any, card: TaskCard) -> str:
    """A label's name from its name or its number."""
    names = card.schema.label_names
    if isinstance(value, bool | int) and names is not None:
        if not 0 <= int(value) < len(names):
            raise InlayError(f"The data of {card.name!r} has the label {value}; there are {len(names)} labels.")
        return names[int(value)]
    return labels.as_name(value)


def _hub_images(card: TaskCard, data: Any) -> tuple[Any, tuple[str, ...]]:
    """A hub's data set of images with the columns image and label, left where it is on disk."""
    import datasets

    columns = data.column_names
    image = next((c for c, feature in data.features.items() if isinstance(feature, datasets.Image)), None)
    image = image or next((c for c in _IMAGE_COLUMNS if c in columns), None)
    label = next((c for c in card.label if c in columns), None)
    if image is None or label is None:
        raise InlayError(f"The hub's {card.hub} should have images and labels and has {', '.join(columns)}.")
    data = data.select_columns([image, label])
    names = getattr(data.features[label], "names", None)
    count = card.num_labels or max(data[label]) + 1
    data = data.cast_column(label, datasets.Value("int64"))
    for old, new in ((image, "image"), (label, "label")):
        if old != new:
            data = data.rename_column(old, new)
    return data, tuple(names or (str(i) for i in range(count)))
