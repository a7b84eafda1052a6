"""The explanations that lie in a folder, as `charts.keep` left them: figure, data, metadata."""

from __future__ import annotations

import base64
import csv
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import InlayError

MAX_BYTES = 4 * 2**20
MAX_ROWS = 200
DEPTH = 3
PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}
TITLES = {
    "layers": "One layer at a time",
    "samples": "As the training set grows",
    "prompt-norm": "Size of the trained prompt",
    "cka": "How alike layers are (CKA)",
    "attention-distance": "How far attention reaches",
    "information": "Mutual information of prompts",
    "landscape": "Loss landscape",
}


@dataclass
class KeptExplanation:
    """One explanation: what it shows, in words, as a figure (a data URI) and as data."""

    what: str
    title: str
    subject: str
    sentence: str
    command: str
    picture: str
    columns: list[str]
    rows: list[list[str]]
    left_out: int


def beside(folders: Iterable[Path], tasks: Collection[str]) -> tuple[list[KeptExplanation], list[str]]:
    """Those within folders of runs, and those in `explain` beside them that are about one of the tasks; and what is
    wrong with others."""
    found, problems = [], []
    for folder in folders:
        for more, wrong in (_read([folder]), _read([folder.resolve().parent / "explain"], tasks)):
            found += more
            problems += wrong
    return found, problems


def read(folders: Sequence[Path]) -> tuple[list[KeptExplanation], list[str]]:
    """The explanations below folders that were asked for, and what is wrong with others."""
    for folder in folders:
        if not folder.is_dir():
            raise InlayError(
                f"{str(folder)!r} is no folder: --explain takes one that `inlay explain --out` has written."
            )
    return _read(folders)


def _read(folders: Iterable[Path], tasks: Collection[str] | None = None) -> tuple[list[KeptExplanation], list[str]]:
    found, problems = [], []
    for folder in folders:
        for path in sorted(_facts_below(folder, DEPTH)):
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(facts, dict) or facts.get("what") != path.stem or "sentence" not in facts:
                    continue
                if tasks is None or _subject(facts["spec"]) in tasks:
                    found.append(_kept(path, facts))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
                problems.append(f"The explanation in {path.parent} cannot be shown: {error!r}.")
    return found, problems


def _facts_below(folder: Path, depth: int) -> Iterator[Path]:
    """Every `<name>.json` with a figure of the same name, runs' own folders left out."""
    if not folder.is_dir() or (folder / "spec.json").is_file():
        return
    for path in folder.iterdir():
        if path.is_dir() and depth and not path.name.startswith("."):
            yield from _facts_below(path, depth - 1)
        elif path.suffix == ".json" and path.with_suffix(".png").is_file():
            yield path


def _subject(spec: dict[str, Any]) -> str:
    return str(spec.get("task") or " + ".join(spec.get("tasks") or ()) or spec.get("data"))


def _kept(path: Path, facts: dict[str, Any]) -> KeptExplanation:
    spec = facts["spec"]
    pictures = [place for ending in PICTURES if (place := path.with_suffix(ending)).is_file()]
    picture = min(pictures, key=lambda place: place.stat().st_size)
    if picture.stat().st_size > MAX_BYTES:
        raise ValueError(f"{picture.name} has {picture.stat().st_size / 2**20:.0f} MiB, more than a page should hold")
    with open(path.with_suffix(".csv"), encoding="utf-8", newline="") as file:
        columns, *rows = list(csv.reader(file))
    return KeptExplanation(
        what=facts["what"],
        title=TITLES.get(facts["what"], facts["what"]),
        subject=" · ".join([_subject(spec), spec["model"], *([] if spec["method"] == "none" else [spec["method"]])]),
        sentence=facts["sentence"],
        command=shlex.join(facts.get("command") or []),
        picture=f"data:{PICTURES[picture.suffix]};base64,{base64.b64encode(picture.read_bytes()).decode()}",
        columns=columns,
        rows=rows[:MAX_ROWS],
        left_out=max(0, len(rows) - MAX_ROWS),
    )
