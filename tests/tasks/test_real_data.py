"""The real data beside the checkout, where there is some: every set loads, with the counts of its card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inlay import tasks
from inlay.records.spec import Spec

MakeSpec = Callable[..., Spec]

# name: training and selection rows together, test rows (data to text: sources), labels
TEXTS = {
    "cola": (8551, 1043, 2),
    "sst2-sentences": (6920 + 872, 1821, 2),
    "mrpc": (3668 + 408, 1725, 2),
    "rte": (2490, 277, 2),
    "stsb": (5749 + 1500, 1379, 1),
    "mnli-small": (9832, 9815, 3),
    "boolq": (9427, 3270, 2),
    "cb": (250, 56, 3),
    "copa": (400, 100, 2),
    "wsc": (554, 104, 2),
    "semeval2010": (8000, 2717, 19),
    "wnut17": (3394 + 1009, 1287, 13),
    "wnut17-spans": (1975 + 836, 1079, 6),
    "e2e": (42061 + 547, 630, None),
    "wikitext2": (36718 + 3760, 4358, None),
    "gsm8k": (7473, 1319, None),
}
IMAGES = {
    "caltech101": (1212, 808, 101),
    "cifar10": (2000, 1000, 10),
    "dtd10": (960, 240, 10),
    "fashion-mnist": (3000, 2000, 10),
    "oxford-flowers": (1020, 1020, 102),
    "hymenoptera": (244, 153, 2),
    "oxford-pets": (1110, 925, 37),
}


@pytest.mark.parametrize("name", [*TEXTS, *IMAGES])
def test_counts_are_those_of_the_card(shared: Path, spec: MakeSpec, name: str) -> None:
    seen, tested, classes = (TEXTS | IMAGES)[name]
    task = tasks.load(spec(task=name, data_dir=shared / "data"))
    assert (len(task.train) + len(task.validation), len(task.test), task.num_labels) == (seen, tested, classes)


def test_relations_are_numbered_as_in_the_file(shared: Path, spec: MakeSpec) -> None:
    """The data names each relation beside its number: the catalogue's order must agree."""
    from inlay.tasks.tables import read_table

    table = read_table(shared / "data" / "text" / "semeval2010_task8" / "test.jsonl.gz")
    names = tasks.describe("semeval2010").schema.label_names or ()
    assert all(names[row["label"]] == row["relation"] for row in table.rows)
    task = tasks.load(spec(task="semeval2010", data_dir=shared / "data"))
    labels = np.array(task.test["label"])
    perfect = task.compute_metrics(np.eye(19)[labels], labels)
    assert perfect == {"accuracy": 1.0, "semeval-f1": pytest.approx(1.0)}


def test_few_shots_are_balanced(shared: Path, spec: MakeSpec) -> None:
    task = tasks.load(spec(task="rte", data_dir=shared / "data", shots=64, seed=3))
    assert np.bincount(task.train["label"]).tolist() == [32, 32]


@pytest.fixture(scope="module")
def minilm(shared: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared / "models" / "minilm_l6_mlm")


@pytest.mark.parametrize("name", ["cola", "copa", "wsc", "semeval2010", "wnut17", "wnut17-spans"])
def test_real_rows_are_encoded(shared: Path, spec: MakeSpec, minilm: Any, name: str) -> None:
    task = tasks.load(spec(task=name, data_dir=shared / "data"))
    made = task.encode("test", minilm, 48)
    assert len(made) == len(task.test)
    batch = task.collator(minilm)([made[i] for i in range(8)])
    assert batch["input_ids"].shape[1] <= 48
    if name == "wnut17":
        words = sum(len(row["tokens"]) for row in task.test.select(range(8)))
        assert (batch["labels"] != -100).sum() <= words
    if name == "semeval2010":
        kept = [minilm.decode(made[i]["input_ids"]) for i in range(len(made))]
        assert all("< e1 >" in text and "< / e2 >" in text for text in kept), "no entity was cut off"


def test_real_answers_match_themselves(shared: Path, spec: MakeSpec) -> None:
    task = tasks.load(spec(task="gsm8k", data_dir=shared / "data"))
    assert task.score_texts(list(task.test["target"]), task.test) == {"answer-accuracy": 1.0}


def test_real_references_score_well_against_the_others(shared: Path, spec: MakeSpec) -> None:
    task = tasks.load(spec(task="e2e", data_dir=shared / "data"))
    rows = [row for row in task.test if len(row["references"]) > 1][:100]
    others = [row | {"references": row["references"][1:]} for row in rows]
    score = task.score_texts([row["references"][0] for row in rows], others)["bleu"]
    assert 25 < score < 90
