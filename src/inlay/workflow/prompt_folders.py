"""Folders of adapters that stand for prompts: looked at before they are obeyed, and put into a model.

`inlay compress` writes them. What a folder says is checked as any other adapter folder is (`methods/folder.py`,
`methods/vetting.py`), and it must have been made of the base model that is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from inlay.backbones import embedded
from inlay.backbones.locate import recall_folder
from inlay.errors import InlayError, misspelt
from inlay.methods import registry
from inlay.methods.folder import CONFIG, DEFAULT, NOTE, WEIGHTS, AdapterFolder, is_present, read_json
from inlay.methods.protocol import Method
from inlay.workflow.compress import REPORT
from inlay.workflow.generation import Writer

TASK_TYPE = "CAUSAL_LM"


@dataclass(frozen=True)
class PromptAdapter:
    """What the files of an adapter say of it; its weights have not been read."""

    place: Path
    method: Method
    settings: Mapping[str, Any]
    note: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def fingerprint(self) -> str | None:
        """That of the base model it was made of."""
        return self.note.get("fingerprint")

    @property
    def base_model(self) -> str | None:
        """The base model, by the name that inlay finds it by."""
        return self.note.get("base_model") or self.settings.get("base_model_name_or_path")

    @property
    def digest(self) -> str | None:
        """The SHA-256 of its weights."""
        return self.note.get("sha256", {}).get(WEIGHTS["peft"])

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt had that it stands for; None where it stands for none."""
        found = self.report.get("prompt_tokens") or self.settings.get("prompt_length")
        return found if isinstance(found, int) else None

    @property
    def size(self) -> float | None:
        """How many keys a head of it has on average, where it is made of keys: as many tokens it has the room of."""
        sizes = self.settings.get("sizes")
        if isinstance(sizes, Mapping) and sizes:
            return round(fmean(size for heads in sizes.values() for size in heads), 1)
        found = self.settings.get("size")
        return found if isinstance(found, int) else None

    def describe(self) -> dict[str, Any]:
        """What a person may want to know of it."""
        return {
            "method": self.method.name,
            "stands_for_tokens": self.prompt_tokens,
            "size": self.size,
            "bytes": (self.place / WEIGHTS["peft"]).stat().st_size,
            "sha256": self.digest,
        }


def look(folder: Path | str) -> PromptAdapter:
    """What a folder holds; an error where it is no whole adapter of a causal language model."""
    from inlay.methods import vetting

    folder = Path(folder)
    place = next((each for each in (folder, folder / "adapter") if is_present(each / CONFIG["peft"])), None)
    if place is None:
        problem = f"has no {CONFIG['peft']}" if folder.is_dir() else "is no folder"
        raise InlayError(
            f"{folder} {problem}.{misspelt(folder)} Give the folder of one adapter, as `inlay compress --out` writes "
            "it."
        )
    settings = read_json(place / CONFIG["peft"])
    vetting.check_type(place / CONFIG["peft"], settings)
    named = read_json(place / NOTE["peft"]).get("method") if is_present(place / NOTE["peft"]) else None
    method = method_of(place, settings.get("peft_type"), named)
    note = AdapterFolder.find(place, method, DEFAULT).read_note()
    if settings.get("task_type") != TASK_TYPE:
        raise InlayError(
            f"{place} is an adapter for {settings.get('task_type') or 'another kind of task'}, and writes no texts: "
            f"give one of a causal language model ({TASK_TYPE})."
        )
    return PromptAdapter(place, method, settings, note, _report(place))


def mixes_rows(method: Method) -> bool:
    """Whether adapters of a method that stands for prompts can be mixed in one batch; imports it."""
    if not method.compresses_prompts or method.tuner is None:
        return False
    tuner: Any = method.tuner_class()
    return bool(getattr(tuner.tuner_layer_cls, "mixes", False))


def mixing_method() -> Method:
    """The method whose prompts are mixed in one batch."""
    return registry.get(next(name for name, each in registry.all_methods().items() if mixes_rows(each)))


