"""What a verb tells people besides its result: where data and model came from, what was dropped, cut or assumed.

The command line gives the verbs a `say` that prints to stderr. Called from Python without one, they tell the logger
`inlay.notes`: what a person should know is a warning there, which Python shows unless told otherwise, and where things
came from is information. `say=silent` keeps a verb quiet; so does `logging.getLogger("inlay.notes").disabled = True`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

Say = Callable[[str], None]
NOTES = logging.getLogger("inlay.notes")
PLAIN = ("data: ", "model: ", "already done: ")


def silent(line: str) -> None:
    """A `say` that tells nobody."""


def heard(say: Say | None) -> Say:
    """Who is told: `say`, or the logger. Of several processes that train together the first one speaks."""
    if say is not None:
        return say
    return silent if int(os.environ.get("RANK", "0")) else _log


def _log(line: str) -> None:
    NOTES.log(logging.INFO if any(start in line for start in PLAIN) else logging.WARNING, "%s", line)
