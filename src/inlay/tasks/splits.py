"""Which rows are trained on, selected on and tested on: stratified, and a function of the rows and the seed alone.

RowKeys are put in the order of their keys (digests of what is in them) before anything is drawn, so that neither the
order of a file, nor the hash seed, nor the platform, nor NumPy's global state has a say. Draws for different purposes
use independent streams of the same seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.errors import InlayError

TEST_SHARE = 0.2
VALIDATION_SHARE = 0.1
VALIDATION_MOST = 1000
VTAB_TRAIN, VTAB_VALIDATION = 800, 200

_PURPOSES = ("test", "validation", "shots", "vtab-1k", "vtab-1k validation", "evaluations")


@dataclass(frozen=True)
class RowKeys:
    """What a draw may look at: a key for each row, its class where it has one, and the group it must stay with.

    `inputs` says which rows show a model the same, whatever their labels; without it, those of the same key do.
    """

    keys: Sequence[str]
    strata: Sequence[int] | None = None
    groups: Sequence[str] | None = None
    inputs: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: np.ndarray) -> RowKeys:
        """Some of the rows."""
        return RowKeys(
            [self.keys[i] for i in indices],
            None if self.strata is None else [self.strata[i] for i in indices],
            None if self.groups is None else [self.groups[i] for i in indices],
            None if self.inputs is None else [self.inputs[i] for i in indices],
        )

    @property
    def shown(self) -> Sequence[str]:
        """What each row shows a model: the same for rows that are copies but for their labels."""
        return self.keys if self.inputs is None else self.inputs


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random numbers for one purpose under one seed."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, _PURPOSES.index(purpose)])))


def _by_stratum(rows: RowKeys) -> dict[int, list[int]]:
    """The rows of each class in the order of their keys, classes in a fixed order; one class when there are none."""
    order = sorted(range(len(rows)), key=lambda i: rows.keys[i])
    found: dict[int, list[int]] = {}
    for i in order:
        found.setdefault(0 if rows.strata is None else rows.strata[i], []).append(i)
    return dict(sorted(found.items()))


def _proportional(counts: Mapping[int, int], total: int, most: Mapping[int, int]) -> dict[int, int]:
    """`total` divided in proportion to `counts`, nobody above `most`, by largest remainders."""
    whole = sum(counts.values())
    exact = {name: total * count / whole for name, count in counts.items()}
    given = {name: min(int(share), most[name]) for name, share in exact.items()}
    while sum(given.values()) < total:
        name = max((n for n in given if given[n] < most[n]), key=lambda n: exact[n] - given[n])
        given[name] += 1
    return given


def _balanced(counts: Mapping[int, int], total: int, rng: np.random.Generator) -> dict[int, int]:
    """`total` divided as evenly as `counts` allow; which classes get one more is drawn."""
    given = dict.fromkeys(counts, 0)
    while (left := total - sum(given.values())) > 0:
        unfilled = [name for name in counts if given[name] < counts[name]]
        if left < len(unfilled):
            unfilled = [unfilled[i] for i in sorted(rng.permutation(len(unfilled))[:left])]
        step = max(1, min(left // len(unfilled), min(counts[name] - given[name] for name in unfilled)))
        for name in unfilled:
            given[name] += step
    return given


def _pick(members: Mapping[int, list[int]], given: Mapping[int, int], rng: np.random.Generator) -> np.ndarray:
    """That many of each class, at random; indices in the order of the data."""
    picked = [members[name][i] for name in members for i in rng.permutation(len(members[name]))[: given[name]]]
    return np.sort(np.asarray(picked, dtype=np.int64))


def _rest(count: int, taken: np.ndarray) -> np.ndarray:
    left = np.ones(count, dtype=bool)
    left[taken] = False
    return np.flatnonzero(left)


def _together(names: Sequence[str]) -> dict[str, list[int]]:
    """The rows of each name, in the order of the data."""
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    return members


def _one_each(rows: RowKeys) -> np.ndarray:
    """One row of each input: of those with different labels the one whose key comes first."""
    found = (min(copies, key=lambda i: rows.keys[i]) for copies in _together(rows.shown).values())
    return np.asarray(sorted(found), dtype=np.int64)


def _without_last_of_a_class(rows: RowKeys, copies: Sequence[Sequence[int]]) -> list[int]:
    """All those rows, but for copies that have the last rows of a class: only the label of one of them was drawn by."""
    if rows.strata is None:
        return [i for found in copies for i in found]
    left = Counter(rows.strata)
    held: list[int] = []
    for found in sorted(copies, key=lambda found: min(rows.keys[i] for i in found)):
        lost = Counter(rows.strata[i] for i in found)
        if all(left[name] > count for name, count in lost.items()):
            left -= lost
            held += found
    return held


def hold_out(rows: RowKeys, size: int, seed: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows divided into (rest, held out), about `size` held out; indices in the order of the data.

    Classes are held out in proportion and every class keeps at least one row in the rest. RowKeys of the same input go
    to the same side, so that nothing leaks. So do rows of one group, and then the classes are left to chance.
    """
    rng = stream(seed, purpose)
    members = _together(rows.shown if rows.groups is None else rows.groups)
    if rows.groups is not None:
        names = sorted(members)
        held: list[int] = []
        for i in rng.permutation(len(names))[: len(names) - 1]:
            if len(held) >= size:
                break
            held += members[names[i]]
    else:
        distinct = rows.take(_one_each(rows))
        strata = _by_stratum(distinct)
        counts = {name: len(found) for name, found in strata.items()}
        most = {name: count - 1 for name, count in counts.items()}
        picked = _pick(strata, _proportional(counts, min(size, sum(most.values())), most), rng)
        held = _without_last_of_a_class(rows, [members[distinct.shown[i]] for i in picked])
    taken = np.sort(np.asarray(held, dtype=np.int64))
    if len(taken) == 0 or len(taken) == len(rows):
        raise InlayError(
            f"{len(rows)} rows are too few to hold some out for {purpose}"
            + ("" if rows.strata is None else f" with {len(set(rows.strata))} classes")
            + ". Add rows, or give a split of your own (a column or folders named train, validation and test)."
        )
    return _rest(len(rows), taken), taken


