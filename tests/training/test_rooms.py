"""Training with the real rooms around it: a user's own files, a model from disk, texts that the model writes."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
import toys

from inlay import backbones, tasks
from inlay.methods.registry import get
from inlay.records import Spec
from inlay.training import FitOptions, evaluate, fit, predict


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A language model that has learnt to answer the last word of the prompt, wK, by w(K+10) and w(K+20)."""
    folder = tmp_path_factory.mktemp("rooms")
    model = toys.language_model(folder / "model")
    draw = random.Random(0)
    with open(folder / "last.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "answer"])
        for _ in range(400):
            words = [f"w{draw.randrange(10)}" for _ in range(draw.randrange(1, 8))]
            last = int(words[-1][1:])
            table.writerow([" ".join(words), f"w{last + 10} w{last + 20}"])
    spec = Spec(
        model=str(model), method="full", data=str(folder / "last.csv"), text=("prompt",), label="answer",
        kind="causal-lm", epochs=25, batch_size=32, learning_rate=2e-2, evaluations=2,
    )  # fmt: skip
    task = tasks.load(spec)
    backbone = backbones.load(spec.model, kind=task.kind, seed=spec.seed)
    outcome = fit(backbone, task, get("full"), spec, folder / "run", FitOptions(progress=False))
    return outcome, task, backbone, spec


def test_texts_are_written_and_scored(writer: tuple) -> None:
    outcome, task, backbone, spec = writer
    assert task.generates
    assert (
        outcome.metrics["test"].keys() == {"perplexity", "loss", "exact-match"} == outcome.metrics["validation"].keys()
    )
    assert outcome.metrics["test"]["exact-match"] > 0.9
    assert outcome.metrics["test"]["perplexity"] < 1.5
    during = [entry["validation"] for entry in outcome.history if "validation" in entry]
    assert all("exact-match" not in metrics for metrics in during), "no texts are written while it trains"
    metrics, texts = evaluate(outcome.model, task, "test", backbone.processor, spec)
    assert metrics == outcome.metrics["test"]
    assert len(texts) == len(task.test)


def test_a_prompt_gets_the_same_text_alone_and_in_any_company(writer: tuple) -> None:
    outcome, task, backbone, spec = writer
    rows = [{"prompt": prompt} for prompt in ("w1 w2 w3 w4 w5 w6 w7", "w5", "w3 w9")]
    together, encoded = predict(outcome.model, task, rows, backbone.processor, spec)
    alone, _ = predict(outcome.model, task, rows, backbone.processor, spec.with_(batch_size=1))
    assert together == alone == ["w17 w27", "w15 w25", "w19 w29"]
    assert task.decode(together, encoded)[0] == {"text": "w17 w27"}


def test_a_model_that_does_not_stop_stays_within_what_it_reads(tmp_path: Path) -> None:
    """30 tokens are all that this tokenizer allows, and an untrained model writes until it is stopped."""
    model = toys.language_model(tmp_path / "model")
    lines = [f"{'w1 ' * (60 + i)},w2\nw{i},w2" for i in range(20)]
    (tmp_path / "long.csv").write_text("\n".join(["prompt,answer", *lines]))
    spec = Spec(model=str(model), method="lora", data=str(tmp_path / "long.csv"), text=("prompt",), label="answer",
        kind="causal-lm", max_steps=1, batch_size=4)  # fmt: skip
    task = tasks.load(spec)
    for method in ("lora", "prompt"):
        backbone = backbones.load(spec.model, kind=task.kind, seed=0)
        outcome = fit(
            backbone, task, get(method), spec.with_(method=method), tmp_path / method, FitOptions(progress=False)
        )
        rows = [{"prompt": "w1 " * 60}, {"prompt": "w1"}]
        texts, _ = predict(outcome.model, task, rows, backbone.processor, spec)
        assert all(0 < len(text.split()) <= 15 for text in texts)
