"""What `inlay.json` beside an adapter says, for the doors that read an adapter without it: PEFT's and Transformers'.

PEFT's own configs have no place for what the head reads. Without a look at the note, a LoRA that was trained on one
feature would be put before another one without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTE = "inlay.json"


def heed(model: Any, source: Any) -> None:
    """Let the head of a model read what the adapter in the folder `source` was trained with, or say that it cannot.

    A folder without a note says nothing, and nor does what is not a folder.
    """
    from inlay.backbones.pooled import agree
    from inlay.methods.plain import base_of

    path = Path(str(source)) / NOTE
    try:
        note = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return  # who reads the note for its own sake says what is wrong with it
    if isinstance(note, dict):
        agree(base_of(model), note.get("pooling"), str(source))
