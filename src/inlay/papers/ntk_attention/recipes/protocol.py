"""What the recipes of this paper share: rows by the names of its tables, counts on its models, kept runs, protocols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.papers.ntk_attention import table
from inlay.papers.reproduce import kept
from inlay.papers.reproduce.counting import in_millions, scores, trained
from inlay.papers.reproduce.predicates import Test, mean_of_columns
from inlay.papers.reproduce.recipe import UNTESTED, RecipeScale, Verdict
from inlay.papers.reproduce.results import Key, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench
    from inlay.records.spec import Spec
    from inlay.records.store import Run

FOLDER = Path(__file__).parent
NTK, LORA, PREFIX = "NTK-Attention", "LoRA", "P-Tuning V2"
LORA_8 = "LoRA, r' = 8"
SMOL = "SmolLM2-135M"
Way = tuple[str, Mapping[str, Any]]
# Appendix E.1: rate 0.001, cosine, 30 epochs; batches of 256 for pictures and of 32 for texts. The rest is Hugging
# Face's: no warm-up, no weight decay, gradients clipped to norm 1.
PAPER = {"epochs": 30, "learning_rate": 1e-3, "schedule": "cosine", "warmup": 0.0, "evaluations": 1}
# Section 3.3 to the letter: phi as printed, and a start from Eq. (4) of a random prefix, cut to the rank.
LITERAL = {"start": "prefix", "feature_map": "paper"}
# What runs of language models have by default here, and the paper does not.
UNCHANGED = {"skip_first": False, "centred": False}
OURS = (
    "Not in the paper, ours: the length of the prefix that Z and kappa start from (32), LoRA's alpha (twice its rank), "
    "up to 10 % of the training data held out where a set has no validation part"
)
ONE_STEP = {"max_steps": 1, "batch_size": 4, "evaluations": 1}
PREFIX_NOTE = (
    "P-Tuning V2 is PEFT's prefix tuning without a projection: it trains a key and a value at each place, twice what "
    "the paper counts."
)


def prefix(length: int) -> Way:
    return "prefix", {"num_virtual_tokens": length}


def lora(rank: int) -> Way:
    return "lora", {"r": rank, "lora_alpha": 2 * rank}


def ntk(rank: int, multiplier: int = 1) -> Way:
    return "ntk-attention", {"rank": rank, "feature_multiplier": multiplier}


def printed(item: str) -> Path:
    """The file of an item's printed numbers."""
    return FOLDER / f"{item}.csv"


def counted(shapes: Mapping[str, str], ways: Mapping[str, Way]) -> Results:
    """What each row trains in each panel's model, without a head."""
    return in_millions(
        {
            (panel, row): trained(shape, method, settings)
            for panel, shape in shapes.items()
            for row, (method, settings) in ways.items()
        }
    )


def counts(bench: Bench, shapes: Mapping[str, str], ways: Mapping[str, Way]) -> Results:
    """The same, kept."""
    return bench.once("ntk-attention/counts", {"shapes": shapes, "ways": ways}, lambda: counted(shapes, ways))


