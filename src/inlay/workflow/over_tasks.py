"""Do methods differ over tasks? Mean ranks, one test of all methods, and a test of each pair with Holm's correction.

Seeds say whether two methods differ on one task; tasks say whether a difference can be expected on another task. So
here a task is one observation: a method's mean over its seeds. The recipe is that of Demsar (Statistical Comparisons of
Classifiers over Multiple Data Sets, JMLR 2006):

- Methods are ranked within each task (1 is best, ties share the mean of their ranks), and ranks are averaged.
- The Friedman test asks whether all methods are equal. Its usual approximation needs more than 10 tasks and 5 methods;
  below that p is the share of random orders within tasks that are at least as uneven.
- Pairs are tested by Wilcoxon's signed-rank test, with exact p and Holm's correction for all pairs. The older choice, a
  critical difference of mean ranks (Nemenyi), lets a third method decide whether two differ (Benavoli et al., Should We
  Really Use Post-Hoc Tests Based on Mean-Ranks?, JMLR 2016). Where gaps on different tasks are not in one unit, only
  their signs count (sign test).

Two methods differ significantly where both tests say so. With few tasks no pair can: `fewest_tasks` says how many
it takes. A table with holes is not ranked, because a mean rank over other tasks is another quantity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from inlay.workflow.statistics import DRAWS, LEVEL, holm, pairs_among

FEWEST_TASKS = 5
APPROXIMATE = (10, 5)  # above so many tasks and methods the Friedman test's F distribution is close (Demsar 2006)
DIGITS = 12  # significant ones: means over seeds that differ by less are ties
LISTED = 6
PairTest = Literal["signed-rank", "sign"]
Table = np.ndarray


@dataclass(frozen=True)
class PairOverTasks:
    """Two methods over all tasks, the one with the better mean rank first.

    `better`, `equal` and `worse` are numbers of tasks; `gap` is the median gain of the first; `p` is corrected.
    `favours` is the one that the pair's own test finds ahead, None where it finds them level. Other methods decide the
    order of mean ranks too, so this can be `other`.
    """

    one: str
    other: str
    better: int
    equal: int
    worse: int
    gap: float
    p: float
    differs: bool
    favours: str | None


@dataclass(frozen=True)
class OverTasks:
    """What can be said of methods over tasks; `methods` and `ranks` from the best mean rank on.

    `title` says what is the same in all tasks. `refusal` says why there is no ranking: then `missing` has the
    cells without a score, and the rest is empty. `cliques` are the first and last place of each group of neighbours
    no two of which differ. `needed` is how many tasks it takes for any pair to differ. `p` is the Friedman test's, None
    for two methods, whose one pair says it all.
    """

    title: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...] = ()
    ranks: tuple[float, ...] = ()
    p: float | None = None
    pairs: tuple[PairOverTasks, ...] = ()
    cliques: tuple[tuple[int, int], ...] = ()
    test: PairTest = "signed-rank"
    needed: int = 0
    refusal: str | None = None
    missing: tuple[tuple[str, str], ...] = ()

    @property
    def differ(self) -> bool:
        """Whether the methods differ at all; of two methods their one pair decides."""
        return any(pair.differs for pair in self.pairs) if self.p is None else self.p < 1 - LEVEL


def over_tasks(title: str, scores: Mapping[str, Mapping[str, float]], *, one_unit: bool = True) -> OverTasks:
    """Rank methods over tasks. `scores` has each task's value of each method, greater for better.

    `one_unit`: whether gaps on different tasks can be compared by size, as those of accuracies can.
    """
    tasks = tuple(scores)
    names = list(dict.fromkeys(name for each in scores.values() for name in each))
    missing = tuple((task, name) for task in tasks for name in names if name not in scores[task])
    test: PairTest = "signed-rank" if one_unit else "sign"
    if why := _refuse(tasks, names, missing):
        return OverTasks(title, tasks, test=test, refusal=why, missing=missing)
    table = _rounded(np.array([[scores[task][name] for name in names] for task in tasks]))
    ranks = rank(table)
    order = sorted(range(len(names)), key=lambda index: (ranks[:, index].mean(), names[index]))
    table, ranks = table[:, order], ranks[:, order]
    methods = tuple(names[index] for index in order)
    p = friedman(ranks)[1] if len(methods) > 2 else None
    pairs = _pairs(methods, table, test, every_other=p is None or p < 1 - LEVEL)
    apart = {(methods.index(pair.one), methods.index(pair.other)) for pair in pairs if pair.differs}
    means = tuple(float(mean) for mean in ranks.mean(axis=0))
    together = tuple(cliques(len(methods), apart))
    return OverTasks(title, tasks, methods, means, p, pairs, together, test, fewest_tasks(len(methods)))


def _refuse(tasks: Sequence[str], names: Sequence[str], missing: Sequence[tuple[str, str]]) -> str | None:
    if len(names) < 2:
        return f"a ranking needs two methods, and there is {len(names)}"
    if len(tasks) < FEWEST_TASKS:
        return f"a ranking needs {FEWEST_TASKS} tasks, and there {'is' if len(tasks) == 1 else 'are'} {len(tasks)}"
    if missing:
        told = ", ".join(f"{name} on {task}" for task, name in missing[:LISTED])
        more = f", and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        verb = "is" if len(missing) == 1 else "are"
        return f"{len(missing)} of {len(tasks) * len(names)} results {verb} missing: {told}{more}"
    return None


def _rounded(table: Table) -> Table:
    """Values to their significant digits, so that equal means over seeds are equal."""
    return np.array([[float(f"{value:.{DIGITS}g}") for value in row] for row in table])


def rank(table: Table) -> Table:
    """Each row's ranks, 1 for the greatest; equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    return np.asarray(rankdata(-table, axis=1), dtype=np.float64)


