"""Gather LoRAs from wherever they are into one folder, each checked: what one model can serve together.

The folder has a subfolder for each adapter, in PEFT's own format, and nothing else but a note for people (`set.json`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inlay.backbones import embedded
from inlay.backbones.locate import portable
from inlay.errors import InlayError, first_line, misspelt
from inlay.methods import registry
from inlay.methods.folder import (
    ADAPTER_FILES,
    CONFIG,
    DEFAULT,
    NOTE,
    WEIGHTS,
    AdapterFolder,
    copy_plain,
    is_present,
    preprocessing,
    read_json,
    tasks_in,
)
from inlay.methods.protocol import Method
from inlay.records.atomic import file_digest, write_folder, write_json
from inlay.tasks import kinds
from inlay.workflow.notes import Say, or_log

SET = "set.json"
FORMAT = 1
HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
PICKLED = ("adapter_model.bin", "adapter_model.pt")
AUTO = {head.task_type: head.auto_class for head in (kinds.SEQUENCE, kinds.TOKEN, kinds.LANGUAGE, kinds.TWO_PARTS)} | {
    None: kinds.IMAGE.auto_class,
}


@dataclass(frozen=True)
class Gathered:
    """What became of each adapter: the names of those in `folder`, and of the others why they are not there."""

    folder: Path
    base_model: str
    taken: tuple[str, ...]
    refused: Mapping[str, str]


@dataclass
class _Candidate:
    """An adapter that was found, and what its files say; `name` is the one it is to have."""

    called: str
    source: str
    place: Path
    revision: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    outputs: int | None = None
    name: str = ""

    @property
    def base(self) -> str:
        """Its base model's name, the same for an embedded model by any of its names."""
        name = str(self.settings.get("base_model_name_or_path") or self.note.get("base_model") or "")
        found = next((f"{embedded.PREFIX}{short}" for short, card in embedded.CARDS.items() if card.hub == name), name)
        return portable(found) if found else ""

    @property
    def belongs_to(self) -> tuple[str, str | None, str]:
        """In what all adapters of a set agree: the base model, its revision, and what the head reads."""
        revision = self.settings.get("revision")
        return self.base, None if revision is None else str(revision), str(self.note.get("pooling") or "own")

    @property
    def labels(self) -> list[str] | None:
        return (self.note.get("about") or {}).get("labels")

    def describe(self) -> dict[str, Any]:
        """What a person may want to know of it."""
        return {
            "source": self.source if HUB_ID.fullmatch(self.source) else Path(self.source).name,
            "revision": self.revision,
            "task_type": self.settings.get("task_type"),
            "rank": self.settings.get("r"),
            "outputs": self.outputs,
            "labels": self.labels,
            "sha256": file_digest(self.place / WEIGHTS["peft"]),
        }


def gather(
    sources: Sequence[Path | str], output: Path | str, *, model: str | None = None, say: Say | None = None
) -> Gathered:
    """Write the LoRAs in `sources` into the new folder `output`, one subfolder each, as PEFT has them.

    A source is the folder of an adapter or of a run, a folder of such folders, a hub id (`owner/name` or
    `owner/name@revision`), or any of these as `name=source`. All adapters of a set have one base model: the one that
    most of them name. Whatever is no LoRA that can be mixed with others in one pass (`inlay.mix`), does not fit that
    model, is damaged or not finite is left out, with the reason. `model` says where the base model is; of it the
    config alone is read. Without one, the files alone are checked. An error where nothing is left.
    """
    say = or_log(say)
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InlayError(f"{target} is there already: give the name of a new folder.")
    found, refused = _find(sources)
    found = [each for each in found if _holds(each, refused, lambda each: _check_files(each))]
    if found:
        wanted = Counter(each.belongs_to for each in found).most_common(1)[0][0]
        found = [each for each in found if _holds(each, refused, lambda each: _check_same(each, wanted))]
        found = _check_fit(found, refused, model, say)
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "no adapter is there"
        raise InlayError(f"There is no LoRA to gather in {', '.join(map(str, sources))} ({why}).")

    def fill(place: Path) -> None:
        for each in found:
            (place / each.name).mkdir()
            copy_plain(each.place, [*ADAPTER_FILES, *preprocessing(each.note)], place / each.name)
        base, revision, pooling = found[0].belongs_to
        told = {"format": FORMAT, "base_model": base or None, "revision": revision, "pooling": pooling}
        write_json(place / SET, told | {"adapters": {each.name: each.describe() for each in found}})

    write_folder(target, fill)
    return Gathered(target, found[0].base, tuple(each.name for each in found), refused)


