"""Runs to one self-contained web page: no network, no library, one file to look at and to send.

The page's structure, look and behaviour are files of their own in `assets/`. The data go in as JSON, inert; whatever a
spec or an error says reaches the page as text, never as markup. The page's own policy forbids every request and every
script but the one whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.records.atomic import write_text, writing
from inlay.records.spec import Spec
from inlay.records.store import Run, now
from inlay.report import explanations
from inlay.report.against import changes, describe
from inlay.report.collect import Collected, Result, ResultRow, collect, settings_of
from inlay.report.columns import columns_in
from inlay.report.comparable import short_commit, warnings
from inlay.report.conclusion import findings
from inlay.report.inside import look
from inlay.report.loading import loads, place_of
from inlay.report.over_tasks import in_words, rankings
from inlay.report.paths import cutter, everywhere
from inlay.report.subjects import family, kind, reads
from inlay.workflow.chance import NAME

ENDINGS = (".html", ".htm")
SCRIPTS = ("base.js", "table.js", "plot.js", "figures.js", "ranks.js", "inside.js", "page.js")
PACKAGES = (
    *("inlay", "commit", "python", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors"),
    "numpy",
)
LISTED = 12  # values of one setting
RANKINGS = 3  # in the first lines
SPLITS = ("train", "validation", "test")
MACHINE = ("cpu", "cores", "threads", "gpu", "cuda", "platform")


def write_report(
    runs: Path | Sequence[Run],
    out: Path,
    explain: Sequence[Path] | None = None,
    *,
    found: Collected | None = None,
    earlier: Collected | None = None,
) -> Path:
    """Write the page about the runs of a folder, or about those given, to `out`; the path comes back.

    `explain` are folders of explanations to show; by default those among the runs, and those in a folder `explain`
    beside theirs that are about the same tasks. `found` is what `collect(runs)` gave, where that was done already, and
    `earlier` what it gave of an earlier folder, to be compared with. Of absolute paths only the names are shown.
    """
    out = Path(out)
    check_out(out)
    found = found or collect(runs)
    within = {result.run.folder.parent for result in found.results} if isinstance(runs, Path) else set()
    folders = [runs, *sorted(within - {runs})] if isinstance(runs, Path) else sorted({r.folder.parent for r in runs})
    kept, problems = explanations.read(explain) if explain is not None else explanations.beside(folders, found.tasks)
    found.damaged += problems
    inside, left = look(found)
    whole = page_data(found) | {"explanations": [asdict(each) for each in kept], "inside": inside, "inside_left": left}
    whole["loads"] = loads(found)
    whole["against"] = None
    if earlier is not None:
        changed = changes(found, earlier)
        whole["against"] = {"name": earlier.name, "changes": [asdict(each) for each in changed]}
        whole["findings"].append(describe(changed, earlier.name))
    data = everywhere(whole, cutter([*found.specs, *(earlier.specs if earlier else ())]))
    data["cut"] = data != whole
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, render(data))
    return out


def check_out(out: Path, endings: Sequence[str] = ENDINGS) -> None:
    """Refuse before the work what cannot be a page's place."""
    if out.is_dir():
        raise InlayError(
            f"{str(out)!r} is a folder: give the name of a file in it, such as {out / ('report' + endings[0])}."
        )
    if out.suffix.lower() not in endings:
        raise InlayError(f"{str(out)!r} does not end in {' or '.join(endings)}: say --out report{endings[0]}.")


