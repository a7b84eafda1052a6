"""Where the folders of base models lie on this machine, by the fingerprints of their weights.

What is given away names a base model's folder without its path (`locate.portable`). On the machine it was made on, the
folder is found again by what is kept here, in the cache; elsewhere a user says where it is.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from inlay import fetch
from inlay.errors import InlayError
from inlay.records.atomic import write_text


def remember(fingerprint: str, folder: Path) -> None:
    """Keep in mind where a base model lies. A cache that cannot be written to keeps nothing, and nothing is lost."""
    file = _file(fingerprint)
    if file is not None:
        with suppress(OSError, InlayError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, f"{folder.resolve()}\n")


def recall(fingerprint: str) -> Path | None:
    """The folder of a base model, if it is known and still there."""
    file = _file(fingerprint)
    try:
        folder = Path(file.read_text(encoding="utf-8").strip()) if file is not None else None
    except (OSError, UnicodeDecodeError):
        return None
    return folder if folder is not None and folder.is_absolute() and folder.is_dir() else None


def _file(fingerprint: str) -> Path | None:
    """A file for each model; None for what is no fingerprint, as a stranger's folder may have it."""
    known = re.fullmatch(r"[0-9a-f]{16,128}", fingerprint)
    return fetch.cache_root() / "bases" / fingerprint if known else None
