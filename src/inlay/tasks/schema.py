"""What a prediction needs of a task once the training data is out of sight: small, plain, JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import InlayError, unknown
from inlay.tasks import files, kinds, metrics, prepare, templates
from inlay.tasks.cells import as_text, as_words, is_null, reach
from inlay.tasks.inputs import Inputs
from inlay.tasks.own import locate

if TYPE_CHECKING:
    from inlay.tasks.encode import Encoded
    from inlay.tasks.images import EncodedImages

FORMAT = 1
_TUPLES = ("fields", "label_names", "metrics", "words")


@dataclass(frozen=True)
class TaskSchema:
    """The shape of a task's inputs and outputs.

    `columns` names the user's column for a field where the two differ; `mean` and `deviation` undo the scaling of a
    regression's values; `answers` says that a language model completes a prompt. `prompt_template` is the template for
    methods that put prompt tokens into the text, and `prompt_tokens` how many; with none it is not used. `cue` is what
    such a text ends in for a model that reads from left to right. `words` is a word for each class.
    """

    name: str
    kind: str
    fields: tuple[str, ...]
    metrics: tuple[str, ...]
    label_names: tuple[str, ...] | None = None
    template: str | None = None
    prompt_template: str | None = None
    cue: str | None = None
    prompt_tokens: int = 0
    words: tuple[str, ...] | None = None
    prepare: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    answers: bool = False
    lm: str | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def num_labels(self) -> int | None:
        """Outputs of the head: the classes, 1 for a value, None for language models."""
        if self.kind == kinds.REGRESSION:
            return 1
        return len(self.label_names) if self.label_names is not None else None

    @property
    def modality(self) -> str:
        """What the model reads: "text" or "image"."""
        return kinds.modality(self.kind)

    @property
    def writes_text(self) -> bool:
        """Whether a prediction is a text that the model generates."""
        return self.kind in kinds.LANGUAGE_MODELS

    @property
    def generates(self) -> bool:
        """Whether some of the metrics need generated texts: generate, then `score_texts`."""
        return bool(set(self.metrics) & metrics.OF_TEXTS)

    @property
    def full_template(self) -> str:
        """The template, or the default that the fields imply."""
        return self.template or templates.default(self.fields)

    def reading(self, tokenizer: Any) -> tuple[str, Any]:
        """The template to fill in and the tokenizer to read it with: those that know prompts, where there are any."""
        if not self.prompt_tokens:
            return self.full_template, tokenizer
        from inlay.tasks.prompts import PromptTokenizer, expand

        return expand(self.prompt_template or self.full_template, self.prompt_tokens), PromptTokenizer(tokenizer)

    def to_json(self) -> dict[str, Any]:
        """The schema as JSON-ready data."""
        return {"format": FORMAT} | json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TaskSchema:
        """The schema from what `to_json` made, of this version or an earlier one."""
        entries = dict(data)
        version = entries.pop("format", None)
        if not isinstance(version, int) or version > FORMAT:
            raise InlayError(
                f"The task's description has format {version!r}; this version of inlay reads up to {FORMAT}. Use the "
                "version that wrote it, or a later one."
            )
        known = {each.name for each in dataclasses.fields(cls)}
        for key in entries:
            if key not in known:
                raise unknown("field of a task's description", key, known)
        for key in _TUPLES:
            if entries.get(key) is not None:
                entries[key] = tuple(entries[key])
        return cls(**entries)

    # ---------------------------------------------------------------------------------------------------- inputs

    def read_inputs(self, path: str | Path) -> list[dict[str, Any]]:
        """The rows of new data to predict, as the model reads them; see `read_given`."""
        return self.read_given(path).rows

    def read_given(self, path: str | Path) -> Inputs:
        """The rows of new data to predict, from a table, a folder of pictures, or one picture.

        Only the columns that the model reads are looked at: a label column may be there or not, and whatever it says
        is ignored. An empty text is predicted like any other; one that is missing (null, NaN) is an error.
        """
        path = Path(path).expanduser()
        if self.kind == kinds.IMAGES and (path.is_dir() or files.is_picture(path)):
            pictures = self._pictures(path)
            return Inputs(pictures, pictures)
        if path.is_dir():
            raise InlayError(f"{str(path)!r} is a folder; give a table ({', '.join(files.TABLES)}).")
        if self.kind == kinds.IMAGES and path.exists() and files.suffix(path) not in files.TABLES:
            raise InlayError(
                f"{str(path)!r} is neither a picture ({', '.join(files.PICTURES)}) nor a table of pictures "
                f"({', '.join(files.TABLES)}), by its ending."
            )
        lines = self.kind == kinds.CAUSAL_LM and files.suffix(path) == ".txt"
        table = files.read_lines(path, self.fields[0]) if lines else files.read_table(path)
        given = [dict(row) for row in table.rows]  # as they came, without the columns of dotted paths
        table.add_paths(self.inputs)
        if self.kind == kinds.IMAGES:
            column = self._column("image", table.columns, path)
            return Inputs(
                given,
                [
                    {"image": locate(row[column], path, column, f"{path.name!r}, row {number}")}
                    for number, row in table.numbered
                ],
            )
        return Inputs(given, [self._input(row, table.columns, path, number) for number, row in table.numbered])

    def _pictures(self, path: Path) -> list[dict[str, Any]]:
        found = [p for p in files.files_below(path) if files.is_picture(p)] if path.is_dir() else [path]
        if not found:
            raise InlayError(f"There is no picture in {str(path)!r} ({', '.join(files.PICTURES)}).")
        return [{"image": str(p)} for p in found]

    @property
    def inputs(self) -> list[str]:
        """The user's columns that are read, by their names or their dotted paths."""
        return list(dict.fromkeys([self.columns.get(name, name) for name in self.fields] + [*self.columns.values()]))

    def _column(self, name: str, columns: Sequence[str], path: Path) -> str:
        column = self.columns.get(name, name)
        if column not in columns:
            raise InlayError(
                f"{path.name!r} lacks the column {column!r} that the model was trained on (columns: "
                f"{', '.join(columns)})."
            )
        return column

    def row(self, values: Mapping[str, Any], source: str, number: int) -> dict[str, Any]:
        """One row to predict from its fields; `source` and `number` say where it stood if it cannot be read."""
        inner = {name: reach(values, name) for name in self.inputs if name not in values}
        whole = {**values, **{name: value for name, value in inner.items() if value is not None}}
        return self._input(whole, list(whole), Path(source), number)

    def _input(self, row: Mapping[str, Any], columns: Sequence[str], path: Path, number: int) -> dict[str, Any]:
        """One row to predict, normalised as in training."""
        if self.prepare:
            needed = prepare.INPUTS[self.prepare]
            renamed = {ours: row.get(theirs) for ours, theirs in self.columns.items()}
            values = {**row, **{name: value for name, value in renamed.items() if not is_null(value)}}
            found = next((names for names in needed if all(not is_null(values.get(n)) for n in names)), None)
            if found is None:
                wanted = " or ".join(", ".join(map(repr, names)) for names in needed)
                has = ", ".join(name for name in columns if not is_null(row[name])) or "none"
                raise InlayError(f"{path.name!r}, row {number}: it needs the columns {wanted} (it has {has}).")
            given = {name: values[name] for name in found}
            if isinstance(given.get("text"), list):
                given["tokens"] = given.pop("text")
            try:
                (made,) = prepare.PREPARE[self.prepare](given)
            except InlayError as error:
                raise InlayError(f"{path.name!r}, row {number}: {error}") from None
            return made
        read = as_words if self.kind == kinds.TOKENS else as_text
        where = f"{path.name!r}, row {number}"
        taken = {name: self._column(name, columns, path) for name in self.fields}
        return {name: read(row[column], column, where) for name, column in taken.items()}

    def encode_inputs(
        self, rows: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
    ) -> Encoded | EncodedImages:
        """Unlabelled rows ready for the collator. For language models: prompts to be continued."""
        from inlay.tasks import encode, images

        if self.kind == kinds.IMAGES:
            sources = [row["image"] for row in rows]
            images.check_all(sources)
            return images.EncodedImages(sources, None, processor)
        # What was settled on in training is what the model can read: never more, whatever is asked for.
        limits = (max_length, self.max_length, encode.length_limit(processor))
        length = min((limit for limit in limits if limit), default=encode.DEFAULT_LENGTH)
        if self.writes_text:
            mask = getattr(processor, "mask_token", None)
            prompts = [templates.render(self.full_template, row, mask)[0] for row in rows]
            # What is written needs room after the prompt, but never more than half of it.
            return encode.encode_prompts(prompts, processor, max(length // 2, length - (self.max_new_tokens or 0)))
        if self.kind == kinds.TOKENS:
            columns, words, cut = encode.encode_tokens(rows, processor, length)
            return encode.Encoded(columns, words=words, cut=cut, sizes=[len(row["tokens"]) for row in rows])
        how = encode.encode_spans if self.kind == kinds.SPANS else encode.encode_texts
        columns, cut = how(rows, *self.reading(processor), length)
        return encode.Encoded(columns, cut=cut)

    def collator(self, processor: Any, model: Any = None, *, generation: bool = False) -> Any:
        """What makes a batch of encoded rows; padded on the left when the batch is to be continued.

        `model` is accepted for the convenience of callers and not needed.
        """
        from inlay.tasks.encode import TextCollator
        from inlay.tasks.images import ImageCollator

        return ImageCollator() if self.kind == kinds.IMAGES else TextCollator(processor, left=generation)

    # --------------------------------------------------------------------------------------------------- outputs

    def decode(
        self, predictions: Any, inputs: Encoded | None = None, *, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """Predictions in words, one dict a row.

        Classes: label and score (its probability), with `probabilities` those of all classes by name. A value: value.
        Token classification: a tag for each word, for which the encoded `inputs` are needed. Language models: the
        generated texts as they are.
        """
        if self.writes_text:
            return [{"text": str(text).strip()} for text in predictions]
        predictions = np.asarray(predictions)
        if self.kind == kinds.REGRESSION:
            return [{"value": float(value)} for value in self.unscale(predictions.reshape(len(predictions)))]
        names = self.label_names or ()
        if self.kind == kinds.TOKENS:
            if inputs is None or inputs.words is None or inputs.sizes is None:
                raise InlayError(
                    "To decode token classification, pass the encoded inputs: decode(predictions, inputs)."
                )
            # Prompt-tuned models give logits for their virtual tokens too, ahead of the text's.
            ahead = max(0, predictions.shape[1] - max(map(len, inputs.words), default=0))
            found = zip(predictions[:, ahead:].argmax(axis=-1), inputs.words, inputs.sizes, strict=True)
            return [{"tags": self._tags(row, words, size)} for row, words, size in found]
        logits = predictions.astype(np.float64)
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        best = shares.argmax(axis=-1)
        answers = [{"label": names[i], "score": float(row[i])} for i, row in zip(best, shares, strict=True)]
        if not probabilities:
            return answers
        every = [dict(zip(names, map(float, row), strict=True)) for row in shares]
        return [answer | {"probabilities": each} for answer, each in zip(answers, every, strict=True)]

    def _tags(self, best: np.ndarray, words: Sequence[int], size: int) -> list[str]:
        """A tag for each word; one that the model did not read (cut off, or control characters alone) gets O."""
        names = self.label_names or ()
        tags = ["O"] * size
        for position, word in enumerate(words):
            if word >= 0:
                tags[word] = names[int(best[position])]
        return tags

    def unscale(self, values: np.ndarray) -> np.ndarray:
        """Values as the data has them, from values as the model is trained on them."""
        return values.astype(np.float64) * self.deviation + self.mean

    def compute_metrics(self, predictions: Any, labels: Any, encoded: Any = None) -> dict[str, float]:
        """The task's metrics from the model's outputs (for language models: from those of `reduce_logits`).

        `encoded` is the split that was predicted. Token classification needs it to score against every word of the
        texts, those that were cut off included; without it, only words that the model read are scored.
        """
        predictions = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
        labels = np.asarray(labels[0] if isinstance(labels, tuple) else labels)
        if self.kind in kinds.LANGUAGE_MODELS:
            return metrics.of_tokens(self.metrics, predictions[:, 0], predictions[:, 1], predictions[:, 2])
        if self.kind == kinds.REGRESSION:
            return metrics.of_values(
                self.metrics, self.unscale(predictions.reshape(-1)), self.unscale(labels.reshape(-1))
            )
        names = self.label_names or ()
        if self.kind == kinds.TOKENS:
            # Prompt-tuned models give logits for their virtual tokens too, ahead of the text's.
            best = predictions[:, predictions.shape[1] - labels.shape[1] :].argmax(axis=-1)
            if encoded is not None:
                found = zip(best, encoded.words, encoded.sizes, strict=True)
                guessed = [self._tags(row, words, size) for row, words, size in found]
                return metrics.of_entities(self.metrics, guessed, [[names[i] for i in row] for row in encoded.tags])
            kept = labels >= 0
            predicted = [[names[i] for i in row[mask]] for row, mask in zip(best, kept, strict=True)]
            true = [[names[i] for i in row[mask]] for row, mask in zip(labels, kept, strict=True)]
            return metrics.of_entities(self.metrics, predicted, true)
        return metrics.of_classes(self.metrics, predictions.argmax(axis=-1), labels, names)

    def reduce_logits(self, logits: Any, labels: Any) -> Any:
        """What to keep of a batch's logits for `compute_metrics`; pass as `preprocess_logits_for_metrics`.

        For language models three numbers an example (summed loss, predicted tokens, whether all were right) in place
        of the whole vocabulary at every position.
        """
        import torch
        from torch.nn.functional import cross_entropy

        from inlay.tasks.encode import IGNORED

        logits = logits[0] if isinstance(logits, tuple) else logits
        if self.kind not in kinds.LANGUAGE_MODELS:
            return logits
        ahead = logits[:, -labels.shape[1] : -1].float()
        wanted = labels[:, 1:]
        losses = cross_entropy(ahead.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
        counted = wanted != IGNORED
        right = ((ahead.argmax(-1) == wanted) | ~counted).all(-1)
        return torch.stack([losses.sum(-1), counted.sum(-1).float(), right.float()], dim=1)

    def score_texts(self, texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The metrics of generated texts, one for each of `rows` (those of a split, in order)."""
        texts = [text.strip() for text in texts]
        found = {}
        if "bleu" in self.metrics:
            found["bleu"] = metrics.bleu(texts, [row["references"] for row in rows])
        if "answer-accuracy" in self.metrics:
            found["answer-accuracy"] = metrics.answer_accuracy(texts, [row["target"] for row in rows])
        if "exact-match" in self.metrics:
            found["exact-match"] = metrics.exact_match(texts, [row["target"] for row in rows])
        return found
