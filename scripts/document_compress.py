"""Generate the table of compressed prompts in docs/compress.md from benchmarks/results/compress-cpu.json.

python scripts/document_compress.py --check     # is it up to date?
python scripts/document_compress.py --write     # bring it up to date
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from generated import ROOT, replaced

PAGE = ROOT / "docs/compress.md"
RESULTS = ROOT / "benchmarks/results/compress-cpu.json"
MARKS = ("<!-- compact:begin -->", "<!-- compact:end -->")
NAMES = {
    "matched": "matched, continuations",
    "matched on mixed texts": "matched, mixed texts",
    "last tokens": "the prompt's last tokens",
}
HEAD = (
    "SmolLM2-135M, two CPU cores, 120 texts, matching alone (`--steps 0`). Means over seeds, ± the standard deviation "
    "where there are three."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    text = PAGE.read_text(encoding="utf-8")
    wanted = replaced(text, MARKS, table(json.loads(RESULTS.read_text(encoding="utf-8"))), PAGE)
    if text == wanted:
        return 0
    if options.check:
        print("docs/compress.md is not up to date: python scripts/document_compress.py --write")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


def table(kept: dict[str, Any]) -> str:
    """Prompt, tokens kept and what was tried by row."""
    tokens: dict[str, list[int]] = {}
    for key, found in kept["yardsticks"].items():
        tokens.setdefault(key.split("/")[0], []).append(found["tokens"])
    rows: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for key, found in kept["results"].items():
        prompt, _, size, who = key.split("/")
        if who in NAMES:
            rows.setdefault((prompt, int(size), who), []).append(found)
    lines = [HEAD, "", "| prompt (tokens) | kept | how | benefit | recall | agreement | seeds |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    order = list(NAMES)
    for prompt, size, who in sorted(rows, key=lambda row: (row[0], row[1], order.index(row[2]))):
        found = rows[prompt, size, who]
        cells = [
            f"{prompt} ({round(statistics.mean(tokens[prompt])):,})",
            str(size),
            NAMES[who],
            _spread([each["benefit"] for each in found]),
            _spread([each["recall"] for each in found if each["recall"] is not None]),
            _spread([each["agreement"] for each in found]),
            str(len(found)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = f"{100 * statistics.mean(values):.0f}"
    return f"{mean} ± {100 * statistics.stdev(values):.0f} %" if len(values) > 2 else f"{mean} %"


if __name__ == "__main__":
    sys.exit(main())
