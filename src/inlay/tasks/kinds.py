"""The kinds of task there are, in one table; importing this file imports nothing heavy.

A new kind is a row of `TABLE`. Loading, attaching, mixing, splitting, metrics and decoding ask the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from inlay.errors import InlayError, unknown


@dataclass(frozen=True)
class Head:
    """A head of Transformers' models. Tasks that share one share the shape of their labels and may be mixed in a batch.

    `name` is that of its list of architectures (`inlay.backbones.locate.heads`), `auto_class` the class that loads it,
    `task_type` PEFT's name for it: none for images, as PEFT's typed forward passes take token ids. `probed_as` is the
    name that methods/capabilities.json has it under.
    """

    name: str
    auto_class: str
    task_type: str | None
    probed_as: str
    modality: Literal["text", "image"] = "text"


SEQUENCE: Final = Head("sequence", "AutoModelForSequenceClassification", "SEQ_CLS", "classification")
TOKEN: Final = Head("token-classification", "AutoModelForTokenClassification", "TOKEN_CLS", "token-classification")
LANGUAGE: Final = Head("causal-lm", "AutoModelForCausalLM", "CAUSAL_LM", "causal-lm")
VECTOR: Final = Head("embedding", "AutoModel", "FEATURE_EXTRACTION", "classification")
TWO_PARTS: Final = Head(
    "sequence-to-sequence", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", probed_as="sequence-to-sequence"
)
MASKED: Final = Head("masked-lm", "AutoModelForMaskedLM", None, "masked-lm")
TOWERS: Final = Head("image-text", "AutoModelForZeroShotImageClassification", None, "image-text", "image")
READER: Final = Head("question-answering", "AutoModelForQuestionAnswering", "QUESTION_ANS", "question-answering")
IMAGE: Final = Head("image-classification", "AutoModelForImageClassification", None, "classification", "image")


@dataclass(frozen=True)
class TaskKind:
    """The facts of a kind of task.

    `predicts` is what an example is given: one class, a set of labels, probabilities of classes (shares), one of
    several ordered classes (rank), one value, several values, a tag for each word, a text, a vector, the words at masks
    (masked), or a stretch of a text (span). `loss` is Transformers' `problem_type`. `metrics` are the default ones.
    `fields` are the columns of a normalised row that the model reads; none: they keep the names of the user's columns.
    `around` are further names that a template may use.
    """

    name: str
    head: Head
    predicts: Literal[
        "class", "labels", "shares", "rank", "value", "values", "tags", "text", "vector", "masked", "span"
    ]
    metrics: tuple[str, ...]
    loss: str | None = None
    fields: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    @property
    def has_classes(self) -> bool:
        """Whether the outputs of the head have names."""
        return self.predicts == "tags" or self.has_probabilities

    @property
    def has_probabilities(self) -> bool:
        """Whether an answer has a probability for each class or label."""
        return self.predicts in ("class", "labels", "shares", "rank")

    @property
    def has_captions(self) -> bool:
        """Whether the model has a tower for images and one for texts, and compares what they read."""
        return self.head is TOWERS

    @property
    def pairs_images(self) -> bool:
        """Whether images and texts search each other, and there are no classes."""
        return self.has_captions and self.predicts == "vector"

    @property
    def has_own_answers(self) -> bool:
        """Whether `inlay.tasks.answers` says what the outputs mean, which Transformers does not."""
        return self.predicts in ("labels", "shares", "rank", "values")


CLASSIFICATION: Final = "classification"
PAIR: Final = "pair-classification"
REGRESSION: Final = "regression"
TOKENS: Final = "token-classification"
SPANS: Final = "span-classification"
CAUSAL_LM: Final = "causal-lm"
DATA_TO_TEXT: Final = "data-to-text"
EMBEDDING: Final = "embedding"
MASKED_LM: Final = "masked-lm"
QUESTION_ANSWERING: Final = "question-answering"
SEQUENCE_TO_SEQUENCE: Final = "sequence-to-sequence"
IMAGES: Final = "image-classification"
MULTI_LABEL: Final = "multi-label"
IMAGE_MULTI_LABEL: Final = "image-multi-label"
SOFT_LABELS: Final = "soft-labels"
IMAGE_SOFT_LABELS: Final = "image-soft-labels"
ORDINAL: Final = "ordinal"
IMAGE_ORDINAL: Final = "image-ordinal"
MULTI_REGRESSION: Final = "multi-regression"
IMAGE_REGRESSION: Final = "image-regression"
IMAGE_TEXT: Final = "image-text"
IMAGE_TEXT_CLASSES: Final = "image-text-classes"

_CLASS_METRICS = ("accuracy", "macro-f1")
_RETRIEVAL_METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10")
# Of an image's texts (i2t) and of a text's images (t2i); the first is the mean of both directions.
_TWO_WAY_METRICS = (
    "two-way-ndcg@10",
    *(f"{way}-{name}" for way in ("i2t", "t2i") for name in ("ndcg@10", "recall@1", "recall@10")),
)
_ENTITY_METRICS = ("entity-f1", "entity-precision", "entity-recall")
_TEXT_METRICS = ("rouge-l", "bleu", "chrf", "exact-match", "perplexity")
_ONE_OF = "single_label_classification"
_SET_METRICS = ("average-precision", "micro-f1", "macro-f1", "subset-accuracy")
_ANY_OF = "multi_label_classification"
# Transformers' heads have no loss for probabilities and ranks: this one takes their targets, and ours its place.
_SHARE_METRICS = ("kl", "brier", "accuracy")
_RANK_METRICS = ("quadratic-kappa", "rank-mae", "within-one", "accuracy")
_VALUE_METRICS = ("pearson", "spearman", "r2", "mse")
TABLE: Final[dict[str, TaskKind]] = {
    kind.name: kind
    for kind in (
        TaskKind(CLASSIFICATION, SEQUENCE, "class", _CLASS_METRICS, _ONE_OF),
        TaskKind(PAIR, SEQUENCE, "class", _CLASS_METRICS, _ONE_OF),
        TaskKind(REGRESSION, SEQUENCE, "value", ("pearson", "spearman", "mse"), "regression"),
        TaskKind(TOKENS, TOKEN, "tags", _ENTITY_METRICS, fields=("tokens",)),
        TaskKind(SPANS, SEQUENCE, "class", _CLASS_METRICS, _ONE_OF, ("text", "span"), around=("left", "right")),
        TaskKind(CAUSAL_LM, LANGUAGE, "text", ("perplexity", "exact-match")),
        TaskKind(DATA_TO_TEXT, LANGUAGE, "text", ("bleu", "perplexity"), fields=("source",)),
        TaskKind(EMBEDDING, VECTOR, "vector", _RETRIEVAL_METRICS),
        TaskKind(SEQUENCE_TO_SEQUENCE, TWO_PARTS, "text", _TEXT_METRICS),
        TaskKind(MASKED_LM, MASKED, "masked", ("perplexity", "masked-accuracy")),
        TaskKind(QUESTION_ANSWERING, READER, "span", ("squad-f1", "squad-exact"), fields=("question", "context")),
        TaskKind(IMAGES, IMAGE, "class", _CLASS_METRICS, _ONE_OF, ("image",)),
        TaskKind(MULTI_LABEL, SEQUENCE, "labels", _SET_METRICS, _ANY_OF),
        TaskKind(IMAGE_MULTI_LABEL, IMAGE, "labels", _SET_METRICS, _ANY_OF, ("image",)),
        TaskKind(SOFT_LABELS, SEQUENCE, "shares", _SHARE_METRICS, _ANY_OF),
        TaskKind(IMAGE_SOFT_LABELS, IMAGE, "shares", _SHARE_METRICS, _ANY_OF, ("image",)),
        TaskKind(ORDINAL, SEQUENCE, "rank", _RANK_METRICS, _ANY_OF),
        TaskKind(IMAGE_ORDINAL, IMAGE, "rank", _RANK_METRICS, _ANY_OF, ("image",)),
        TaskKind(MULTI_REGRESSION, SEQUENCE, "values", _VALUE_METRICS, "regression"),
        TaskKind(IMAGE_REGRESSION, IMAGE, "values", _VALUE_METRICS, "regression", ("image",)),
        TaskKind(IMAGE_TEXT, TOWERS, "vector", _TWO_WAY_METRICS, fields=("image", "text")),
        TaskKind(IMAGE_TEXT_CLASSES, TOWERS, "class", _CLASS_METRICS, fields=("image",)),
    )
}
KINDS: Final = tuple(TABLE)
ALL_OF_IMAGES: Final = tuple(name for name, kind in TABLE.items() if kind.head.modality == "image")
# One class an example: the metrics, the strata of splits and the decoding are the same for all of these.
ONE_LABEL: Final = frozenset(name for name, kind in TABLE.items() if kind.predicts == "class")
# The model predicts the next token, so that what is learnt is text. It reads the prompt in the same pass as what it
# writes, or (`TWO_PARTS`) in an encoder of its own.
LANGUAGE_MODELS: Final = frozenset(name for name, kind in TABLE.items() if kind.predicts == "text")

# What is learnt is the text itself: there is no label.
OF_RUNNING_TEXT: Final = (CAUSAL_LM, MASKED_LM)

# What a kind of texts is called where images are read.
_OF_IMAGES: Final = {
    MULTI_LABEL: IMAGE_MULTI_LABEL,
    SOFT_LABELS: IMAGE_SOFT_LABELS,
    ORDINAL: IMAGE_ORDINAL,
    REGRESSION: IMAGE_REGRESSION,
    MULTI_REGRESSION: IMAGE_REGRESSION,
}


def get(name: str) -> TaskKind:
    """The kind of this name, or a clear error."""
    if name not in TABLE:
        raise unknown("kind of task", name, KINDS)
    return TABLE[name]


def check_kind(name: str) -> str:
    """The name, if it is that of a kind; otherwise a clear error."""
    return get(name).name


def modality(name: str) -> Literal["text", "image"]:
    """What a model for this kind of task reads."""
    return get(name).head.modality


def of_images(name: str) -> str | None:
    """The kind that predicts the same from images; None where there is none."""
    return name if modality(name) == "image" else _OF_IMAGES.get(name)


def may_be_mixed(name: str) -> bool:
    """Whether tasks of this kind can be trained in batches with others of the same head."""
    kind = get(name)
    return not kind.has_own_answers and not kind.has_captions and kind.predicts not in ("masked", "span")


def fields_of(name: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """What a template of this kind may name, where a row has these fields."""
    return (*fields, *get(name).around)


def refuse(name: str, needs: str) -> InlayError:
    """The error for data that cannot serve a kind of task."""
    return InlayError(f"The data cannot be used for kind {name!r}: {needs}")
