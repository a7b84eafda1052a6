"""What the backbone tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zoo
from checkpoints import Write, write_tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a tiny model of a family as a checkpoint folder, with a tokenizer for text; returns the folder."""

    def write_model(family: str, task: zoo.Task = "base", *, tokenizer: bool = True, **settings: Any) -> Path:
        folder = tmp_path / f"{family}-{task}"
        model, _ = zoo.tiny(family, task)
        if family == "resnet":
            del model.config.image_size  # as checkpoints have it: the zoo's stands for a model that was loaded
        model.save_pretrained(folder)  # type: ignore[operator]
        if tokenizer and zoo.FAMILIES[family].modality == "text":
            write_tokenizer(folder, **settings)
        return folder

    return write_model