def check_fits(adapter: PromptAdapter, writer: Writer) -> None:
    """An error where an adapter was made of another base model than this one."""
    if adapter.fingerprint is not None and adapter.fingerprint != writer.fingerprint:
        raise InlayError(
            f"{adapter.place} belongs to another base model: it was made of {adapter.base_model or 'one'} with "
            f"fingerprint {adapter.fingerprint[:12]}, and {writer.name} has {writer.fingerprint[:12]}. Load the same "
            "weights, in the same precision."
        )


def put_in(adapter: PromptAdapter, writer: Writer, name: str = DEFAULT) -> None:
    """Put an adapter into the model. One that cannot be put in leaves nothing behind beside others."""
    from inlay.console import quiet
    from inlay.methods import attach

    check_fits(adapter, writer)
    before = writer.model
    try:
        with quiet():  # PEFT warns of every further adapter in one model
            found = attach.restore(
                before, adapter.method, adapter.place, adapter_name=name, fingerprint=writer.fingerprint
            )
        writer.model = found.to(writer.place.device).eval()
    except BaseException:
        if name in (getattr(before, "peft_config", None) or {}):
            before.delete_adapter(name)
        raise


def open_writer(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False, precision: str = "auto"
) -> Writer:
    """The base model, ready to write."""
    from inlay import backbones
    from inlay.tasks import kinds

    backbone = backbones.load(model, kind=kinds.CAUSAL_LM, revision=revision, trust_remote_code=trust_remote_code)
    if backbone.newly_initialised:
        raise InlayError(
            f"{model!r} came without {', '.join(backbone.newly_initialised)}: it is no trained language model. Take a "
            "causal language model, such as embedded:smollm2."
        )
    return Writer(backbone, precision)


def find_base(adapter: PromptAdapter) -> str:
    """The base model of an adapter, by a name that loads here. Of a folder `inlay` writes no path: it is where the
    fingerprint says that it lies on this machine, or in the working folder. A whole path that is there is taken."""
    name = adapter.base_model
    if name and Path(name).is_absolute() and Path(name).is_dir():
        return name
    known = recall_folder(adapter.fingerprint) if adapter.fingerprint else None
    if known is not None:
        return str(known)
    if not name:
        raise InlayError(f"{adapter.place} does not say which base model it was made of: give --model.")
    for short, card in embedded.CARDS.items():
        if card.hub == name:
            return f"{embedded.PREFIX}{short}"
    if name.startswith(".") and not Path(name).exists():
        raise InlayError(
            f"{adapter.place} was made of a model folder called {Path(name).name!r}, and there is none at {name!r}. "
            "Say where it is: --model FOLDER (model= in Python)."
        )
    return name


def method_of(place: Path, kind: Any, named: Any) -> Method:
    """The method that reads this type of adapter; PEFT has more types than the registry names."""
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    from inlay.methods.register import register

    register()
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise InlayError(f"{place / CONFIG['peft']} has peft_type={kind!r}, which is no method known here.")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    able = [
        method
        for method in registry.all_methods().values()
        if method.form == "peft"
        and (method.peft_type == kind or (method.peft_type is None and method.config_class() is config))
    ]
    if not able:
        name = named if isinstance(named, str) else kind.lower()
        tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(PeftType(kind))
        weights = isinstance(tuner, type) and issubclass(tuner, BaseTuner)
        return Method(
            name,
            f"PEFT's {kind}.",
            "",
            config=f"{config.__module__}:{config.__name__}",
            mergeable=weights,
            unmergeable="its tokens stand beside the text's, and no weight can hold them",
        )
    return next((method for method in able if method.name == named), able[0])


def _report(place: Path) -> dict[str, Any]:
    """What `inlay compress` wrote beside the adapter; nothing where it cannot be read, since nothing depends on it."""
    try:
        return read_json(place / REPORT) if is_present(place / REPORT) else {}
    except (InlayError, json.JSONDecodeError):
        return {}
