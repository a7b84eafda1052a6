"""The command line that makes a run again: what a spec says, in the words of `inlay tune`.

Every field of a spec is an option of the same name, so that the rule is short; a test types the commands and compares
the specs. A field that has its default is left out.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from inlay.records.spec import Spec
from inlay.records.store import Run

# Said in an order that people would choose; the others follow in the order of the spec.
FIRST = ("model", "task", "tasks", "data", "method", "seed", "shots")


def arguments(spec: Spec, out: str | None = None) -> list[str]:
    """The words of the command, the program's own name first; `out` is the folder of runs, if it is to be said."""
    fields = {entry.name: entry for entry in dataclasses.fields(Spec)}
    words = ["inlay", "tune"]
    for name in (*FIRST, *(name for name in fields if name not in FIRST)):
        value = getattr(spec, name)
        if name == "settings":
            words += [word for key, each in value.items() for word in ("--set", f"{key}={_setting(each)}")]
        elif name == "task_fields":
            words += ["--task-fields", json.dumps(value)] if value else []
        elif name != "seed" and value == fields[name].default:
            continue
        else:
            words += _option(f"--{name.replace('_', '-')}", name, value)
    return words if out is None else [*words, "--out", out]


def command(spec: Spec, out: str | None = None) -> str:
    """The command as one line for a POSIX shell."""
    return shlex.join(arguments(spec, out))


def asked(run: Run) -> Spec:
    """What somebody asked for: an earlier inlay wrote False where nobody had said whether to recompute activations."""
    spec = run.spec
    if run.status == "finished" and "gradient_checkpointing" not in run.portrait:  # None came with that entry
        return spec.with_(gradient_checkpointing=spec.gradient_checkpointing or None)
    return spec


def _option(option: str, name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if name == "tasks":
        return [option, ",".join(value)]
    if isinstance(value, tuple):
        return [word for each in value for word in (option, str(each))]
    # repr gives a float's shortest digits that mean the same number; a whole one needs no point.
    return [option, f"{value:.0f}" if isinstance(value, float) and value.is_integer() and value < 1e6 else str(value)]


def _setting(value: Any) -> str:
    """A setting's value as `--set` reads it: JSON, or a plain word where that is not taken for JSON."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)
