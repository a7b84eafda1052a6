"""A task: rows divided into training, selection and test, and what turns them into batches and into metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from inlay.errors import InlayError, unknown
from inlay.tasks import chat_rows, image_text, images, kinds, metrics, templates
from inlay.tasks import encode as encoding
from inlay.tasks.catalogue import SPLITS
from inlay.tasks.chat_encode import encode_conversations
from inlay.tasks.chat_template import own_template
from inlay.tasks.images import Augmentation
from inlay.tasks.masking import encode_masked
from inlay.tasks.pairs import EncodedPairs, encode_pairs
from inlay.tasks.places import Places
from inlay.tasks.schema import Described, TaskSchema
from inlay.tasks.targets import to_targets
from inlay.tasks.windows import encode_windows

if TYPE_CHECKING:
    from datasets import Dataset


ImageTexts = image_text.ImageTextPairs | image_text.JudgedItems


@dataclass(frozen=True)
class Task(Described):
    """A data set with its template, labels and metrics. The splits are `datasets.Dataset`s of normalised columns.

    `source` says where the data came from, `digest` is a hash of the rows that are used and how they are divided,
    `notes` are the things that a user should know: rows dropped, kinds inferred. `spelled_out` names the fields of the
    spec without which it would be the same, `decided` has those that it was read with and the spec does not say.
    `places` says where the rows that are held out stood; `unused` counts rows that were read and are in no split. A
    task never changes: `with_schema`, `with_length` and `with_notes` return another.
    """

    schema: TaskSchema
    train: Dataset
    validation: Dataset
    test: Dataset
    source: str
    digest: str
    notes: tuple[str, ...] = ()
    spelled_out: tuple[str, ...] = ()
    decided: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Places] = dataclasses.field(default_factory=dict)
    unused: int = 0

    @property
    def label_names(self) -> tuple[str, ...] | None:
        return self.schema.label_names

    @property
    def num_labels(self) -> int | None:
        return self.schema.num_labels

    @property
    def output_names(self) -> tuple[str, ...] | None:
        return self.schema.output_names

    @property
    def template(self) -> str:
        return self.schema.full_template

    @property
    def examples(self) -> int | None:
        """How many there are to train on; None for running text: the model's length says into how many it is cut."""
        running = self.kind in kinds.OF_RUNNING_TEXT and not (self.schema.answers or self.schema.chat)
        return None if running else len(self.train)

    @property
    def generates(self) -> bool:
        return self.schema.generates

    @property
    def max_new_tokens(self) -> int | None:
        return self.schema.max_new_tokens

    @property
    def selection_metric(self) -> str:
        """The metric to choose a checkpoint by: the first that needs no generated texts."""
        return next(name for name in self.metrics if name not in metrics.OF_TEXTS)

    def greater_is_better(self, metric: str | None = None) -> bool:
        """Which way a metric improves; by default the one to select by."""
        return metrics.greater_is_better(metric or self.selection_metric)

    def split(self, name: str) -> Dataset:
        """The rows of a split by name."""
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        return getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        """What predicting needs, as JSON-ready data; `TaskSchema.from_json` reads it."""
        return self.schema.to_json()

    def with_schema(self, schema: TaskSchema) -> Self:
        """The same rows under another schema."""
        return dataclasses.replace(self, schema=schema)

    def with_notes(self, notes: Iterable[str]) -> Self:
        """The task with further notes, each once."""
        new = [note for note in dict.fromkeys(notes) if note not in self.notes]
        return dataclasses.replace(self, notes=(*self.notes, *new))

    def with_thresholds(self, outputs: Any, targets: Any) -> Self:
        """The task of label sets with the thresholds that are best on these outputs for rows held out, and a note."""
        from inlay.tasks import answers

        found = answers.choose_thresholds(outputs, targets)
        shown = ", ".join(f"{name} {at:.2f}" for name, at in list(zip(self.label_names or (), found, strict=True))[:10])
        more = ", ..." if len(found) > 10 else ""
        note = f"thresholds, chosen on {len(targets):,} validation rows: {shown}{more}"
        return self.with_schema(dataclasses.replace(self.schema, thresholds=found)).with_notes([note])

    def with_temperature(self, outputs: Any, labels: Any) -> Self:
        """The task with the temperature of its classes' probabilities that suits these outputs for rows held out."""
        from inlay.tasks.calibration import choose_temperature

        found = choose_temperature(outputs[:, : self.num_labels], labels)
        note = f"probabilities are calibrated on {len(labels):,} validation rows: temperature {found:.3g}"
        return self.with_schema(dataclasses.replace(self.schema, temperature=found)).with_notes([note])

    def with_no_answer(self, outputs: Any, encoded: Any) -> Self:
        """The task with the threshold for "no answer" that is best on these outputs for rows held out, and a note."""
        from inlay.tasks import answer_spans

        found = answer_spans.choose_no_answer(self.schema, outputs, encoded)
        note = (
            "no answer is given where its score minus that of the best answer is above "
            f"{found:.2f}, which was chosen on {encoded.rows:,} validation rows"
        )
        return self.with_schema(dataclasses.replace(self.schema, no_answer=found)).with_notes([note])

    # ------------------------------------------------------------------------------------------------- encoding

    def with_length(self, processor: Any, max_length: int | None = None, *, model_config: Any = None) -> Self:
        """The task with the length in tokens that its texts are cut to in its schema.

        It is `max_length`, the schema's, or a default, and never more than the model reads, which is noted. Images
        have none.
        """
        if self.modality == "image":
            return self
        limit = encoding.length_limit(processor, model_config)
        wanted = max_length or self.schema.max_length or min(encoding.DEFAULT_LENGTH, limit or encoding.DEFAULT_LENGTH)
        length = min(wanted, limit or wanted)
        notes = [f"max_length={wanted} is more than the model reads: {limit} is used"] if length < wanted else []
        continues = self.schema.writes_text and not self.schema.two_parts
        encoding.check_room(length, processor, self.template, writes=continues)
        changes: dict[str, Any] = {"max_length": length}
        if self.schema.chat and self.schema.chat_template is None:
            changes["chat_template"] = own_template(processor)
        return self.with_schema(dataclasses.replace(self.schema, **changes)).with_notes(notes)

    def encode(
        self,
        split: str,
        processor: Any,
        max_length: int | None = None,
        *,
        model_config: Any = None,
        augmentation: Augmentation | None = None,
    ) -> encoding.Encoded | EncodedPairs | images.EncodedImages | ImageTexts:
        """A split as a data set for the Trainer; its `notes` say what was cut. Of the length see `with_length`."""
        data = self.split(split)
        if self.schema.pairs_images:
            return self._encode_image_texts(split, data, processor, augmentation)
        if self.modality == "image":
            labels = to_targets(self.schema, data["label"])
            return images.EncodedImages(EncodedFiles(data), labels, processor, augmentation=augmentation)
        if augmentation is not None:
            raise InlayError(f"Only images can be augmented; {self.name!r} is of kind {self.kind!r}.")
        task = self.with_length(processor, max_length, model_config=model_config)
        length = task.schema.max_length
        assert length is not None
        made = task._encode_text(split, data, processor, length)
        notes = [note for note in task.notes if note not in self.notes] + list(made.notes)
        if made.cut and not self.schema.chat:
            notes.append(f"{made.cut:,} of {len(made):,} {split} texts are longer than {length} tokens and were cut")
        if made.targets_cut:
            notes.append(
                f"{made.targets_cut:,} of {len(made):,} {split} answers are longer than {length} tokens and were cut"
            )
        made.notes = tuple(notes)
        return made

    def _encode_image_texts(
        self, split: str, data: Dataset, processor: Any, augmentation: Augmentation | None
    ) -> ImageTexts:
        sources, texts = EncodedFiles(data), list(data["text"])
        made = image_text.encode_pairs(sources, texts, processor, judged=split != "train", augmentation=augmentation)
        if made.cut:
            count = f"{made.cut:,} of {len(made.texts):,} different {split} texts"
            made.notes = (f"{count} are longer than {processor.length} tokens and were cut",)
        return made

    def _encode_text(self, split: str, data: Dataset, tokenizer: Any, length: int) -> encoding.Encoded | EncodedPairs:
        if self.schema.writes_text:
            return self._encode_language(split, data, tokenizer, length)
        if self.schema.predicts == "masked":
            return encode_masked([self.schema.text_of(row, tokenizer) for row in data], tokenizer, length, split)
        rows = data.to_list()
        if self.schema.predicts == "vector":
            return encode_pairs(rows, self.fields, tokenizer, length, judged=split != "train")
        if self.schema.predicts == "span":
            windows = encode_windows(rows, tokenizer, length, split)
            windows.mark([row["label"] for row in rows])
            return windows
        made = self.schema.encode_texts(rows, tokenizer, length)
        labels = [row["label"] for row in rows]
        if made.words is not None:
            made.tags = labels
            labels = [encoding.align_labels(each, row) for each, row in zip(made.words, labels, strict=True)]
        else:
            labels = to_targets(self.schema, labels)
        made.labels = labels
        return made

    def _encode_language(self, split: str, data: Dataset, tokenizer: Any, length: int) -> encoding.Encoded:
        if self.schema.two_parts:
            read = self.schema.encode_texts(data, tokenizer, length)
            return encoding.with_targets(read, list(data["target"]), tokenizer, length)
        if self.schema.chat:
            return encode_conversations(chat_rows.read(data), self.schema.template_of_chats(tokenizer), length, split)
        if self.schema.answers:
            mask = getattr(tokenizer, "mask_token", None)
            prompts = [templates.render(self.template, row, mask)[0] for row in data]
            return encoding.encode_answers(prompts, list(data["target"]), tokenizer, length)
        texts = data[self.fields[0]]
        if self.schema.lm == "last-word" and split != "train":
            parts = [text.rstrip().rpartition(" ") for text in texts]
            prompts, words = [before for before, _, _ in parts], [word for _, _, word in parts]
            return encoding.encode_answers(prompts, words, tokenizer, length, end=False)
        ending = getattr(tokenizer, "eos_token", None) or "\n\n"
        return encoding.encode_blocks(texts, "\n" if self.schema.lm == "lines" else ending, tokenizer, length)

    # ---------------------------------------------------------------------------------- as the schema does them

    def stops(self, processor: Any) -> tuple[int, ...]:
        """The tokens that end a text; see `TaskSchema.stops`."""
        return self.schema.stops(processor)

    def collator(self, processor: Any, model: Any = None, *, generation: bool = False) -> Any:
        """What makes a batch; see `TaskSchema.collator`."""
        return self.schema.collator(processor, model, generation=generation)

    def encode_inputs(
        self, rows: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
    ) -> encoding.Encoded | images.EncodedImages | image_text.JudgedItems:
        """Unlabelled rows, or prompts; see `TaskSchema.encode_inputs`."""
        return self.schema.encode_inputs(rows, processor, max_length)

    def read_inputs(self, path: str | Path) -> list[dict[str, Any]]:
        """New rows from disk; see `TaskSchema.read_inputs`."""
        return self.schema.read_inputs(path)

    def decode(self, predictions: Any, inputs: encoding.Encoded | None = None) -> list[dict[str, Any]]:
        """Predictions in words; see `TaskSchema.decode`."""
        return self.schema.decode(predictions, inputs)

    def compute_metrics(self, predictions: Any, labels: Any, encoded: Any = None) -> dict[str, float]:
        """The task's metrics; see `TaskSchema.compute_metrics`."""
        return self.schema.compute_metrics(predictions, labels, encoded)

    def reduce_logits(self, logits: Any, labels: Any) -> Any:
        """What to keep of a batch's logits; see `TaskSchema.reduce_logits`."""
        return self.schema.reduce_logits(logits, labels)

    def score_texts(self, texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The metrics of generated texts; see `TaskSchema.score_texts`."""
        return self.schema.score_texts(texts, rows)


class EncodedFiles(Sequence[Any]):
    """The undecoded images of a data set: {"bytes", "path"} each, read when asked for."""

    def __init__(self, data: Dataset) -> None:
        from datasets import Image

        self._data = data.select_columns("image").cast_column("image", Image(decode=False))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        return self._data[index]["image"]


def dataset(rows: list[dict[str, Any]], kind: str, fields: Sequence[str], *, expand: bool = False) -> Any:
    """Normalised rows of a kind as a `datasets.Dataset`; `expand`ed, each reference of a text is a row."""
    import datasets

    if not rows:
        return datasets.Dataset.from_dict({name: [] for name in fields})
    if kind == kinds.DATA_TO_TEXT:
        rows = _one_reference_each(rows) if expand else _one_source_each(rows)
    if kinds.modality(kind) == "image":
        if kinds.get(kind).pairs_images:
            pairs = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
            return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in pairs}, features=pairs)
        label: Any = datasets.Value("int64")
        if kinds.get(kind).predicts == "labels":
            label = datasets.List(label)
        elif kinds.get(kind).predicts in ("shares", "values"):
            label = datasets.List(datasets.Value("float64"))
        features = datasets.Features({"image": datasets.Image(), "label": label})
        columns = {name: [row[name] for row in rows] for name in features}
        return datasets.Dataset.from_dict(columns, features=features)
    return datasets.Dataset.from_list(rows)


def _one_reference_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """To train on, every reference is an example."""
    return [
        {"source": row["source"], "target": text, "references": [text]} for row in rows for text in row["references"]
    ]


def _one_source_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """To score, every source is an example with all its references."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["source"], []).extend(row["references"])
    return [{"source": source, "target": texts[0], "references": texts} for source, texts in found.items()]