# ---- finding


def _find(sources: Sequence[Path | str]) -> tuple[list[_Candidate], dict[str, str]]:
    """The adapters in these places, by names of their own."""
    found: list[_Candidate] = []
    refused: dict[str, str] = {}
    for source in sources:
        name, equals, place = ("", "", str(source)) if Path(source).exists() else str(source).rpartition("=")
        given = name if equals else None
        folder = Path(place)
        if not folder.exists() and (hub := HUB_ID.fullmatch(place)) is not None:
            try:
                found.append(_from_hub(given or hub["name"].rpartition("/")[2], place, hub))
            except InlayError as error:
                refused[given or place] = str(error)
            continue
        if not folder.is_dir():
            raise InlayError(
                f"{place} is no folder.{misspelt(folder)} Give a folder of adapters, an adapter's own, or a hub id as "
                "owner/name."
            )
        inner = _adapter_in(folder)
        if inner is not None:
            found.append(_Candidate(given or folder.resolve().name, place, inner))
            continue
        if (folder / "adapter").is_dir() and tasks_in(folder / "adapter"):
            folder = folder / "adapter"  # a run of several tasks
        if given is not None:
            raise InlayError(f"{place} is no adapter's folder, and only one adapter can be called {given!r}.")
        for each in sorted(folder.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                inner = _adapter_in(each)
                if inner is None:
                    refused[each.name] = f"it holds no adapter: it has no {CONFIG['peft']}"
                else:
                    found.append(_Candidate(each.name, str(each), inner))
    taken: set[str] = set()
    kept = []
    for candidate in found:
        candidate.name = _word(candidate.called)
        if candidate.name in taken:
            refused[candidate.called] = (
                f"another adapter is called {candidate.name!r}: give it a name of its own, as in NAME=SOURCE"
            )
            continue
        taken.add(candidate.name)
        kept.append(candidate)
    return kept, refused


def _adapter_in(folder: Path) -> Path | None:
    """Where an adapter's files lie: in the folder itself, or a run's in its `adapter`."""
    return next((each for each in (folder, folder / "adapter") if (each / CONFIG["peft"]).is_file()), None)


def _word(name: str) -> str:
    """A name that an adapter can have: a word of letters, digits and underscores, and none that torch uses itself."""
    from torch.nn import ModuleDict

    word = re.sub(r"\W", "_", name)
    return f"adapter_{word}" if word == DEFAULT or not word.isidentifier() or hasattr(ModuleDict(), word) else word


def _from_hub(name: str, source: str, hub: re.Match[str]) -> _Candidate:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub["name"], revision=hub["revision"], allow_patterns=[*ADAPTER_FILES]))
    except Exception as error:  # whatever the HTTP client of this version raises
        raise InlayError(f"it could not be fetched from the hub: {first_line(error)}") from error
    return _Candidate(name, source, folder, revision=folder.name)


# ---- checking


def _holds(each: _Candidate, refused: dict[str, str], check: Any) -> bool:
    """Whether a check passes; otherwise why it does not is kept."""
    try:
        check(each)
    except InlayError as error:
        refused[each.called] = str(error)
        return False
    except Exception as error:  # settings of odd types: the others go on
        refused[each.called] = f"its settings cannot be read ({type(error).__name__}: {first_line(error)})"
        return False
    return True


def _check_files(each: _Candidate) -> None:
    """What can be known of an adapter by its files: a LoRA, mixable by its settings, whole, readable, finite."""
    from inlay.methods import vetting
    from inlay.methods.mixture.unmixable import METHOD, why_not
    from inlay.workflow.prompt_folders import method_of

    path = each.place / CONFIG["peft"]
    each.settings = read_json(path)
    vetting.check_type(path, each.settings)
    named = read_json(each.place / NOTE["peft"]).get("method") if is_present(each.place / NOTE["peft"]) else None
    method: Method = method_of(each.place, each.settings.get("peft_type"), named)
    if method.name != METHOD:
        one = f": `inlay export --adapter {each.source} --to {METHOD}` makes one of it"
        raise InlayError(f"it is no LoRA but {method.name}{one if METHOD in method.exports else ''}")
    if (why := why_not(SimpleNamespace(**each.settings))) is not None:
        raise InlayError(why)
    if not is_present(each.place / WEIGHTS["peft"]):
        pickled = next((name for name in PICKLED if (each.place / name).exists()), None)
        raise InlayError(
            f"it has its weights only as {pickled!r}, which can run code when it is opened: load it once where you "
            "trust it, and save it with save_pretrained"
            if pickled
            else f"it has no {WEIGHTS['peft']}"
        )
    each.note = AdapterFolder.find(each.place, method, DEFAULT).read_note()
    vetting.read_tensors(each.place / WEIGHTS["peft"], each.note)


