"""What a run keeps of the rows that it held out: where each stands, what it is, and what the model says of it.

    file, row       where the row stands: the file, or an image's path below the folder of data; its number, from 1
    split           test or validation; rows for validation have no prediction
    label           what is right
    prediction      what the model says, in the words of the data
    text, image     the input of the worst rows alone: the beginning of the text, a small copy of the image, or both

A kind of task adds columns of its own (`OF`, by what it predicts):

    class           score (the probability of the prediction), probabilities (of all classes, in the order of the names)
    labels          label and prediction are lists, probabilities those of all labels
    shares          label is a list of probabilities; prediction (the likeliest class), score, probabilities
    rank            score, probabilities
    value           -
    values          label and prediction are lists, a value for each name
    tags            label and prediction are lists, a tag for each word
    text            loss (the mean over tokens), tokens; prediction where the run scored texts that the model wrote
    masked          loss (the mean over masked tokens), masked and right: how many there are, and how many are right
    span            label is a list of the right answers, prediction a text, empty for no answer; f1, score; start and
                    end of the prediction in the context
    vector          cosine of the pair; rank of the positive in the test's corpus, where pairs have no scores. Of an
                    image and its text the rank of the text, and rank_of_image, which the text finds

A kind that is not in `OF` has its label and its prediction as JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inlay.tasks.calibration import to_probabilities
from inlay.tasks.conversations import FIELD, unpack
from inlay.tasks.places import Places

if TYPE_CHECKING:
    import pyarrow as pa

    from inlay.tasks.pairs import Judged
    from inlay.tasks.schema import TaskSchema
    from inlay.tasks.task import Task

FORMAT = 1
METADATA = b"inlay"
IMAGE_RANK = "rank_of_image"
WORST = 24  # rows whose input is kept
LONGEST = 300  # characters of a text that is kept
SIDE = 112  # pixels of a small copy
MOST_SHARES = 10_000_000  # probabilities; with more, only those of the predictions are kept


@dataclass(frozen=True)
class TestedRows:
    """The rows of a split as they were scored: `outputs` as `reduce_logits` leaves them, and the `texts` that the
    model wrote, where it did."""

    schema: TaskSchema
    rows: Any
    encoded: Any
    outputs: np.ndarray
    texts: Sequence[str] | None = None


@dataclass(frozen=True)
class Columns:
    """A kind's columns, and the positions of the rows that it got wrong, the worst first."""

    values: Mapping[str, Any]
    worst: Sequence[int]


def keep(task: Task, encoded: Any, outputs: np.ndarray | None, texts: Sequence[str] | None = None) -> pa.Table | None:
    """The table of a task's held-out rows; `outputs` are those of its test split, where it has one.

    A task of one's own that has no schema keeps nothing.
    """
    import pyarrow as pa

    schema = getattr(task, "schema", None)
    if schema is None:
        return None
    parts = []
    if outputs is not None:
        found = OF.get(schema.predicts, _of_others)(TestedRows(schema, task.test, encoded, outputs, texts))
        taken = getattr(encoded, "taken", None)
        inputs = _inputs(task, found.worst, range(len(task.test)) if taken is None else taken)
        count = len(next(iter(found.values.values())))
        parts.append(_table("test", _places_of(task, taken), count, {**found.values, **inputs}))
    if (held := task.places.get("validation")) is not None:
        parts.append(_table("validation", held, len(held), {}))
    if not parts:
        return None
    about = {"format": FORMAT, "task": task.name, "kind": task.kind, "predicts": schema.predicts}
    about["labels"] = None if schema.label_names is None else list(schema.label_names)
    whole = pa.concat_tables(parts, promote_options="default")
    return whole.replace_schema_metadata({METADATA: json.dumps(about, ensure_ascii=True).encode()})


def _places_of(task: Task, taken: Sequence[int] | None) -> Places | None:
    """Where the rows of the test split stand, or those that were `taken`; None for running text, of which a row is no
    example."""
    places = task.places.get("test")
    if places is None or task.examples is None:
        return None
    return places if taken is None else places.take(taken)