def friedman(ranks: Table, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """The Friedman statistic of ranks (tasks x methods), corrected for ties, and its p.

        chi2 = (k - 1) sum_j (R_j - N (k + 1) / 2)^2 / sum_ij (r_ij - (k + 1) / 2)^2,   R_j = sum_i r_ij

    For many tasks and methods p is from Iman and Davenport's F = (N - 1) chi2 / (N (k - 1) - chi2), otherwise the share
    of random orders within the tasks with at least this statistic.
    """
    from scipy.stats import f

    tasks, methods = ranks.shape
    centred = ranks - (methods + 1) / 2
    spread = float((centred**2).sum())
    if spread == 0:
        return 0.0, 1.0  # every task is a tie of all
    uneven = float((centred.sum(axis=0) ** 2).sum())
    chi2 = (methods - 1) * uneven / spread
    if tasks > APPROXIMATE[0] and methods > APPROXIMATE[1]:
        left = tasks * (methods - 1) - chi2
        p = 0.0 if left <= 0 else float(f.sf((tasks - 1) * chi2 / left, methods - 1, (methods - 1) * (tasks - 1)))
        return chi2, p
    # Tasks in one order, whatever order they came in: near a limit the draws decide, and the verdict must not change.
    centred = centred[np.lexsort(centred.T)]
    chance = np.random.Generator(np.random.PCG64(seed))
    drawn = chance.permuted(np.broadcast_to(centred, (draws, tasks, methods)), axis=2)
    as_uneven = int(((drawn.sum(axis=1) ** 2).sum(axis=1) >= uneven - 1e-9 * (1 + uneven)).sum())
    return chi2, (1 + as_uneven) / (1 + draws)


def _doubled_ranks(gaps: Sequence[float]) -> list[tuple[int, bool]]:
    """Twice the rank of each gap's size, and whether it is a gain; gaps of 0 are ranked, and left out then."""
    from scipy.stats import rankdata

    sizes = np.array([float(f"{abs(gap):.{DIGITS}g}") for gap in gaps])
    doubled = np.rint(2 * rankdata(sizes)).astype(int)  # whole numbers, ties included
    return [(int(weight), gap > 0) for weight, gap, size in zip(doubled, gaps, sizes, strict=True) if size > 0]


def signed_rank(gaps: Sequence[float]) -> float:
    """The exact two-sided p of Wilcoxon's signed-rank test: the share of all choices of signs that are as uneven.

    Ties share ranks. Gaps of 0 keep their ranks but have no sign (Pratt), so a task without a difference counts for
    neither method.
    """
    weights = _doubled_ranks(gaps)
    if not weights:
        return 1.0
    chances = np.zeros(sum(weight for weight, _ in weights) + 1)
    chances[0] = 1.0
    for weight, _ in weights:
        chances[weight:] = (chances[weight:] + chances[:-weight]) / 2
        chances[:weight] /= 2
    seen = sum(weight for weight, positive in weights if positive)
    return min(1.0, 2 * float(min(chances[: seen + 1].sum(), chances[seen:].sum())))


def sign_test(better: int, worse: int) -> float:
    """The exact two-sided p of so many gains and losses; ties are left out."""
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def _pairs(methods: Sequence[str], table: Table, test: PairTest, *, every_other: bool) -> tuple[PairOverTasks, ...]:
    """All pairs; without `every_other`, where the test of all methods found no difference, none differs."""
    found: list[tuple[int, int, list[float], int, int]] = []
    for one, other in combinations(range(len(methods)), 2):
        # Differences are rounded against the values they come from: 0.3 - 0.2 and 0.2 - 0.1 are the same gap.
        scale = float(np.abs(table[:, [one, other]]).max()) or 1.0
        gaps = [round(float(gap) / scale, DIGITS) * scale for gap in table[:, one] - table[:, other]]
        found.append((one, other, gaps, sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)))
    raw = [signed_rank(gaps) if test == "signed-rank" else sign_test(up, down) for _, _, gaps, up, down in found]
    return tuple(
        PairOverTasks(
            one=methods[one],
            other=methods[other],
            better=up,
            equal=len(gaps) - up - down,
            worse=down,
            gap=float(np.median(gaps)),
            p=float(p or 0.0),
            differs=every_other and (p or 0.0) < 1 - LEVEL,
            favours=_ahead(methods[one], methods[other], gaps, test),
        )
        for (one, other, gaps, up, down), p in zip(found, holm(raw), strict=True)
    )


