"""Texts that are written from texts: columns, tokens, batches, and the loss of a decoder's labels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, tasks
from inlay.tasks.encode import IGNORED

SEQ2SEQ = "sequence-to-sequence"
Make = Callable[..., Spec]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return write_tokenizer(tmp_path)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A spec on rows as JSON lines."""

    def write(rows: list[dict[str, Any]], **options: Any) -> Spec:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Spec(model="none", data=str(path), kind=SEQ2SEQ, method="lora", **options)

    return write


def numbered(**columns: str) -> list[dict[str, Any]]:
    return [{"id": i, **{name: f"{text} w{5 + i % 30}" for name, text in columns.items()}} for i in range(30)]


@pytest.mark.parametrize(
    ("columns", "options", "read", "written"),
    [
        ({"source": "w6", "target": "w7"}, {}, "source", "target"),
        ({"Article": "w6", "Highlights": "w7", "title": "w8"}, {}, "Article", "Highlights"),
        ({"text": "w6", "summary": "w7", "note": "w8"}, {}, "text", "summary"),
        ({"german": "w6", "english": "w7"}, {"text": ("german",), "label": "english"}, "german", "english"),
        ({"german": "w6", "english": "w7"}, {"text": ("german", "english")}, "german", "english"),
        ({"letter": "w6", "target": "w7", "x": "w8"}, {"text": ("letter",)}, "letter", "target"),
    ],
)
def test_columns(make: Make, columns: dict[str, str], options: Any, read: str, written: str) -> None:
    task = tasks.load(make(numbered(**columns), **options))
    assert (task.kind, task.fields, task.schema.answers) == (SEQ2SEQ, (read,), True)
    first = task.train[0]
    assert first[read].startswith("w6")
    assert first["target"].startswith("w7")
    assert task.metrics[0] == "rouge-l"
    assert task.selection_metric == "perplexity"
    assert len(task.train) + len(task.validation) + len(task.test) == 30


def test_what_is_missing_is_said(make: Make) -> None:
    with pytest.raises(InlayError, match=r"a text to read and one to write.*--text and --label.*columns: id, a, b"):
        tasks.load(make(numbered(a="w6", b="w7")))
    with pytest.raises(InlayError, match=r"the text to write: name it with --label"):
        tasks.load(make(numbered(a="w6", b="w7", c="w8"), text=("a",)))
    rows = numbered(source="w6", target="w7")
    rows[7]["target"] = {"de": "w7"}
    with pytest.raises(InlayError, match=r"rows.jsonl, row 8.*'target'"):
        tasks.load(make(rows))


def test_labels_end_the_text_and_are_cut_by_themselves(make: Make, tokenizer: Any) -> None:
    rows = [{"source": " ".join(["w6"] * (i + 1)), "target": " ".join(["w7"] * (30 - i))} for i in range(30)]
    task = tasks.load(make(rows))
    encoded = task.encode("train", tokenizer, 12)
    for item, row in zip(encoded, task.train, strict=False):
        ids, labels = item["input_ids"], item["labels"]
        assert len(ids) == min(12, len(row["source"].split()))
        assert len(labels) == min(12, len(row["target"].split()) + 1)
        assert labels[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(labels, skip_special_tokens=True) == " ".join(row["target"].split()[:11])
    long = sum(len(row["target"].split()) > 11 for row in task.train)
    assert encoded.targets_cut == long
    assert any(f"{long} of {len(task.train)} train answers are longer than 12 tokens" in note for note in encoded.notes)


def test_a_batch_is_padded_to_each_ones_own_width_and_on_the_right(make: Make, tokenizer: Any) -> None:
    task = tasks.load(make(numbered(source="w6 w8", target="w7")))
    items = [{"input_ids": [6, 7, 8], "attention_mask": [1, 1, 1], "labels": [9, 2]}]
    items.append({"input_ids": [6], "attention_mask": [1], "labels": [9, 10, 11, 12, 2]})
    for generation in (False, True):
        batch = task.collator(tokenizer, generation=generation)(items)
        assert batch["input_ids"].tolist() == [[6, 7, 8], [6, 1, 1]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch["labels"].tolist() == [[9, 2, IGNORED, IGNORED, IGNORED], [9, 10, 11, 12, 2]]


def test_perplexity_is_that_of_every_label(make: Make, tokenizer: Any) -> None:
    """Against log-softmax in float64, row by row and without padding."""
    task = tasks.load(make(numbered(source="w6 w8", target="w7")))
    model, batch = zoo.tiny("t5", SEQ2SEQ)
    with torch.no_grad():
        outputs = model(**{name: value for name, value in batch.items() if name != "decoder_input_ids"})
    kept = task.reduce_logits(outputs.logits, batch["labels"]).numpy()
    losses, counts = [], 0
    for i, labels in enumerate(batch["labels"]):
        wanted = labels[labels != IGNORED]
        ids = batch["input_ids"][i][batch["attention_mask"][i] == 1]
        with torch.no_grad():
            alone = model(input_ids=ids[None], labels=wanted[None]).logits[0].double().numpy()
        shares = (
            alone
            - np.log(np.exp(alone - alone.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - alone.max(-1, keepdims=True)
        )
        losses.append(-shares[np.arange(len(wanted)), wanted.numpy()].sum())
        counts += len(wanted)
        assert kept[i, 2] == float((alone.argmax(-1) == wanted.numpy()).all())
    found = task.compute_metrics(kept, batch["labels"].numpy())
    assert found == pytest.approx({"perplexity": math.exp(sum(losses) / counts)}, rel=1e-5)
    assert float(outputs.loss) == pytest.approx(sum(losses) / counts, rel=1e-5)
