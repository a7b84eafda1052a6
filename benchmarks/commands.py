"""The command that made a result, as its file keeps it: without the folder of one machine that it was written to."""

from __future__ import annotations

import sys
from pathlib import Path

PLACES = ("--results", "--out", "--trl")


def command() -> str:
    """What this process was called with."""
    kept, skips = [], False
    for word in sys.argv[1:]:
        if not skips and word.split("=")[0] not in PLACES:
            kept.append(word)
        skips = word in PLACES
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept])
