"""Generate the tables of compressed prompts in docs/compress.md from what is in benchmarks/results.

python scripts/document_compress.py --check     # are they up to date?
python scripts/document_compress.py --write     # bring them up to date
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from generated import ROOT, replaced

PAGE = ROOT / "docs/compress.md"
KEPT = ROOT / "benchmarks/results"
PROMPTS = ("e2e", "gsm8k", "document", "rules")
NAMES = {
    "distilled on mixed texts": "matched, then distilled",
    "matched on mixed texts": "matched",
    "PEFT CARTRIDGE on mixed texts": "PEFT's CARTRIDGE",
    "last tokens": "the prompt's last tokens",
    "own summary": "the model's own summary",
}
SIZELESS = {"ntk-attention": "`--to ntk-attention`", "ntk-attention, matched": "`--to ntk-attention`, not distilled"}
STUDIES = {"matched": "continuations", "matched on mixed texts": "mixed"}


@dataclass(frozen=True)
class Results:
    """What one file keeps, by prompt, contender and size."""

    by_row: dict[tuple[str, str, int], list[dict[str, Any]]]
    tokens: dict[str, int]

    @classmethod
    def read(cls, name: str) -> Results:
        """The file of this name."""
        kept = json.loads((KEPT / name).read_text(encoding="utf-8"))
        tokens: dict[str, list[int]] = {}
        for key, found in kept["yardsticks"].items():
            tokens.setdefault(key.split("/")[0], []).append(found["tokens"])
        by_row: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for key, found in kept["results"].items():
            prompt, _, size, who = key.split("/")
            by_row.setdefault((prompt, who, int(size)), []).append(found)
        return cls(by_row, {prompt: round(statistics.mean(each)) for prompt, each in tokens.items()})

    def values(self, prompt: str, who: str, size: int, column: str) -> list[float]:
        """Of every seed that has one."""
        found = self.by_row.get((prompt, who, size), [])
        return [each[column] for each in found if each[column] is not None]

    def sizes(self, names: Sequence[str]) -> list[int]:
        """All that were tried of these contenders."""
        return sorted({size for _, who, size in self.by_row if who in names})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    text = wanted = PAGE.read_text(encoding="utf-8")
    for mark, block in blocks().items():
        wanted = replaced(wanted, (f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"), block, PAGE)
    if text == wanted:
        return 0
    if options.check:
        print("docs/compress.md is not up to date: python scripts/document_compress.py --write")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


def blocks() -> dict[str, str]:
    """The generated parts of the page by their marks."""
    cuda, cpu = Results.read("compress-cuda.json"), Results.read("compress-cpu.json")
    return {
        "benefit": by_size(cuda, "benefit", _spread),
        "recall": by_size(cuda, "recall", _mean),
        "agreement": by_size(cuda, "agreement", _mean),
        "fixed": fixed(cuda),
        "size": sizes_in_bytes(cuda),
        "studies": studies(cpu),
        "matching": matching(),
    }


def by_size(kept: Results, column: str, told: Callable[[Sequence[float]], str]) -> str:
    """Prompt and contender by row, tokens kept by column."""
    sizes = kept.sizes(list(NAMES))
    lines = [f"| prompt (tokens) | how | {' | '.join(map(str, sizes))} |", f"| --- | --- |{' ---: |' * len(sizes)}"]
    for prompt in PROMPTS:
        for who, name in NAMES.items():
            found = [kept.values(prompt, who, size, column) for size in sizes]
            if any(found):
                cells = " | ".join(told(values) for values in found)
                lines.append(f"| {prompt} ({kept.tokens[prompt]:,}) | {name} | {cells} |")
    return "\n".join(lines)


def fixed(kept: Results) -> str:
    """The targets that know no size."""
    lines = ["| prompt | target | benefit | agreement | seeds |", "| --- | --- | ---: | ---: | ---: |"]
    for prompt in PROMPTS:
        for who, name in SIZELESS.items():
            benefit = kept.values(prompt, who, 0, "benefit")
            if benefit:
                agreement = _mean(kept.values(prompt, who, 0, "agreement"))
                lines.append(f"| {prompt} | {name} | {_spread(benefit)} | {agreement} | {len(benefit)} |")
    return "\n".join(lines)


def sizes_in_bytes(kept: Results) -> str:
    """What a compact prefix stores in half precision, beside the prompt's cache."""
    who, prompt = "distilled on mixed texts", "e2e"
    lines = ["| kept tokens | bytes | share of the cache of 2,021 tokens |", "| ---: | ---: | ---: |"]
    for size in kept.sizes([who]):
        stored = kept.values(prompt, who, size, "bytes")[0]
        cache = kept.tokens[prompt] * next(_a_token(kept))
        lines.append(f"| {size} | {stored / 1e6:.2f} MB | {100 * stored / cache:.1f} % |")
    return "\n".join(lines)


def _a_token(kept: Results) -> Iterator[float]:
    """Bytes of one token's keys and values."""
    for (_, who, size), found in kept.by_row.items():
        if who == "last tokens":
            yield found[0]["bytes"] / size


def studies(kept: Results) -> str:
    """Matching alone on two kinds of texts."""
    lines = ["| prompt (tokens) | kept | texts | benefit | recall | agreement |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    for prompt in PROMPTS:
        for size in kept.sizes(list(STUDIES)):
            for who, name in STUDIES.items():
                if all((prompt, each, size) in kept.by_row for each in STUDIES):
                    cells = [_mean(kept.values(prompt, who, size, each)) for each in ("benefit", "recall", "agreement")]
                    lines.append(f"| {prompt} ({kept.tokens[prompt]:,}) | {size} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def matching() -> str:
    """What one layer's matching costs, by the commit that was measured."""
    lines = ["| commit | keys of the heads | operations | waits for the device | processor seconds |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for commit, kept in json.loads((KEPT / "matching-cpu.json").read_text(encoding="utf-8")).items():
        for name, found in kept["results"].items():
            cells = f"{found['operations']:,} | {found['waits']} | {found['processor_seconds']:.2f}"
            lines.append(f"| {commit} | {name} | {cells} |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.0f} %" if values else "-"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 3:
        return f"{_mean(values)} ({len(values)} of 3 seeds)" if values else "-"
    return f"{100 * statistics.mean(values):.0f} ± {100 * statistics.stdev(values):.0f} %"


if __name__ == "__main__":
    sys.exit(main())
