"""The script behind docs/multi-lora-measured.md: what its runs count, and which rate a line of its tables has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import zoo
from checkpoints import write_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(not SCRIPTS.is_dir(), reason="no checkout: the scripts of the tables are not installed"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    import multi_lora_table

    return multi_lora_table


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder where the script looks for SmolLM2, and a few rows of its three tasks as they come."""
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
def test_numbers_are_those_of_the_formula_where_texts_are_written(
    script: Any, place: Path, line: str, task: str
) -> None:
    work = script.Work("decoder", line, task, 0.01, 0, str(place), str(place), steps=1, limit=4)
    found = script.measure(work)
    assert all("bleu" in score for score in found["scores"].values())
    config = AutoConfig.from_pretrained(place / "smollm2")
    values = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    a, b = 2 * 4 * config.hidden_size, 4 * (config.hidden_size + values)  # of a layer's queries and values, r = 4
    tasks = len(found["scores"])
    assert tasks == (3 if task == "all" else 1)
    assert found["numbers"] == config.num_hidden_layers * (a + tasks * b)
