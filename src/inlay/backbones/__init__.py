"""Frozen models to set pieces into: a hub id, a local folder, or `embedded:<name>`, which needs no account and no hub.

    backbone = load("embedded:minilm", kind="classification", label_names=["bad", "good"])

Importing this package imports neither torch nor Transformers, so that the command line can name the embedded models.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inlay.backbones.embedded import EMBEDDED

if TYPE_CHECKING:
    from inlay.backbones.image_sizes import own_side
    from inlay.backbones.loading import Backbone, load, load_for
    from inlay.backbones.locate import has_two_parts, kind, modality, version, writes_texts
    from inlay.backbones.new_parts import fingerprint
    from inlay.backbones.pooling import settle_pooling
    from inlay.backbones.processors import image_side

_LAZY = {
    "Backbone": "loading",
    "fingerprint": "new_parts",
    "has_two_parts": "locate",
    "image_side": "processors",
    "kind": "locate",
    "load": "loading",
    "load_for": "loading",
    "modality": "locate",
    "own_side": "image_sizes",
    "settle_pooling": "pooling",
    "version": "locate",
    "writes_texts": "locate",
}

__all__ = [
    "EMBEDDED",
    "Backbone",
    "fingerprint",
    "has_two_parts",
    "image_side",
    "kind",
    "load",
    "load_for",
    "modality",
    "own_side",
    "settle_pooling",
    "version",
    "writes_texts",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
