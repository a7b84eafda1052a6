"""The description of a task, with which a prediction needs no training data: small, plain, JSON.

Importing this file imports nothing heavy: the catalogue of named tasks is made of these.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, unknown
from inlay.tasks import kinds, templates

if TYPE_CHECKING:
    import numpy as np

    from inlay.tasks.chat_template import ChatTemplate
    from inlay.tasks.encode import Encoded
    from inlay.tasks.image_text import JudgedItems
    from inlay.tasks.images import EncodedImages
    from inlay.tasks.places import Places

FORMAT = 1
SPAN_OUTPUTS = ("start", "end")  # what the outputs for each token are called where a stretch of a text is found
_TUPLES = ("fields", "label_names", "metrics", "words", "class_weights", "thresholds", "means", "deviations")


@dataclass(frozen=True)
class TaskSchema:
    """What a task reads and what it answers.

    `columns` names the user's column for a field where the two differ; `mean` and `deviation` undo the scaling of a
    regression's values; `answers` says that a language model completes a prompt. `prompt_template` is the template for
    methods that put prompt tokens into the text, and `prompt_tokens` how many; with none it is not used. `cue` is what
    such a text ends in for a model that reads from left to right. `words` is a word for each class. `chat` is the form
    of conversations, where the rows are such, and `chat_template` the template that they are read with. `class_weights`
    is what each class counts in the loss. `label_separator` stands between the labels in a cell, and `thresholds` are
    the probabilities from which on each of them is given; None: a half. `means` and `deviations` are those of several
    values, whose names are the `label_names`. `temperature` divides the outputs before the softmax that makes
    probabilities of classes; None: 1, as they were trained. `longest_answer` is how many characters an answer has at
    most, and `no_answer` by how much the score of "no answer" must exceed that of the best answer; None: there always
    is one.
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
    chat: str | None = None
    chat_template: str | None = None
    class_weights: tuple[float, ...] | None = None
    label_separator: str | None = None
    thresholds: tuple[float, ...] | None = None
    means: tuple[float, ...] | None = None
    deviations: tuple[float, ...] | None = None
    temperature: float | None = None
    longest_answer: int | None = None
    no_answer: float | None = None

    @property
    def num_labels(self) -> int | None:
        """Outputs of the head: the classes, of ordered ones all but one, 1 for a value, None for language models."""
        if self.predicts == "value":
            return 1
        names = self.output_names
        return None if names is None else len(names)

    @property
    def output_names(self) -> tuple[str, ...] | None:
        """What the outputs of the head are called: as the labels; of ordered classes each says if it is above one."""
        if self.predicts == "span":
            return SPAN_OUTPUTS
        if self.predicts == "rank" and self.label_names is not None:
            return tuple(f"above {name}" for name in self.label_names[:-1])
        return self.label_names

    @property
    def modality(self) -> str:
        """What the model reads: "text" or "image"."""
        return kinds.modality(self.kind)

    @property
    def predicts(self) -> str:
        """What an example is given: see `inlay.tasks.kinds.TaskKind`."""
        return kinds.get(self.kind).predicts

    @property
    def writes_text(self) -> bool:
        """Whether a prediction is a text that the model generates."""
        return self.predicts == "text"

    @property
    def scored(self) -> bool:
        """Whether pairs of texts to embed come with how alike they are."""
        return self.predicts == "vector" and "spearman" in self.metrics

    @property
    def two_parts(self) -> bool:
        """Whether the model reads in an encoder and writes in a decoder, and not both in one."""
        return kinds.get(self.kind).head is kinds.TWO_PARTS

    @property
    def has_captions(self) -> bool:
        """Whether images are compared with texts."""
        return kinds.get(self.kind).has_captions

    @property
    def pairs_images(self) -> bool:
        """Whether images and texts search each other, and there are no classes."""
        return kinds.get(self.kind).pairs_images

    @property
    def captions(self) -> tuple[str, ...]:
        """What the classes are called in the texts that images are compared with; none where there are no classes."""
        from inlay.tasks.image_text import captions

        return captions(self.template, self.label_names) if self.has_captions and self.label_names else ()

    @property
    def generates(self) -> bool:
        """Whether some of the metrics need generated texts: generate, then `score_texts`."""
        from inlay.tasks import metrics

        return bool(set(self.metrics) & metrics.OF_TEXTS)

    @property
    def full_template(self) -> str:
        """The template, or the default that the fields imply."""
        if self.has_captions:
            from inlay.tasks.image_text import TEMPLATE

            return self.template or TEMPLATE
        if self.predicts == "vector":
            return "{text}"  # the texts of a pair are read one by one
        return self.template or templates.default(self.fields)

    def with_template(self, template: str) -> TaskSchema:
        """The schema with another template."""
        return dataclasses.replace(self, template=template, prompt_template=template)

    def template_of_chats(self, tokenizer: Any) -> ChatTemplate:
        """The chat template of conversations: the one of training, or the tokenizer's own."""
        from inlay.tasks.chat_template import ChatTemplate

        return ChatTemplate(tokenizer, self.chat_template)

    def stops(self, tokenizer: Any) -> tuple[int, ...]:
        """The tokens at which a text that the model writes is at its end."""
        if self.chat:
            return self.template_of_chats(tokenizer).stops
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

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
        """The rows of new data to predict, as the model reads them; see `inlay.tasks.new_rows.read`."""
        from inlay.tasks import new_rows

        return new_rows.read(self, path).rows

    def row(self, values: Mapping[str, Any], source: str, number: int) -> dict[str, Any]:
        """One row to predict from its fields; `source` and `number` say where it stood if it cannot be read."""
        from inlay.tasks import rows

        return rows.read_input(self, rows.with_paths(self, values), f"{source!r}, row {number}")

    def encode_inputs(
        self, rows: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
    ) -> Encoded | EncodedImages | JudgedItems:
        """Unlabelled rows ready for the collator. For language models: prompts to be continued."""
        from inlay.tasks import encode, images

        if self.pairs_images:
            from inlay.tasks.image_text import encode_items

            return encode_items(rows, processor)
        if self.modality == "image":
            sources = [row["image"] for row in rows]
            images.check_all(sources, "Mend or remove the files, or leave them out (--skip-unreadable).")
            return images.EncodedImages(sources, None, processor)
        # What was settled on in training is what the model can read: never more, whatever is asked for.
        limits = (max_length, self.max_length, encode.length_limit(processor))
        length = min((limit for limit in limits if limit), default=encode.DEFAULT_LENGTH)
        if self.two_parts:
            return self.encode_texts(rows, processor, length)
        if self.writes_text:
            # What is written needs room after the prompt, but never more than half of it.
            room = max(length // 2, length - (self.max_new_tokens or 0))
            if self.chat:
                from inlay.tasks.chat_encode import encode_questions

                return encode_questions([row["messages"] for row in rows], self.template_of_chats(processor), room)
            mask = getattr(processor, "mask_token", None)
            prompts = [templates.render(self.full_template, row, mask)[0] for row in rows]
            return encode.encode_prompts(prompts, processor, room)
        return self.encode_texts(rows, processor, length)

    def encode_texts(self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, length: int) -> Encoded:
        """The texts of rows as tokens, without their labels; not for models that continue a text."""
        from inlay.tasks import encode

        if self.predicts == "span":
            from inlay.tasks.windows import encode_windows

            return encode_windows(rows, tokenizer, length)
        if self.predicts == "tags":
            columns, words, cut = encode.encode_tokens(rows, tokenizer, length)
            return encode.Encoded(columns, words=words, cut=cut, sizes=[len(row["tokens"]) for row in rows])
        how = encode.encode_spans if self.kind == kinds.SPANS else encode.encode_texts
        columns, cut = how(rows, *self.reading(tokenizer), length)
        return encode.Encoded(columns, cut=cut)

    def text_of(self, row: Mapping[str, Any], tokenizer: Any) -> str:
        """The text that the template makes of a row."""
        return templates.render(self.full_template, row, getattr(tokenizer, "mask_token", None))[0]

    def collator(self, processor: Any, model: Any = None, *, generation: bool = False) -> Any:
        """What makes a batch of encoded rows; padded on the left when the texts themselves are to be continued.

        `model` is accepted for the convenience of callers and not needed.
        """
        from inlay.tasks.encode import TextCollator
        from inlay.tasks.images import ImageCollator
        from inlay.tasks.pairs import PairCollator

        if self.pairs_images:
            from inlay.tasks.image_text import ImageTextCollator

            return ImageTextCollator(processor)
        if self.predicts == "vector":
            return PairCollator(processor)
        left = generation and not self.two_parts
        return ImageCollator() if self.modality == "image" else TextCollator(processor, left=left)

    # --------------------------------------------------------------------------------------------------- outputs

    def decode(
        self, predictions: Any, inputs: Encoded | None = None, *, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """Predictions in words, one dict a row.

        Classes: label and score (its probability by the softmax of the outputs over `temperature`), with
        `probabilities` those of all classes by name. A value: value.
        Sets of labels and the like: see `inlay.tasks.answers`. Token classification: a tag for each word, for which the
        encoded `inputs` are needed. Language models: the generated texts as they are. A vector: embedding, and
        with `inputs` the tokens that were read. Answers to questions: see `inlay.tasks.answer_spans`; the encoded
        `inputs` are needed too.
        """
        if self.writes_text:
            return [{"text": str(text).strip()} for text in predictions]
        if self.predicts == "masked":  # in words already: see `inlay.training.filling`
            return list(predictions)
        import numpy as np

        predictions = np.asarray(predictions)
        if self.predicts == "span":
            from inlay.tasks import answer_spans

            if inputs is None:
                raise InlayError("To decode answers, pass the encoded inputs: decode(predictions, inputs).")
            return answer_spans.decode(self, predictions, inputs)
        if self.predicts == "vector":
            made: list[dict[str, Any]] = [{"embedding": vector.tolist()} for vector in predictions]
            if inputs is None or self.pairs_images:
                return made
            return [each | {"tokens": int(n)} for each, n in zip(made, inputs.lengths, strict=True)]
        if self.predicts == "value":
            return [{"value": float(value)} for value in self.unscale(predictions.reshape(len(predictions)))]
        if self.predicts not in ("class", "tags"):
            from inlay.tasks import answers

            return answers.decode(self, predictions, probabilities=probabilities)
        names = self.label_names or ()
        if self.predicts == "tags":
            if inputs is None or inputs.words is None or inputs.sizes is None:
                raise InlayError(
                    "To decode token classification, pass the encoded inputs: decode(predictions, inputs)."
                )
            # Prompt-tuned models give logits for their virtual tokens too, ahead of the text's.
            ahead = max(0, predictions.shape[1] - max(map(len, inputs.words), default=0))
            each = zip(predictions[:, ahead:].argmax(axis=-1), inputs.words, inputs.sizes, strict=True)
            return [{"tags": self._tags(row, words, size)} for row, words, size in each]
        from inlay.tasks.calibration import to_probabilities

        shares, best = to_probabilities(predictions, self.temperature), predictions.argmax(axis=-1)
        found = [{"label": names[i], "score": float(row[i])} for i, row in zip(best, shares, strict=True)]
        if not probabilities:
            return found
        every = [dict(zip(names, map(float, row), strict=True)) for row in shares]
        return [answer | {"probabilities": each} for answer, each in zip(found, every, strict=True)]

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
        return values.astype("float64") * self.deviation + self.mean

    def compute_metrics(self, predictions: Any, labels: Any, encoded: Any = None) -> dict[str, float]:
        """The task's metrics from the model's outputs (for language models: from those of `reduce_logits`).

        `encoded` is the split that was predicted. Vectors are scored by what it says of them. Token classification
        needs it to score against every word of the texts, those that were cut off included; without it, only words
        that the model read are scored.
        """
        import numpy as np

        from inlay.tasks import metrics

        predictions = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
        if self.pairs_images:
            from inlay.tasks.image_text import score_both

            return score_both(self.metrics, predictions, encoded.judged)
        if self.predicts == "vector":
            from inlay.tasks.retrieval import score

            return score(self.metrics, predictions, encoded.judged)
        if self.predicts == "span":
            from inlay.tasks import answer_spans

            return answer_spans.score(self, predictions, encoded)
        labels = np.asarray(labels[0] if isinstance(labels, tuple) else labels)
        if self.writes_text:
            return metrics.of_tokens(self.metrics, predictions[:, 0], predictions[:, 1], predictions[:, 2])
        if self.predicts == "masked":
            return metrics.of_masks(self.metrics, predictions[:, 0], predictions[:, 1], predictions[:, 2])
        if self.predicts == "value":
            return metrics.of_values(
                self.metrics, self.unscale(predictions.reshape(-1)), self.unscale(labels.reshape(-1))
            )
        if self.predicts not in ("class", "tags"):
            from inlay.tasks import answers

            return answers.score(self, predictions, labels)
        names = self.label_names or ()
        if self.predicts == "tags":
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
        if self.predicts == "masked":
            losses = cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
            counted = labels != IGNORED
            right = (logits.argmax(-1) == labels) & counted
            return torch.stack([losses.sum(-1), counted.sum(-1).float(), right.sum(-1).float()], dim=1)
        if not self.writes_text:
            return logits
        ahead, wanted = logits[:, -labels.shape[1] :].float(), labels
        if not self.two_parts:  # whose labels are those of the decoder, one for each of its outputs
            ahead, wanted = ahead[:, :-1], wanted[:, 1:]
        losses = cross_entropy(ahead.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
        return _by_row(losses, ahead.argmax(-1) == wanted, wanted != IGNORED)

    def reduce_tokens(self, losses: Any, likeliest: Any, labels: Any) -> Any:
        """The same for a causal language model, of which is known for each place the loss of the token that follows it,
        and whether that is the likeliest: there may be places of virtual tokens before those of the labels."""
        from inlay.tasks.encode import IGNORED

        losses, likeliest = (each[:, -labels.shape[1] :][:, :-1] for each in (losses, likeliest))
        return _by_row(losses.float(), likeliest, labels[:, 1:] != IGNORED)

    def score_texts(self, texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The metrics of generated texts, one for each of `rows` (those of a split, in order)."""
        from inlay.tasks import metrics

        return metrics.of_texts(self.metrics, [text.strip() for text in texts], rows)


def _by_row(losses: Any, right: Any, counted: Any) -> Any:
    import torch

    return torch.stack([losses.sum(-1), counted.sum(-1).float(), (right | ~counted).all(-1).float()], dim=1)


class Described:
    """What callers read most of a schema, without the detour."""

    schema: TaskSchema

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def kind(self) -> str:
        return self.schema.kind

    @property
    def fields(self) -> tuple[str, ...]:
        return self.schema.fields

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.schema.metrics

    @property
    def modality(self) -> str:
        """What a model for it reads: "text" or "image"."""
        return self.schema.modality


@dataclass(frozen=True)
class UndividedTask(Described):
    """What every source of data hands on: normalised rows, not yet divided, with labels still by name.

    `splits` maps "train", "validation", "test" to rows, or "all" to rows that have no division yet. Rows have the
    normalised columns of their kind; a class in "label" is its name, a value is a float, tags are a list of names. For
    images `splits` may hold a `datasets.Dataset` whose labels are numbers already. Rows that agree in the column
    `group` stay together; `resplit` are the shares of a division anew; `standardise` scales the values of a regression.
    `doubts` are those of the notes that may be why the rows cannot be divided. `spelled_out` names the fields of the
    spec that say only what the data show anyway; `decided` are those that the data and the model decided, and another
    reading of the data needs. `places` says where the rows of a split stood; without it they are counted from 1.
    """

    schema: TaskSchema
    splits: Mapping[str, Any]
    source: str
    group: str | None = None
    resplit: tuple[float, float, float] | None = None
    standardise: bool = False
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    spelled_out: tuple[str, ...] = ()
    decided: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Places] = field(default_factory=dict)
