"""One page with all the pictures of an experiment's command, beside the claims and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from inlay.papers.findings import Finding
from inlay.records.atomic import writing

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}img{max-width:100%}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
)


def write(path: Path, title: str, command: Sequence[str], found: Sequence[tuple[Finding, Path]]) -> None:
    """An HTML file that shows each finding's picture from its folder, and its claims as a table."""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p><code>{escape(' '.join(command))}</code></p>",
    ]
    for finding, folder in found:
        picture = folder.relative_to(path.parent) / f"{finding.name}.png"
        rows = "".join(
            f"<tr><td>{escape(claim.claim)}</td><td>{escape(claim.measured)}</td><td>{claim}</td></tr>"
            for claim in finding.claims
        )
        parts.append(
            f"<h2>{escape(finding.name)}</h2><img src='{escape(picture.as_posix())}' alt='{escape(finding.name)}'>"
            f"<table><tr><th>claim</th><th>measured</th><th>holds?</th></tr>{rows}</table>"
        )
    with writing(path):
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
