"""Writes the counts of a run, and the table of what is refused and why, into docs/peft-suite.md."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peft_suite import stand_ins

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "peft-suite.md"
COUNTS = ROOT / "docs" / "data" / "peft-suite.json"
REFUSALS = Path(__file__).with_name("refusals.toml")
BEGIN, END = "<!-- generated:begin -->", "<!-- generated:end -->"


def record(found: Iterable[Mapping[str, Any]]) -> None:
    """Keep the counts of these methods, beside those of others that were kept before, and write the page."""
    kept = kept_counts() if COUNTS.is_file() else {}
    for counts in found:
        if counts["broken"]:
            raise SystemExit(f"{counts['method']}: the tests could not be run, and nothing is recorded.")
        entry = {key: value for key, value in counts.items() if key not in ("method", "broken")}
        kept[counts["method"]] = entry | {"deviations": len(counts["deviations"])}
    COUNTS.parent.mkdir(parents=True, exist_ok=True)
    COUNTS.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def kept_counts() -> dict[str, Any]:
    """The counts that were recorded, by method."""
    found: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return found


def written(page: str) -> str:
    """The page with its tables as the files have them now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


def tables() -> str:
    """The counts by method, what is refused, and what is left out."""
    kept = kept_counts()
    table = tomllib.loads(REFUSALS.read_text(encoding="utf-8"))
    versions = sorted({entry["peft"] for entry in kept.values()})
    lines = [f"With PEFT {', '.join(versions)}:", "", *_counts(kept), "", "Refused, with one clear error:", ""]
    lines += _reasons(table["refused"], {name: entry["refused"] for name, entry in kept.items()})
    lines += ["", "Not run:", ""]
    lines += _reasons(table["left_out"], {name: entry["left_out"] for name, entry in kept.items()})
    lines += ["", "Run with a setting of their own:", "", "| tests | methods | why |", "| --- | --- | --- |"]
    lines += [f"| `{one['tests']}` | {', '.join(one['methods'])} | {one['why']} |" for one in table["adjusted"]]
    return "\n".join(lines) + "\n"


def _counts(kept: Mapping[str, Any]) -> list[str]:
    lines = ["| method | passed | refused | deviations | skipped by PEFT itself |", "| --- | --- | --- | --- | --- |"]
    for method in stand_ins.methods():
        if method in kept:
            entry = kept[method]
            numbers = (entry["passed"], sum(entry["refused"].values()), entry["deviations"], entry["skipped_by_peft"])
            name = f"{method} (control)" if method == stand_ins.CONTROL else method
            lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return lines


def _reasons(entries: Iterable[Mapping[str, Any]], counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = ["| what | why | tests |", "| --- | --- | --- |"]
    for entry in entries:
        number = sum(each.get(entry["reason"], 0) for each in counts.values())
        lines.append(f"| {entry['reason']} | {entry['why']} | {number:,} |")
    return lines
