"""Why prompts made of the text lose against fixed ones on the sentence encoder: docs/infoprompt-measured.md.

From WARP to InfoPrompt without its losses there are two steps: prompts become products of matrices, and they become
different from text to text. Here they are taken one by one. What the encoder of prompts gets is

    Phi_a(X) = c + a (Phi(X) - c),        c the mean of Phi over the first batch,

so that at a = 0 all texts have the same prompts, which are trained by InfoPrompt's matrices; a = 1 is InfoPrompt
without both losses, and InfoPrompt itself is there too. All else is as in the tables, at one rate (0.3, the default,
and what the tables chose there for WARP and for InfoPrompt without both losses). How much texts differ in Phi is
measured too, also on the other models.

    python scripts/infoprompt_why.py run --models-dir <folder> --data-dir <folder> --workers 2
    python scripts/infoprompt_why.py write    # its table, from benchmarks/results/infoprompt_why.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import infoprompt_table as tables_of
import torch
from tables import RESULTS, ROOT, Entry, Key, difference, fill, run_all, run_options

FILE = "infoprompt_why.json"
NAMES = (*tables_of.NAMES, "share")
GROUP = "minilm-64"
OTHERS = ("mlm-64", "smollm2-64")  # of which only a = 1 is run, with one seed: how much texts differ
TASKS = ("wnut17-spans", "sst2")  # where InfoPrompt lacks most of WARP
SEEDS = range(5)
RATE = 0.3
LINES: Mapping[str, tuple[str, float | None]] = {  # of a table here: the line of the large tables, and a
    "fixed prompts, trained themselves (WARP)": ("warp", None),
    "fixed prompts, made by matrices (a = 0)": ("without both", 0.0),
    "a = 0.3": ("without both", 0.3),
    "prompts made of the text (a = 1)": ("without both", 1.0),
    "the same with both losses (InfoPrompt)": ("infoprompt", 1.0),
}
OF_THE_TEXT = "prompts made of the text (a = 1)"  # with which the others are compared


@dataclass(frozen=True)
class Work(tables_of.Work):
    """A run of the tables whose encoder of prompts sees a `share` of what tells texts apart; None: there is none."""

    share: float | None = None

    @property
    def named(self) -> dict[str, Any]:
        return super().named | {"share": self.share}


@contextmanager
def seen_in_part(share: float, apart: list[float]) -> Iterator[None]:
    """Inside, encoders of prompts get Phi_a(X). `apart` gets |Phi(X) - c|^2 / |Phi(X)|^2, a mean of each batch."""
    from inlay.methods.infoprompt.layer import InfoPromptLayer

    plain = InfoPromptLayer._context
    centre: list[torch.Tensor] = []

    def context(layer: Any, *args: Any) -> torch.Tensor:
        phi, without = plain(layer, *args).unbind(1)
        if not centre:
            centre.append(phi.mean(0))
        own = phi - centre[0]
        apart.append(float((own.square().sum(1) / phi.square().sum(1)).mean()))
        return torch.stack((centre[0] + share * own, without), dim=1)

    InfoPromptLayer._context = context  # type: ignore[method-assign]
    try:
        yield
    finally:
        InfoPromptLayer._context = plain  # type: ignore[method-assign]


def measure(work: Work) -> dict[str, Any]:
    if work.share is None:
        return tables_of.measure(work)
    apart: list[float] = []
    with seen_in_part(work.share, apart):
        found = tables_of.measure(work)
    return found | {"apart": round(fmean(apart), 4)}


def run(args: argparse.Namespace) -> None:
    def wanted(known: Mapping[Key, Entry]) -> Iterator[Work]:
        for seed, task, (line, share) in itertools.product(SEEDS, TASKS, LINES.values()):
            yield Work(GROUP, line, task, RATE, seed, args.models_dir, args.data_dir, share=share)
        line, share = LINES[OF_THE_TEXT]
        for group, task in itertools.product(OTHERS, TASKS):
            yield Work(group, line, task, RATE, 0, args.models_dir, args.data_dir, share=share)

    run_all(measure, wanted, NAMES, args)


def scores(runs: Sequence[Entry], task: str, name: str) -> dict[int, float]:
    """Test accuracy times 100 by seed."""
    found = (GROUP, task, *LINES[name])
    return {
        entry["seed"]: tables_of.value(entry)
        for entry in runs
        if (entry["group"], entry["task"], entry["line"], entry["share"]) == found
    }


def table(runs: Sequence[Entry]) -> list[str]:
    """Every line's mean and standard error by task, and by how much it is above prompts made of the text."""
    lines = tables_of.head("prompts", *(f"{task}{what}" for task in TASKS for what in ("", ", above a = 1")), "seeds")
    for name in LINES:
        cells = []
        for task in TASKS:
            mine, theirs = scores(runs, task, name), scores(runs, task, OF_THE_TEXT)
            seeds = sorted(set(mine) & set(theirs))
            pair = [[found[seed] for seed in seeds] for found in (mine, theirs)]
            cells += [tables_of.with_error(pair[0]), "" if name == OF_THE_TEXT else difference(*pair, size=1)]
        lines.append(tables_of.row(name, *cells, str(len(seeds))))
    return lines


def apart_table(runs: Sequence[Entry]) -> list[str]:
    """How much texts differ in Phi(X), by model and task: |Phi(X) - c|^2 / |Phi(X)|^2 with seed 0."""
    lines = tables_of.head("model", *TASKS)
    for group in (GROUP, *OTHERS):
        found = {
            entry["task"]: entry["apart"]
            for entry in runs
            if (entry["group"], entry["share"], entry["seed"]) == (group, 1, 0)
        }
        lines.append(tables_of.row(tables_of.GROUPS[group].model, *(f"{found[task]:.2f}" for task in TASKS)))
    return lines


def write(args: argparse.Namespace) -> None:
    runs = json.loads(Path(args.results).read_text())["runs"]
    fill(Path(args.page), {"why": table(runs), "apart": apart_table(runs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs")
    run_options(doing, FILE)
    doing.set_defaults(do=run)
    writing = commands.add_parser("write", help="put the tables into the page")
    writing.add_argument("--results", default=str(RESULTS / FILE))
    writing.add_argument("--page", default=str(ROOT / "docs" / "infoprompt-measured.md"))
    writing.set_defaults(do=write)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
