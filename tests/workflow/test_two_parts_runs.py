"""Runs on models with an encoder and a decoder: trained, scored, asked, served and merged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, predict, tune
from inlay.anatomy import anatomy
from inlay.methods.attach import attach, trained_parameters
from inlay.serve.hosting import host
from inlay.tasks.metrics import of_texts
from inlay.training.batches import shift_labels
from inlay.workflow.answer import Request
from inlay.workflow.chat import Chat
from inlay.workflow.generate import as_prompts, begin, write
from inlay.workflow.generation import Sampling
from inlay.workflow.speakers import open_speaker

SEQ2SEQ = "sequence-to-sequence"
Build = Callable[[], Any]


def bart() -> Any:
    config = hf.BartConfig(
        **zoo.SPECIAL,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=40,
        decoder_start_token_id=zoo.EOS,
        forced_eos_token_id=None,
        init_std=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.BartForConditionalGeneration(config).eval()


def t5() -> Any:
    return zoo.tiny("t5", SEQ2SEQ)[0]


FAMILIES = {"t5": t5, "bart": bart}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The target repeats the last word of the source, in other letters, and ends."""
    rng, path = random.Random(0), tmp_path / "pairs.jsonl"
    with path.open("w") as file:
        for _ in range(80):
            words = [rng.randrange(6, 12) for _ in range(rng.randrange(1, 4))]
            file.write(json.dumps({"source": " ".join(f"w{w}" for w in words), "target": f"w{words[-1] + 10}"}) + "\n")
    return path