def _table(split: str, places: Places | None, count: int, columns: Mapping[str, Any]) -> pa.Table:
    import pyarrow as pa

    known = places is not None and len(places) == count
    where = {
        "file": pa.array(places.files if places is not None and known else [None] * count, pa.string()),
        "row": pa.array(places.numbers if places is not None and known else [None] * count, pa.int64()),
        "split": pa.array([split] * count, pa.string()),
    }
    return pa.table({**where, **columns})


# ------------------------------------------------------------------------------------------------ columns of a kind


def _of_classes(tested: TestedRows) -> Columns:
    import pyarrow as pa

    names = np.asarray(tested.schema.label_names or (), dtype=object)
    logits = tested.outputs[:, : len(names)]
    shares = to_probabilities(logits, tested.schema.temperature)
    true, best = np.asarray(tested.rows["label"], dtype=np.int64), logits.argmax(axis=-1)
    score = shares[np.arange(len(best)), best]
    wrong = np.flatnonzero(best != true)
    columns: dict[str, Any] = {
        "label": pa.array(names[true], pa.string()),
        "prediction": pa.array(names[best], pa.string()),
        "score": pa.array(score, pa.float32()),
    }
    if shares.size <= MOST_SHARES:
        offsets = np.arange(0, shares.size + 1, len(names), dtype=np.int32)
        columns["probabilities"] = pa.ListArray.from_arrays(offsets, pa.array(shares.ravel(), pa.float32()))
    return Columns(columns, wrong[np.argsort(-score[wrong], kind="stable")].tolist())


def _of_sets(tested: TestedRows) -> Columns:
    import pyarrow as pa

    names = tested.schema.label_names or ()
    true = [[names[label] for label in row] for row in tested.rows["label"]]
    said = tested.schema.decode(tested.outputs[:, : len(names)], probabilities=True)
    predicted, some = [each["labels"] for each in said], pa.list_(pa.string())
    wrong = [len(set(a) ^ set(b)) for a, b in zip(true, predicted, strict=True)]
    shares = pa.array([list(each["probabilities"].values()) for each in said], pa.list_(pa.float32()))
    order = sorted((i for i in range(len(wrong)) if wrong[i]), key=lambda i: -wrong[i])
    columns = {"label": pa.array(true, some), "prediction": pa.array(predicted, some), "probabilities": shares}
    return Columns(columns, order)


def _of_shares(tested: TestedRows) -> Columns:
    """Of probabilities of classes, and of ordered classes."""
    import pyarrow as pa

    names, ranks = tested.schema.label_names or (), tested.schema.predicts == "rank"
    said = tested.schema.decode(tested.outputs[:, : tested.schema.num_labels], probabilities=True)
    predicted = [each["label"] for each in said]
    shares = np.array([list(each["probabilities"].values()) for each in said])
    if ranks:
        wrong = np.abs(np.array([names.index(name) for name in predicted]) - np.asarray(tested.rows["label"]))
        true = pa.array([names[rank] for rank in tested.rows["label"]], pa.string())
    else:
        wrong = np.abs(shares - np.asarray(tested.rows["label"])).sum(-1)
        true = pa.array(tested.rows["label"], pa.list_(pa.float64()))
    order = [int(i) for i in np.argsort(-wrong, kind="stable") if wrong[i] > 0]
    columns = {
        "label": true,
        "prediction": pa.array(predicted, pa.string()),
        "score": pa.array([each["score"] for each in said], pa.float32()),
        "probabilities": pa.array(shares.tolist(), pa.list_(pa.float32())),
    }
    return Columns(columns, order)


def _of_several_values(tested: TestedRows) -> Columns:
    import pyarrow as pa

    schema = tested.schema
    said = schema.decode(tested.outputs[:, : schema.num_labels])
    predicted = np.array([list(each["values"].values()) for each in said])
    true = np.asarray(tested.rows["label"], dtype=np.float64)
    wrong = (np.abs(predicted - true) / (schema.deviations or 1.0)).sum(-1)
    some = pa.list_(pa.float64())
    columns = {"label": pa.array(true.tolist(), some), "prediction": pa.array(predicted.tolist(), some)}
    return Columns(columns, np.argsort(-wrong, kind="stable").tolist())


