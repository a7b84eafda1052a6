"""Masked language models: what is hidden, how it is scored, masks filled, and runs that go on from the adapter."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, evaluate, predict, tasks, tune
from inlay.methods.attach import attach, save
from inlay.methods.begin import begin_from
from inlay.records.store import Store
from inlay.serve.hosting import host
from inlay.tasks.encode import IGNORED
from inlay.tasks.masking import encode_masked
from inlay.workflow import auto
from inlay.workflow.answer import Request


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.BertForMaskedLM(zoo.FAMILIES["bert"].config()).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def spec(model: Path, tmp_path: Path) -> Callable[..., Spec]:
    """Two words follow each other, all through a text: what is hidden can be told."""
    rng, path = random.Random(0), tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(100):
            first = rng.randrange(6, 9)
            words = [f"w{first + 10 * (i % 2)}" for i in range(4 + number % 30)]
            file.write(json.dumps({"id": number, "text": " ".join(words)}) + "\n")

    def make(**options: Any) -> Spec:
        usual = {"data": str(path), "kind": "masked-lm", "method": "lora", "max_steps": 4, "batch_size": 16}
        return Spec(model=str(model), **usual | options)

    return make


@pytest.fixture
def reviews_of(tmp_path: Path) -> Callable[[], Path]:
    def make() -> Path:
        path, rng = tmp_path / "reviews.csv", random.Random(1)
        rows = [(" ".join(f"w{rng.randrange(6, 40)}" for _ in range(5)), i % 2) for i in range(60)]
        path.write_text("body,stars\n" + "".join(f"{text},{stars}\n" for text, stars in rows))
        return path

    return make


def test_a_method_is_chosen_by_the_loss_of_masked_tokens(
    spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "SEEDS", 1)
    found = auto.choose(spec(method="auto", max_steps=1), tmp_path / "runs", progress=False)
    assert found.measure == "loss per masked token, less is better"
    for trial in found.trials:
        scored = Store(tmp_path / "runs").get(trial.run).metrics["validation"]
        assert -trial.mean == pytest.approx(scored["loss"], rel=1e-3)


def test_what_is_hidden(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    texts = [" ".join(f"w{5 + (i * j) % 30}" for j in range(1, 19)) for i in range(1, 400)]
    rows = encode_masked([*texts, "", "w6"], tokenizer, 20, "train")
    assert len(rows) == len(texts) + 1  # nothing can be hidden of an empty text
    assert rows.notes == ("401 train texts make 400 rows of at most 20 tokens",)
    hidden = masked = random_ = kept = 0
    for i in range(len(rows)):
        item, plain = rows[i], tokenizer([*texts, "w6"][i])["input_ids"]
        labels = np.asarray(item["labels"])
        at = np.flatnonzero(labels != IGNORED)
        assert len(at) == max(1, round(0.15 * len(plain)))
        assert labels[at].tolist() == [plain[j] for j in at]
        given = np.asarray(item["input_ids"])
        untouched = labels == IGNORED
        assert given[untouched].tolist() == np.asarray(plain)[untouched].tolist()
        assert not set(given[at].tolist()) & (set(tokenizer.all_special_ids) - {tokenizer.mask_token_id})
        hidden += len(at)
        masked += int((given[at] == tokenizer.mask_token_id).sum())
        kept += int((given[at] == labels[at]).sum())
    random_ = hidden - masked - kept
    # Five standard deviations of a binomial; a random token is now and then the one that stood there.
    for count, share in ((masked, 0.8), (random_, 0.1), (kept, 0.1)):
        assert abs(count - share * hidden) < 5 * math.sqrt(hidden * share * (1 - share)) + 0.01 * hidden


def test_masks_follow_from_seed_epoch_and_row_alone(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    texts = [" ".join(f"w{5 + j}" for j in range(18))] * 6
    rows, again = (encode_masked(texts, tokenizer, 20, "test") for _ in range(2))
    assert [rows[i] for i in range(6)] == [again[i] for i in reversed(range(6))][::-1]
    assert rows[0] != rows[1]
    before = rows[3]
    rows.epoch = 1
    assert rows[3] != before
    rows.epoch, rows.seed = 0, 5
    assert rows[3] != before


def test_metrics_against_plain_sums(spec: Callable[..., Spec]) -> None:
    task = tasks.load(spec())
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(3, 5, 7)), np.full((3, 5), IGNORED)
    labels[0, 1], labels[0, 4], labels[2, 0] = 3, 6, 2
    kept = task.reduce_logits(torch.tensor(logits), torch.tensor(labels)).numpy()
    places = [(i, j) for i in range(3) for j in range(5) if labels[i, j] != IGNORED]
    losses = [np.log(np.exp(logits[p]).sum()) - logits[p][labels[p]] for p in places]
    right = [int(logits[p].argmax() == labels[p]) for p in places]
    found = task.compute_metrics(kept, labels)
    assert found == pytest.approx(
        {"perplexity": math.exp(sum(losses) / 3), "masked-accuracy": sum(right) / 3}, rel=1e-6
    )


def test_it_learns_fills_masks_and_scores_the_same_again(spec: Callable[..., Spec], tmp_path: Path) -> None:
    run = tune(spec(method="full", max_steps=150, learning_rate=0.01, evaluations=1), tmp_path / "runs", progress=False)
    assert run.metrics["test"]["perplexity"] < 12  # of 48 words
    texts = list(tasks.load(run.spec).test["text"])
    again = evaluate(run.folder, [{"text": text} for text in texts])
    assert again.metrics == pytest.approx(run.metrics["test"], rel=1e-5)
    asked = ["w6 <mask> w6 <mask>", "w7 w17"]
    one, other = predict(run.folder, asked)
    assert [len(each["masks"]) for each in (one, other)] == [2, 0]
    words = one["filled"].split()
    assert [words[1], words[3]] == [mask["token"] for mask in one["masks"]]
    assert [words[0], words[2], other["filled"]] == ["w6", "w6", "w7 w17"]
    plain = hf.BertForMaskedLM.from_pretrained(run.adapter)
    tokenizer = hf.AutoTokenizer.from_pretrained(run.spec.model)
    with torch.no_grad():
        shares = plain(**tokenizer(asked[0], return_tensors="pt")).logits[0].double().softmax(-1)
    assert tokenizer.decode([shares[1].argmax()]) == words[1]
    assert one["masks"][0]["score"] == pytest.approx(float(shares[1].max()), rel=1e-5)


def test_an_interrupted_run_sees_the_same_masks(spec: Callable[..., Spec], tmp_path: Path) -> None:
    from inlay.training.progress import Interrupted

    whole = tune(spec(max_steps=8), tmp_path / "whole", progress=False)
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        tune(spec(max_steps=8), tmp_path / "cut", progress=False, stop=lambda: next(steps) > 6)
    again = tune(spec(max_steps=8), tmp_path / "cut", progress=False)
    assert again.record["resumed_from"] is not None
    assert again.metrics == whole.metrics


def test_a_run_is_served(spec: Callable[..., Spec], tmp_path: Path) -> None:
    run = tune(spec(), tmp_path / "runs", progress=False)
    hosted = host(run.folder, batch=4)
    ((name, schema),) = hosted.schemas.items()
    given = {"text": "w6 <mask> w6"}
    (answer,) = hosted.answer([Request(name, given, schema.row(given, "test", 1))])
    assert answer == {**given, **predict(run.folder, [given])[0]}


@pytest.mark.parametrize("method", ["lora", "adapter", "ntk-attention", "ia3"])
def test_a_task_goes_on_from_the_adapter(
    method: str, spec: Callable[..., Spec], reviews_of: Callable[[], Path], tmp_path: Path
) -> None:
    """The pieces at the start are those of the run before, and the head is the new task's."""
    before = tune(spec(method=method, settings={"layers": [1, 3]}), tmp_path / "runs", progress=False)
    task = spec(kind=None, data=str(reviews_of()), text=("body",), label="stars", method=method)
    wanted = task.with_(init_adapter=str(before.folder), learning_rate=1e-12, max_steps=1)
    run = tune(wanted, tmp_path / "runs", progress=False)
    assert run.spec.settings["layers"] == [1, 3]
    from safetensors.torch import load_file

    old, new = (load_file(each.adapter / "adapter_model.safetensors") for each in (before, run))
    pieces = {name for name in new if "classifier" not in name and "pooler" not in name}
    assert pieces == old.keys()
    assert all(torch.allclose(new[name], old[name], atol=1e-9) for name in pieces)
    assert tune(wanted, tmp_path / "runs", progress=False).id == run.id
    assert tune(wanted.with_(init_adapter=None), tmp_path / "runs", progress=False).id != run.id
    assert len(predict(run.folder, ["w6 w7", "w8"])) == 2


