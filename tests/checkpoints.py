"""Checkpoints on disk for the backbone tests: real `save_pretrained` folders of the zoo's tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *(f"w{i}" for i in range(zoo.VOCABULARY - 5))]
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
Write = Callable[..., Path]


def write_tokenizer(folder: Path, words: list[str] = WORDS, **settings: Any) -> PreTrainedTokenizerFast:
    """A word tokenizer whose ids are the zoo's; settings of None leave a special token out."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chosen = {"model_max_length": 20, **SPECIAL, **settings}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{key: value for key, value in chosen.items() if value is not None}
    )
    fast.save_pretrained(folder)
    return fast
