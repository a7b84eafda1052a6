"""Why prompts made of the text are below fixed ones on the sentence encoder: docs/infoprompt-measured.md.

WARP's prompts start from words and are trained themselves. Those of InfoPrompt, here without its losses, start from
random numbers, are made by matrices, and differ from text to text. One step is taken at a time: WARP's from random
numbers; InfoPrompt's matrices, which get the state of the first text, and so make the same prompts, for every text;
InfoPrompt's as they are. All else is as in the tables, and so is the rate of 0.3, which these chose for both. The tasks
are those where InfoPrompt lacks most of WARP there: the seeds are new, so that this choice is no part of what is found.
How much texts differ in Phi(X), of which prompts are made, is measured as well, on all three models.

    python -m inlay.papers.infoprompt.why run --models-dir <folder> --data-dir <folder> --workers 2
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from inlay.papers import tables
from inlay.papers.infoprompt import table as large
from inlay.papers.reproduce import kept
from inlay.papers.tables import Entry, Key, run_all, run_options

FILE = kept.path("infoprompt", "why.json")
NAMES = (*tables.NAMES, "prompts")
GROUPS = ("minilm-64", "mlm-64", "smollm2-64")  # of the last two it is only measured how much texts differ
TASKS = ("wnut17-spans", "sst2")
SEEDS = range(5, 10)
RATE = 0.3


@dataclass(frozen=True)
class PromptLine:
    """A line of the table: a line of the large ones, changed."""

    line: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    alike: bool = False  # whether all texts are seen as the first


OF_THE_TEXT = "made of the text"
LINES = {
    "fixed, started from words (WARP)": PromptLine("warp"),
    "fixed, started from random numbers": PromptLine("warp", {"initial": "uniform"}),
    "fixed, made by matrices": PromptLine("without both", alike=True),
    OF_THE_TEXT: PromptLine("without both"),
}
COLUMNS = (("minilm-64", "wnut17-spans"), ("minilm-64", "sst2"), ("minilm-256", "wnut17-spans"))  # group and task
TITLES = [f"{task}, N = {large.GROUPS[group].shots}" for group, task in COLUMNS]


@dataclass(frozen=True)
class WhyRun(large.FewShotRun):
    prompts: str = OF_THE_TEXT

    @property
    def named(self) -> dict[str, Any]:
        return super().named | {"prompts": self.prompts}

    def spec(self) -> Any:
        plain = super().spec()
        return plain.with_(settings={**plain.settings, **LINES[self.prompts].settings})


@contextmanager
def states_seen(alike: bool) -> Iterator[list[torch.Tensor]]:
    """Inside, the states Phi(X) that encoders of prompts get are noted; where `alike`, all get the first one."""
    from inlay.methods.infoprompt.pieces import PromptEncoder

    seen: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: Any) -> Any:
        if not isinstance(module, PromptEncoder):
            return None
        phi, rows = inputs
        seen.append(phi.detach())
        return (seen[0][:1].expand_as(phi) if alike else phi), rows

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def spread(states: Sequence[torch.Tensor]) -> float:
    """How much texts differ: `1 - |mean Phi|^2 / mean |Phi|^2`, 0 where all are alike, 1 where nothing is shared."""
    texts = torch.cat(list(states)).double().unique(dim=0)
    return float(1 - texts.mean(0).square().sum() / texts.square().sum(1).mean())


def measure(work: WhyRun) -> dict[str, Any]:
    with states_seen(LINES[work.prompts].alike) as seen:
        found = large.measure(work)
    return found | ({"spread": round(spread(seen), 4)} if seen else {})


def run(args: argparse.Namespace) -> None:
    def wanted(known: Mapping[Key, Entry]) -> Iterator[WhyRun]:
        folders = (args.models_dir, args.data_dir)
        for group, task in itertools.product(GROUPS[1:], TASKS):
            yield WhyRun(group, LINES[OF_THE_TEXT].line, task, RATE, SEEDS[0], *folders, steps=1)
        for seed, (group, task), name in itertools.product(SEEDS, COLUMNS, LINES):
            yield WhyRun(group, LINES[name].line, task, RATE, seed, *folders, prompts=name)

    run_all(measure, wanted, NAMES, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs")
    run_options(doing, FILE)
    doing.set_defaults(do=run)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
