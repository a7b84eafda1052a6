"""The format of an adapter folder: what its files are called, where they lie, and how they are checked when read.

| file | what it holds |
| --- | --- |
| `adapter_model.safetensors` | the weights (a head: `head.safetensors`; a full checkpoint: `model.safetensors`) |
| `adapter_config.json` | the settings, as PEFT writes them (a full checkpoint: `config.json`; a head has none) |
| `inlay.json` | the note (a head: `head.json`): method, base model, hashes of the files above, its own digest |
| `README.md` | the card |
| `tasks.json` | only beside the adapters of several tasks: what predicting needs of each, with its own checksum |

PEFT puts an adapter that is not called `default` into a folder of its name. Nothing heavy is imported here; what is in
the weights and settings is checked in vetting.py.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.methods.protocol import Method
from inlay.records.atomic import NotPlain, file_digest, write_text
from inlay.records.sealed import is_intact, read_object, sealed, write_sealed
from inlay.records.spec import POOLINGS
from inlay.records.store import read_json as read_record

NOTE = {"peft": "inlay.json", "head": "head.json", "full": "inlay.json"}
WEIGHTS = {"peft": "adapter_model.safetensors", "head": "head.safetensors", "full": "model.safetensors"}
CONFIG = {"peft": "adapter_config.json", "full": "config.json"}
CARD = "README.md"
TASKS = "tasks.json"
ADAPTER_FILES = (CONFIG["peft"], WEIGHTS["peft"], NOTE["peft"], CARD)
DEFAULT = "default"
FORMAT = 1
LARGEST_JSON = 32 << 20
SEAL = "digest"
_TEXT: tuple[type, ...] = (str, type(None))
_NOTE_TYPES: dict[str, tuple[type, ...]] = {
    "base_model": _TEXT,
    "fingerprint": _TEXT,
    "newly_initialised": (list,),
    "sha256": (dict,),
    SEAL: (str,),
}
_TASKS_TYPES: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "model": str,
    "revision": (str, type(None)),
    "trust_remote_code": bool,
    "tasks": Mapping,
    "max_length": (int, type(None)),
    "precision": str,
    "batch_size": int,
}


# ---- files


def is_present(path: Path) -> bool:
    """Whether there is a plain file, or a link to one; an error for what is something else."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise InlayError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(mode):
        raise _not_plain(path)
    return True


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a plain file that somebody else may have written, of finite numbers."""
    try:
        return read_object(path, LARGEST_JSON, finite=True)
    except NotPlain:
        raise _not_plain(path) from None
    except (OSError, ValueError) as error:
        raise InlayError(f"{path} cannot be read: {error}") from error


def _not_plain(path: Path) -> InlayError:
    return InlayError(f"{path} is not a plain file: a folder, a pipe or a device is not read.")


def sort_sets(file: Path) -> None:
    """Write PEFT's sets of module names in order: it writes them as they come, in another order in every process."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


# ---- where adapters lie


def adapter_place(folder: Path, adapter_name: str) -> Path:
    """Where PEFT writes an adapter of this name."""
    return folder if adapter_name == DEFAULT else folder / adapter_name


def task_place(folder: Path, task: str) -> Path:
    """Where the files of a task lie: in a folder of its name; those of a run of one task, in the folder itself."""
    return folder / task if (folder / task / CONFIG["peft"]).is_file() else folder


def tasks_in(folder: Path) -> list[str]:
    """The names of the adapters that lie in folders of their names."""
    return sorted(place.name for place in folder.glob("*") if (place / CONFIG["peft"]).is_file())


@dataclass(frozen=True)
class AdapterFolder:
    """The files of what one method saved; `place` is the folder that they lie in."""

    place: Path
    method: Method

    @classmethod
    def find(cls, folder: Path, method: Method, adapter_name: str) -> AdapterFolder:
        """Of the adapter of this name; where there is a single one, it goes by any name."""
        weights = WEIGHTS[method.form]
        names = [weights, f"{weights}.index.json"] if method.form == "full" else [weights]
        named = adapter_place(folder, adapter_name) if method.form == "peft" else folder
        places = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
        found = [place for place in places if any(is_present(place / name) for name in names)]
        if named in found:
            return cls(named, method)
        if len(found) > 1:
            held = ", ".join(DEFAULT if place == folder else place.name for place in found)
            raise InlayError(
                f"{folder} holds several adapters, none called {adapter_name!r}: give adapter_name, of {held}."
            )
        if found:
            return cls(found[0], method)
        other = next((form for form in WEIGHTS if form != method.form and (folder / WEIGHTS[form]).is_file()), None)
        hint = f" It holds {WEIGHTS[other]}, which another method wrote." if other else ""
        raise InlayError(f"{folder} has no {weights}, which method {method.name!r} saves.{hint}")

    @property
    def weights(self) -> Path:
        return self.place / WEIGHTS[self.method.form]

    @property
    def note(self) -> Path:
        return self.place / NOTE[self.method.form]

    @property
    def config(self) -> Path | None:
        """The settings beside the weights; a head has none."""
        return self.place / CONFIG[self.method.form] if self.method.form in CONFIG else None

    def write_note(self, facts: Mapping[str, Any], pooling: str | None) -> None:
        """Write the note beside what was saved. One without a pooling is of a head that reads what its architecture has
        it read."""
        config = [self.config] if self.config is not None and is_present(self.config) else []
        hashed = [*sorted(self.place.glob("*.safetensors")), *config]
        whole = dict(facts) | {
            "format": FORMAT,
            "method": self.method.name,
            "sha256": {file.name: file_digest(file) for file in hashed},
        }
        if pooling is not None:
            whole["pooling"] = pooling
        write_text(self.note, json.dumps(sealed(whole, SEAL), indent=2, sort_keys=True) + "\n")

    def read_note(self) -> dict[str, Any]:
        """What was written beside the weights, and that the settings are those that were saved; empty for what PEFT or
        Transformers alone saved."""
        note = self._checked_note()
        if self.config is not None and is_present(self.config):
            check_hash(self.config, note)
        return note

    def _checked_note(self) -> dict[str, Any]:
        path, method = self.note, self.method
        if not is_present(path) and method.form != "head":
            return {}
        note = read_json(path)
        if note.get("format") != FORMAT:
            raise InlayError(
                f"{path} has format {note.get('format')!r}; this version of inlay reads {FORMAT}. "
                "Use the version that wrote it."
            )
        if note.get("method") != method.name:
            raise InlayError(f"{self.place} was saved by method {note.get('method')!r}, not by {method.name!r}.")
        for key, types in (_NOTE_TYPES | ({"parameters": (list,)} if method.form == "head" else {})).items():
            if key not in note:
                raise InlayError(f"{path} lacks {key!r}: it was edited or is damaged. Save the model again.")
            if not isinstance(note[key], types) or not _holds_text(note[key]):
                raise InlayError(f"{path} has {key}={note[key]!r}: it was edited or is damaged. Save the model again.")
        if not is_intact(note, SEAL):
            raise InlayError(f"{path} is not what was saved: its own digest differs. Save the model again.")
        for name in note["sha256"]:
            if not is_present(self.place / name):
                raise InlayError(f"{self.place} has no {name}, which was saved there. Save the model again.")
        return note