def _check_same(each: _Candidate, wanted: tuple[str, str | None, str]) -> None:
    for what, own, others in zip(("base model", "revision", "pooling"), each.belongs_to, wanted, strict=True):
        if own != others:
            raise InlayError(f"its {what} is {own or 'not named'}, and that of the set is {others or 'not named'}")


def _check_fit(found: list[_Candidate], refused: dict[str, str], model: str | None, say: Say) -> list[_Candidate]:
    """Those that fit the base model and can be mixed there; all of them where that model is not to be had."""
    from inlay.methods.mixture.unmixable import METHOD
    from inlay.workflow.prompt_folders import PromptAdapter, find_base

    prints = Counter(each.note["fingerprint"] for each in found if each.note.get("fingerprint"))
    if prints:
        most = prints.most_common(1)[0][0]

        def check(each: _Candidate) -> None:
            if each.note.get("fingerprint") not in (None, most):
                raise InlayError("it was trained on other weights of the base model than the others of the set")

        found = [each for each in found if _holds(each, refused, check)]
    first = next((each for each in found if _kind_of(each) in AUTO), found[0])
    try:
        base = model or find_base(PromptAdapter(first.place, registry.get(METHOD), first.settings, first.note, {}))
        _skeleton(base, first)
    except InlayError as error:
        if model is not None:
            raise
        say(f"the base model was not found ({error}): whether the adapters fit it was not checked")
        return found
    return [each for each in found if _holds(each, refused, lambda each: _check_in_model(each, base))]


def _skeleton(base: str, each: _Candidate, outputs: int | None = None) -> Any:
    from inlay.backbones.skeleton import load_skeleton

    kind = _kind_of(each)
    if kind not in AUTO:
        raise InlayError(f"its task_type is {kind!r}, and {', '.join(str(name) for name in AUTO if name)} are known")
    return load_skeleton(base, each.settings.get("revision"), AUTO[kind], outputs)


def _kind_of(each: _Candidate) -> str | None:
    found = each.settings.get("task_type")
    return found if found is None else str(found)


def _check_in_model(each: _Candidate, base: str) -> None:
    """An error where an adapter does not fit its base model, or cannot be mixed with others in it."""
    from peft import PeftConfig, PeftModel
    from peft.mapping_func import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
    from peft.utils.save_and_load import get_peft_model_state_dict

    from inlay.console import quiet
    from inlay.methods import vetting
    from inlay.methods.attach import check_adapter_name
    from inlay.methods.mixture.heads import outputs_in
    from inlay.methods.mixture.lora import mix
    from inlay.methods.plain import WRAPPED
    from inlay.methods.saving import compare

    shapes = vetting.read_shapes(each.place / WEIGHTS["peft"])
    skeleton = _skeleton(base, each)
    check_adapter_name(skeleton, each.name)
    vetting.check_settings(each.place / CONFIG["peft"], each.settings, shapes, skeleton, vouched=bool(each.note))
    each.outputs = outputs_in(skeleton, {name.removeprefix(WRAPPED): shape for name, shape in shapes.items()})
    if each.outputs is not None:
        skeleton = _skeleton(base, each, each.outputs)
    config: Any = PeftConfig.from_pretrained(str(each.place))
    config.inference_mode, config.init_lora_weights = True, True
    wrapper = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    try:
        with quiet():
            adapted = mix(wrapper(skeleton, config, each.name, low_cpu_mem_usage=True))
    except InlayError:
        raise
    except Exception as error:  # whatever PEFT makes of settings that nobody checked
        raise InlayError(f"it does not fit {type(skeleton).__name__}: {first_line(error)}") from error
    expected = get_peft_model_state_dict(adapted, adapter_name=each.name, save_embedding_layers=False)
    compare(shapes, expected, each.place)


def lines(found: Gathered) -> Iterator[str]:
    """What became of each, for people."""
    for name, why in found.refused.items():
        yield f"left out {name}: {why}"
    yield f"gathered {len(found.taken)} LoRAs of {found.base_model or 'a base model without a name'}: {found.folder}"