def _ahead(one: str, other: str, gaps: Sequence[float], test: PairTest) -> str | None:
    """Which of two the test's own statistic favours: the greater sum of ranks, or the greater number of tasks."""
    signed = [(weight if test == "signed-rank" else 1) * (1 if gain else -1) for weight, gain in _doubled_ranks(gaps)]
    lead = sum(signed)
    return None if lead == 0 else one if lead > 0 else other


def cliques(count: int, apart: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """First and last place of every group of neighbours in which no two are `apart`, without groups within others."""
    found: list[tuple[int, int]] = []
    for first in range(count):
        last = first
        while last + 1 < count and not any((each, last + 1) in apart for each in range(first, last + 1)):
            last += 1
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


def fewest_tasks(methods: int) -> int:
    """How many tasks it takes for any pair of so many methods to differ: with fewer, even a method that wins on all of
    them has a corrected p of 0.05 or more, by either test."""
    tasks = 1
    while pairs_among(methods) * 2.0 ** (1 - tasks) >= 1 - LEVEL:
        tasks += 1
    return tasks


def sentences(found: OverTasks) -> list[str]:
    """What the tasks say, in words."""
    if found.refusal is not None:
        again = " Finish these runs, or report on fewer methods (inlay report --methods)." if found.missing else ""
        return [f"Methods are not ranked over tasks ({found.title}): {found.refusal}.{again}"]
    where = f"Over {len(found.tasks)} tasks ({found.title})"
    said = "" if found.p is None else f" (Friedman test, p {_written(found.p)})"
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in zip(found.methods, found.ranks, strict=True))
    if not found.differ:
        told = [f"{where} no difference between the methods is shown{said}. Mean ranks: {listed}."]
    else:
        best = found.methods[0]
        beside = [pair for pair in found.pairs if pair.one == best]
        worse = [pair.other for pair in beside if pair.differs and pair.favours == best]
        better = [pair.other for pair in beside if pair.differs and pair.favours == pair.other]
        ties = [pair.other for pair in beside if not pair.differs]
        told = [f"{where} the methods differ{said}. Mean ranks: {listed}."]
        told += [f"{best} is significantly better than {', '.join(worse)}."] * bool(worse)
        told += [f"{', '.join(better)}: significantly better than {best}, against the mean ranks."] * bool(better)
        told += [f"No significant difference from {best}: {', '.join(ties)}."] * bool(ties)
    if len(found.tasks) < found.needed:
        few = f"{len(found.tasks)} tasks are too few for any pair of {len(found.methods)} methods to differ"
        told.append(f"{few}, whatever the scores: that takes {found.needed} tasks.")
    return [" ".join(told)]


def _written(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"
