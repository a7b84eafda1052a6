"""Folders of PEFT's LoRAs, from anywhere: looked at before they are obeyed, and told what they are for.

An adapter with inlay's notes, or in a run, says what it reads and what its outputs mean. Of any other the type of its
task says what kind of thing it does, and the size of its head how many classes there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from inlay.backbones import embedded
from inlay.errors import InlayError, first_line, misspelt
from inlay.methods.folder import CONFIG, DEFAULT, NOTE, TASKS, WEIGHTS, AdapterFolder, is_present, read_json
from inlay.records.atomic import file_digest
from inlay.tasks import kinds
from inlay.workflow.prompt_folders import method_of

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.tasks import TaskSchema

LORA = "LORA"  # PEFT's name of the type
SHORT = 12  # characters of a revision
EMBEDDING = kinds.EMBEDDING
HEADS = {head.task_type: head for head in (kinds.SEQUENCE, kinds.TOKEN, kinds.LANGUAGE)}
FEATURES = kinds.VECTOR.task_type
INSIDE = "adapter"  # of a run, the folder that it lies in
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")


@dataclass(frozen=True)
class LoraAdapter:
    """What the files of a LoRA say of it. `schema` is what its task reads and says, where somebody wrote that down;
    `labels` and `named_kind` are what a note alone says. `revision` is a commit of the hub, or the SHA-256 of the
    weights, in short."""

    place: Path
    source: str
    revision: str
    settings: Mapping[str, Any]
    note: Mapping[str, Any]
    schema: TaskSchema | None
    shapes: Mapping[str, Tensor]
    kept: Any = field(default=None, compare=False)  # a folder for as long as it is needed

    @property
    def fingerprint(self) -> str | None:
        """That of the base model it was made of, where a note says."""
        found = self.note.get("fingerprint")
        return found if isinstance(found, str) else None

    @property
    def base_model(self) -> str | None:
        """The base model, by the name that inlay finds it by."""
        found = self.note.get("base_model") or self.settings.get("base_model_name_or_path")
        return found if isinstance(found, str) else None

    @property
    def pooling(self) -> str | None:
        """What its head was trained to read in place of what the architecture has it read; None: nothing."""
        found = self.note.get("pooling")
        return found if isinstance(found, str) else None

    @property
    def head(self) -> kinds.Head | None:
        """The head of Transformers' that it was trained with; None: none, or it does not say."""
        if self.schema is not None:
            head = kinds.get(self.schema.kind).head
            return None if head is kinds.VECTOR else head
        found = self.settings.get("task_type")
        return HEADS.get(found) if isinstance(found, str) else None

    @property
    def own_weights(self) -> dict[str, Tensor]:
        """The shapes of what it brings beside its low-rank products: a head, by the names that the model has."""
        from inlay.methods.plain import plain_name

        return {plain_name(key): value for key, value in self.shapes.items() if ".lora_" not in key}

    def task(self, outputs: int | None, name: str, max_length: int | None) -> TaskSchema:
        """What it reads and says. Where nobody wrote that down: a text, or a pair of them, and classes by number."""
        from inlay.tasks import TaskSchema

        if self.schema is not None:
            if self.schema.num_labels not in (None, outputs):
                raise InlayError(
                    f"{self.place} has a head with {outputs} outputs, and its task has {self.schema.num_labels}: they "
                    "do not belong together."
                )
            return self.schema
        about = self.note.get("about") if isinstance(self.note.get("about"), Mapping) else {}
        labels = about.get("labels") if about else None
        if not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != outputs:
            labels = [f"LABEL_{i}" for i in range(outputs or 0)]
        if self.head is kinds.TOKEN:
            return TaskSchema(name, kinds.TOKENS, ("tokens",), (), tuple(map(str, labels)), max_length=max_length)
        if self.head is kinds.LANGUAGE:
            return TaskSchema(name, kinds.CAUSAL_LM, ("text",), (), answers=True, max_length=max_length)
        if outputs == 1:
            return TaskSchema(name, kinds.REGRESSION, ("text",), (), max_length=max_length)
        return TaskSchema(name, kinds.CLASSIFICATION, ("text",), (), tuple(map(str, labels)), max_length=max_length)


# ---- where they lie


def adapter_in(folder: Path) -> Path | None:
    """The folder itself, or that of the run it is, if it holds an adapter; None where it holds none."""
    places = (folder, folder / INSIDE)
    return next((place for place in places if (place / CONFIG["peft"]).is_file()), None)


def tasks_in(folder: Path) -> Path | None:
    """The folder itself, or that of the run it is, if it holds adapters of several tasks."""
    return next((place for place in (folder, folder / INSIDE) if (place / TASKS).is_file()), None)


def is_hub_id(source: str) -> bool:
    """Whether a name looks like a repository's on the hub."""
    return HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def fetch(repository: str, revision: str | None = None) -> tuple[Path, str]:
    """The folder in the hub's cache that a repository's adapter lies in, and the commit; it is fetched where it is not
    there."""
    from huggingface_hub import snapshot_download

    try:
        place = Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=[CONFIG["peft"], WEIGHTS["peft"], NOTE["peft"]]
            )
        )
    except (OSError, ValueError) as error:  # all of the hub's errors are one or the other
        raise InlayError(
            f"{repository!r} could not be fetched from the hub: {first_line(error)} Without a network it must be in "
            "the cache; a folder is given by its path."
        ) from None
    return place, place.name


