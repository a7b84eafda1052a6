"""MetaMathQA to train on, GSM8K and MATH to test on (figure 2 of the NTK-Attention paper): one prompt, one score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inlay import tasks
from inlay.records.spec import Spec
from inlay.tasks import metrics

# Rows with the hub's columns.
META = {
    "type": "GSM_Rephrased",
    "query": "How many are 3 and 4?",
    "original_question": "What is 3 + 4?",
    "response": "3 and 4 are 7.\n#### 7\nThe answer is: 7",
}
GSM = {"question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
MATH = {
    "problem": "What is $3 \\pi$ halves?",
    "level": "Level 1",
    "solution": "It is $\\boxed{\\frac{3\\pi}{2}}$.",
    "type": "Algebra",
}


def load(folder: Path, name: str, row: dict[str, Any], split: str) -> tasks.Task:
    (folder / name).mkdir()
    rows = [
        {**row, key: f"{row[key]} ({i})"} for i in range(40) for key in ("query", "question", "problem") if key in row
    ]
    (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = Spec(model="none", method="lora", task=name, data_dir=str(folder))
    return tasks.load(spec, need_train=split == "train")


def test_what_is_trained_on_one_is_asked_and_scored_as_the_others_are(tmp_path: Path) -> None:
    trained = load(tmp_path, "metamathqa", META, "train")
    for name, row, right, wrong in (
        ("gsm8k", GSM, "So there are 7.\n#### 7\nThe answer is: 7", "The answer is: 8"),
        ("math", MATH, "The answer is: \\frac{3\\pi}{2}", "The answer is: 3"),
    ):
        tested = load(tmp_path, name, row, "test")
        assert (tested.template, tested.metrics) == (trained.template, trained.metrics)
        rows = list(tested.test)
        assert tested.score_texts([right] * len(rows), rows) == {"answer-accuracy": 1.0}
        assert tested.score_texts([wrong] * len(rows), rows) == {"answer-accuracy": 0.0}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("$3\\pi$", "$3\\pi$"),
        ("2x", "2x"),
        ("x - 2", "x - 2"),
        ("\\sqrt{3}", "\\sqrt{3}"),
        ("(1,2)", "(1,2)"),
        ("x = 5", "5"),
        ("$18.50 a week.", "$18.50"),
        ("3/4 of the cake", "3/4"),
    ],
)
def test_a_number_is_taken_out_of_words_and_not_out_of_formulas(said: str, found: str) -> None:
    assert metrics.answer(f"Hence 9. The answer is: {said}") == found
