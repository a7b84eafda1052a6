"""Vectors of texts, from pairs on disk to files of vectors, by the command line and in Python."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModel, AutoTokenizer

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, tune
from inlay.records.store import Run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Type = Callable[..., tuple[int, str, str]]


def write_pairs(path: Path, count: int = 90) -> Path:
    """Questions about the words w1 to w15, answered by the words w16 to w30: a random model knows nothing of it."""
    rng = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "query", "positive"])
        for number in range(count):
            words = rng.sample(range(1, 16), 2)
            writer.writerow([f"r{number}", " ".join(f"w{w}" for w in words), " ".join(f"w{w + 15}" for w in words)])
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pairs, and a run by lora on them."""
    folder = tmp_path_factory.mktemp("embed")
    zoo.tiny("bert", "base")[0].save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    write_pairs(folder / "pairs.csv")
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return tune(spec_of(place), place / "runs", progress=False, say=lambda line: None)


def spec_of(place: Path, **changes: Any) -> Spec:
    given: dict[str, Any] = {
        "model": str(place / "model"),
        "data": str(place / "pairs.csv"),
        "method": "full",
        "max_steps": 40,
        "batch_size": 16,
        "learning_rate": 0.01,
    }
    return Spec(**(given | changes))


def test_training_finds_more_than_the_frozen_model(run: Run) -> None:
    record = run.record
    assert record["metric"] == "ndcg@10"
    frozen, tuned = record["frozen"]["metrics"]["ndcg@10"], run.metrics["test"]["ndcg@10"]
    assert tuned > frozen + 0.1
    assert "loss" not in run.metrics["test"]
    assert record["backbone"]["pooling"] == "mean"


def test_a_run_is_scored_again_to_the_bit_and_gives_the_vectors_it_is_scored_by(run: Run, place: Path) -> None:
    model = inlay.load(run)
    task = inlay.tasks.load(run.spec)
    pairs = [dict(row) for row in task.test]
    assert model.evaluate(pairs).metrics == pytest.approx(run.metrics["test"])
    queries = list(dict.fromkeys(row["query"] for row in pairs))
    corpus = list(dict.fromkeys(row["positive"] for row in pairs))
    cosines = model.embed(queries).astype(np.float64) @ model.embed(corpus).astype(np.float64).T
    best = [corpus[i] for i in cosines.argmax(1)]
    own = {query: {row["positive"] for row in pairs if row["query"] == query} for query in queries}
    hits = [(found in own[query]) / len(own[query]) for query, found in zip(queries, best, strict=True)]
    assert np.mean(hits) == pytest.approx(run.metrics["test"]["recall@1"])


def test_the_rank_and_the_cosine_of_each_test_pair_are_kept(run: Run, place: Path) -> None:
    model, task = inlay.load(run), inlay.tasks.load(run.spec)
    (file,) = run.folder.rglob("*.parquet")
    kept = [row for row in pq.read_table(file).to_pylist() if row["split"] == "test"]
    assert len(kept) == len(task.test)
    corpus = list(dict.fromkeys(task.test["positive"]))
    documents = model.embed(corpus).astype(np.float64)
    for row, pair in zip(kept, task.test, strict=True):
        (query,) = model.embed([pair["query"]]).astype(np.float64)
        own = documents[corpus.index(pair["positive"])] @ query
        assert row["cosine"] == pytest.approx(own, abs=1e-5)
        assert row["rank"] == 1 + int((documents @ query > own + 1e-6).sum())
        assert (
            (place / "pairs.csv").read_text().splitlines()[row["row"]].endswith(f"{pair['query']},{pair['positive']}")
        )


