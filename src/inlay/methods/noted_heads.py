"""What `inlay.json` beside an adapter says of its outputs, for PEFT's classes that load the base model themselves.

`AutoPeftModelForSequenceClassification.from_pretrained(place)` gives the base as many outputs as its own config says,
and an adapter with a head for other classes does not fit it. The note has the names of the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay.methods.folder import CONFIG, NOTE, read_json
from inlay.methods.pooling_notes import find_file
from inlay.tasks import kinds

SAID = ("num_labels", "id2label", "label2id")


def with_noted_head(source: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `AutoPeftModel...from_pretrained`, with the outputs that the note of an adapter names.

    What is given stays; an adapter without a note, or with one of a language model, changes nothing.
    """
    if any(name in given for name in SAID):
        return dict(given)
    note = find_file(str(source), NOTE["peft"], given)
    about = read_json(note).get("about") if note is not None else None
    if not isinstance(about, Mapping):
        return dict(given)
    labels = about.get("labels")
    more: dict[str, Any] = {}
    if isinstance(labels, list) and labels and all(isinstance(label, str) for label in labels):
        more = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
        more["label2id"] = {label: number for number, label in enumerate(labels)}
    elif about.get("kind") == kinds.REGRESSION:
        more = {"num_labels": 1}
    if more and _has_other_head(str(source), given, more["num_labels"]):
        more["ignore_mismatched_sizes"] = True  # the base's own head, in whose place the adapter's comes
    return {**more, **given}


def _has_other_head(source: str, given: Mapping[str, Any], outputs: int) -> bool:
    """Whether the base model comes with a head of another size."""
    from transformers import PretrainedConfig

    path = find_file(source, CONFIG["peft"], given)
    settings = read_json(path) if path is not None else {}
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str):
        return False
    try:
        config, _ = PretrainedConfig.get_config_dict(base, revision=revision)
    except (OSError, ValueError):  # whoever loads the base says what is wrong with it
        return False
    with_head = any("Classification" in str(name) for name in config.get("architectures") or ())
    return with_head and len(config.get("id2label") or range(2)) != outputs
