"""The tables of docs/multi-lora-measured.md: what their runs count, and which rate a line of them has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import zoo
from checkpoints import write_tokenizer
from inlay.papers.multi_lora import table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def page(script: Any) -> Any:
    """What writes the tables into their page."""
    return script("document_multi_lora")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder where the table looks for SmolLM2, and a few rows of its three tasks as they come."""
    place = tmp_path_factory.mktemp("table")
    zoo.tiny("llama", "causal-lm")[0].save_pretrained(place / "smollm2")
    write_tokenizer(place / "smollm2")
    triples = [{"triples": [["w6", "w7", f"w{i}"]], "texts": [f"w{i} w6"]} for i in range(8)]
    pairs = [{"meaning_representation": f"name[w{i}]", "human_reference": f"w{i} w6"} for i in range(8)]
    for folder, rows in (("e2e_nlg", pairs), ("webnlg2017", triples), ("dart", triples)):
        (place / folder).mkdir()
        for split in ("train", "validation", "test"):
            (place / folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.mark.parametrize(("line", "task"), [("multi-lora", "all"), ("lora", "dart")])
def test_numbers_are_those_of_the_formula_where_texts_are_written(place: Path, line: str, task: str) -> None:
    work = table.TaskRun("decoder", line, task, 0.01, 0, str(place), str(place), steps=1, limit=4)
    found = table.measure(work)
    assert all("bleu" in score for score in found["scores"].values())
    config = AutoConfig.from_pretrained(place / "smollm2")
    values = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    a, b = 2 * 4 * config.hidden_size, 4 * (config.hidden_size + values)  # of a layer's queries and values, r = 4
    tasks = len(found["scores"])
    assert tasks == (3 if task == "all" else 1)
    assert found["numbers"] == config.num_hidden_layers * (a + tasks * b)


def test_a_rate_above_the_others_counts_when_it_is_tried_and_is_told_until_then(page: Any) -> None:
    line = table.DECODER.line("multi-lora")
    assert line.rates == (1e-3, 3e-3, 1e-2, 3e-2)

    def entry(rate: float, perplexity: float) -> dict[str, Any]:
        score = {"metric": "perplexity", "validation": perplexity, "test": perplexity, "bleu": 40.0}
        named = {"group": "decoder", "line": "multi-lora", "task": "all", "rate": rate, "seed": 0}
        return named | {"numbers": 414_720, "steps": 200, "scores": dict.fromkeys(table.DECODER.tasks, score)}

    runs = [entry(1e-3, 9.0), entry(3e-3, 8.0)]
    assert table.best_rate(runs, "decoder", line) is None
    runs.append(entry(1e-2, 7.0))
    assert table.best_rate(runs, "decoder", line) == 1e-2
    assert table.best_rate(runs, "decoder", line, settled=True) is None  # no seeds before all has been tried
    (row,) = page.results_table(runs, "decoder")[2:]
    assert row.startswith("| multi-lora | 415k | 0.01 (0.03 not tried yet) | 40.0")
    for perplexity, best in ((7.5, 1e-2), (6.5, 3e-2)):
        tried = [*runs, entry(3e-2, perplexity)]
        assert table.best_rate(tried, "decoder", line) == table.best_rate(tried, "decoder", line, settled=True) == best
        assert "not tried" not in page.results_table(tried, "decoder")[2]
    alike = table.QUESTIONS.line("A of seed 1")
    assert table.rate_of([], "questions", alike) is None


def test_a_later_measurement_replaces_an_earlier_one_and_a_miss_is_told(page: Any, tmp_path: Path) -> None:
    def goal(name: str, value: float, bound: float | None) -> dict[str, Any]:
        return {"name": name, "value": value, "bound": bound}

    files = [tmp_path / "whole.json", tmp_path / "again.json", tmp_path / "absent.json"]
    files[0].write_text(json.dumps({"goals": [goal("one", 0.5, 1.0), goal("two", 0.7, 1.0)]}))
    files[1].write_text(json.dumps({"goals": [goal("two", 1.25, 1.0), goal("three", 3.0, None)]}))
    assert page.cost_table({"H200": files})[2:] == [
        "| H200 | one | 1 | 0.50 |",
        "| H200 | two | 1 | 1.25 (missed) |",
        "| H200 | three | - | 3.00 |",
    ]
