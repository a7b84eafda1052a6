"""Tokenizers and processors that need no network, and a way to write small files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.normalizers import BertNormalizer
from transformers import PreTrainedTokenizerFast

from inlay.records.spec import Spec

# The first example of a test may pay for an import; and the same examples every time make the same result.
settings.register_profile("inlay", deadline=None, derandomize=True)
settings.load_profile("inlay")

CORPUS = [
    "the cat sat on the mat and the dog ran into the garden",
    "an unbelievable story of a small town in the north of France",
    "Paris is the capital of France [ and ] London is not",
    "what is seven times eight? the answer is 56. question: answer:",
    "name : Blue Spice | area : city centre || a coffee shop in the city centre",
] * 20


@pytest.fixture(scope="session")
def wordpiece() -> Any:
    """A small tokenizer in the manner of BERT: [CLS] ... [SEP] ... [SEP], with a mask."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = [chr(c) for c in range(32, 127)]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|end|>", "<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Any:
    """A small tokenizer in the manner of GPT-2: nothing is added to a text, and the end of text pads."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(), eos_token="<|end|>", pad_token="<|end|>", model_max_length=128
    )


@pytest.fixture(scope="session")
def with_start() -> Any:
    """A small tokenizer in the manner of Llama: a text begins with <s>."""
    tokenizer = _byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", pad_token="<|end|>"
    )


@pytest.fixture(scope="session")
def processor() -> Any:
    """An image processor that makes 16 x 16 tensors."""
    from transformers import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 16, "width": 16})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return make


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Spec]:
    """A spec with what a task reads; nothing is found in the cache, and there is no package index."""
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "empty-cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def make(**options: Any) -> Spec:
        options = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
        return Spec(model="none", method="none", **options)

    return make
