"""The commands of `inlay explain` that are figures of one paper."""

from __future__ import annotations

from collections.abc import Callable

from inlay.papers.infoprompt.explain import command as infoprompt

COMMANDS: dict[str, Callable[..., None]] = {
    "information": infoprompt.information,
    "landscape": infoprompt.landscape,
}
