"""Where a named backbone lies, and whether what lies there can be loaded at all.

A name is `embedded:<name>`, the path of a folder, or a hub id, in this order. The hub is asked once, with a short
timeout; where it does not answer, what an earlier run left in the hub's cache is used without another attempt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from inlay import fetch
from inlay.backbones import embedded
from inlay.errors import InlayError, asked, first_line, misspelt, nearest, unknown
from inlay.records.atomic import file_digest, write_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
IMAGE_PROCESSOR = "preprocessor_config.json"
CACHED = "hub cache"
_WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
CARD_CHARACTERS = 2**16  # of a model card: its head stands at the beginning
_CONVERT = (
    "Pickled weights can run code when they are opened, so inlay never opens them. Convert a checkpoint you trust "
    "once, with `AutoModel.from_pretrained(..., use_safetensors=False).save_pretrained(...)`, or take a revision that "
    "has model.safetensors."
)
_ALTERNATIVES = (
    "A local folder (--model ./my-model) or an embedded backbone (--model embedded:minilm) works without it."
)


@dataclass(frozen=True)
class Location:
    """A backbone that was found: what to hand to Transformers, its raw config, and where it came from, for people."""

    name: str
    path: str
    config: Mapping[str, Any]
    source: str
    files: frozenset[str]
    folder: Path | None = None
    revision: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords that point `from_pretrained` at exactly this place."""
        return {"revision": self.revision} if self.folder is None else {"local_files_only": True}

    def has(self, file: str) -> bool:
        """Whether the checkpoint comes with this file."""
        return file in self.files

    def read_json(self, file: str) -> Any:
        """What a small file of the checkpoint holds; None where there is no such file."""
        path = None if self.folder is None else self.folder / file
        try:
            if path is None and file in self.files:
                from huggingface_hub import hf_hub_download

                path = Path(hf_hub_download(self.name, file, revision=self.revision))
            return json.loads(path.read_text("utf-8")) if path is not None and path.is_file() else None
        except Exception as error:  # also whatever the HTTP client of this version raises
            raise InlayError(f"{file} of {self.name!r} cannot be read: {first_line(error)}") from error

    @property
    def model_type(self) -> str:
        """Transformers' name of the architecture."""
        return "timm_wrapper" if "pretrained_cfg" in self.config else str(self.config.get("model_type"))

    @property
    def modality(self) -> Literal["text", "image"]:
        """Whether it reads text or images."""
        own_code = "AutoModelForImageClassification" in self.config.get("auto_map", {})
        return "image" if own_code or self.model_type in heads("image-classification") else "text"


def find(name: str, revision: str | None = None) -> Location:
    """The place of the backbone called `name`, with every check that needs no weights."""
    path = Path(name).expanduser()
    if name.startswith(embedded.PREFIX) or path.exists() or _looks_like_path(name):
        if revision is not None:
            raise InlayError(f"revision={revision!r} is for hub ids; {name!r} is not one. Leave the revision out.")
        if name.startswith(embedded.PREFIX):
            return _embedded(name)
        return _folder(name, path)
    return _hub(name, revision)


def portable(name: str) -> str:
    """A backbone's name without a path of this machine, to be written into what is given away.

    A folder that was named from the root or the home directory goes by its own name alone. Folders begin with a dot: a
    plain name would be taken for one of the hub's.
    """
    path = Path(name).expanduser()
    if name.startswith(embedded.PREFIX) or not (path.exists() or _looks_like_path(name)):
        return name
    if path.is_absolute():
        return f"./{path.resolve().name}"
    return name if name.startswith(".") else f"./{name}"


def licence(place: Location) -> str | None:
    """The licence of a checkpoint: an embedded one's, or what the card beside a local one says."""
    if place.name.startswith(embedded.PREFIX):
        return embedded.card(place.name).licence
    card = None if place.folder is None else place.folder / "README.md"
    if card is None or not card.is_file():
        return None
    try:
        with open(card, encoding="utf-8") as file:
            begin, *lines = file.read(CARD_CHARACTERS).splitlines()
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    if begin != "---" or "---" not in lines:
        return None
    said = [line.partition(":")[2].strip() for line in lines[: lines.index("---")] if line.startswith("license:")]
    return said[0] if said and re.fullmatch(r"[\w.+-]+", said[0]) else None


def modality(name: str, revision: str | None = None) -> Literal["text", "image"]:
    """Whether the backbone reads text or images, from its config alone."""
    if name.startswith(embedded.PREFIX):
        return embedded.card(name).modality
    return find(name, revision).modality


def kind(name: str, revision: str | None = None) -> str | None:
    """How the backbone is built (`inlay.anatomy.Kind`), from its config alone; None where that does not say."""
    from inlay.anatomy import kind_of

    return kind_of(find(name, revision).model_type)


def has_two_parts(name: str, revision: str | None = None) -> bool:
    """Whether a text model has an encoder and a decoder, by its config alone."""
    from transformers import CONFIG_MAPPING

    place = find(name, revision)
    if place.model_type not in heads("sequence-to-sequence"):
        return False
    said = place.config.get("is_encoder_decoder")
    return bool(CONFIG_MAPPING[place.model_type]().is_encoder_decoder if said is None else said)


