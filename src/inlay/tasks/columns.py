"""Which columns of a user's table are the texts, the label and the images, and what kind of task they make.

A choice is made only where there is one; otherwise the error lists the columns and the options that name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import cells, conversations, kinds
from inlay.tasks.column_values import Choice, listed, require, values_of
from inlay.tasks.image_columns import image_column, with_captions, with_images
from inlay.tasks.label_columns import TEXTS, doubts_about, kind_of, label_column, text_columns, usual_labels
from inlay.tasks.tables import Table
from inlay.tasks.text_columns import for_answers, for_embedding, for_language_model, holds_answers, holds_positives
from inlay.tasks.texts_to_write import as_written, why_written


def choose(table: Table, spec: Spec, notes: list[str], *, writes: bool = False, beside: Sequence[Table] = ()) -> Choice:
    """The columns that the spec names, completed where only one choice is sensible; `writes`, if the model writes
    texts. `beside` are the tables of the other splits."""
    if spec.kind is not None:
        kinds.check_kind(spec.kind)
    for given in (*spec.text, *filter(None, (spec.label, spec.image))):
        require(given, table)
    pairs = spec.kind in (kinds.IMAGE_TEXT, kinds.IMAGE_TEXT_CLASSES)
    if spec.image and spec.text and not pairs:
        raise InlayError(f"Give either --image or --text, not both ({spec.image!r} and {', '.join(spec.text)!r}).")
    image = spec.image or image_column(table, spec)
    if pairs and image:
        return with_captions(table, spec, image, notes)
    if image and not (spec.image or spec.label or spec.kind) and (talk := _conversations(table, spec)):
        raise InlayError(
            f"{table.path.name!r} has images ({image!r}) beside conversations ({talk[1][conversations.FIELD]!r}), and "
            f"conversations are learnt as texts alone: --text {talk[1][conversations.FIELD]} learns them without the "
            "images. Rows that are about an image are better removed."
        )
    if image:
        return with_images(table, spec, image, notes)
    if spec.kind is not None and kinds.modality(spec.kind) == "image":
        raise InlayError(
            f"No column of {table.path.name!r} holds images or paths of images ({listed(table)}). Name it with --image."
        )
    if talk := _conversations(table, spec):
        form, columns = talk
        return Choice(kinds.CAUSAL_LM, tuple(columns.values()), chat=form, parts=columns)
    if not spec.text:
        _refuse_chats(table)
    if spec.kind in (*kinds.LANGUAGE_MODELS, *kinds.OF_RUNNING_TEXT):
        return for_language_model(table, spec, notes)
    if spec.kind == kinds.EMBEDDING or holds_positives(table, spec):
        return for_embedding(table, spec, notes)
    if spec.kind == kinds.QUESTION_ANSWERING or holds_answers(table, spec):
        return for_answers(table, spec, notes)
    label = spec.label or label_column(table, spec)
    texts = spec.text or text_columns(table, label)
    if label in texts:
        raise InlayError(f"Column {label!r} cannot be both the text and the label.")
    if not (spec.label and spec.text):
        notes.append(f"text from {', '.join(map(repr, texts))}, label from {label!r}")
    if writes and (why := why_written([table, *beside], spec, texts, label)) is not None:
        notes.append(f"kind: {kinds.CAUSAL_LM}, because {why} (--kind {kinds.CLASSIFICATION} says otherwise)")
        return Choice(kinds.CAUSAL_LM, texts, label, decided=as_written(texts, label))
    kind = kind_of(table, spec, texts, label, notes)
    return Choice(kind, texts, label, doubts=doubts_about(table, spec, kind, label))


def spelled_out(table: Table, spec: Spec, choice: Choice) -> tuple[str, ...]:
    """The fields of the spec that say what would have been chosen without them: to give them changes nothing."""
    found: list[str] = []
    chosen = replace(choice, doubts=(), decided={})
    for name, without in (("label", None), ("image", None), ("text", ()), ("kind", None)):
        if not getattr(spec, name):
            continue
        less = spec.with_(**{name: without})
        try:
            same = replace(choose(table, less, []), doubts=()) == chosen
        except InlayError:
            same = False
        if same:
            spec = less
            found.append(name)
    return tuple(found)


def _conversations(table: Table, spec: Spec) -> tuple[str, dict[str, str]] | None:
    """The form and the columns of conversations: those found where no column is named, or the one that --text names."""
    if spec.kind not in (None, kinds.CAUSAL_LM) or spec.label or len(spec.text) > 1:
        return None
    if spec.text:
        (name,) = spec.text
        held = conversations.holds(name, values_of(table, name, 1))
        return (conversations.TURNS, {conversations.FIELD: name}) if held else None
    text = [name for name in table.columns if name.lower() in TEXTS]
    usual = text if spec.kind else usual_labels(table.columns)
    return conversations.find(table.columns, lambda name, most: values_of(table, name, most), bool(usual))


def _refuse_chats(table: Table) -> None:
    """Where the text is to be found: a chat is what was meant, and not some other column beside it."""
    for name in table.columns:
        if any(map(cells.is_chat, values_of(table, name, 1))):
            raise InlayError(
                f"{table.path.name!r}: {name!r} holds chats. {cells.CHATS}. To use another column, name it with --text."
            )