def specs(
    bench: Bench,
    settings: Mapping[str, Any],
    models: Mapping[str, str],
    ways: Mapping[str, Way],
    tasks: Mapping[str, str],
) -> dict[Key, Spec]:
    """A spec for each model (panel), row and set (column), trained as the scale's `settings` say.

    Of these `most_rank` is for NTK-Attention where heads are small, and `ntk` are further settings of NTK-Attention.
    """
    training, most_rank, literal = settings["training"], settings.get("most_rank"), settings.get("ntk")

    def fitting(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        cut = {"rank": min(given["rank"], most_rank)} if most_rank and "rank" in given else {}
        return {**given, **cut, **({**UNCHANGED, **(literal or {})} if method == "ntk-attention" else {})}

    return {
        (panel, row, column): bench.spec(model, method, task=task, settings=fitting(method, given), **training)
        for panel, model in models.items()
        for row, (method, given) in ways.items()
        for column, task in tasks.items()
    }


def looked_for(bench: Bench, settings: Mapping[str, Any], *data: str) -> None:
    """Find out whether models and data are there, where only a GPU makes use of them."""
    bench.check("This", RecipeScale("", "", tuple(settings["models"].values()), data))


def percent(run: Run) -> float:
    """A run's test metric, in per cent."""
    return 100 * float(run.metrics["test"][run.record["metric"]])


def plain(run: Run) -> float:
    """A run's test metric as it is: perplexity."""
    return float(run.metrics["test"][run.record["metric"]])


def kept_cells(
    group: str,
    lines: Mapping[str, str],
    tasks: Mapping[str, str],
    size: float,
    panel: str = "",
    what: str = "test",
) -> Results:
    """The kept runs: `lines` are its lines by our rows, `tasks` its tasks by our columns.

    Whole lines only, and nothing without NTK-Attention's; no cells where nothing is kept.
    """
    found = kept.table("ntk_attention")
    if found is None:
        return Results()
    runs, notes = found.runs, []
    if group == "vision" and (others := kept.table("activation_prompts")) is not None:
        runs = [*runs, *table.beside(others.runs)]
        notes.append(others.note)
    cells = {
        (panel, row, column): {
            run["seed"]: kept.KeptValue(size * run[what], run.get("steps"))
            for run in table.cell(runs, group, line, task)
            if what in run
        }
        for row, line in lines.items()
        for column, task in tasks.items()
    }
    read = kept.whole(found, cells, NTK, {row: 1 for row, line in lines.items() if line == table.UNTRAINED})
    return replace(read, notes=(*read.notes, *(notes if read.cells else ())))


COMMONER = "the commoner class"  # the row of what is right without looking


def commoner(bench: Bench, models: Mapping[str, str], tasks: Mapping[str, str]) -> Results:
    """The share of each task's commonest class in its test part, in per cent: a method below it has learnt nothing."""
    from inlay import tasks as loading

    cells: dict[Key, float] = {}
    for column, name in tasks.items():
        labels = Counter(loading.load(bench.spec("", "full", task=name)).test["label"])
        for panel in models:
            cells[panel, COMMONER, column] = 100 * max(labels.values()) / labels.total()
    return Results.of(cells)


def where_learnt(rows: Sequence[str], columns: Sequence[str], make: Callable[[list[str]], Test]) -> Test:
    """A predicate over those columns where one of the rows, at least, is above the commoner class.

    Where none is, which of them is highest is chance. A table that does not have that class is taken as it is.
    """

    def test(results: Results) -> Verdict:
        def learnt(column: str) -> bool:
            level = results.get(COMMONER, column)
            cells = [results.get(row, column) for row in rows]
            return level is None or any(cell is not None and cell.mean > level.mean for cell in cells)

        there = [column for column in columns if all(results.get(row, column) is not None for row in rows)]
        left = [column for column in there if learnt(column)]
        out = ", ".join(column for column in there if column not in left)
        if there and not left:
            return Verdict.untested(f"none is above the commoner class: {out}")
        verdict = make(left)(results)
        told = f"; left out, as none is above the commoner class: {out}" if out else ""
        return replace(verdict, measured=verdict.measured + told)

    return test


def averages(results: Results) -> Verdict:
    """The column Average is the mean of the sets, to rounding."""
    return mean_of_columns("Average", 0.011)(scores(results))


def first_of(rows: Iterable[str], make: Callable[[str], Test]) -> Test:
    """A predicate about the first of several rows that a table has: ours may have another than the printed one."""

    def test(results: Results) -> Verdict:
        found = [make(row)(results) for row in rows]
        return next((verdict for verdict in found if verdict.judgement != UNTESTED), found[0])

    return test


def every_panel(make: Callable[[str], Test], panels: Sequence[str] | None = None) -> Test:
    """A predicate that must hold in each panel that it can be put to; the first that fails is told."""

    def test(results: Results) -> Verdict:
        found = [(panel, make(panel)(results)) for panel in panels or results.panels]
        tested = [(panel, verdict) for panel, verdict in found if verdict.judgement != UNTESTED]
        if not tested:
            return found[0][1] if found else Verdict.untested("no numbers")
        failing = [pair for pair in tested if pair[1].judgement != "holds"]
        _, verdict = (failing or tested)[0]
        told = f"in {len(tested) - len(failing)} of {len(tested)} models; {verdict.measured}"
        return replace(verdict, measured=told) if len(tested) > 1 else verdict

    return test
