"""What people call the parts of their data: the values of a column `split`, the names of files and folders.

Blanks around a name, capital letters, `-`, `_` and blanks within it, and a final "set" do not matter.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

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
_NEAR = 0.78  # as alike as "tests" and "test"; "best" is not
_SHARD = re.compile(r"[_-]\d+")


def split_of(name: str) -> str | None:
    """The split that a name means, None if it is not the name of one."""
    return SPLIT_NAMES.get(_bare(name).removesuffix("set"))


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.casefold())


def known() -> str:
    """All names, by split, for an error."""
    listed = {split: [name for name, of in SPLIT_NAMES.items() if of == split] for split in SPLIT_NAMES.values()}
    return "; ".join(f"{split}: {', '.join(names)}" for split, names in listed.items())


def resembles_split(name: str, present: Collection[str | None] = ()) -> bool:
    """Whether a name that is not one of a split may be meant for one: misspelt (`tset`), a part of one
    (`train-00000-of-00002`), or with a word that names a split which is not `present` otherwise (`test_old`)."""
    words, whole = re.split(r"[^a-z]+", name.casefold()), _bare(name)
    misspelt = any(sorted(whole) == sorted(known) for known in SPLIT_NAMES)
    misspelt = misspelt or bool(difflib.get_close_matches(whole, SPLIT_NAMES, 1, _NEAR))
    part = words[0] in SPLIT_NAMES and _SHARD.match(name.casefold(), len(words[0])) is not None
    return misspelt or part or any(SPLIT_NAMES[word] not in present for word in words if word in SPLIT_NAMES)


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