def writes_texts(name: str, revision: str | None = None) -> bool:
    """Whether the backbone is a causal language model with its head, by its config alone."""
    place = find(name, revision)
    if place.model_type not in heads("causal-lm") or place.modality != "text" or has_two_parts(name, revision):
        return False
    if place.model_type in heads("masked-lm") and not place.config.get("is_decoder"):
        return False
    made_as = place.config.get("architectures") or []
    return not made_as or any(each.endswith(_WRITERS) for each in made_as)


def version(name: str, revision: str | None = None) -> str:
    """What tells this backbone from an earlier one of the same name: the commit of a hub model, the source of an
    embedded one, the contents of a folder (but for what only people read)."""
    place = find(name, revision)
    if name.startswith(embedded.PREFIX):
        return place.source
    if place.folder is None or place.source.startswith(CACHED):
        return f"commit {place.revision or Path(place.path).name}"
    kept = sorted(file for file in place.folder.iterdir() if file.is_file() and _shapes_the_result(file))
    return " ".join(f"{file.name}:{file_digest(file)}" for file in kept)


def _shapes_the_result(file: Path) -> bool:
    return not file.name.startswith(".") and file.suffix.lower() not in (".md", ".png", ".jpg")


@cache
def heads(kind: str) -> frozenset[str]:
    """The architectures for which Transformers has a model of this kind of task."""
    from transformers.models.auto import modeling_auto as auto

    names = {
        "sequence": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "sequence-to-sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image-classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    if kind == "image-text":
        from inlay.anatomy import with_towers

        return frozenset(auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.keys() & with_towers())
    if kind == "embedding":  # a body that reads texts and has no decoder beside it
        readers = {*names["sequence"], *names["token-classification"], *names["causal-lm"], *names["masked-lm"]}
        return frozenset(readers & auto.MODEL_MAPPING_NAMES.keys() - names["sequence-to-sequence"].keys())
    if kind == "question-answering":  # what reads a question and a text, and no image beside them
        return frozenset(auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES.keys() & names["sequence"].keys())
    return frozenset(names[kind])


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1


def _embedded(name: str) -> Location:
    where = embedded.folder(name)
    return _in_folder(name, where.path, where.source, where.notes)


def _in_folder(name: str, folder: Path, source: str, notes: tuple[str, ...] = ()) -> Location:
    check_folder(folder, name)
    files = frozenset(entry.name for entry in folder.iterdir())
    return Location(name, str(folder), read_config(folder, name), source, files, folder=folder, notes=notes)


def _folder(name: str, path: Path) -> Location:
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise InlayError(
            f"Model folder {name!r} {problem}.{misspelt(path)} Give a folder with config.json and {WEIGHTS}, a hub id "
            f"such as google/vit-base-patch16-224, or {embedded.PREFIX}<name> ({', '.join(embedded.CARDS)})."
        )
    return _in_folder(name, path, f"local folder {path.resolve()}")


def _meant(name: str) -> str:
    """Of a name that is nothing here and nothing on the hub: an embedded backbone or a folder it may stand for."""
    whole = nearest(name, [f"{embedded.PREFIX}{each}" for each in embedded.CARDS], most=1)
    return asked(whole or [f"{embedded.PREFIX}{each}" for each in nearest(name, embedded.CARDS)]) or misspelt(name)


def _hub(name: str, revision: str | None) -> Location:
    """A model of the hub at one commit; out of the cache where the hub cannot be reached."""
    from huggingface_hub import HfApi, hf_hub_download, is_offline_mode
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reason = "HF_HUB_OFFLINE is set"
    if not is_offline_mode():
        try:
            info = HfApi().model_info(name, revision=revision, timeout=embedded.HUB_TIMEOUT)
            files = frozenset(entry.rfilename for entry in info.siblings or ())
            check_files(files, name)
            # By the name the user gave, so that the cache remembers it; all the rest by the commit that this gave.
            file = Path(hf_hub_download(name, "config.json", revision=revision))
            config, commit = json.loads(file.read_text("utf-8")), file.parent.name
            check_config(config, name)
            return Location(name, name, config, f"hub {name} at {commit[:12]}", files, revision=commit)
        except InlayError:
            raise
        except HFValidationError as error:
            raise InlayError(
                f"{name!r} is neither a folder here nor a possible hub id.{_meant(name)} {_ALTERNATIVES}"
            ) from error
        except GatedRepoError as error:
            raise InlayError(
                f"The hub model {name!r} is gated: accept its terms on its page, then log in with `hf auth login` (or "
                "set HF_TOKEN)."
            ) from error
        except RevisionNotFoundError as error:
            raise InlayError(f"The hub model {name!r} has no revision {revision!r}.") from error
        except RepositoryNotFoundError as error:
            raise InlayError(
                f"There is no model {name!r} on the hub that you may read, and no folder of that name here."
                f"{_meant(name)} Check the spelling; if it is private, log in with `hf auth login` (or set HF_TOKEN)."
            ) from error
        except Exception as error:  # whatever the HTTP client of this version raises when nobody answers
            reason = f"{type(error).__name__}: {first_line(error)}"
    return _cached(name, revision, reason)


def _cached(name: str, revision: str | None, reason: str) -> Location:
    """What an earlier run left in the hub's cache, or the one error that says what could not be reached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        raise InlayError(
            f"{name!r} is neither a folder here nor a possible hub id.{_meant(name)} {_ALTERNATIVES}"
        ) from error
    at = f" at revision {revision!r}" if revision else ""
    if not isinstance(config, str):
        raise InlayError(
            f"The hub could not be reached for {name!r}{at} ({reason}), it is not in the hub's cache, and there is no "
            f"folder of that name here.{_meant(name)} {_ALTERNATIVES}"
        )
    folder = Path(config).parent
    note = f"the hub was not reached ({reason}): the copy in its cache was used"
    return _in_folder(name, folder, f"{CACHED} {name} at {folder.name[:12]}", (note,))


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """config.json of a folder, as far as it can be read without knowing the architecture."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InlayError(f"config.json of {name!r} cannot be read: {error}.") from error
    check_config(config, name)
    return config


def check_config(config: Any, name: str) -> None:
    """Refuse a config whose architecture Transformers does not know."""
    if not isinstance(config, dict):
        raise InlayError(f"config.json of {name!r} is not a JSON object; it is not a Transformers config.")
    if "pretrained_cfg" in config or "auto_map" in config:
        return
    if "model_type" not in config:
        raise InlayError(
            f"config.json of {name!r} has no model_type, so it is not in Transformers' layout. Convert the model and "
            "save it with save_pretrained."
        )
    from transformers import CONFIG_MAPPING

    if config["model_type"] not in CONFIG_MAPPING:
        error = unknown("architecture (model_type)", str(config["model_type"]), CONFIG_MAPPING)
        hint = str(error).split(" Known:")[0]
        raise InlayError(f"{hint} It stands in config.json of {name!r}; a newer Transformers may know it.")


def check_files(names: Iterable[str], name: str) -> None:
    """Refuse a list of files that has no config or no safetensors, and say what it has in their place."""
    files = {file for file in names if "/" not in file}
    if "adapter_config.json" in files:
        raise InlayError(
            f"{name!r} holds a PEFT adapter (adapter_config.json), not a base model. Give the base model; to use a run "
            "of inlay, see `inlay predict --run`."
        )
    if "config.json" not in files:
        raise InlayError(f"{name!r} has no config.json. A model saved with save_pretrained has one.")
    if WEIGHTS in files or INDEX in files:
        return
    pickled = sorted(f for f in files if f.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")))
    if pickled:
        raise InlayError(f"{name!r} has its weights only as {pickled[0]!r}, not as {WEIGHTS}. {_CONVERT}")
    gguf = sorted(file for file in files if file.endswith(".gguf"))
    if gguf:
        raise InlayError(
            f"{name!r} has its weights only as {gguf[0]!r}. Load it once with from_pretrained(..., "
            f"gguf_file={gguf[0]!r}) and save it with save_pretrained, which writes {WEIGHTS}."
        )
    raise InlayError(f"{name!r} has no weights: neither {WEIGHTS} nor {INDEX}.")


def check_folder(folder: Path, name: str) -> None:
    """Refuse a folder without config or safetensors, with shards missing, or with a cut-off file."""
    from safetensors import SafetensorError, safe_open

    check_files((entry.name for entry in folder.iterdir()), name)
    for file in weight_files(folder, name):
        try:
            with safe_open(file, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise InlayError(f"{name!r} lacks the shard {file.name!r} that {INDEX} lists. Copy it again.") from error
        except (SafetensorError, OSError) as error:
            raise InlayError(
                f"{file.name} of {name!r} is damaged or cut off ({error}). Download or copy it again."
            ) from error


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of a folder, in order."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    try:
        shards = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InlayError(f"{INDEX} of {name!r} cannot be read: {error}.") from error
    return [folder / shard for shard in sorted(set(shards))]


# ----------------------------------------------------------------------------------------- folders of base models


def remember_folder(fingerprint: str, folder: Path) -> None:
    """Keep in mind where a base model lies. A cache that cannot be written to keeps nothing, and nothing is lost."""
    file = _memory(fingerprint)
    if file is not None:
        with suppress(OSError, InlayError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, f"{folder.resolve()}\n")


def recall_folder(fingerprint: str) -> Path | None:
    """The folder of a base model, if it is known and still there."""
    file = _memory(fingerprint)
    try:
        folder = Path(file.read_text(encoding="utf-8").strip()) if file is not None else None
    except (OSError, UnicodeDecodeError):
        return None
    return folder if folder is not None and folder.is_absolute() and folder.is_dir() else None


def _memory(fingerprint: str) -> Path | None:
    """A file for each model; None for what is no fingerprint, as a stranger's folder may have it."""
    known = re.fullmatch(r"[0-9a-f]{16,128}", fingerprint)
    return fetch.cache_root() / "bases" / fingerprint if known else None
