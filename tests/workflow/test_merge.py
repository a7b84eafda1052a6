"""An adapter folded into its base model: a checkpoint that Transformers alone loads, and that answers the same.

The cases are the registry's: every method that says it can be merged, on architectures of every kind.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors import safe_open
from torch import Tensor, nn

import inlay
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, tune
from inlay.backbones import loading
from inlay.methods import registry
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.capabilities import capabilities
from inlay.methods.merging import check_mergeable
from inlay.methods.protocol import Method
from probing import logits
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
CLOSE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
CLASSES = {
    "classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "causal-lm": transformers.AutoModelForCausalLM,
    "image-classification": transformers.AutoModelForImageClassification,
    "sequence-to-sequence": transformers.AutoModelForSeq2SeqLM,
}
WRITE = ("causal-lm", "sequence-to-sequence")
ELSEWHERE = ("base", "image-text", "question-answering")  # merged with their runs: test_image_text*, test_question_runs
MERGEABLE = [method for method in registry.all_methods().values() if method.mergeable]
OTHERS = [method for method in registry.all_methods().values() if method.form == "peft" and not method.mergeable]
# A head of one layer and of several, tied and grouped attention, Conv1D, convolutions, batch norms, relative positions.
FAST = ("bert", "roberta", "gpt2", "llama", "t5", "vit", "swin", "resnet")


def cases() -> list[Any]:
    found = []
    for method in MERGEABLE:
        for family, description in FAMILIES.items():
            for task in description.tasks:
                works = task in capabilities()["methods"][method.name].get(family, ())
                if task in ELSEWHERE or not works or (task == "token-classification" and family not in ("bert", "t5")):
                    continue
                marks = () if family in FAST else (pytest.mark.slow,)
                found.append(pytest.param(method, family, task, id=f"{method.name}-{family}-{task}", marks=marks))
    return found


def kind_of(family: str, task: str) -> str:
    return "image-classification" if FAMILIES[family].modality == "image" else task


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of tiny models without a head, as they lie on disk, made once."""
    place = tmp_path_factory.mktemp("bases")

    def base(family: str, task: str) -> Path:
        folder = place / f"{family}-{task if task in WRITE else 'base'}"
        if not folder.exists():
            # T5's classifier has a decoder and CLIP's a text model, which their plain encoders have not.
            whole = "classification" if family in ("t5", "clip") else "base"
            model: Any = tiny(family, task if task in WRITE else whole)[0]  # type: ignore[arg-type]
            model.save_pretrained(folder)
            if FAMILIES[family].modality == "text":
                write_tokenizer(folder)
        return folder

    return base