def render(data: dict[str, Any]) -> str:
    """The page with its data, as one text."""
    style = _asset("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    finite = everywhere(data, lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf)
    inert = json.dumps(finite, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # In JSON `<` only stands in strings, where its escape means the same; so no string can end the element.
    inert = inert.replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _asset("page.html")
    parts = {"policy": policy, "title": html.escape(data["title"]), "style": style, "data": inert, "script": script}
    # In one pass: what is put in is not looked through for marks, whatever a note in the data says.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], page)


def _asset(name: str) -> str:
    return resources.files("inlay.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ------------------------------------------------------------------------------------------------------------ the data


def page_data(found: Collected) -> dict[str, Any]:
    """What the page's script reads."""
    from inlay import __version__

    numbers = {id(result): number for number, result in enumerate(found.results)}
    ranked = rankings(found)
    return {
        "title": f"{found.name}: inlay report",
        "name": found.name,
        "made": now(),
        "version": __version__,
        "sets": [
            asdict(each) | {"label": each.label, "kind": kind(rows[0].results[0]), "data": reads(rows[0].results[0])}
            for each, rows in found.by_set
        ],
        "families": {name: family(name) for name in dict.fromkeys(row.spec.method for row in found.rows)},
        "over_tasks": [
            asdict(each.found) | {"places": each.places, "share": each.share, "notes": each.notes} for each in ranked
        ],
        "columns": [
            {"key": each.key, "label": each.titles["page"], "plot": each.titles.get("plot"), "kind": each.kind}
            | {"about": each.about, "better": each.better, "unit": each.unit, "log": each.log}
            for each in columns_in("page")
        ],
        "rows": [
            _row(row, numbers) | {"beats": [found.rows.index(other) for other in row.beats]} for row in found.rows
        ],
        "references": _references(found),
        "runs": [_run(result) for result in found.results],
        "findings": in_words(ranked)[:RANKINGS] + findings(found) + found.said,
        "warnings": [asdict(warning) for warning in warnings(found)],
        "unfinished": [
            {"id": run.id, "status": run.status, "error": run.error, "command": run.command} for run in found.unfinished
        ],
        "damaged": found.damaged,
        "settings": _count_settings([result.spec for result in found.results]),
        "versions": _count_versions(found.results, PACKAGES),
        "machine": _count_versions(found.results, MACHINE),
        "models": _pair_up(
            (result.spec.model, (result.record.get("backbone") or {}).get("source")) for result in found.results
        ),
        "examples": _count_examples(found.results),
        "data": _pair_up((task, source) for result in found.results for task, source in _sources_of(result)),
        "first": min(str(result.record.get("created", "")) for result in found.results),
        "last": max(str(result.record.get("finished", "")) for result in found.results),
    }


def _row(row: ResultRow, numbers: dict[int, int]) -> dict[str, Any]:
    known = [result.validation for result in row.results if result.validation is not None]
    return {
        "method": row.spec.method,
        "variant": row.variant,
        "set": row.place,
        "mean": row.mean,
        "interval": row.interval,
        "validation": sum(known) / len(known) if known else None,
        "chosen": row.chosen,
        "best": row.badge,
        "verdict": row.verdict,
        **{column.key: column.value(row.records) for column in columns_in("page")},
        "spreads": {column.key: column.spread(row.records) for column in columns_in("page")},
        "settings": {key: value for key, value in settings_of(row.spec).items() if value not in (None, [], {}, False)},
        "runs": [numbers[id(result)] for result in row.results],
    }


def _references(found: Collected) -> list[dict[str, Any]]:
    """A set's majority class, where its runs have it on record."""
    known: dict[int, dict[str, Any]] = {}
    for row in found.rows:
        standing = row.standing
        if standing.majority and row.place not in known:
            mean = sum(standing.majority) / len(standing.majority)
            known[row.place] = {"set": row.place, "name": f"{NAME} ({standing.answer})", "mean": mean}
    return list(known.values())


def _run(result: Result) -> dict[str, Any]:
    record, portrait = result.record, result.run.portrait
    return {
        "id": result.run.id,
        "place": place_of(result.run.folder),
        "seed": result.spec.seed,
        "value": result.value,
        "validation": result.validation,
        "watched": result.watched,
        "others": _other_metrics(result),
        "seconds": (portrait.get("seconds_per_epoch") or {}).get("mean"),
        "memory": (portrait.get("peak_memory") or {}).get("bytes"),
        "steps": record.get("steps"),
        "whole": record.get("seconds"),
        "finished": record.get("finished"),
        "curve": result.curve,
        "command": result.command,
    }


def _other_metrics(result: Result) -> dict[str, float]:
    """The other metrics of the split that is shown: those of each task, where there are several."""
    named = [(name, value) for name, value in result.run.metrics[result.of.split].items() if name != result.metric]
    return dict([(name, value) for name, value in named if not name.endswith("loss")][:LISTED])


def _sources_of(result: Result) -> list[tuple[str, str | None]]:
    tasks = result.record.get("tasks") or {result.spec.task or str(result.spec.data): result.record.get("task") or {}}
    return [(name, task.get("source")) for name, task in tasks.items()]


def _count_examples(results: Sequence[Result]) -> list[dict[str, Any]]:
    """How many rows there are for training, validation and test, each combination once."""
    known = [(result.of.label, result.record.get("examples") or {}) for result in results]
    told = dict.fromkeys((name, *(each.get(split) for split in SPLITS)) for name, each in known if each)
    return [dict(zip(("name", *SPLITS), each, strict=True)) for each in told]


def _pair_up(pairs: Any) -> list[dict[str, str]]:
    return [{"name": str(name), "source": str(source)} for name, source in dict.fromkeys(pairs)]


def _count_versions(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """Every value of some entries of `versions`, the commonest first, with how many runs have it."""
    seen = []
    for name in names:
        known = [value for result in results if (value := (result.record.get("versions") or {}).get(name))]
        values = Counter(short_commit(value) if name == "commit" else str(value) for value in known)
        if values:
            seen.append({"name": name, "values": [{"value": v, "runs": n} for v, n in values.most_common()]})
    return seen


def _count_settings(specs: Sequence[Spec]) -> list[dict[str, Any]]:
    """What all runs share, and what differs, of what their specs say."""
    told = []
    said = [spec.to_json() for spec in specs]
    for name in said[0]:
        values = Counter(json.dumps(each[name], sort_keys=True) for each in said)
        if set(values) - {"null", "[]", "{}", "false"}:
            listed = [{"value": value, "runs": runs} for value, runs in values.most_common(LISTED)]
            told.append({"name": name, "values": listed, "kinds": len(values)})
    return told
