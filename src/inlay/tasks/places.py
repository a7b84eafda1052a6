"""Where rows stood before they were divided, so that a prediction leads back to its row."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Places:
    """The file of each row, as people know it, and the row's number there, counted from 1.

    `names` are the files, `which` says for each row which of them. Data without files have the names of their splits.
    """

    names: tuple[str, ...]
    which: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, name: str, numbers: Iterable[int]) -> Self:
        """Rows of one file."""
        found = np.fromiter(numbers, dtype=np.int64)
        return cls((name,), np.zeros(len(found), dtype=np.int64), found)

    @classmethod
    def of_files(cls, paths: Sequence[str], folder: Path, numbers: Iterable[int]) -> Self:
        """Rows that have a file each, named as `folder` has them; one from elsewhere by its own name."""
        return cls(
            tuple(_below(path, folder) for path in paths),
            np.arange(len(paths), dtype=np.int64),
            np.fromiter(numbers, dtype=np.int64),
        )

    def take(self, indices: np.ndarray | Sequence[int]) -> Self:
        """Some of the rows."""
        chosen = np.asarray(indices, dtype=np.int64)
        return type(self)(self.names, self.which[chosen], self.numbers[chosen])

    def and_(self, other: Places) -> Self:
        """These rows and then the others."""
        which = np.concatenate([self.which, other.which + len(self.names)])
        return type(self)((*self.names, *other.names), which, np.concatenate([self.numbers, other.numbers]))

    @property
    def files(self) -> list[str]:
        """The file of each row."""
        return [self.names[i] for i in self.which]


def _below(path: str, folder: Path) -> str:
    try:
        return Path(os.path.abspath(path)).relative_to(os.path.abspath(folder)).as_posix()
    except ValueError:
        return Path(path).name