def adapted(method: Any, base: Path, family: str, task: str) -> tuple[nn.Module, Any]:
    """A loaded base with the method in it, moved away from its start; and the backbone."""
    labels = None if task in WRITE else ["bad", "good", "odd", "new"]
    backbone = loading.load(str(base), kind=kind_of(family, task), label_names=labels, pooling="own", seed=3)
    model = attach(backbone.model, method, newly_initialised=backbone.newly_initialised)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(trained_parameters(model).items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval(), backbone


def batch_of(family: str, task: str) -> dict[str, Tensor]:
    batch = tiny(family, task)[1]  # type: ignore[arg-type]
    return {name: value for name, value in batch.items() if name != "labels"}


def dtypes_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("method", "family", "task"), cases())
def test_a_merged_adapter_is_a_checkpoint_that_answers_the_same(
    method: Any, family: str, task: str, bases: Any, tmp_path: Path
) -> None:
    base = bases(family, task)
    model, backbone = adapted(method, base, family, task)
    wanted = logits(model, batch_of(family, task))
    save(model, method, tmp_path / "adapter", base_model_name=str(base), fingerprint=backbone.fingerprint)
    made = inlay.merge(tmp_path / "adapter", tmp_path / "merged")
    plain, report = CLASSES[kind_of(family, task)].from_pretrained(made, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(plain).__module__.startswith("transformers.")
    found = logits(plain.eval(), batch_of(family, task))
    torch.testing.assert_close(found, wanted, atol=CLOSE["float32"], rtol=CLOSE["float32"])
    # The base alone answers otherwise: it is the adapter that was merged.
    untouched = loading.load(str(base), kind=kind_of(family, task), num_labels=None if task in WRITE else 4)
    with torch.no_grad():
        assert (found - untouched.model.eval()(**batch_of(family, task)).logits).abs().max() > 1e-4


# ---- what a user has: runs, tasks, and adapters that PEFT alone wrote


@pytest.mark.parametrize("method", ["lora", "ssf", "linear-probe", "full"])
def test_a_run_becomes_a_checkpoint_by_the_command(
    method: str, typed: Any, review_spec: Spec, reviews: Path, tmp_path: Path
) -> None:
    template = "w9 {body}"
    spec = review_spec.with_(method=method, pooling="own", template=template)
    run = tune(spec, tmp_path / "runs", progress=False)
    status, _, err = typed("merge", "--run", run.id, "--out", "merged")
    assert status == 0, err
    made = tmp_path / "merged"
    answers = inlay.predict(run, reviews, probabilities=True)
    pipe = transformers.pipeline("text-classification", model=str(made), top_k=None, device="cpu")
    for answer in answers[:6]:
        found = {each["label"]: each["score"] for each in pipe([f"w9 {answer['body']}"])[0]}
        assert found == pytest.approx(answer["probabilities"], abs=1e-5)
    config = json.loads((made / "config.json").read_text())
    assert list(config["id2label"].values()) == ["1", "2", "3"]
    card = (made / "README.md").read_text()
    assert method in card
    assert template in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("this/folder", str(made)), names)  # what a reader of the card would type
    batch = names["processor"](f"w9 {answers[0]['body']}", return_tensors="pt")
    shares = names["model"](**batch).logits.softmax(-1)[0].tolist()
    assert shares == pytest.approx(list(answers[0]["probabilities"].values()), abs=1e-5)
    assert not {"adapter_config.json", "inlay.json", "head.json"} & {each.name for each in made.iterdir()}
    written = "".join(each.read_text() for each in made.iterdir() if each.suffix in (".json", ".md"))
    assert str(tmp_path) not in written
    assert typed("merge", "--run", run.id, "--out", "merged")[0] == 2, "a folder with something in it"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision(dtype: str, review_spec: Spec, tmp_path: Path) -> None:
    run = tune(review_spec.with_(method="lora", pooling="own"), tmp_path / "runs", progress=False)
    made = inlay.merge(run, tmp_path / "merged", dtype=dtype)
    assert dtypes_in(made) == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(made, dtype="auto").eval()
    assert plain.dtype == getattr(torch, dtype)
    batch = batch_of("bert", "classification")
    wanted = logits(inlay.load(run).model, batch)
    torch.testing.assert_close(logits(plain, batch).float(), wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    with pytest.raises(InlayError, match="float32"):
        inlay.merge(run, tmp_path / "other", dtype="int4")


def test_images_with_their_processor(image_model: Path, photos: Path, tmp_path: Path) -> None:
    given = {"max_steps": 4, "batch_size": 8, "learning_rate": 0.05}
    run = tune(Spec(model=str(image_model), data=str(photos), method="norm", **given), tmp_path / "r", progress=False)
    made = inlay.merge(run, tmp_path / "merged")
    answers = inlay.predict(run, photos, probabilities=True)
    pipe = transformers.pipeline("image-classification", model=str(made), device="cpu", use_fast=False)
    for answer in answers[::7]:
        found = {each["label"]: each["score"] for each in pipe(str(photos / answer["image"]))}
        assert found == pytest.approx(answer["probabilities"], abs=1e-3)


def test_one_of_several_tasks(tmp_path: Path, text_model: Path) -> None:
    for name, labels in (("cola", ["unacceptable", "acceptable"]), ("cb", ["entailment", "contradiction", "neutral"])):
        (tmp_path / "data" / name).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [
                {"sentence": f"w{i}", "premise": f"w{i}", "hypothesis": f"w{9 + i}", "label": labels[i % len(labels)]}
                for i in range(9)
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / "data" / name / f"{split}.jsonl").write_text(lines)
    given = {"max_steps": 2, "batch_size": 8, "evaluations": 1, "learning_rate": 0.05, "pooling": "own"}
    spec = Spec(
        model=str(text_model),
        method=next(iter(registry.names_where(lambda method: method.mixes_tasks))),
        tasks=("cola", "cb"),
        data_dir=str(tmp_path / "data"),
        **given,
    )
    run = tune(spec, tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="several tasks: choose one with --task"):
        inlay.merge(run, tmp_path / "merged")
    moved = tmp_path / "moved"
    shutil.copytree(run.adapter, moved)  # without its run
    for number, place in enumerate((run, moved)):
        made = inlay.merge(place, tmp_path / f"merged{number}", task="cb", model=str(text_model))
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(made).eval()
        assert plain.config.num_labels == 3
        batch = batch_of("bert", "classification")
        wanted = logits(inlay.load(run, task="cb").model, batch)
        torch.testing.assert_close(logits(plain, batch), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("labels", ["own", "others"])
def test_an_adapter_that_peft_alone_wrote(labels: str, tmp_path: Path) -> None:
    """Its head has the base model's labels, or is of another size."""
    base: Any = tiny("bert", "classification", num_labels=4)[0]
    base.config.id2label = dict(enumerate(["a", "b", "c", "d"]))
    base.config.label2id = {name: number for number, name in base.config.id2label.items()}
    base.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    outputs = {"num_labels": 2, "ignore_mismatched_sizes": True} if labels == "others" else {}
    loaded = CLASSES["classification"].from_pretrained(tmp_path / "base", **outputs)
    model = get_peft_model(
        loaded,
        LoraConfig(
            r=3,
            lora_alpha=7,
            use_rslora=True,
            target_modules=["query", "dense"],
            init_lora_weights=False,
            task_type="SEQ_CLS",  # by which PEFT keeps the head
        ),
    ).eval()
    model.save_pretrained(tmp_path / "adapter")
    made = inlay.merge(tmp_path / "adapter", tmp_path / "merged", model=str(tmp_path / "base"))
    plain = CLASSES["classification"].from_pretrained(made).eval()
    wanted = ["LABEL_0", "LABEL_1"] if labels == "others" else ["a", "b", "c", "d"]
    assert list(plain.config.id2label.values()) == wanted
    batch = batch_of("bert", "classification")
    torch.testing.assert_close(logits(plain, batch), logits(model, batch), atol=1e-5, rtol=1e-5)


PEFTS_OTHERS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, "use_dora": True},
    "ADALORA": {"init_r": 4, "total_step": 10},
    "LOHA": {"r": 4},
    "LOKR": {"r": 4},
    "OFT": {"oft_block_size": 4},
    "HRA": {"r": 4},
    "FOURIERFT": {"n_frequency": 16},
    "RANDLORA": {"r": 4},
    "VBLORA": {"r": 4, "vector_length": 4, "num_vectors": 16},
    "MISS": {"r": 4},
    "SHIRA": {"r": 4},
    "C3A": {"block_size": 4},
}


