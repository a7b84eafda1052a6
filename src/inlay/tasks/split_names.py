"""What people call the parts of their data: the values of a column `split`, the names of files and folders.

Blanks around a name, capital letters, `-`, `_` and blanks within it, and a final "set" do not matter.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from inlay.errors import InlayError

SPLIT_NAMES: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "development": "validation",
    "eval": "validation",
    "evaluation": "validation",
    "test": "test",
    "testing": "test",
    "holdout": "test",
    "heldout": "test",
}
_NEAR = 0.75  # as alike as "tset" and "test"


def split_of(name: str) -> str | None:
    """The split that a name means, None if it is not the name of one."""
    return SPLIT_NAMES.get(_bare(name).removesuffix("set"))


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.casefold())


def known() -> str:
    """All names, by split, for an error."""
    listed = {split: [name for name, of in SPLIT_NAMES.items() if of == split] for split in SPLIT_NAMES.values()}
    return "; ".join(f"{split}: {', '.join(names)}" for split, names in listed.items())


def resembles_split(name: str) -> bool:
    """Whether a name that is not one of a split may be meant for one: `tset`, `test_old`, `train-00000-of-00002`."""
    words = re.split(r"[^a-z]+", name.casefold())
    return any(difflib.get_close_matches(word, SPLIT_NAMES, 1, _NEAR) for word in (*words, _bare(name)) if word)


def one_of_each(names: Iterable[str], where: str) -> dict[str, str]:
    """The name of each split among the names of files or folders; two names of one split are an error."""
    found: dict[str, str] = {}
    for name in names:
        split = split_of(name.split(".")[0])
        if split in found:
            raise InlayError(
                f"{where} has both {found[split]!r} and {name!r}, which are one split ({split}). Keep one of them, or "
                "join them."
            )
        if split is not None:
            found[split] = name
    return found
