"""What the recipes of this paper share: its methods by the names of its tables, its tasks, one protocol, kept runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.papers.infoprompt import table
from inlay.papers.reproduce import kept
from inlay.papers.reproduce.predicates import above, above_on_average, best_in, mean_of_columns
from inlay.papers.reproduce.recipe import READING, Claim
from inlay.papers.reproduce.results import Key, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench
    from inlay.records.spec import Spec
    from inlay.records.store import Run

FOLDER = Path(__file__).parent
ROBERTA = "FacebookAI/roberta-large"
# At `here`: anybody can have the first; the second reads masks as RoBERTa does, and is taken where --models-dir has it.
HOUSE, BETTER = "embedded:minilm", "minilm_l6_mlm"
WITHOUT_HEAD, WITHOUT_STATE, WITHOUT_BOTH = "gamma = 0", "beta = 0", "gamma = 0, beta = 0"
# The adapter stands after the feed-forward alone (section 4.3).
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Finetuning": ("full", {}),
    "Adapter": ("adapter-pfeiffer", {}),
    "WARP": ("warp", {}),
    "IDPG": ("idpg", {}),
    "InfoPrompt": ("infoprompt", {}),
    WITHOUT_HEAD: ("infoprompt", {"gamma": 0.0}),
    WITHOUT_STATE: ("infoprompt", {"beta": 0.0}),
    WITHOUT_BOTH: ("infoprompt", {"beta": 0.0, "gamma": 0.0}),
    "LoRA": ("lora", {}),
    "WARP, random uniform": ("warp", {"initial": "uniform"}),
    "WARP, sampled vocabulary": ("warp", {}),
}
ROWS = tuple(list(WAYS)[:8])
PROMPTED = ("WARP", "IDPG", "InfoPrompt", WITHOUT_HEAD, WITHOUT_STATE, WITHOUT_BOTH)
PEFT = ("Adapter", "WARP", "IDPG")
# The script's lines by ours.
LINES = {
    "InfoPrompt": "infoprompt",
    "WARP": "warp",
    "IDPG": "idpg",
    WITHOUT_HEAD: "without head loss",
    WITHOUT_STATE: "without representation loss",
    WITHOUT_BOTH: "without both",
    "Adapter": "adapter",
    "LoRA": "lora",
    "Finetuning": "full",
    "WARP, sampled vocabulary": "warp",
    "WARP, random uniform": "warp, uniform",
}
SENTENCES = {"CoLA": "cola", "RTE": "rte", "MRPC": "mrpc", "SST2": "sst2"}
# Whole sentences where runs are made here: SST-2 has 6,700 phrases held out, which take longer than a training.
SENTENCES_HERE = {"CoLA": "cola", "SST2": "sst2-sentences"}
SPANS = {"RE": "ace2005-relations", "NER": "ace2005", "SemEval": "semeval2010"}
# ACE 2005 is licensed: WNUT-17's given spans stand in for its entities, and nothing for its relations.
SPANS_HERE = {"NER": "wnut17-spans", "SemEval": "semeval2010"}
# Section 4.2: 30 epochs of batches of 8. Its rate is said of prompts and head: methods that have prompts get it,
# plainly, and full training, adapters and LoRA have their own.
PAPER = {"epochs": 30, "batch_size": 8, "evaluations": 1, "rates": "printed"}
PRINTED = {"learning_rate": 1e-3, "schedule": "constant", "warmup": 0.0, "clip": 1e9}  # no schedule, no clipping
OURS = (
    "Not in the paper, ours: a constant learning rate without warm-up or clipping; learning rate, schedule and "
    "clipping of Finetuning, "
    "Adapter and LoRA; up to 10 % of the training data held out where a set has no validation part."
)
TRIALS = 5
ONE_STEP = {"max_steps": 1, "batch_size": 4, "evaluations": 1}
NER_NOTE = (
    "NER is ACE 2005 in the paper and WNUT-17's given spans here; its RE, relations of ACE 2005, has no stand-in."
)
SST_NOTE = "Runs that are made at `here` have SST-2's whole sentences only."
SPAN_NOTE = "A value that the paper prints once for both n_p (no prompts) stands in both columns."


def printed(item: str) -> Path:
    """The file of an item's printed numbers."""
    return FOLDER / f"{item}.csv"


def house(bench: Bench, settings: Mapping[str, Any]) -> str:
    """The scale's model, or the better one where it is there."""
    better = settings.get("if_found")
    return better if better and bench.has(better) else settings["model"]


