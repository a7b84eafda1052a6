"""What one of several tasks of a run has of its own: its data and columns, as fields of a spec by the task's name.

    {"reviews": {"data": "reviews.csv", "text": ["body"], "label": "stars"}, "mood": {"task": "sst2", "shots": 64}}

A task without an entry is a named one. What an entry does not say is as the spec says it for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.records.spec_values import fitting, shown

FIELDS = ("task", "data", "test_data", "text", "label", "image", "kind", "template", "shots", "data_dir")
"""The fields that a task may have of its own."""
PATHS = ("data", "test_data", "data_dir")
COLUMNS = ("text", "label", "image")


def read_fields(spec: type, tasks: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries as a spec keeps them, checked: of JSON's kinds, without what says nothing."""
    entries = {entry.name: entry for entry in dataclasses.fields(spec)}
    found = {}
    for name, own in given.items():
        if name not in tasks:
            raise unknown("task in task_fields", name, tasks)
        if not isinstance(own, Mapping):
            raise InlayError(f"task_fields: {name!r} has {shown(own)}: give a mapping of {', '.join(FIELDS)}.")
        try:
            found[name] = _read(entries, own)
        except InlayError as error:
            raise InlayError(f"Task {name!r}: {error}") from None
    return found


def _read(entries: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in own.items():
        if key not in FIELDS:
            raise unknown("field", str(key), FIELDS)
        value = fitting(entries[key], value)
        if value not in (None, ()):
            found[key] = list(value) if isinstance(value, tuple) else value
    if ("task" in found) == ("data" in found):
        raise InlayError("give either task (a name) or data (a path), not both or neither.")
    if found.get("shots", 1) < 1:
        raise InlayError(f"shots={found['shots']!r} must be greater than 0.")
    return found


def contents(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries without where the data lie, which count by what is in them."""
    return {name: {key: "" if key in PATHS else value for key, value in own.items()} for name, own in given.items()}