@pytest.fixture
def spec(tmp_path: Path, pairs: Path) -> Callable[..., Spec]:
    def make(family: str = "t5", **options: Any) -> Spec:
        folder = tmp_path / family
        if not folder.exists():
            FAMILIES[family]().save_pretrained(folder)
            write_tokenizer(folder)
        usual = {"kind": SEQ2SEQ, "method": "lora", "max_steps": 4, "batch_size": 8, "data": str(pairs)}
        return Spec(model=str(folder), **usual | options)

    return make


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_learns_and_answers_as_it_was_scored(spec: Callable[..., Spec], pairs: Path, tmp_path: Path) -> None:
    """Everything is trained, since the tiny model knows nothing; what a fresh load writes scores what is on record."""
    run = tune(spec(method="full", max_steps=300, batch_size=16, learning_rate=0.01), tmp_path / "runs", progress=False)
    assert run.metrics["test"]["perplexity"] < 2  # of 48 words
    assert run.metrics["test"]["exact-match"] > 0.5  # by chance 1 in 6
    held_out = inlay.tasks.load(run.spec).test
    answers = predict(run.folder, [dict(row) for row in held_out])
    texts = [answer["text"] for answer in answers]
    wanted = of_texts(run.record["task"]["schema"]["metrics"], texts, list(held_out))
    assert {name: run.metrics["test"][name] for name in wanted} == pytest.approx(wanted)
    found = inlay.evaluate(run.folder, [dict(row) for row in held_out], label="target")
    assert found.metrics["exact-match"] == run.metrics["test"]["exact-match"]
    assert found.metrics["perplexity"] == pytest.approx(run.metrics["test"]["perplexity"])

    speaker = open_speaker(run.folder)
    prompts = as_prompts(speaker, held_out["source"][:5])
    begun = begin(speaker, prompts, Sampling(20))
    assert [each["text"].strip() for each in write(speaker, prompts, begun, batch_size=3)] == texts[:5]
    assert all(row.finish == "end" for row in begun if row.text)
    with pytest.raises(InlayError, match="encoder and a decoder and answers one text at a time"):
        Chat(speaker)
    merged = inlay.merge(run.folder, tmp_path / "merged")
    plain, tokenizer = hf.AutoModelForSeq2SeqLM.from_pretrained(merged), hf.AutoTokenizer.from_pretrained(merged)
    ids = plain.generate(tokenizer(held_out["source"][0], return_tensors="pt").input_ids, max_new_tokens=20)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == texts[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_adapted(family: str) -> None:
    """LoRA acts in the encoder, in the decoder and between them; a prefix stands before the decoder's own keys."""
    parts = anatomy(FAMILIES[family]())
    assert [block.index for block in parts.all_blocks] == list(range(1, len(parts.all_blocks) + 1))
    assert all(block.cross is None for block in parts.blocks)
    assert all(block.cross is not None for block in parts.decoder)
    adapted: Any = attach(FAMILIES[family](), "lora")
    count = 2 * (len(parts.blocks) + 2 * len(parts.decoder))  # queries and values
    assert len(adapted.targeted_module_names) == count
    narrowed: Any = attach(FAMILIES[family](), "lora", settings={"layers": [parts.decoder[0].index]})
    assert all("decoder" in name for name in narrowed.targeted_module_names)
    prefix = attach(FAMILIES[family](), "prefix", settings={"num_virtual_tokens": 3})
    assert sum(p.numel() for p in trained_parameters(prefix).values()) == 3 * 2 * len(parts.decoder) * 16
    ours: Any = attach(FAMILIES[family](), "ntk-attention")
    assert len(ours.targeted_module_names) == len(parts.all_blocks)


def test_a_classifier_of_such_a_model_has_no_decoder_to_adapt() -> None:
    assert anatomy(zoo.tiny("t5", "classification")[0]).decoder == ()


@pytest.mark.parametrize("method", ["lora", "prefix", "prompt", "ntk-attention", "compact-prefix", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_writing_with_a_cache_is_teacher_forcing(family: str, method: str) -> None:
    """Token by token from `generate`, and by whole passes over what was written so far; rows are of unequal length."""
    base = FAMILIES[family]()
    settings = {"num_virtual_tokens": 3} if method in ("prefix", "prompt") else {}
    model: Any = attach(base, method, settings=settings).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 1, 1]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    written = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    forced = torch.full((2, 1), base.config.decoder_start_token_id)
    with torch.no_grad():
        for _ in range(5):
            logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=forced).logits
            forced = torch.cat([forced, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written, forced)


@pytest.mark.parametrize("family", FAMILIES)
def test_shifted_labels_are_the_models_own(family: str) -> None:
    model, (_, batch) = FAMILIES[family](), zoo.tiny("t5", SEQ2SEQ)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        own = model(**given, labels=batch["labels"]).logits
        ours = model(**given, decoder_input_ids=shift_labels(model, batch["labels"])).logits
    assert torch.equal(own, ours)


def test_a_run_goes_on_where_it_stopped(spec: Callable[..., Spec], tmp_path: Path) -> None:
    from inlay.training.progress import Interrupted

    wanted = spec("bart", method="adapter", max_steps=6)
    whole = tune(wanted, tmp_path / "whole", progress=False)
    steps = iter(range(100))
    with pytest.raises(Interrupted):
        tune(wanted, tmp_path / "cut", progress=False, stop=lambda: next(steps) > 8)
    again = tune(wanted, tmp_path / "cut", progress=False)
    assert again.record["resumed_from"] is not None
    assert again.metrics == whole.metrics


def test_several_tasks_share_batches_and_are_served(spec: Callable[..., Spec], pairs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(pairs.read_text().replace("w2", "w3"))
    columns = {"kind": SEQ2SEQ, "text": ["source"], "label": "target"}
    fields = {"one": {"data": str(pairs), **columns}, "two": {"data": str(other), **columns}}
    joint = spec("bart", data=None, kind=None, tasks=("one", "two"), task_fields=fields)
    run = tune(joint, tmp_path / "runs", progress=False)
    assert {"one/rouge-l", "two/perplexity"} <= set(run.metrics["test"])
    hosted = host(run.folder, batch=4)
    asked = [(name, {"task": name, "source": text}) for name, text in (("one", "w6 w7"), ("two", "w8 w9 w10"))]
    requests = [Request(name, given, hosted.schemas[name].row(given, "test", 1)) for name, given in asked]
    together = hosted.answer(requests)
    assert together == [hosted.answer([each])[0] for each in requests]
    for (name, given), answer in zip(asked, together, strict=True):
        assert predict(run.folder, [given], task=name)[0]["text"] == answer["text"]


def test_kinds_and_models_that_do_not_go_together(spec: Callable[..., Spec], tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"has an encoder and a decoder.*'causal-lm'.*--kind sequence-to-sequence"):
        tune(spec(kind="causal-lm", text=("source",), label="target"), tmp_path / "runs")
    zoo.tiny("gpt2", "causal-lm")[0].save_pretrained(tmp_path / "gpt2")
    write_tokenizer(tmp_path / "gpt2")
    with pytest.raises(InlayError, match=r"cannot do sequence-to-sequence. It can do: .*causal-lm"):
        tune(spec().with_(model=str(tmp_path / "gpt2")), tmp_path / "runs", progress=False)
    with pytest.raises(
        InlayError, match=r"trains a new head, and T5ForConditionalGeneration came with all its weights"
    ):
        attach(t5(), "linear-probe", newly_initialised=[])
