"""A table that is wider than the terminal, in blocks of columns."""

from __future__ import annotations

from collections.abc import Sequence

from inlay.cli import show


def in_blocks(columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: int, pairs: bool = False) -> None:
    """A table of any width without a broken number: as many columns side by side as fit, then the next, under the same
    names of rows (the first `names` columns). Of `pairs`, a column and its fellow ("x, paper" and "x, ours") stay
    together; rows that have nothing in a block are left out of it. A pipe gets it whole."""
    groups: list[list[int]] = []
    for index in range(names, len(columns)):
        fellow = pairs and groups and columns[groups[-1][0]].rpartition(", ")[0] == columns[index].rpartition(", ")[0]
        if fellow and ", " in columns[index] and len(groups[-1]) == 1:
            groups[-1].append(index)
        else:
            groups.append([index])
    blocks: list[list[int]] = [[]]
    for group in groups:
        wider = [*range(names), *blocks[-1], *group]
        if blocks[-1] and not show.fits([columns[index] for index in wider], [[row[i] for i in wider] for row in rows]):
            blocks.append([])
        blocks[-1] += group
    for block in blocks:
        shown = [*range(names), *block]
        some = [row for row in rows if len(blocks) == 1 or any(row[index].strip("-") for index in block)]
        every = range(len(shown))
        cells = [[row[index] for index in shown] for row in some]
        show.table([columns[index] for index in shown], cells, right=every[names:], whole=every)
