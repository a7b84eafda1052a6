"""What goes wrong in a user's hands, said once and clearly.

Every message names the offending value, the values that would do, and the next step. The command line prints an
`InlayError` without a traceback and exits with status 2; anything else that escapes is a defect of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class InlayError(ValueError):
    """A mistake the user can mend: bad input, a missing file, a model that does not fit.

    A `ValueError`, as PEFT and Transformers raise for the same mistakes: what catches theirs catches ours. Code here
    that rewords another library's `ValueError` lets an `InlayError` through as it is: it is worded already.
    """


def nearest(value: str, allowed: Iterable[str], most: int = 3) -> list[str]:
    """The allowed names that look most like `value`, best first; empty when nothing comes close."""
    by_folded = {name.casefold().replace("_", "-"): name for name in allowed}
    folded = value.casefold().replace("_", "-")
    close = difflib.get_close_matches(folded, by_folded, n=most, cutoff=0.5)
    return [by_folded[name] for name in close]


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """A question to end a message with, after a blank; empty when no allowed name comes close."""
    return asked(nearest(value, allowed))


def asked(close: Iterable[str]) -> str:
    """Whether one of these names was meant."""
    names = " or ".join(map(repr, close))
    return f" Did you mean {names}?" if names else ""


def misspelt(path: Path | str) -> str:
    """The same question for a file or folder that is not there: of what lies beside it."""
    path = Path(path)
    try:
        beside = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    return "" if path.name in beside else did_you_mean(str(path), [str(path.parent / name) for name in beside])


def unknown(kind: str, value: str, allowed: Iterable[str], next_step: str = "") -> InlayError:
    """An `InlayError` for a name that is not one of a known set."""
    names = sorted(allowed)
    return InlayError(
        f"Unknown {kind} {value!r}.{did_you_mean(value, names)} Known: {', '.join(names) or '(none)'}."
        + (f" {next_step}" if next_step else "")
    )


def check_keywords(function: str, given: Mapping[str, Any], known: type) -> None:
    """The error that Python raises for an argument by an unknown name, where a TypedDict (`known`) lists the names."""
    for name in given.keys() - known.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """The first line of what another library had to say, to be quoted in a message of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
