"""What the generators of documents share: the checkout, and pages with a part between two marks."""

from __future__ import annotations

from pathlib import Path

from inlay.errors import InlayError

ROOT = Path(__file__).resolve().parents[1]


def replaced(text: str, markers: tuple[str, str], content: str, path: Path) -> str:
    """A page's text with other content between two lines of it."""
    begin, end = markers
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise InlayError(f"{path} has no lines {begin} and {end}, between which the generated part goes.")
    return f"{head}{begin}\n{content}\n{end}{tail}"
