"""Images and texts that belong together: pairs to learn from, and both sides to be searched and scored on.

Every different image, by the bytes of its file, and every different text is read once. To learn from, a row is an image
and a text; to be scored on, all images come first and all texts follow, and each side is searched by the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from inlay.errors import InlayError
from inlay.tasks import images, templates
from inlay.tasks.encode import IGNORED, Encoded, TextCollator
from inlay.tasks.images import Augmentation, EncodedImages, ImageCollator
from inlay.tasks.pairs import Judged
from inlay.tasks.retrieval import score

TEMPLATE = "a photo of a {label}"
LABEL = "label"
PIXELS, TOKENS, PLACE, KNOWN = "pixel_values", "tokens", "place", "known"  # of an item that is a pair
WAYS = ("i2t", "t2i")


def captions(template: str | None, names: Sequence[str]) -> tuple[str, ...]:
    """What a template says of each class; an underscore in a class's name is read as a blank."""
    given = template or TEMPLATE
    texts = tuple(templates.render(given, {LABEL: name.replace("_", " ")}, None)[0] for name in names)
    for name, text in zip(names, texts, strict=True):
        if texts.count(text) > 1:
            same = [other for other, each in zip(names, texts, strict=True) if each == text]
            raise InlayError(
                f"The classes {', '.join(map(repr, same))} have one caption, {text!r}: no model can tell them apart. "
                f"Rename {name!r}, or merge them."
            )
    return texts


def check_template(template: str) -> None:
    """An error for a template that does not name the class, or has what only other models read."""
    templates.check(template, (LABEL,))
    for name in (templates.SEPARATOR, templates.MASK, templates.PROMPT):
        if f"{{{name}}}" in template:
            raise InlayError(
                f"The template {template!r} has {{{name}}}, which a caption cannot have. Write it with {{label}} "
                f"alone, as in {TEMPLATE!r}."
            )


class ImageTextPairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Images with their texts to learn from, for `ImageTextCollator`; `notes` and `cut` are as of `Encoded`."""

    def __init__(self, pictures: EncodedImages, texts: Encoded, judged: Judged) -> None:
        self.pictures, self.texts, self.judged = pictures, texts, judged
        self.cut, self.targets_cut = texts.cut, 0
        self.notes: tuple[str, ...] = ()
        self._known = dict(zip(judged.queries, judged.relevant, strict=True))

    @property
    def in_memory(self) -> bool:
        """Whether everything is preprocessed already, so that no process need read ahead."""
        return self.pictures.in_memory

    @property
    def deterministic(self) -> bool:
        """Whether an image is the same in every epoch."""
        return self.pictures.deterministic

    @property
    def epoch(self) -> int:
        """Which epoch the images are augmented for."""
        return self.pictures.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.pictures.epoch = number

    def __len__(self) -> int:
        return len(self.judged.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, text = self.judged.pairs[index]
        tokens = self.texts[text - len(self.pictures)]
        return {**self.pictures[image], TOKENS: tokens, PLACE: text, KNOWN: self._known[image]}


class JudgedItems(torch.utils.data.Dataset[dict[str, Any]]):
    """All images and then all texts, each by itself, and what is known of them; without that, things to embed."""

    def __init__(self, pictures: EncodedImages, texts: Encoded, judged: Judged | None = None) -> None:
        self.pictures, self.texts = pictures, texts
        self.cut, self.targets_cut = texts.cut, 0
        self.notes: tuple[str, ...] = ()
        if judged is not None:
            self.judged = judged

    @property
    def in_memory(self) -> bool:
        """Whether everything is preprocessed already, so that no process need read ahead."""
        return self.pictures.in_memory or not len(self.pictures)

    def __len__(self) -> int:
        return len(self.pictures) + len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        count = len(self.pictures)
        return self.pictures[index] if index < count else {TOKENS: self.texts[index - count]}


def encode_pairs(
    sources: Sequence[Any],
    texts: Sequence[str],
    processor: Any,
    *,
    judged: bool,
    augmentation: Augmentation | None = None,
) -> ImageTextPairs | JudgedItems:
    """Images and their texts, one for one; `judged`: as two sides that search each other."""
    number: dict[str, int] = {}
    first: list[Any] = []
    rows: list[int] = []
    for source in sources:
        key = _content(source)
        if key not in number:
            number[key] = len(number)
            first.append(source)
        rows.append(number[key])
    count = len(first)
    place: dict[str, int] = {}
    for text in texts:
        place.setdefault(text, count + len(place))
    pairs = tuple((of, place[said]) for of, said in zip(rows, texts, strict=True))
    known: dict[int, set[int]] = {}
    for picture, caption in pairs:
        known.setdefault(picture, set()).add(caption)
    found = Judged(tuple(known), tuple(place.values()), tuple(map(frozenset, known.values())), pairs)
    pictures = EncodedImages(first, None, processor, augmentation=augmentation)
    encoded = encode_captions(list(place), processor)
    return JudgedItems(pictures, encoded, found) if judged else ImageTextPairs(pictures, encoded, found)


def encode_items(rows: Sequence[Mapping[str, Any]], processor: Any) -> JudgedItems:
    """Rows to embed: all with an `image`, or all with a `text`."""
    pictures = [row["image"] for row in rows if "image" in row]
    images.check_all(pictures)
    texts = [row["text"] for row in rows if "image" not in row]
    return JudgedItems(EncodedImages(pictures, None, processor), encode_captions(texts, processor))


def encode_captions(texts: Sequence[str], processor: Any) -> Encoded:
    """Texts as the tower of texts reads them."""
    columns, cut = processor.read_texts(texts)
    return Encoded(columns, cut=cut)


def _content(source: Any) -> str:
    return hashlib.sha256(images.raw_bytes(source) or b"").hexdigest()


def reverse(judged: Judged) -> Judged:
    """What is known of the other way: the images that belong to each text."""
    found: dict[int, set[int]] = {text: set() for text in judged.corpus}
    for image, text in judged.pairs:
        found[text].add(image)
    pairs = tuple((text, image) for image, text in judged.pairs)
    return Judged(tuple(found), judged.queries, tuple(map(frozenset, found.values())), pairs)


def score_both(names: Sequence[str], vectors: np.ndarray, judged: Judged) -> dict[str, float]:
    """The named metrics of vectors of length 1: those of a way begin with its name, and others are means of both."""
    single = list(dict.fromkeys(name.removeprefix("two-way-").split("2t-")[-1].split("2i-")[-1] for name in names))
    found = {way: score(single, vectors, each) for way, each in zip(WAYS, (judged, reverse(judged)), strict=True)}
    made = {f"{way}-{name}": value for way, own in found.items() for name, value in own.items()}
    made |= {f"two-way-{name}": (found["i2t"][name] + found["t2i"][name]) / 2 for name in single}
    return {name: made[name] for name in names}


class ImageTextCollator:
    """A batch of pairs, whose `labels` are B x B: 1 for an image and its own text, 0 for a negative, and `IGNORED`
    where a text belongs to the image too. Of things by themselves: the images, and then the texts."""

    def __init__(self, processor: Any) -> None:
        self.images, self.texts = ImageCollator(), TextCollator(processor.tokenizer)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        pictures = [{PIXELS: item[PIXELS]} for item in items if PIXELS in item]
        texts = [item[TOKENS] for item in items if TOKENS in item]
        batch = self.images(pictures) if pictures else {}
        if texts:
            batch |= self.texts(texts)
        if KNOWN in items[0]:
            rows = range(len(items))
            batch["labels"] = torch.tensor([[_relation(i, j, items) for j in rows] for i in rows])
        return batch


def _relation(image: int, text: int, items: Sequence[Mapping[str, Any]]) -> int:
    if image == text:
        return 1
    return IGNORED if items[text][PLACE] in items[image][KNOWN] else 0
