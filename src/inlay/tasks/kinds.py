"""The kinds of task there are, as plain strings; importing this file imports nothing heavy."""

from __future__ import annotations

from typing import Final

from inlay.errors import InlayError, unknown

CLASSIFICATION: Final = "classification"
PAIR: Final = "pair-classification"
REGRESSION: Final = "regression"
TOKENS: Final = "token-classification"
SPANS: Final = "span-classification"
CAUSAL_LM: Final = "causal-lm"
DATA_TO_TEXT: Final = "data-to-text"
IMAGES: Final = "image-classification"

KINDS: Final = (CLASSIFICATION, PAIR, REGRESSION, TOKENS, SPANS, CAUSAL_LM, DATA_TO_TEXT, IMAGES)

# One class an example: the metrics, the strata of splits and the decoding are the same for all of these.
ONE_LABEL: Final = frozenset({CLASSIFICATION, PAIR, SPANS, IMAGES})
# The model predicts the next token, so that what is learnt is text.
LANGUAGE_MODELS: Final = frozenset({CAUSAL_LM, DATA_TO_TEXT})


def check_kind(kind: str) -> str:
    """`kind`, if it is one; otherwise a clear error."""
    if kind not in KINDS:
        raise unknown("kind of task", kind, KINDS)
    return kind


def modality(kind: str) -> str:
    """What a model for this kind of task reads: "text" or "image"."""
    return "image" if check_kind(kind) == IMAGES else "text"


def refuse(kind: str, needs: str) -> InlayError:
    """The error for data that cannot serve a kind of task."""
    return InlayError(f"The data cannot be used for kind {kind!r}: {needs}")


def fields_of(kind: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """What a template may name: the fields, and around a marked span what stands on both sides of it."""
    return (*fields, "left", "right") if kind == SPANS else fields