@pytest.mark.parametrize("kind", PEFTS_OTHERS)
def test_peft_s_other_methods_that_change_weights(kind: str, tmp_path: Path) -> None:
    tiny("bert", "classification", num_labels=4)[0].save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    base = CLASSES["classification"].from_pretrained(tmp_path / "base")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](target_modules=["query"], task_type="SEQ_CLS", **PEFTS_OTHERS[kind])
    model = get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    batch = batch_of("bert", "classification")
    wanted = logits(model, batch)
    with model.disable_adapter():
        assert (logits(model, batch) - wanted).abs().max() > 1e-4
    model.save_pretrained(tmp_path / "adapter")
    made = inlay.merge(tmp_path / "adapter", tmp_path / "merged", model=str(tmp_path / "base"))
    plain = CLASSES["classification"].from_pretrained(made).eval()
    torch.testing.assert_close(logits(plain, batch), wanted, atol=1e-5, rtol=1e-5)


def test_a_language_model_keeps_its_generation_config_and_the_template_of_training(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny("llama", "causal-lm")[0].save_pretrained(folder)
    write_tokenizer(folder)
    transformers.GenerationConfig(max_new_tokens=7, temperature=0.3, do_sample=True, eos_token_id=2).save_pretrained(
        folder
    )
    rows = [{"messages": [{"role": r, "content": f"w{i} w5"} for r in ("user", "assistant")]} for i in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} </s>{% endfor %}"
    spec = Spec(
        model=str(folder),
        data=str(tmp_path / "chats.jsonl"),
        method="lora",
        template=template,
        max_steps=1,
        batch_size=4,
    )
    made = inlay.merge(tune(spec, tmp_path / "runs", progress=False), tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(made)
    assert (plain.generation_config.max_new_tokens, plain.generation_config.temperature) == (7, 0.3)
    assert transformers.AutoTokenizer.from_pretrained(made).chat_template == template


def test_a_run_on_a_quantised_base_is_merged_into_the_full_weights(tmp_path: Path, text_model: Path) -> None:
    pytest.importorskip("bitsandbytes")
    backbone = loading.load(str(text_model), kind="classification", num_labels=2, pooling="own")
    rows = "".join(json.dumps({"text": f"w{6 + i}", "label": i % 2}) + "\n" for i in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    spec = Spec(
        model=str(text_model),
        data=str(tmp_path / "rows.jsonl"),
        method="lora",
        quantize="8bit",
        pooling="own",
        max_steps=3,
        batch_size=8,
        learning_rate=0.05,
    )
    run = tune(spec, tmp_path / "runs", progress=False)
    said: list[str] = []
    made = inlay.merge(run, tmp_path / "merged", say=said.append)
    assert any("trained on weights in 8bit" in line for line in said)
    full = restore(backbone.model, "lora", run.adapter, fingerprint=backbone.fingerprint)
    plain = CLASSES["classification"].from_pretrained(made)
    batch = batch_of("bert", "classification")
    torch.testing.assert_close(logits(plain, batch), logits(full, batch), atol=1e-5, rtol=1e-5)


# ---- what is refused, with nothing written


@pytest.mark.parametrize("method", OTHERS, ids=lambda method: method.name)
def test_what_no_weight_can_hold_is_refused_by_name(method: Any) -> None:
    with pytest.raises(InlayError) as refused:
        check_mergeable(method)
    for each in MERGEABLE:
        assert each.name in str(refused.value)
    assert method.name in str(refused.value).partition(".")[0]
    assert f": {method.unmergeable}." in str(refused.value)
    assert method.unmergeable != Method.unmergeable, "it says its own reason"
    assert "linear-probe" in str(refused.value)


def test_a_run_that_cannot_be_merged(review_spec: Spec, typed: Any, tmp_path: Path) -> None:
    run = tune(review_spec.with_(method="adaptformer"), tmp_path / "runs", progress=False)
    status, _, err = typed("merge", "--run", run.id, "--out", "merged")
    assert status == 2
    assert "cannot be merged" in err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("method", ["lora", "full"])
def test_another_pooling_is_not_lost_without_a_word(method: str, review_spec: Spec, tmp_path: Path) -> None:
    run = tune(review_spec.with_(method=method, pooling="mean"), tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="reads pooling='mean', and BertForSequenceClassification by itself"):
        inlay.merge(run, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    bare = tmp_path / "bare"
    shutil.copytree(run.adapter, bare)  # without its run
    if method == "lora":
        with pytest.raises(InlayError, match="reads pooling='mean'"):
            inlay.merge(bare, tmp_path / "merged", model=run.spec.model)


def test_a_weight_that_two_modules_share_is_not_merged(tmp_path: Path) -> None:
    """A LoRA on the embeddings of a model whose output layer is the same matrix."""
    config: Any = FAMILIES["llama"].config()
    config.tie_word_embeddings = True
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False, lora_alpha=64, task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(InlayError, match="gives other outputs"):
        inlay.merge(tmp_path / "adapter", tmp_path / "merged", model=str(tmp_path / "base"))
    assert not (tmp_path / "merged").exists()


def test_what_a_checkpoint_of_values_gives_is_said(review_spec: Spec, tmp_path: Path) -> None:
    rows = [{"body": f"w{6 + i % 9} w{8 + i}", "price": 100.0 + 37.5 * (i % 9)} for i in range(60)]
    (tmp_path / "prices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data": str(tmp_path / "prices.jsonl"), "label": "price", "pooling": "own", "method": "bias"}
    run = tune(review_spec.with_(**data), tmp_path / "runs", progress=False)
    said: list[str] = []
    made = inlay.merge(run, tmp_path / "merged", say=said.append)
    (line,) = [line for line in said if "value = output *" in line]
    assert line in (made / "README.md").read_text()
    scale, shift = map(float, re.findall(r"output \* (\S+) \+ (\S+)", line)[0])
    plain = CLASSES["classification"].from_pretrained(made).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    wanted = [answer["value"] for answer in inlay.predict(run, rows[:3])]
    found = plain(**tokenizer([row["body"] for row in rows[:3]], return_tensors="pt", padding=True)).logits[:, 0]
    assert [float(each) * scale + shift for each in found] == pytest.approx(wanted, rel=1e-4)


def test_a_folder_that_is_no_adapter(tmp_path: Path, typed: Any) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InlayError, match=r"holds no adapter: it has no adapter_config\.json"):
        inlay.merge(tmp_path / "empty", tmp_path / "merged")
    assert typed("merge", "--out", "merged")[0] == 2


def test_images_that_only_inlay_prepares(photos: Path, tmp_path: Path) -> None:
    config: Any = FAMILIES["vit"].config()
    config.num_channels = 1
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "grey")
    spec = Spec(model=str(tmp_path / "grey"), data=str(photos), method="bias", max_steps=2, batch_size=8)
    run = tune(spec, tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="are prepared by inlay"):
        inlay.merge(run, tmp_path / "merged")