def _of_values(tested: TestedRows) -> Columns:
    import pyarrow as pa

    predicted = tested.schema.unscale(tested.outputs.reshape(len(tested.outputs)))
    true = np.asarray(tested.rows["label"], dtype=np.float64)
    order = np.argsort(-np.abs(predicted - true), kind="stable")
    return Columns(
        {"label": pa.array(true, pa.float64()), "prediction": pa.array(predicted, pa.float64())}, order.tolist()
    )


def _of_tags(tested: TestedRows) -> Columns:
    import pyarrow as pa

    names = tested.schema.label_names or ()
    true = [[names[tag] for tag in row] for row in tested.rows["label"]]
    predicted = [each["tags"] for each in tested.schema.decode(tested.outputs, tested.encoded)]
    wrong = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in zip(true, predicted, strict=True)]
    order = sorted(range(len(wrong)), key=lambda i: -wrong[i])
    tags = pa.list_(pa.string())
    return Columns(
        {"label": pa.array(true, tags), "prediction": pa.array(predicted, tags)}, [i for i in order if wrong[i]]
    )


def _of_texts(tested: TestedRows) -> Columns:
    import pyarrow as pa

    losses, tokens = tested.outputs[:, 0].astype(np.float64), tested.outputs[:, 1]
    mean = np.divide(losses, tokens, out=np.zeros_like(losses), where=tokens > 0)
    columns: dict[str, Any] = {"loss": pa.array(mean, pa.float32()), "tokens": pa.array(tokens, pa.int32())}
    known = tested.rows.column_names
    if tested.texts is not None:
        name = "references" if "references" in known else "target"
        columns["label"] = pa.array(tested.rows[name])
        columns["prediction"] = pa.array([text.strip() for text in tested.texts], pa.string())
    return Columns(columns, np.argsort(-mean, kind="stable").tolist())


def _of_masked(tested: TestedRows) -> Columns:
    import pyarrow as pa

    losses, hidden, right = np.asarray(tested.outputs, dtype=np.float64).T
    mean = np.divide(losses, hidden, out=np.zeros_like(losses), where=hidden > 0)
    counts = {"masked": pa.array(hidden.astype(np.int32)), "right": pa.array(right.astype(np.int32))}
    return Columns({"loss": pa.array(mean, pa.float32()), **counts}, [])


def _of_vectors(tested: TestedRows) -> Columns:
    import pyarrow as pa

    from inlay.tasks.image_text import reverse
    from inlay.tasks.retrieval import cosines

    judged = tested.encoded.judged
    cosine = cosines(tested.outputs, judged)
    columns: dict[str, Any] = {"cosine": pa.array(cosine, pa.float32())}
    if judged.scores is not None:
        columns |= {"label": pa.array(judged.scores, pa.float64()), "prediction": pa.array(cosine, pa.float64())}
        return Columns(columns, [])
    found = {"rank": _ranks_of_pairs(tested.outputs, judged)}
    if tested.schema.pairs_images:
        found[IMAGE_RANK] = _ranks_of_pairs(tested.outputs, reverse(judged))
    worse = np.max(list(found.values()), axis=0)
    order = np.argsort(-worse, kind="stable")
    columns |= {name: pa.array(ranks, pa.int32()) for name, ranks in found.items()}
    return Columns(columns, order[worse[order] > 1].tolist())


def _ranks_of_pairs(vectors: np.ndarray, judged: Judged) -> np.ndarray:
    """At which rank the first of each pair finds the second."""
    from inlay.tasks.retrieval import ranks

    places = {
        (query, each): int(rank)
        for query, relevant, found in zip(judged.queries, judged.relevant, ranks(vectors, judged), strict=True)
        for each, rank in zip(judged.in_order(relevant), found, strict=True)
    }
    return np.asarray([places[pair[0], pair[1]] for pair in judged.pairs])


