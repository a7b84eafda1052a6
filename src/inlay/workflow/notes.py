"""Notes for the user beside a result: where data and model came from, what was dropped, cut or assumed.

The command line gives the verbs a `say` that prints to stderr. Called from Python without one, they use the logger
`inlay.notes`: what a user should know is a warning, which Python shows by default, and where things came from is
information. `say=silent` keeps a verb quiet; so does `logging.getLogger("inlay.notes").disabled = True`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

Say = Callable[[str], None]
NOTES = logging.getLogger("inlay.notes")
PLAIN = ("data: ", "model: ", "already done: ")


def silent(line: str) -> None:
    """A `say` that prints nothing."""


def or_log(say: Say | None) -> Say:
    """`say`, or the logger where it is None. Of several processes that train together only the first one logs."""
    if say is not None:
        return say
    return silent if int(os.environ.get("RANK", "0")) else _log


def _log(line: str) -> None:
    NOTES.log(logging.INFO if any(start in line for start in PLAIN) else logging.WARNING, "%s", line)