def draw_shots(rows: RowKeys, shots: int, seed: int) -> np.ndarray:
    """`shots` rows in all, as evenly over the classes as they allow (few-shot training sets, as in InfoPrompt)."""
    if shots > len(rows):
        raise InlayError(
            f"shots={shots} asks for more examples than the {len(rows)} there are to train on (what is held out for "
            f"selection and test does not count). Give at most {len(rows)}."
        )
    rng = stream(seed, "shots")
    strata = _by_stratum(rows)
    return _pick(strata, _balanced({name: len(found) for name, found in strata.items()}, shots, rng), rng)


def draw_vtab(rows: RowKeys, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """VTAB-1k: 1,000 rows in all, 800 to train on and 200 to select on, both in proportion to the classes.

    Copies count once: with 1,000 different rows nothing of what is selected on is trained on.
    """
    wanted = VTAB_TRAIN + VTAB_VALIDATION
    distinct = _one_each(rows)
    if wanted > len(distinct):
        raise InlayError(
            f"protocol='vtab-1k' needs {wanted:,} different training examples and there are {len(distinct):,}."
        )
    rng = stream(seed, "vtab-1k")
    strata = _by_stratum(rows.take(distinct))
    counts = {name: len(found) for name, found in strata.items()}
    drawn = distinct[_pick(strata, _proportional(counts, wanted, counts), rng)]
    inner = rows.take(drawn)
    strata = _by_stratum(inner)
    counts = {name: len(found) for name, found in strata.items()}
    selected = _pick(strata, _proportional(counts, VTAB_VALIDATION, counts), stream(seed, "vtab-1k validation"))
    return drawn[_rest(wanted, selected)], drawn[selected]


def validation_size(rows: int) -> int:
    """How many of `rows` training rows are held out for selection."""
    return max(1, min(VALIDATION_MOST, round(rows * VALIDATION_SHARE)))


def test_size(rows: int) -> int:
    """How many of `rows` rows are held out for the test."""
    return max(1, round(rows * TEST_SHARE))
