"""Which feature of a text a classifier's head reads: the checkpoint's own pooling, the user's choice, or Transformers'.

A sentence encoder was trained for one pooling, and says for which in sentence-transformers' files beside its weights.
Transformers' classifiers do not read these: BERT's takes the pooler, which such a checkpoint never trained.
Nothing here imports torch before an architecture must be looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from inlay.backbones import embedded
from inlay.backbones.locate import CACHED, Location, find, heads
from inlay.errors import InlayError, unknown
from inlay.records.spec import POOLINGS
from inlay.tasks import kinds

AUTO, OWN, POOLER = "auto", "own", "pooler"
MODULES, FOLDER = "modules.json", "1_Pooling"
PUBLISHER = "sentence-transformers/"  # on the hub: all that it has are sentence encoders
IN_WORDS = {
    "mean": "the mean of the tokens' states",
    "first": "the first token's state",
    "last": "the last token's state",
    POOLER: "the pooler's output",
}
# Sentence-transformers' names of what is done here, as written before version 5 and since.
_SENTENCES = {
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "first",
    "cls": "first",
    "lasttoken": "last",
}


def _pools(kind: str) -> bool:
    """Whether the head reads one state of a text."""
    return kinds.get(kind).head is kinds.SEQUENCE


def settle_pooling(name: str, kind: str, wanted: str, revision: str | None = None) -> str:
    """What is to be recorded for the backbone called `name`: auto only where the checkpoint says nothing of its own."""
    if kinds.get(kind).head is kinds.VECTOR:
        return str(settle(find(name, revision), kind, wanted))
    if wanted == OWN or (wanted == AUTO and not _pools(kind)):
        return wanted
    replaced = settle(find(name, revision), kind, wanted)
    return replaced or (AUTO if wanted == AUTO else OWN)


def settle(place: Location, kind: str, wanted: str) -> str | None:
    """What the head is to read in place of what its architecture has it read; None: nothing is replaced.

    `wanted` is one of `inlay.records.spec.POOLINGS`.
    """
    if wanted not in POOLINGS:
        raise unknown("pooling", wanted, POOLINGS)
    if kinds.get(kind).head is kinds.VECTOR:
        return _of_vector(place, wanted)
    if not _pools(kind) or place.modality != "text":
        if wanted in (OWN, AUTO):
            return None
        raise InlayError(
            f"pooling={wanted!r}: {kind} has no single feature of a text that a head could read. Leave it out."
        )
    own = reads(place)
    if wanted == AUTO:
        wanted = (declared(place) or OWN) if own is not None else OWN
    if wanted == OWN:
        return None
    if own is None:
        raise InlayError(
            f"pooling={wanted!r}: what the head of {place.name!r} ({place.model_type}) reads cannot be chosen. "
            "Leave it out."
        )
    if wanted == POOLER != own:
        raise InlayError(
            f"pooling='pooler': the head of {place.name!r} ({place.model_type}) reads no pooler, it reads "
            f"{IN_WORDS[own]}. Give mean, first or last."
        )
    return None if wanted == own else wanted


def _of_vector(place: Location, wanted: str) -> str:
    """Which feature of a text is its vector; auto: what the checkpoint was made for, else the mean of an encoder's
    states, and the last one of a decoder, where only the last token has read the whole text."""
    if wanted in (OWN, POOLER):
        raise InlayError(
            f"pooling={wanted!r}: a text's vector is made of the tokens' states, without a pooler. Give mean, first or "
            "last, or leave it out."
        )
    if wanted != AUTO:
        return wanted
    forward_only = place.model_type in heads("causal-lm") and place.model_type not in heads("masked-lm")
    return declared(place) or ("last" if forward_only else "mean")


def reads(place: Location) -> str | None:
    """What the head of this architecture reads by itself; None where that is not known."""
    from inlay.anatomy import pooling_of

    own = pooling_of(place.model_type)
    stated = place.config.get("classifier_pooling")  # of ModernBERT, whose config has the choice
    return own if own is None or stated != "mean" else "mean"


def declared(place: Location) -> str | None:
    """The pooling that the checkpoint was made for, by its card or by sentence-transformers' files; None: none is said.

    One that there is not here is an error: to read another feature without a word would be worse.
    """
    if place.name.startswith(embedded.PREFIX):
        return embedded.card(place.name).pooling
    folder = _folder(place)
    found = None if folder is None else place.read_json(f"{folder}/config.json")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise InlayError(f"{folder}/config.json of {place.name!r} is not a JSON object. {_CHOOSE}")
    modes = _modes(found)
    if len(modes) != 1 or modes[0] not in _SENTENCES:
        raise InlayError(
            f"{place.name!r} is a sentence encoder that pools by {' and '.join(modes) or 'nothing that is known'} "
            f"({folder}/config.json), which there is not here. {_CHOOSE}"
        )
    return _SENTENCES[modes[0]]


_CHOOSE = f"Choose what the head reads: --pooling {' | '.join(POOLINGS[2:])}."


def _folder(place: Location) -> str | None:
    """The folder of the pooling's settings."""
    modules = place.read_json(MODULES)
    if modules is None:
        if place.source.startswith(CACHED) and place.name.startswith(PUBLISHER):
            raise InlayError(
                f"The copy of {place.name!r} in the hub's cache lacks {MODULES}, which says what it was made for. Load "
                f"it once with a network. Or: {_CHOOSE}"
            )
        return FOLDER
    if not isinstance(modules, list) or not all(isinstance(each, Mapping) for each in modules):
        raise InlayError(f"{MODULES} of {place.name!r} is not a list of JSON objects. {_CHOOSE}")
    path = next((each.get("path") for each in modules if str(each.get("type")).endswith(".Pooling")), None)
    if path is not None and (not isinstance(path, str) or not path or PurePosixPath(path).name != path):
        raise InlayError(f"{MODULES} of {place.name!r} has the pooling at {path!r}, which is no folder. {_CHOOSE}")
    return path


def doubts(place: Location, kind: str, wanted: str) -> list[str]:
    """A line for people where a copy in the hub's cache may be a sentence encoder's and cannot say so.

    Such a checkpoint is a body without any head.
    """
    if wanted != AUTO or not _pools(kind) or not place.source.startswith(CACHED) or reads(place) is None:
        return []
    made = place.config.get("architectures")
    body = isinstance(made, list) and any(str(each).endswith("Model") and "LMHead" not in str(each) for each in made)
    if not body or any(place.read_json(file) is not None for file in (MODULES, f"{FOLDER}/config.json")):
        return []
    lacking = f"the copy of {place.name} in the hub's cache has no {MODULES}"
    return [f"{lacking}: if it is a sentence encoder, load it once with a network, or choose by --pooling"]


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Sentence-transformers' names of what is done, of which several would be joined."""
    named = config.get("pooling_mode")
    if named is not None:
        return [str(each) for each in (named if isinstance(named, list) else [named])]
    prefix = "pooling_mode_"
    return [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]


def written(pooling: str, hidden_size: int) -> dict[str, Any]:
    """Sentence-transformers' files, by their paths, by which a checkpoint says what it was trained for."""
    stated = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
    kinds_of = {"": "Transformer", FOLDER: "Pooling"}
    return {
        MODULES: [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(kinds_of.items())
        ],
        f"{FOLDER}/config.json": {"word_embedding_dimension": hidden_size}
        | {f"pooling_mode_{name}": how == pooling for how, name in stated.items()},
    }