def look(source: Path | str, revision: str | None = None) -> LoraAdapter:
    """What a folder, a run or a repository of the hub holds; an error where that is no whole LoRA."""
    from inlay.methods import vetting

    said, commit = str(source), None
    folder = Path(source)
    if isinstance(source, str) and is_hub_id(source):
        folder, commit = fetch(source, revision)
    place = adapter_in(folder)
    if place is None:
        if (inner := tasks_in(folder)) is not None:
            raise InlayError(
                f"{folder} holds several tasks: give --adapters {inner} as well, and each is an adapter by its name."
            )
        problem = f"has no {CONFIG['peft']}" if folder.is_dir() else "is no folder"
        raise InlayError(f"{folder} {problem}.{misspelt(folder)} Give the folder of one adapter of PEFT's.")
    settings = read_json(place / CONFIG["peft"])
    if (written := _exported(place, settings)) is not None:
        return replace(written, source=said)
    check_mixable(place, settings)
    named = read_json(place / NOTE["peft"]).get("method") if is_present(place / NOTE["peft"]) else None
    method = method_of(place, settings["peft_type"], named)
    note = AdapterFolder.find(place, method, DEFAULT).read_note()
    weights = place / WEIGHTS["peft"]
    if not is_present(weights):
        pickled = " It has a file that would be unpickled, which is not done." * bool(list(place.glob("*.bin")))
        raise InlayError(f"{place} has no {WEIGHTS['peft']}.{pickled} Save it with PEFT's save_pretrained.")
    vetting.read_tensors(weights, note)  # whole, finite, and what its note says
    shapes = vetting.read_shapes(weights)
    adapter = LoraAdapter(
        place, said, (commit or file_digest(weights))[:SHORT], settings, note, _schema_of(place), shapes
    )
    _check_kind(adapter)
    return adapter


def _exported(place: Path, settings: Mapping[str, Any]) -> LoraAdapter | None:
    """What a task of a method that can be written as a LoRA is as one; None for any other adapter."""
    from inlay.workflow.export import export

    kind = settings.get("peft_type")
    if kind == LORA or not is_present(place / NOTE["peft"]):
        return None
    note = read_json(place / NOTE["peft"])
    method = method_of(place, kind, note.get("method"))
    if not method.exports:
        return None
    kept = TemporaryDirectory(prefix="inlay-exported-")
    several = (place.parent / TASKS).is_file()
    written = export(place.parent if several else place, place.name if several else None, Path(kept.name) / "as-lora")
    made = look(written)
    # What the note says holds of the product too, but for the hashes of its files.
    facts = {key: note.get(key) for key in ("fingerprint", "base_model", "pooling", "about")}
    digest = file_digest(place / WEIGHTS["peft"])[:SHORT]
    return replace(made, note={**made.note, **facts}, schema=_schema_of(place), revision=digest, kept=kept)


def check_mixable(place: Path, settings: Mapping[str, Any]) -> None:
    """An error for what is no LoRA, or one that cannot share a pass with others."""
    from inlay.methods import vetting
    from inlay.methods.mixture.unmixable import why_not

    vetting.check_type(place / CONFIG["peft"], settings)
    kind = settings.get("peft_type")
    if kind != LORA:
        raise InlayError(
            f"{place} is an adapter of type {kind!r}; LORA alone is mixed here. `inlay serve --adapter` serves a run "
            "by any method by itself, and `inlay serve --prompts` compressed prompts."
        )
    if (why := why_not(SimpleNamespace(**settings))) is not None:
        raise InlayError(f"{place} cannot be mixed with others in one pass: {why}.")


def _check_kind(adapter: LoraAdapter) -> None:
    """An error for a kind of task that is not served."""
    kind = adapter.settings.get("task_type")
    schema = adapter.schema
    if schema is not None and schema.modality != "text":
        raise InlayError(
            f"{adapter.place} reads images; adapters of texts are mixed here. `inlay serve --adapter` serves it."
        )
    if schema is None and kind not in (None, FEATURES, *HEADS):
        raise InlayError(
            f"{adapter.place} is an adapter for {kind}; served are {', '.join(map(str, HEADS))} and {FEATURES}."
        )
    if schema is None and kind is None and adapter.own_weights:
        raise InlayError(
            f"{adapter.place} has a head, and {CONFIG['peft']} does not say what for: set task_type to SEQ_CLS or "
            "TOKEN_CLS."
        )


def _schema_of(place: Path) -> TaskSchema | None:
    """What the run that an adapter lies in says of its task, checked; None where there is no run."""
    from inlay.records.store import load
    from inlay.tasks import TaskSchema
    from inlay.workflow.answer_files import read_facts

    if (place.parent / TASKS).is_file():
        found = read_facts(place.parent)["tasks"].get(place.name)
        return None if found is None else TaskSchema.from_json(found)
    if place.name != INSIDE or not (place.parent / "record.json").is_file():
        return None
    run = load(place.parent)
    run.verify()
    found = (run.record.get("task") or {}).get("schema")
    return None if found is None else TaskSchema.from_json(found)


# ---- whose they are


def plain_base(name: str) -> str:
    """A base model's name, to be compared: an embedded one's on the hub, of the hub's cache the repository, of a folder
    its last part."""
    if name.startswith(embedded.PREFIX):
        card = embedded.CARDS.get(name.removeprefix(embedded.PREFIX))
        return (card.hub or name).lower() if card is not None else name
    if (found := SNAPSHOT.search(name)) is not None:
        return "/".join(found.groups()).lower()
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        return "./" + Path(name).expanduser().resolve().name
    return name.lower()


def is_same_base(name: str, others: Collection[str]) -> bool:
    """Whether a base model's name, as `plain_base` gives it, is one of these; of a folder only its own name counts."""
    return any(
        name == other
        or ((name.startswith("./") or other.startswith("./")) and Path(name).name.lower() == Path(other).name.lower())
        for other in others
    )
