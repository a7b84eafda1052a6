"""What `inlay.json` beside an adapter says of what its head reads, for PEFT's and Transformers' doors.

PEFT's own configs have no place for it. Without a look at the note, a LoRA that was trained on one feature would be put
before another one without a word. So PEFT writes a note beside what it saves from such a model, and it is read wherever
an adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inlay.methods.folder import CONFIG, NOTE, AdapterFolder, adapter_place, read_json

HUB = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")


@contextmanager
def agreeing_with_note(model: Any, source: Any, hub: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Let the head of a model read what the adapter in `source` was trained with, or say that it cannot.

    `source` is a folder or a repository, and `hub` says how that is found (see `HUB`). One without a note says nothing.
    Inside, the adapter is loaded: what was put in is taken out again where that fails.
    """
    from inlay.backbones.pooled import undone_on_error
    from inlay.methods.plain import base_of

    with undone_on_error(base_of(model)):
        path = None if source is None else find_file(str(source), NOTE["peft"], hub or {})
        if path is not None:
            agree_on_pooling(model, read_json(path).get("pooling"), str(source))
        yield


def agree_on_pooling(model: Any, pooling: str | None, what: str) -> None:
    """Have the head of a model, with whatever PEFT has put around and into it, read what `what` was trained with."""
    from inlay.backbones.pooled import agree
    from inlay.methods.plain import adapters_in, base_of

    agree(base_of(model), pooling, what, adapters_in(model))


def find_file(source: str, name: str, hub: Mapping[str, Any]) -> Path | None:
    """A file of an adapter, where its config is: in a folder, or in a repository on the hub or in its cache."""
    from transformers.utils import cached_file

    given = {name: hub[name] for name in HUB if hub.get(name) is not None}
    folder = Path(source) / given.get("subfolder", "")
    if Path(source).is_dir() or (folder / CONFIG["peft"]).is_file():
        return folder / name if (folder / name).is_file() else None
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    try:
        found = cached_file(source, name, **given, **quiet)
    except (OSError, ValueError):  # whoever reads the adapter itself says what is wrong with where it should be
        return None
    return None if found is None else Path(found)


def write_notes(model: Any, folder: Path, names: Iterable[str]) -> None:
    """Write notes beside adapters that PEFT has just saved, where their own configs do not say what the head reads."""
    from inlay.backbones.pooled import installed
    from inlay.methods.registry import all_methods
    from inlay.methods.saving import NEW

    pooling = installed(model)
    for name in names:
        config = model.peft_config[name]
        place = adapter_place(folder, name)
        if hasattr(config, "pooling") or (pooling is None and not (place / NOTE["peft"]).is_file()):
            continue
        peft_own = (method for method in all_methods().values() if method.config and method.tuner is None)
        method = next((method for method in peft_own if method.config_class() is type(config)), None)
        if method is not None:
            facts = {
                "base_model": config.base_model_name_or_path,
                "fingerprint": None,
                "newly_initialised": list(getattr(model, NEW, ())),
            }
            AdapterFolder(place, method).write_note(facts, pooling)
