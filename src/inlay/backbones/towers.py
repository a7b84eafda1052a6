"""Models with a tower for images and one for texts (CLIP, SigLIP), which compare what the two read.

A loaded model is given another `forward`, and nothing else: its parts keep their names, so that an adapter of it loads
into Transformers' own class. With captions of classes it is a classifier of images, and without it gives vectors of
length 1: v_i of an image, u_j of a text. Both compare by the checkpoint's own scale s and offset b (0 in CLIP):

    z_ij = s cos(v_i, u_j) + b

Of B images with their texts, N_i are the texts that are not known to belong to image i, M_j the images of which the
same is true for text j. A text that stands twice in a batch, or two texts of one image, are no negatives. CLIP's loss
is the mean of two cross-entropies, SigLIP's is one yes or no for each pair:

    L_clip   = -1/2B sum_i [ log(exp z_ii / sum_{j in N_i + {i}} exp z_ij)
                           + log(exp z_ii / sum_{j in M_i + {i}} exp z_ji) ]
    L_siglip = -1/B  sum_i [ log sigmoid(z_ii) + sum_{j in N_i} log sigmoid(-z_ij) ]

Of classes k with captions, L = -1/B sum_i log softmax(z_i)[y_i]: every class is there in every batch, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from transformers.utils import ModelOutput

from inlay.errors import InlayError

CAPTIONS = "inlay_captions"
OWN, NO_PAIR = 1, -100  # of an image and a text: they are a pair; they belong together but are another pair


@dataclass
class TowersOutput(ModelOutput):
    """`logits` are those of the classes, or the vectors: of the images, then of the texts."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class Captions(nn.Module):
    """The captions of the classes as tokens; not saved, as they are no weights."""

    input_ids: Tensor
    attention_mask: Tensor

    def __init__(self, tokens: dict[str, Tensor]) -> None:
        super().__init__()
        for name in ("input_ids", "attention_mask"):
            self.register_buffer(name, tokens[name], persistent=False)


class Towers(nn.Module):
    """What stands before a model's own class, and takes the place of its `forward`."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> TowersOutput:
        """Logits of the classes where there are captions, otherwise vectors; a loss where there are labels.

        The labels are class numbers, or for pairs B x B: 1 for an image and its own text, `NO_PAIR` where they belong
        together too.
        """
        captions = getattr(self, CAPTIONS, None)
        if captions is not None and pixel_values is not None:
            classes = self.text_vectors(captions.input_ids, captions.attention_mask)
            logits = self.compare(self.image_vectors(pixel_values), classes)
            loss = None if labels is None else cross_entropy(logits.float(), labels)
            return TowersOutput(loss=loss, logits=logits)
        images = [] if pixel_values is None else [self.image_vectors(pixel_values)]
        texts = [] if input_ids is None else [self.text_vectors(input_ids, attention_mask)]
        loss = None
        if labels is not None and images and texts:
            logits = self.compare(images[0], texts[0]).float()
            loss = pairwise_loss(logits, labels) if self.has_offset else softmax_loss(logits, labels)
        return TowersOutput(loss=loss, logits=torch.cat([*images, *texts]))

    def image_vectors(self, pixel_values: Tensor) -> Tensor:
        """Vectors of length 1."""
        me: Any = self
        return normalize(me.get_image_features(pixel_values=pixel_values).pooler_output.float(), dim=-1)

    def text_vectors(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Vectors of length 1."""
        me: Any = self
        found = me.get_text_features(input_ids=input_ids, attention_mask=attention_mask)
        return normalize(found.pooler_output.float(), dim=-1)

    def get_input_embeddings(self) -> nn.Module:
        """Those of the tokens of texts."""
        me: Any = self
        found: nn.Module = me.text_model.embeddings.token_embedding
        return found

    @property
    def has_offset(self) -> bool:
        """Whether the model was pretrained by one yes or no for each pair, as SigLIP was, and not by a softmax."""
        return isinstance(getattr(self, "logit_bias", None), Tensor)

    def compare(self, images: Tensor, texts: Tensor) -> Tensor:
        """z of images and texts, by the model's own scale."""
        me: Any = self
        logits = me.logit_scale.exp() * (images @ texts.T)
        return logits + me.logit_bias if self.has_offset else logits


def softmax_loss(logits: Tensor, relations: Tensor) -> Tensor:
    """L_clip of z (B x B): images in rows, texts in columns; for `relations` see `Towers.forward`."""
    left = logits.masked_fill(relations == NO_PAIR, -torch.inf)
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(left, own) + cross_entropy(left.T, own)) / 2


def pairwise_loss(logits: Tensor, relations: Tensor) -> Tensor:
    """L_siglip of z (B x B)."""
    signs = torch.where(relations == OWN, 1.0, -1.0).to(logits.dtype)
    each = logsigmoid(signs * logits).masked_fill(relations == NO_PAIR, 0.0)
    return -each.sum() / len(logits)


def install(model: nn.Module) -> None:
    """Let a model with two towers answer as above."""
    if not isinstance(model, Towers):
        kind: Any = type(model)
        model.__class__ = _with_towers(kind)


@cache
def _with_towers(kind: Any) -> type[nn.Module]:
    """The class under its own name, which is written into a checkpoint's config."""
    return type(kind.__name__, (Towers, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def set_captions(model: nn.Module, processor: Any, captions: Sequence[str]) -> None:
    """Let the model compare images with these captions."""
    columns, cut = processor.read_texts(captions)
    if cut:
        raise InlayError(
            f"{cut} of {len(captions)} captions of classes are longer than the {processor.length} tokens that the "
            f"model reads, such as {max(captions, key=len)[:60]!r}. Shorten the template or the names."
        )
    place = next(model.parameters()).device
    tokens = processor.tokenizer.pad(columns, return_tensors="pt")
    model.add_module(CAPTIONS, Captions({name: value.to(place) for name, value in tokens.items()}))


@contextmanager
def without_captions(model: nn.Module) -> Iterator[None]:
    """Inside, the model gives vectors and no classes."""
    whole: Any = next((module for module in model.modules() if isinstance(module, Towers)), model)
    kept = getattr(whole, CAPTIONS, None)
    try:
        if kept is not None:
            delattr(whole, CAPTIONS)
        yield
    finally:
        if kept is not None:
            whole.add_module(CAPTIONS, kept)


class ImageTextProcessor:
    """The image processor of such a model, and its tokenizer beside it.

    `length` is how many tokens the model reads; a model that was pretrained on texts of one length (`padded`) is given
    that always, and no mask.
    """

    def __init__(self, image: Any, tokenizer: Any, length: int, padded: bool) -> None:
        self.image, self.tokenizer, self.length, self.padded = image, tokenizer, length, padded

    def __call__(self, images: Any, **how: Any) -> Any:
        return self.image(images, **how)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "image" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.image, name)

    def read_texts(self, texts: Sequence[str]) -> tuple[dict[str, list[list[int]]], int]:
        """Texts as tokens, and how many were cut."""
        whole = self.tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
        cut = sum(len(ids) > self.length for ids in whole)
        how: dict[str, Any] = {"truncation": True, "max_length": self.length}
        if self.padded:
            how["padding"] = "max_length"
        ids = self.tokenizer(list(texts), **how)["input_ids"] if texts else []
        # What fills a text of one length up was read in pretraining too.
        return {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}, cut

    def save_pretrained(self, folder: Any) -> None:
        """Both parts, as Transformers finds them."""
        self.image.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
