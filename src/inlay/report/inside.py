"""What the kept predictions of a row's runs come to, for the page: which classes are taken for which, how good each
is, whether confidence can be trusted, and the mistakes that were made most confidently.

The runs of a row differ in the seed alone, and their test rows are the same: their predictions are counted together.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import InlayError
from inlay.tasks.calibration import bin_scores
from inlay.tasks.kept import IMAGE_RANK, METADATA
from inlay.tasks.prepare import entities

if TYPE_CHECKING:
    import pyarrow as pa

    from inlay.report.collect import Collected, ResultRow

MOST_ROWS = 24  # rows of the table that are looked into
MOST_CLASSES = 40  # of a confusion matrix
MISTAKES = 12
CONFUSIONS = 8
POINTS = 400
RANKS = (1, 5, 10)  # among the first so many a search finds what it should
LONGEST = 400  # characters of a label or a text
JPEG = b"\xff\xd8"
Looked = dict[str, Any]


def look(found: Collected) -> tuple[list[Looked], int]:
    """What is in the predictions of the chosen rows, the best of every comparison first; and how many rows more there
    are. A file that cannot be read is noted in `found.damaged`."""
    queues = [[row for row in rows if row.chosen] for _, rows in found.by_set]
    order = [row for rank in zip_longest(*queues) for row in rank if row is not None]
    order = [row for row in order if any(result.run.predictions for result in row.results)]
    made: list[Looked] = []
    for number, row in enumerate(order):
        if len(made) >= MOST_ROWS:
            return made, len(order) - number
        try:
            made += look_into(row, found.rows.index(row))
        except InlayError as error:
            found.damaged.append(str(error))
    return made, 0


def look_into(row: ResultRow, index: int) -> list[Looked]:
    """What is in the predictions of one row of the table, task by task."""
    tables: dict[str, list[pa.Table]] = defaultdict(list)
    for result in row.results:
        for name in result.run.predictions:
            table = result.run.read_predictions(name)
            tables[name].append(table.filter(np.asarray([each == "test" for each in table["split"].to_pylist()])))
    with row.results[0].run.reading():
        return list(_of_tasks(row, index, tables))


def _of_tasks(row: ResultRow, index: int, tables: Mapping[str, list[pa.Table]]) -> Iterator[Looked]:
    for name, parts in tables.items():
        about = _about(parts[0])
        say = SAY.get(str(about.get("predicts")))
        if say is None or not sum(len(part) for part in parts):
            continue
        known = row.results[0].record
        task = (known.get("tasks") or {}).get(name) or known.get("task") or {}
        yield {
            "row": index,
            "task": str(about.get("task") or name),
            "predicts": str(about["predicts"]),
            "seeds": len(parts),
            "tested": len(parts[0]),
            "trained": (task.get("examples") or known.get("examples") or {}).get("train"),
            **say(parts, about, (task.get("classes") or {}).get("train") or {}),
        }


def _about(table: pa.Table) -> dict[str, Any]:
    try:
        found = json.loads((table.schema.metadata or {})[METADATA])
    except (KeyError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _column(parts: Sequence[pa.Table], name: str) -> list[Any]:
    return [value for part in parts for value in part[name].to_pylist()]


# --------------------------------------------------------------------------------------------------------- classes


def confusion(true: Sequence[int], said: Sequence[int], classes: int) -> np.ndarray:
    """How many examples of each class (a row) were given each class (a column)."""
    flat = np.bincount(np.asarray(true) * classes + np.asarray(said), minlength=classes * classes)
    return flat.reshape(classes, classes)


def by_class(counts: np.ndarray) -> list[tuple[float | None, float | None, float | None]]:
    """Precision, recall and F1 of each class of a confusion matrix; None where nothing is counted."""
    found = []
    for hit, present, claimed in zip(counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0), strict=True):
        found.append(_scores(int(hit), int(claimed), int(present)))
    return found


def _scores(hit: int, claimed: int, present: int) -> tuple[float | None, float | None, float | None]:
    return (
        hit / claimed if claimed else None,
        hit / present if present else None,
        2 * hit / (claimed + present) if claimed + present else None,
    )


def _classes(parts: Sequence[pa.Table], about: Mapping[str, Any], trained: Mapping[str, int]) -> Looked:
    true, said, score = (_column(parts, name) for name in ("label", "prediction", "score"))
    sure = np.asarray(score, dtype=np.float64)
    if not np.isfinite(sure).all():
        raise ValueError("a score that is not a number")
    names = list(dict.fromkeys([*(about.get("labels") or ()), *true, *said]))
    number = {name: i for i, name in enumerate(names)}
    counts = confusion([number[each] for each in true], [number[each] for each in said], len(names))
    right = np.asarray([a == b for a, b in zip(true, said, strict=True)])
    bins, error = bin_scores(sure, right)
    return {
        **_of_matrix(counts, names, [trained.get(name) for name in names], len(parts)),
        "bins": bins,
        "ece": error,
        "mistakes": _mistakes(parts, lambda row: row["label"] != row["prediction"], lambda row: row["score"]),
    }


def _of_matrix(counts: np.ndarray, names: Sequence[str], trained: Sequence[int | None], seeds: int) -> Looked:
    """A confusion matrix, or the largest entries alone of one with many classes; and the scores of each class."""
    off = counts.copy()
    np.fill_diagonal(off, 0)
    largest = [divmod(int(place), len(names)) for place in np.argsort(-off, axis=None, kind="stable")[:CONFUSIONS]]
    scores = by_class(counts)
    return {
        "names": [str(name)[:LONGEST] for name in names],
        "matrix": counts.tolist() if len(names) <= MOST_CLASSES else None,
        "confused": [[i, j, int(off[i, j]), int(counts[i].sum())] for i, j in largest if off[i, j]],
        "classes": [
            [i, trained[i], int(counts[i].sum()) / seeds, *scores[i]] for i in range(len(names)) if counts[i].any()
        ],
    }


# ---------------------------------------------------------------------------------------------------- other kinds


def _tags(parts: Sequence[pa.Table], about: Mapping[str, Any], _: Mapping[str, int]) -> Looked:
    true, said = _column(parts, "label"), _column(parts, "prediction")
    names = list(dict.fromkeys([*(about.get("labels") or ()), *(tag for row in (*true, *said) for tag in row)]))
    number = {name: i for i, name in enumerate(names)}
    pairs = [pair for rows in zip(true, said, strict=True) for pair in zip(*rows, strict=True)]
    counts = confusion([number[a] for a, _ in pairs], [number[b] for _, b in pairs], len(names))
    found = _of_matrix(counts, names, [None] * len(names), len(parts))
    there, claimed = ([entities(row) for row in rows] for rows in (true, said))
    return {
        **found,
        "found": _found(there, claimed, lambda entity: entity[0], len(parts)),
        "mistakes": _mistakes(
            parts,
            lambda row: row["label"] != row["prediction"],
            lambda row: sum(a != b for a, b in zip(row["label"], row["prediction"], strict=True)),
        ),
    }


def _found(
    true: Sequence[Sequence[Any]], said: Sequence[Sequence[Any]], name: Callable[[Any], Any], seeds: int
) -> list[list[Any]]:
    """Of rows that have sets: for each name what is there a seed, and precision, recall and F1."""
    hits, claims, present = Counter[str](), Counter[str](), Counter[str]()
    for wanted, guess in zip(true, said, strict=True):
        there, claimed = set(wanted), set(guess)
        for counter, those in ((hits, there & claimed), (claims, claimed), (present, there)):
            counter.update(str(name(each)) for each in those)
    return [
        [each, present[each] / seeds, *_scores(hits[each], claims[each], present[each])]
        for each in sorted({*claims, *present})
    ]


def _sets(parts: Sequence[pa.Table], _: Mapping[str, Any], __: Mapping[str, int]) -> Looked:
    true, said = _column(parts, "label"), _column(parts, "prediction")
    return {
        "found": _found(true, said, lambda label: label, len(parts)),
        "mistakes": _mistakes(
            parts,
            lambda row: set(row["label"]) != set(row["prediction"]),
            lambda row: len(set(row["label"]) ^ set(row["prediction"])),
        ),
    }


def _shares(parts: Sequence[pa.Table], about: Mapping[str, Any], _: Mapping[str, int]) -> Looked:
    """Probabilities beside true ones: the likeliest class, and half the sum of the differences."""
    names = [str(name) for name in about.get("labels") or ()]
    true, said = (np.asarray(_column(parts, name), dtype=np.float64) for name in ("label", "probabilities"))
    counts = confusion(true.argmax(axis=1), said.argmax(axis=1), len(names))

    def apart(row: Any) -> float:
        return float(np.abs(np.subtract(row["label"], row["probabilities"])).sum()) / 2

    mistakes = _mistakes(parts, lambda row: apart(row) > 0, apart)
    for each, shares in zip(mistakes, _labels_of(parts, mistakes), strict=True):
        each["label"] = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True) if share)
    return {
        **_of_matrix(counts, names, [None] * len(names), len(parts)),
        "apart": float(np.abs(true - said).sum(axis=1).mean() / 2),
        "mistakes": mistakes,
    }


def _labels_of(parts: Sequence[pa.Table], rows: Sequence[Looked]) -> Iterator[Any]:
    """The labels of some rows, as they are on record."""
    known = {(row["file"], row["row"]): row["label"] for part in parts for row in part.to_pylist()}
    return (known[row["file"], row["number"]] for row in rows)


def _several_values(parts: Sequence[pa.Table], about: Mapping[str, Any], _: Mapping[str, int]) -> Looked:
    true, said = (np.asarray(_column(parts, name), dtype=np.float64) for name in ("label", "prediction"))
    errors, scale = np.abs(said - true), true.std(axis=0)
    names = [str(name) for name in about.get("labels") or range(1, true.shape[1] + 1)]
    scale[scale == 0] = 1.0
    return {
        "each": [
            [
                name,
                float(errors[:, i].mean()),
                float(np.quantile(errors[:, i], 0.9)),
                _explained(true[:, i], said[:, i]),
            ]
            for i, name in enumerate(names)
        ],
        "mistakes": _mistakes(
            parts,
            lambda row: True,
            lambda row: float((np.abs(np.subtract(row["label"], row["prediction"])) / scale).sum()),
        ),
    }


def _explained(true: np.ndarray, said: np.ndarray) -> float | None:
    spread = float(np.sum((true - true.mean()) ** 2))
    return 1 - float(np.sum((true - said) ** 2)) / spread if spread else None


def _vectors(parts: Sequence[pa.Table], about: Mapping[str, Any], trained: Mapping[str, int]) -> Looked:
    if "rank" not in parts[0].column_names:
        return {**_values(parts, about, trained), "predicts": "value"}
    # Images and texts find each other: a row counts in both ways, and its mistake is the worse one.
    names = [name for name in ("rank", IMAGE_RANK) if all(name in part.column_names for part in parts)]
    rank = np.asarray([_column(parts, name) for name in names], dtype=np.int64)

    def worse(row: Any) -> int:
        return max(row[name] for name in names)

    return {
        "ranks": [float((rank <= most).mean()) for most in RANKS],
        "median": float(np.median(rank)),
        "mistakes": _mistakes(parts, lambda row: worse(row) > 1, worse),
    }


def _values(parts: Sequence[pa.Table], _: Mapping[str, Any], __: Mapping[str, int]) -> Looked:
    true, said = (np.asarray(_column(parts, name), dtype=np.float64) for name in ("label", "prediction"))
    errors = np.abs(said - true)
    shown = np.unique(np.linspace(0, len(true) - 1, min(POINTS, len(true))).round().astype(int))
    return {
        "points": [[float(f"{true[i]:.6g}"), float(f"{said[i]:.6g}")] for i in shown],
        "errors": {
            "mean": float(errors.mean()),
            "median": float(np.median(errors)),
            "most": float(np.quantile(errors, 0.9)),
            "explained": _explained(true, said),
        },
        "mistakes": _mistakes(parts, lambda row: True, lambda row: abs(row["label"] - row["prediction"])),
    }


def _spans(parts: Sequence[pa.Table], _: Mapping[str, Any], __: Mapping[str, int]) -> Looked:
    """Answers found in texts: how good they are where there is one, and whether it is seen where there is none."""
    true, said, f1 = (_column(parts, name) for name in ("label", "prediction", "f1"))
    there = np.asarray([bool(answers) for answers in true])
    given, fit = np.asarray([bool(answer) for answer in said]), np.asarray(f1, dtype=np.float64)
    bins, error = bin_scores(np.asarray(_column(parts, "score"), dtype=np.float64), fit == 1)
    mistakes = _mistakes(parts, lambda row: row["f1"] < 1, lambda row: 1 - row["f1"] + row["score"] / 1000)
    for each, answers in zip(mistakes, _labels_of(parts, mistakes), strict=True):
        each["label"] = " / ".join(dict.fromkeys(answers))[:LONGEST] or "no answer"
        each["prediction"] = each["prediction"] or "no answer"
    rows = [
        [name, int(which.sum()) / len(parts), float(fit[which].mean()), float((given[which] == found).mean())]
        for name, which, found in (("has an answer", there, True), ("has no answer", ~there, False))
        if which.any()
    ]
    return {"answered": rows, "bins": bins, "ece": error, "mistakes": mistakes}


def _masked(parts: Sequence[pa.Table], _: Mapping[str, Any], __: Mapping[str, int]) -> Looked:
    """Masked tokens: how many are predicted correctly, and the losses of rows that have any."""
    hidden, right = (np.asarray(_column(parts, name), dtype=np.int64) for name in ("masked", "right"))
    losses = np.asarray(_column(parts, "loss"), dtype=np.float64)[hidden > 0]
    quarters = [float(each) for each in np.quantile(losses, [0, 0.25, 0.5, 0.75, 1])]
    return {
        "masks": [int(hidden.sum()), float(right.sum() / hidden.sum())],
        "losses": quarters,
        "mistakes": [],  # no input of running text is kept
    }


def _texts(parts: Sequence[pa.Table], _: Mapping[str, Any], __: Mapping[str, int]) -> Looked:
    losses = np.asarray(_column(parts, "loss"), dtype=np.float64)
    quarters = [float(each) for each in np.quantile(losses, [0, 0.25, 0.5, 0.75, 1])]
    return {"losses": quarters, "mistakes": _mistakes(parts, lambda row: True, lambda row: row["loss"])}


SAY: dict[str, Callable[[Sequence[Any], Mapping[str, Any], Mapping[str, int]], Looked]] = {
    "class": _classes,
    "rank": _classes,
    "shares": _shares,
    "labels": _sets,
    "values": _several_values,
    "vector": _vectors,
    "value": _values,
    "tags": _tags,
    "text": _texts,
    "span": _spans,
    "masked": _masked,
}


# -------------------------------------------------------------------------------------------------------- mistakes


def _mistakes(parts: Sequence[pa.Table], wrong: Callable[[Any], bool], weight: Callable[[Any], float]) -> list[Looked]:
    """The rows that weigh most over all seeds, of those whose input was kept; each with how many seeds got it wrong."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for part in parts:
        for number, row in enumerate(part.to_pylist()):
            if wrong(row):
                key = number if row["row"] is None else (row["file"], row["row"])
                found[key].append(row)
    order = sorted(found.values(), key=lambda rows: -sum(map(weight, rows)))
    told: list[Looked] = []
    for rows in order:
        source = next((row for row in rows if row.get("text") is not None or row.get("image") is not None), None)
        if source is None or len(told) == MISTAKES:
            continue
        first = max(rows, key=weight)
        told.append(
            {
                "file": source["file"],
                "number": source["row"],
                "text": source.get("text"),
                "image": as_picture(source.get("image")),
                "label": _written(first.get("label")),
                "prediction": _written(first.get("prediction")),
                "score": first.get("score"),
                "weight": float(weight(first)),
                "wrong": len(rows),
            }
        )
    return told


def as_picture(data: bytes | None) -> str | None:
    """An image of PNG or JPEG as the address that a page shows it by."""
    if data is None:
        return None
    kind = "jpeg" if data.startswith(JPEG) else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _written(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    parts = [f"{each:.4g}" if isinstance(each, float) else str(each) for each in value]
    said = value if isinstance(value, str) else " ".join(parts) or "none"
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