def preprocessing(note: Mapping[str, Any]) -> list[str]:
    """The files of the tokenizer or image processor beside what was saved, as its note lists them."""
    names = note.get("preprocessing")
    listed = names if isinstance(names, list) else []
    return [name for name in listed if isinstance(name, str) and Path(name).name == name and not name.startswith(".")]


def preprocessing_in(folder: Path) -> list[str]:
    """The same of what was saved in a folder."""
    notes = [folder / name for name in dict.fromkeys(NOTE.values()) if (folder / name).is_file()]
    return [name for note in notes for name in preprocessing(read_json(note))]


def copy_plain(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy those of these files that are there, plain files all of them."""
    for name in names:
        if is_present(source / name):
            shutil.copyfile(source / name, target / name)


def check_hash(path: Path, note: Mapping[str, Any]) -> None:
    """An error where a file is not the one that a note was written for; a note may say nothing of it."""
    wanted = note.get("sha256", {}).get(path.name)
    if wanted is not None and file_digest(path) != wanted:
        raise InlayError(f"{path} is not the file that was saved: its SHA-256 differs from the one beside it.")


def base_fingerprint(folder: Path, task: str) -> str | None:
    """The fingerprint of the base model that a task was trained on; None where its note does not say."""
    note = task_place(folder, task) / NOTE["peft"]
    return read_json(note).get("fingerprint") if note.is_file() else None


def _holds_text(value: Any) -> bool:
    """Whether what a list or an object of a note holds is text."""
    held = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(isinstance(each, str) for each in held)


# ---- several tasks


def write_tasks(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `tasks.json` beside the adapters of several tasks. Images of the model's own size are not mentioned."""
    told = {name: value for name, value in facts.items() if name != "image_size" or value is not None}
    write_sealed(folder / TASKS, {"format": FORMAT, **told})


def read_tasks(folder: Path, vouched: bool) -> dict[str, Any]:
    """What `tasks.json` says, checked. One from before there was a checksum is believed only where the record of its
    run `vouched` for it."""
    path = folder / TASKS
    facts = read_record(path)
    if is_intact(facts) is False:
        raise InlayError(
            f"{path} was changed after it was written: its checksum does not fit. Restore it from a copy, or "
            "train the tasks again."
        )
    if is_intact(facts) is None and not vouched:
        raise InlayError(
            f"{path} has no checksum: it was edited, or an earlier inlay wrote it. Use the folder in its run "
            "(<run>/adapter), whose record has the digest of every file, or train the tasks again."
        )
    for key, kind in _TASKS_TYPES.items():
        if key not in facts or not isinstance(facts[key], kind):
            what = f"has {key}={facts[key]!r}" if key in facts else f"lacks {key!r}"
            raise InlayError(f"{path} {what}: it was edited or is damaged. Train the tasks again.")
    pooling = facts.setdefault("pooling", "own")  # in an earlier inlay there was no choice
    if pooling not in POOLINGS:
        raise InlayError(f"{path} has pooling={pooling!r}: it was edited or is damaged. Train the tasks again.")
    side = facts.setdefault("image_size", None)  # likewise
    if side is not None and (type(side) is not int or side < 1):
        raise InlayError(f"{path} has image_size={side!r}: it was edited or is damaged. Train the tasks again.")
    failed = facts.setdefault("failed", {})  # which an earlier inlay did not write
    if not isinstance(failed, Mapping) or not failed.keys() <= facts["tasks"].keys():
        raise InlayError(f"{path} has failed={failed!r}: it was edited or is damaged. Train the tasks again.")
    if not facts["tasks"]:
        raise InlayError(f"{path} lists no tasks: it was edited or is damaged. Train the tasks again.")
    return facts
