"""The columns of images with a label, or with a text each."""

from __future__ import annotations

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds, labels
from inlay.tasks.column_values import Choice, looks_like_image, values_of
from inlay.tasks.label_columns import doubts_about, label_column, several_labels
from inlay.tasks.tables import Table

_CAPTIONS = ("caption", "text", "description", "sentence", "title", "alt_text")
_IMAGES = ("image", "img", "picture", "photo", "path", "file", "filename", "image_path")


def image_column(table: Table, spec: Spec) -> str | None:
    """The one column of images, unless texts were asked for."""
    captioned = spec.kind == kinds.IMAGE_TEXT
    if (spec.text and not captioned) or (spec.kind is not None and kinds.of_images(spec.kind) is None):
        return None
    found = [
        name
        for name in table.columns
        if name != spec.label and (values := values_of(table, name, 20)) and all(map(looks_like_image, values))
    ]
    if len(found) > 1:
        usual = [name for name in found if name.lower() in _IMAGES[:4]]
        if len(usual) != 1:
            raise InlayError(f"Columns {', '.join(found)} all hold images: choose one with --image.")
        found = usual
    return found[0] if found else None


def with_captions(table: Table, spec: Spec, image: str, notes: list[str]) -> Choice:
    """Images with a text each; or with a class, of which a template makes a text."""
    if spec.text and spec.label:
        raise InlayError(
            f"Each image has a text (--text {spec.text[0]}) or a class (--label {spec.label}), not both: leave one out."
        )
    usual = [name for name in table.columns if name.lower() in _CAPTIONS and name != image]
    by_class = spec.kind == kinds.IMAGE_TEXT_CLASSES or spec.label or table.class_names is not None
    if spec.text or (usual and not by_class):
        if spec.kind == kinds.IMAGE_TEXT_CLASSES:
            raise kinds.refuse(
                spec.kind, f"it needs a class for each image, not texts: leave --text {spec.text[0]} out."
            )
        texts = spec.text or tuple(usual)
        if len(texts) > 1:
            raise kinds.refuse(
                kinds.IMAGE_TEXT,
                f"a row has one text, and several columns may hold it ({', '.join(texts)}). "
                "Name one with --text; another row for the same image gives it another text.",
            )
        if not (spec.image and spec.text):
            notes.append(f"images from {image!r}, texts from {texts[0]!r}")
        return Choice(kinds.IMAGE_TEXT, texts, image=image)
    label = spec.label or label_column(table, spec, image)
    if not (spec.image and spec.label):
        notes.append(f"kind: {kinds.IMAGE_TEXT_CLASSES}; images from {image!r}, classes from {label!r}")
    return Choice(kinds.IMAGE_TEXT_CLASSES, label=label, image=image)


def with_images(table: Table, spec: Spec, image: str, notes: list[str]) -> Choice:
    kind = None if spec.kind is None else kinds.of_images(spec.kind)
    if spec.kind is not None and kind is None:
        raise InlayError(f"kind={spec.kind!r} does not go with images; {', '.join(kinds.ALL_OF_IMAGES)} do.")
    label = spec.label or label_column(table, spec, image)
    why = None
    if kind is None and (several := several_labels(table, spec, label)) is not None:
        kind, why = kinds.of_images(several[0]), several[1]
    if kind is None and table.class_names is None:
        looks = labels.looks_like_values(values_of(table, label, len(table.rows)))
        kind, why = (kinds.IMAGE_REGRESSION, f"{label!r} holds {looks}") if looks else (None, None)
    if why is not None:
        notes.append(f"kind: {kind}, because {why} (--kind says otherwise)")
    kind = kind or kinds.IMAGES
    if not (spec.image and spec.label):
        notes.append(f"images from {image!r}, label from {label!r}")
    return Choice(kind, label=label, image=image, doubts=doubts_about(table, spec, kind, label))