def _of_spans(tested: TestedRows) -> Columns:
    import pyarrow as pa

    from inlay.tasks.answer_spans import f1

    said = tested.schema.decode(tested.outputs, tested.encoded)
    answers = [row["text"] for row in tested.rows["label"]]
    fit = [f1(each["answer"], wanted) for each, wanted in zip(said, answers, strict=True)]
    columns = {
        "label": pa.array(answers, pa.list_(pa.string())),
        "prediction": pa.array([each["answer"] for each in said], pa.string()),
        "f1": pa.array(fit, pa.float32()),
        "score": pa.array([each["score"] for each in said], pa.float32()),
        "start": pa.array([each["start"] for each in said], pa.int64()),
        "end": pa.array([each["end"] for each in said], pa.int64()),
    }
    order = sorted((i for i in range(len(fit)) if fit[i] < 1), key=lambda i: (fit[i], -said[i]["score"]))
    return Columns(columns, order)


def _of_others(tested: TestedRows) -> Columns:
    import pyarrow as pa

    outputs = tested.outputs if tested.texts is None else tested.texts
    said = [_as_json(each) for each in tested.schema.decode(outputs, tested.encoded)]
    columns = {"prediction": pa.array(said, pa.string())}
    if "label" in tested.rows.column_names:
        columns["label"] = pa.array([_as_json(each) for each in tested.rows["label"]], pa.string())
    return Columns(columns, [])


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


OF: Final[dict[str, Callable[[TestedRows], Columns]]] = {
    "class": _of_classes,
    "labels": _of_sets,
    "shares": _of_shares,
    "rank": _of_shares,
    "values": _of_several_values,
    "value": _of_values,
    "tags": _of_tags,
    "text": _of_texts,
    "masked": _of_masked,
    "vector": _of_vectors,
    "span": _of_spans,
}


# -------------------------------------------------------------------------------------------------- what was read


def _inputs(task: Task, worst: Sequence[int], taken: Sequence[int]) -> dict[str, Any]:
    """The input of the rows that were got wrong most plainly; nothing of the others, nor of running text.

    `taken` are the rows of the split that were scored, and `worst` positions among them.
    """
    import pyarrow as pa

    if task.examples is None or not worst:
        return {}
    pictures: list[bytes | None] = [None] * len(taken)
    texts: list[str | None] = [None] * len(taken)
    made: dict[str, Any] = {}
    if task.modality == "image":
        from inlay.tasks.task import EncodedFiles

        files = EncodedFiles(task.test)
        for i in worst[:WORST]:
            pictures[i] = shrink(files[taken[i]])
        made["image"] = pa.array(pictures, pa.binary())
    if task.modality == "text" or task.schema.pairs_images:
        for i in worst[:WORST]:
            texts[i] = excerpt(task.schema, task.test[taken[i]])
        made["text"] = pa.array(texts, pa.string())
    return made


def shrink(source: Any) -> bytes:
    """A small copy of an image as PNG or JPEG, whichever suits its size."""
    from inlay.tasks.images import open_rgb

    image, stream = open_rgb(source), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    if max(image.size) <= SIDE // 3:
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=80)
    return stream.getvalue()


def excerpt(schema: TaskSchema, row: Mapping[str, Any]) -> str:
    """The beginning of what the model reads of a row: of a conversation, the last question; of a question about a text,
    what stands around the answer."""
    if schema.chat:
        asked = [each["content"] for each in unpack(row[FIELD]) if each["role"] == "user"]
        said = str(asked[-1]) if asked else ""
    elif schema.predicts == "span":
        places = [start for start in row["label"]["start"] if start >= 0]
        begin = max(0, places[0] - LONGEST // 3) if places else 0
        said = f"{row['question']} | {'…' * bool(begin)}{row['context'][begin:]}"
    else:
        fields = ["text"] if schema.pairs_images else schema.fields
        values = (row[name] for name in fields if row.get(name) is not None)
        said = " | ".join(each if isinstance(each, str) else " ".join(map(str, each)) for each in values)
    said = " ".join(said.split())
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