def test_what_an_adapter_to_begin_with_must_have(
    spec: Callable[..., Spec], reviews_of: Callable[[], Path], model: Path, tmp_path: Path
) -> None:
    before = tune(spec(), tmp_path / "runs", progress=False)
    task = spec(kind=None, data=str(reviews_of()), text=("body",), label="stars", init_adapter=str(before.folder))
    out = tmp_path / "runs"
    with pytest.raises(InlayError, match=r"is an adapter of 'lora', and this run is of 'ia3': give --method lora"):
        tune(task.with_(method="ia3"), out)
    with pytest.raises(InlayError, match=r"does not fit: .*shape \(8, 16\) there and \(4, 16\) here.*--set"):
        tune(task.with_(settings={"r": 4}), out, progress=False)
    other = tmp_path / "other"
    zoo.tiny("bert", "base", seed=3)[0].save_pretrained(other)
    write_tokenizer(other)
    with pytest.raises(InlayError, match=r"which has other weights: give --model .*bert"):
        tune(task.with_(model=str(other)), out)
    with pytest.raises(InlayError, match=r"init_adapter=.* is for a run of one task"):
        task.with_(data=None, text=(), label=None, tasks=("rte", "sst2"))
    with pytest.raises(InlayError, match=r"holds no adapter"):
        tune(task.with_(init_adapter=str(model)), out)


def test_a_bare_adapter_is_begun_with(tmp_path: Path) -> None:
    torch.manual_seed(2)
    one: Any = attach(zoo.tiny("bert", "classification")[0], "lora")
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    save(one, "lora", tmp_path / "adapter")
    other: Any = attach(zoo.tiny("bert", "token-classification")[0], "lora")
    from inlay.methods import registry

    assert begin_from(other, registry.get("lora"), tmp_path / "adapter") == 12
    mine, theirs = (dict(model.named_parameters()) for model in (other, one))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if "lora_" in name)


def test_what_cannot_be_masked(spec: Callable[..., Spec], tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"learns from a text alone.*leave --label id out"):
        tasks.load(spec(label="id"))
    unmasked = tmp_path / "plain"
    unmasked.mkdir()
    with pytest.raises(InlayError, match=r"hides tokens behind a mask token"):
        encode_masked(["w6"], write_tokenizer(unmasked, mask_token=None), 20, "train")
    zoo.tiny("bert", "base")[0].save_pretrained(tmp_path / "headless")
    write_tokenizer(tmp_path / "headless")
    with pytest.raises(InlayError, match=r"has no head that fills masks"):
        tune(spec().with_(model=str(tmp_path / "headless")), tmp_path / "runs", progress=False)