def score(run: Run) -> float:
    """A run's test metric: Matthews' correlation for CoLA, accuracy for the others."""
    return float(run.metrics["test"][run.record["metric"]])


def specs(
    bench: Bench, settings: Mapping[str, Any], rows: Iterable[str], columns: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[Key, Spec]:
    """A spec for each row and column: `columns` have their tasks and what else they change.

    `num_prompt_tokens` of a column goes to the methods that have prompts; with `rates` "printed" so does the paper's.
    """
    model = house(bench, settings)
    made = {}
    for row in rows:
        method, own = WAYS[row]
        for column, (task, changed) in columns.items():
            more = {**settings["training"], **changed}
            tokens, rates = more.pop("num_prompt_tokens", None), more.pop("rates", None)
            given = dict(own)
            if method in PROMPT_METHODS:
                given |= {"num_prompt_tokens": tokens} if tokens else {}
                if rates == "printed":
                    more = {**more, **PRINTED}
                    given["units"] = False  # the rate is one of plain numbers
            made["", row, column] = bench.spec(model, method, task=task, settings=given, **more)
    return made


PROMPT_METHODS = ("warp", "idpg", "infoprompt")


def kept_runs(found: kept.KeptTable, group: str, row: str, task: str) -> dict[int, kept.KeptValue]:
    """The kept runs of one cell, by seed."""
    line = next((one for one in table.GROUPS[group].lines if one.name == LINES[row]), None)
    entries = {} if line is None else table.cell(found.runs, group, line, task)
    return {seed: kept.KeptValue(entry["test"][entry["metric"]], entry.get("steps")) for seed, entry in entries.items()}


def kept_cells(panel: str, columns: Mapping[str, tuple[str, str]], rows: Iterable[str]) -> Results:
    """The kept runs of the masked language model: whole lines, nothing without InfoPrompt's.

    `columns` have the table's group and task; each group is read or not by itself. No cells where nothing is kept.
    """
    found = kept.table("infoprompt")
    if found is None:
        return Results()
    parts = []
    for group in dict.fromkeys(group for group, _ in columns.values()):
        cells = {
            (panel, row, column): kept_runs(found, group, row, task)
            for row in rows
            for column, (where, task) in columns.items()
            if where == group
        }
        parts.append(kept.whole(found, cells, "InfoPrompt"))
    whole = Results().with_(parts)
    if whole.cells and any(not part.cells for part in parts):
        lacking = [name for name in columns if name not in whole.columns]
        whole = replace(whole, notes=tuple(note for note in whole.notes if not note.startswith(kept.NOT_WHOLE)))
        whole = whole.with_([Results(notes=(f"Incomplete: {', '.join(lacking)} are not whole in {found.where}.",))])
    return whole


def claims(columns: Sequence[str], where: str) -> tuple[Claim, ...]:
    """What section 5 says of tables 1 to 4."""
    return (
        *(
            Claim(f"InfoPrompt is above {row} on average", above_on_average("InfoPrompt", row, columns=columns), where)
            for row in PEFT
        ),
        Claim(
            "InfoPrompt is the best of the methods that freeze the encoder, in more than half of the columns",
            best_in("InfoPrompt", PEFT, 0.501, columns=columns),
            READING,
        ),
        Claim(
            "Finetuning is the upper bound: above InfoPrompt everywhere",
            above("Finetuning", "InfoPrompt", columns=columns),
            READING,
        ),
        Claim(
            "Without the head loss it is worse, everywhere", above("InfoPrompt", WITHOUT_HEAD, columns=columns), READING
        ),
        Claim(
            "Without the representation loss it is worse, everywhere",
            above("InfoPrompt", WITHOUT_STATE, columns=columns),
            READING,
        ),
        Claim(
            "Without the head loss it is worse, on average",
            above_on_average("InfoPrompt", WITHOUT_HEAD, columns=columns),
            where,
        ),
        Claim(
            "Without the representation loss it is worse, on average",
            above_on_average("InfoPrompt", WITHOUT_STATE, columns=columns),
            where,
        ),
        Claim(
            "The representation loss alone helps, on average",
            above_on_average(WITHOUT_HEAD, WITHOUT_BOTH, columns=columns),
            where,
        ),
        Claim(
            "The head loss alone helps, on average",
            above_on_average(WITHOUT_STATE, WITHOUT_BOTH, columns=columns),
            where,
        ),
        Claim("Average is the mean of the columns", mean_of_columns("Average", 0.0001), "the table itself"),
    )