@pytest.mark.parametrize("family", ["bert", "mpnet", "llama"])
def test_vectors_are_the_pooled_states_of_transformers(family: str, tmp_path: Path) -> None:
    zoo.tiny(family, "base")[0].save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    texts = ["w1 w2 w3", "w4", "w5 w6"]
    found = inlay.embed(texts, model=str(tmp_path)).vectors
    plain, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = plain(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()
        wanted = states[-1] if family == "llama" else states.mean(0)
        assert vector == pytest.approx((wanted / wanted.norm()).numpy(), abs=1e-5)
    first = inlay.embed(texts, model=str(tmp_path), pooling="first").vectors
    assert not np.allclose(first, found, atol=1e-3)


@pytest.mark.parametrize("method", ["lora", "bias", "prompt"])
def test_an_adapter_loads_into_a_plain_model(method: str, place: Path, tmp_path: Path) -> None:
    settings = {"num_virtual_tokens": 3} if method == "prompt" else {}
    run = tune(
        spec_of(place, method=method, max_steps=3, settings=settings), tmp_path, progress=False, say=lambda line: None
    )
    wanted = inlay.load(run).embed(["w1 w2", "w3"])
    base = AutoModel.from_pretrained(place / "model")
    model = PeftModel.from_pretrained(base, run.adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.adapter)
    with torch.no_grad():
        found = model(**tokenizer(["w1 w2", "w3"], padding=True, return_tensors="pt"))["logits"]
    assert found.numpy() == pytest.approx(wanted, abs=1e-5)


def test_a_merged_checkpoint_says_how_it_is_pooled(place: Path, tmp_path: Path) -> None:
    run = tune(spec_of(place, method="lora", max_steps=3, pooling="first"), tmp_path / "runs", progress=False)
    wanted = inlay.load(run).embed(["w1 w2", "w3"])
    inlay.merge(run, tmp_path / "merged", say=lambda line: None)
    assert inlay.embed(["w1 w2", "w3"], model=str(tmp_path / "merged")).vectors == pytest.approx(wanted, abs=1e-5)
    said = json.loads((tmp_path / "merged" / "1_Pooling" / "config.json").read_text())
    assert (said["pooling_mode_cls_token"], said["pooling_mode_mean_tokens"]) == (True, False)
    with torch.no_grad():
        states = AutoModel.from_pretrained(tmp_path / "merged")(torch.tensor([[6, 7]])).last_hidden_state[0, 0]
    assert (states / states.norm()).numpy() == pytest.approx(wanted[0], abs=1e-5)


def test_scored_pairs_are_ranked(place: Path, tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "scored.jsonl"
    with path.open("w") as file:
        for _ in range(80):
            one, other = (rng.sample(range(1, 16), 4) for _ in range(2))
            shared = rng.randrange(5)
            other = one[:shared] + other[shared:]
            texts = {
                name: " ".join(f"w{w}" for w in words) for name, words in (("sentence1", one), ("sentence2", other))
            }
            file.write(json.dumps(texts | {"score": shared}) + "\n")
    run = tune(spec_of(place, data=str(path), kind="embedding"), tmp_path, progress=False, say=lambda line: None)
    assert run.record["metric"] == "spearman"
    assert run.metrics["test"]["spearman"] > run.record["frozen"]["metrics"]["spearman"] - 0.05
    assert inlay.load(run).evaluate(str(path)).metrics["spearman"] > 0.5


def test_vectors_in_every_form_are_the_same(run: Run, place: Path, typed: Type, tmp_path: Path) -> None:
    texts = place / "pairs.csv"
    wanted = inlay.embed(texts, run=run, text="positive").vectors
    assert np.linalg.norm(wanted, axis=1) == pytest.approx(1.0)
    for name in ("v.npy", "v.parquet", "v.safetensors", "v.jsonl"):
        status, _, said = typed("embed", texts, "--run", run.folder, "--text", "positive", "--output", tmp_path / name)
        assert (status, f"90 vectors of {wanted.shape[1]} dimensions" in said) == (0, True)
    ids = [f"r{i}" for i in range(90)]
    assert np.array_equal(np.load(tmp_path / "v.npy"), wanted)
    table = pq.read_table(tmp_path / "v.parquet")
    assert table["id"].to_pylist() == ids
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), wanted)
    with safe_open(tmp_path / "v.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("embeddings"), wanted)
        assert json.loads(file.metadata()["ids"]) == ids
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ids
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), wanted)


def test_standard_input_and_lines_of_text(
    run: Run, typed: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    wanted = inlay.load(run).embed(["w1 w2", "", "w3"])
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\n\nw3\n"))
    status, out, _ = typed("embed", "-", "--run", run.folder)
    assert status == 0
    assert np.array([json.loads(line)["embedding"] for line in out.splitlines()]) == pytest.approx(wanted, abs=1e-7)
    (tmp_path / "t.txt").write_text("w1 w2\n\nw3\n")
    assert inlay.embed(tmp_path / "t.txt", run=run).vectors == pytest.approx(wanted, abs=1e-6)


def test_what_gives_no_vectors_is_one_error(run: Run, place: Path, review_spec: Spec, tmp_path: Path) -> None:
    other = tune(review_spec, tmp_path, progress=False, say=lambda line: None)
    with pytest.raises(InlayError, match=r"classification.*gives no vectors"):
        inlay.load(other).embed(["w1"])
    for given, says in (
        ({"run": run, "output": tmp_path / "v.pt"}, "written as .npy, .parquet"),
        ({"run": run, "text": "body"}, "Unknown column .*'body'"),
        ({"run": run}, "Name it with --text"),
        ({"run": run, "text": "query", "pooling": "first"}, "pooling='first' is of a model without a run"),
        ({"text": "query"}, "Give a run"),
        ({"model": str(place / "model"), "text": "query", "pooling": "pooler"}, "pooling='pooler'"),
    ):
        with pytest.raises(InlayError, match=says):
            inlay.embed(place / "pairs.csv", **given)
    with pytest.raises(InlayError, match="row 2"):
        inlay.embed([{"text": "w1"}, {"text": None}], run=run)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "linear-probe"}, "trains a head alone"),
        ({"method": "infoprompt"}, "classes of its own"),
        ({"batch_size": 1}, "leaves nothing to tell apart"),
        ({"batch_size": 4, "gradient_accumulation": 4}, "leaves nothing to tell apart"),
        ({"pooling": "own"}, "pooling='own'"),
        ({"max_eval": 5}, "another corpus"),
        ({"template": "{query}"}, "template has no meaning"),
    ],
)
def test_what_cannot_be_trained_is_one_error(changes: dict[str, Any], says: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=says):
        tune(spec_of(place, **changes), tmp_path, progress=False, say=lambda line: None)


def test_the_temperature_is_of_vectors_alone(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"similarity_temperature=0\.1"):
        tune(review_spec.with_(similarity_temperature=0.1), tmp_path, progress=False)
    assert review_spec.digest() == review_spec.with_(similarity_temperature=None).digest()
