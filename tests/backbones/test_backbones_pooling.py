"""What a text classifier's head reads: the checkpoint's own pooling, the user's choice, the architecture's own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import inlay
import zoo
from checkpoints import Write, write_tokenizer
from inlay import InlayError, Spec, backbones
from inlay.backbones.locate import CACHED, Location
from inlay.backbones.pooled import installed
from inlay.backbones.pooling import doubts, settle
from inlay.methods import attach
from inlay.records.sealed import sealed
from inlay.training.trunk.cut import TrunkCache

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# What each architecture has its head read by itself, and what its head makes of one vector a text.
OWN = {
    "bert": "pooler",
    "roberta": "first",
    "distilbert": "first",
    "electra": "first",
    "modernbert": "first",
    "mpnet": "first",
    "deberta-v2": "first",
    "gpt2": "last",
    "opt": "last",
    "llama": "last",
    "gemma": "last",
}
HEADS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bert": lambda model, pooled: model.classifier(pooled),
    "distilbert": lambda model, pooled: model.classifier(model.pre_classifier(pooled).relu()),
    "modernbert": lambda model, pooled: model.classifier(model.head(pooled)),
    "deberta-v2": lambda model, pooled: model.classifier(model.pooler(pooled.unsqueeze(1))),
}


def says(folder: Path, mode: str = "pooling_mode_mean_tokens", **config: Any) -> Path:
    """Let a checkpoint say, as sentence-transformers writes it, what it was made for."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    stated = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False} | {mode: True} | config
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16} | stated))
    return folder


def load(folder: Path, **arguments: Any) -> backbones.Backbone:
    return backbones.load(str(folder), kind="classification", num_labels=3, **arguments)


def texts(side: str = "right") -> dict[str, Tensor]:
    batch = {key: value for key, value in zoo.tiny("bert")[1].items() if key != "labels"}
    return batch if side == "right" else {key: value.flip(1) for key, value in batch.items()}


def pooled_by_hand(states: Tensor, mask: Tensor, how: str) -> Tensor:
    rows = [row[real.bool()] for row, real in zip(states, mask, strict=True)]
    return torch.stack([row.mean(0) if how == "mean" else row[0] if how == "first" else row[-1] for row in rows])


@torch.no_grad()
@pytest.mark.parametrize("family", OWN)
def test_a_head_reads_what_was_chosen_on_whichever_side_the_padding_is(family: str, write: Write) -> None:
    folder = write(family)
    plain = load(folder)
    assert plain.pooling == OWN[family]
    body = getattr(plain.model, plain.model.base_model_prefix)
    lead = HEADS.get(family, lambda model, pooled: model.classifier(pooled.unsqueeze(1)))
    if OWN[family] == "last":
        lead = lambda model, pooled: model.score(pooled)  # noqa: E731
    for how in {"last", "first", "mean"} - {OWN[family]}:
        chosen = load(folder, pooling=how)
        assert chosen.pooling == how
        for side in ("right", "left"):
            batch = texts(side)
            expected = lead(chosen.model, pooled_by_hand(body(**batch)[0], batch["attention_mask"], how))
            torch.testing.assert_close(chosen.model(**batch).logits, expected)
    chosen = load(folder, pooling="mean")
    whole = {"input_ids": texts()["input_ids"][:1]}
    expected = lead(chosen.model, body(**whole)[0].mean(1))
    torch.testing.assert_close(chosen.model(**whole).logits, expected)  # without a mask every token counts


@torch.no_grad()
def test_an_architectures_own_feature_by_its_name_changes_no_bit(write: Write) -> None:
    for family in ("bert", "roberta", "llama"):
        folder = write(family)
        plain, named = load(folder), load(folder, pooling=OWN[family])
        assert torch.equal(plain.model(**texts()).logits, named.model(**texts()).logits)
        assert plain.fingerprint == named.fingerprint
        assert plain.newly_initialised == named.newly_initialised


@pytest.mark.parametrize(
    ("mode", "how"),
    [("pooling_mode_mean_tokens", "mean"), ("pooling_mode_cls_token", "first"), ("pooling_mode_lasttoken", "last")],
)
def test_a_checkpoints_own_pooling_is_read_by_default(mode: str, how: str, write: Write) -> None:
    folder = says(write("bert"), mode)
    assert load(folder).pooling == how
    assert load(folder, pooling="own").pooling == "pooler" == load(folder, pooling="pooler").pooling
    assert load(folder, pooling="mean").pooling == "mean"
    (folder / "modules.json").unlink()
    assert load(folder).pooling == how, "the settings alone say it too"


def test_the_name_of_one_way_is_understood_as_well(write: Write) -> None:
    folder = says(write("bert"))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 16, "pooling_mode": "cls"}))
    assert load(folder).pooling == "first"


def test_the_embedded_sentence_encoder_was_made_for_the_mean() -> None:
    assert backbones.settle_pooling("embedded:minilm", "classification", "auto") == "mean"
    assert backbones.settle_pooling("embedded:minilm", "token-classification", "auto") == "auto"


def test_a_pooling_that_there_is_not_is_an_error_that_says_what_to_give(write: Write) -> None:
    folder = says(write("bert"), "pooling_mode_max_tokens")
    with pytest.raises(InlayError, match=r"pools by max_tokens .*--pooling mean \| first \| last \| pooler"):
        load(folder)
    assert load(folder, pooling="mean").pooling == "mean"
    says(folder, pooling_mode_cls_token=True)
    with pytest.raises(InlayError, match="cls_token and mean_tokens"):
        load(folder)
    for path in ("../elsewhere", "", 3):
        (folder / "modules.json").write_text(json.dumps([{"path": path, "type": "x.Pooling"}]))
        with pytest.raises(InlayError, match="no folder"):
            load(folder)
    (folder / "modules.json").write_text("{}")
    with pytest.raises(InlayError, match="not a list"):
        load(folder)
    (folder / "modules.json").write_text("{")
    with pytest.raises(InlayError, match="cannot be read"):
        load(folder)


def test_an_old_copy_of_a_sentence_encoder_that_cannot_say_what_it_was_made_for_is_not_guessed(write: Write) -> None:
    """An earlier inlay, offline now, left the files that it read in the hub's cache, and not this one."""
    folder = write("bert")
    name, source = "sentence-transformers/some-encoder", f"{CACHED} some-encoder at 0123456789ab"
    place = Location(name, str(folder), {"model_type": "bert"}, source, frozenset(), folder=folder)
    with pytest.raises(InlayError, match=r"lacks modules\.json.*--pooling mean"):
        settle(place, "classification", "auto")
    assert settle(place, "classification", "mean") == "mean"
    assert settle(place, "classification", "own") is None


def test_an_old_copy_of_another_publishers_model_is_read_with_a_word(write: Write) -> None:
    folder = write("bert")

    def said(made: str, source: str = f"{CACHED} me/encoder at 0123456789ab", wanted: str = "auto") -> list[str]:
        config = {"model_type": "bert", "architectures": [made]}
        place = Location("me/encoder", str(folder), config, source, frozenset(), folder=folder)
        return doubts(place, "classification", wanted)

    (line,) = said("BertModel")
    assert "me/encoder in the hub's cache has no modules.json" in line
    assert "--pooling" in line
    assert said("BertForMaskedLM") == said("BertModel", "folder") == said("BertModel", wanted="own") == []
    says(folder)
    assert said("BertModel") == []


def test_what_cannot_be_chosen_is_refused(write: Write) -> None:
    with pytest.raises(InlayError, match=r"reads no pooler, it reads the first token's state\. Give mean"):
        load(write("roberta"), pooling="pooler")
    with pytest.raises(InlayError, match=r"\(t5\) reads cannot be chosen\. Leave it out"):
        load(write("t5"), pooling="mean")
    with pytest.raises(InlayError, match=r"Unknown pooling 'men'.*mean"):
        load(write("bert"), pooling="men")
    for kind, family in (("token-classification", "bert"), ("causal-lm", "gpt2"), ("image-classification", "vit")):
        labels = None if kind == "causal-lm" else 3
        folder = str(write(family))
        with pytest.raises(InlayError, match=f"pooling='mean': {kind} has no single feature"):
            backbones.load(folder, kind=kind, num_labels=labels, pooling="mean")
        assert backbones.load(folder, kind=kind, num_labels=labels).pooling is None


def test_a_pooler_that_nobody_reads_is_neither_new_nor_trained_nor_saved(write: Write, tmp_path: Path) -> None:
    folder = write("bert")
    hf.BertForMaskedLM(zoo.FAMILIES["bert"].config()).save_pretrained(folder)  # which has none
    assert load(folder).newly_initialised == ["bert.pooler", "classifier"]
    backbone = load(folder, pooling="mean")
    assert backbone.newly_initialised == ["classifier"]
    for method in ("linear-probe", "bias", "full"):
        backbone = load(folder, pooling="mean")
        model = attach.attach(backbone.model, method, newly_initialised=backbone.newly_initialised)
        assert not [name for name, _ in model.named_parameters() if "pooler" in name]
        model(**zoo.tiny("bert")[1]).loss.backward()
        silent = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
        assert silent == []


METHODS = ["linear-probe", "lora", "bias", "multi-lora", "prefix", "warp", "full"]


@pytest.mark.parametrize(
    ("family", "method"),
    [("bert", method) for method in METHODS] + [("mpnet", method) for method in METHODS if method != "prefix"],
)
def test_what_was_saved_reads_the_same_feature_again(method: str, family: str, write: Write, tmp_path: Path) -> None:
    folder, saved = says(write(family)), tmp_path / "saved"
    backbone = load(folder)
    settings = {"mask_token_id": 4} if method == "warp" else {}
    model = attach.attach(
        backbone.model,
        method,
        settings=settings,
        newly_initialised=backbone.newly_initialised,
        task_kind="classification",
    )
    with torch.no_grad():
        for parameter in attach.trained_parameters(model).values():
            parameter.add_(0.1)
        expected = model.eval()(**texts()).logits
    attach.save(model, method, saved, base_model_name=str(folder), fingerprint=backbone.fingerprint)
    for pooling in ("auto", "own"):  # as the run loads it, and as one who knows nothing of it
        again = attach.restore(load(folder, pooling=pooling).model, method, saved)
        with torch.no_grad():
            torch.testing.assert_close(again(**texts()).logits, expected)
    if method != "warp":  # which has its own head
        with pytest.raises(InlayError, match=r"pooling='mean'.*this model has pooling='last'.*load_backbone"):
            attach.restore(load(folder, pooling="last").model, method, saved)
    if method == "full":
        write_tokenizer(saved)
        whole = inlay.load_backbone(str(saved), num_labels=3)
        assert whole.pooling == "mean", "a whole checkpoint says itself what it was trained for"
        with torch.no_grad():
            torch.testing.assert_close(whole.model(**texts()).logits, expected)


@pytest.mark.parametrize("method", ["bias", "lora"])
def test_an_adapter_finds_its_feature_by_every_door(method: str, write: Write, tmp_path: Path) -> None:
    """Onto a plain model of Transformers', whose head reads another one."""
    folder, saved = says(write("bert")), tmp_path / "adapter"
    backbone = inlay.load_backbone(str(folder), num_labels=3)
    adapted = attach.attach(backbone.model, method, newly_initialised=backbone.newly_initialised)
    with torch.no_grad():
        for parameter in attach.trained_parameters(adapted).values():
            parameter.add_(0.1)
        expected = adapted.eval()(**texts()).logits
    attach.save(adapted, method, saved, base_model_name=str(folder))
    assert "pooling='mean'" in (saved / "README.md").read_text()

    def plain() -> Any:
        return hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)

    by_transformers = plain()
    by_transformers.load_adapter(str(saved))
    by_name = hf.AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3)
    for loaded in (PeftModel.from_pretrained(plain(), saved), by_transformers, by_name):
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(**texts()).logits, expected)
    with pytest.raises(InlayError, match="pooling='mean'"):
        PeftModel.from_pretrained(load(folder, pooling="first").model, saved)


def lora_of(folder: Path, saved: Path, pooling: str, *, method: str = "lora", **settings: Any) -> Tensor:
    """Save an adapter that is not nothing; its logits."""
    backbone = load(folder, pooling=pooling)
    adapted = attach.attach(backbone.model, method, settings=settings, newly_initialised=["classifier"])
    with torch.no_grad():
        for parameter in attach.trained_parameters(adapted).values():
            parameter.add_(0.1)
        expected = adapted.eval()(**texts()).logits
    attach.save(adapted, method, saved, base_model_name=str(folder), fingerprint=backbone.fingerprint)
    return expected


def plain(folder: Path) -> Any:
    return hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)


SECOND: dict[str, Callable[[Any, str, Path], Any]] = {
    "peft": lambda model, method, folder: model.load_adapter(folder, "second"),
    "peft around it": lambda model, method, folder: PeftModel.from_pretrained(model.get_base_model(), folder, "second"),
    "transformers": lambda model, method, folder: model.get_base_model().load_adapter(folder, adapter_name="second"),
    "restore": lambda model, method, folder: attach.restore(model, method, folder, adapter_name="second"),
}


@pytest.mark.parametrize("method", ["bias", "lora"])
@pytest.mark.parametrize("door", SECOND)
def test_a_second_adapter_does_not_change_what_the_first_reads(
    door: str, method: str, write: Write, tmp_path: Path
) -> None:
    folder = write("bert")
    expected = lora_of(folder, tmp_path / "own", "own", method=method, modules_to_save=["pooler"])
    lora_of(folder, tmp_path / "mean", "mean", method=method)
    model = PeftModel.from_pretrained(plain(folder), tmp_path / "own", "first").eval()
    why = r"pooling='mean'.*has 'first' already.*pooling='own'.*base model of its own.*load_backbone\(.*'mean'\)"
    with pytest.raises(InlayError, match=why):
        SECOND[door](model, method, tmp_path / "mean")
    with torch.no_grad():
        assert torch.equal(model(**texts()).logits, expected)
    model.save_pretrained(tmp_path / "again")
    held = load_file(tmp_path / "again" / "first" / "adapter_model.safetensors")
    assert any("pooler" in name for name in held), "the pooler that the first has trained is still there"
    lora_of(folder, tmp_path / "like", "own", method=method, modules_to_save=["pooler"])
    SECOND[door](model, method, tmp_path / "like")  # of the same feature, it is let in


def test_an_adapter_that_cannot_be_loaded_leaves_the_head_as_it_was(write: Write, tmp_path: Path) -> None:
    folder = write("bert")
    for method in ("bias", "lora"):
        saved = tmp_path / method
        lora_of(folder, saved, "mean", method=method)
        weights = saved / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        for door in (
            lambda model: PeftModel.from_pretrained(model, saved),  # noqa: B023
            lambda model: model.load_adapter(saved),  # noqa: B023
            lambda model: attach.restore(model, method, saved),  # noqa: B023
        ):
            model = plain(folder).eval()
            pooler = model.bert.pooler
            with pytest.raises(Exception, match=r"(?i)header|truncated|safetensors"):
                door(model)
            assert model.bert.pooler is pooler
            assert installed(model) is None
            assert "inlay_pooling" not in repr(model)
            assert not model.bert._forward_hooks


@pytest.mark.parametrize("selected", [None, ["other"]])
def test_a_lora_that_peft_saved_knows_its_feature(selected: list[str] | None, write: Write, tmp_path: Path) -> None:
    """The recipe of docs/pooling.md, by every door."""
    folder, saved = says(write("bert")), tmp_path / "adapter"
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False)
    name = "default" if selected is None else selected[0]
    adapted = get_peft_model(inlay.load_backbone(str(folder), num_labels=3).model, config, name).eval()
    adapted.save_pretrained(saved, selected_adapters=selected)
    place = saved if selected is None else saved / name
    with torch.no_grad():
        expected = adapted(**texts()).logits
    by_transformers = plain(folder)
    by_transformers.load_adapter(place)
    for loaded in (
        PeftModel.from_pretrained(plain(folder), place),
        by_transformers,
        attach.restore(plain(folder), "lora", saved, adapter_name=name),
        attach.restore(load(folder).model, "lora", saved, adapter_name=name),
    ):
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(**texts()).logits, expected)
    (place / "inlay.json").unlink()  # as an earlier inlay, or PEFT alone, left it: nothing is said, nothing refused
    again = attach.restore(load(folder).model, "lora", saved, adapter_name=name)
    with torch.no_grad():
        torch.testing.assert_close(again(**texts()).logits, expected)


def test_peft_saves_over_a_note_that_no_longer_holds(write: Write, tmp_path: Path) -> None:
    folder, saved = write("bert"), tmp_path / "adapter"
    lora_of(folder, saved, "mean")
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
    adapted = get_peft_model(plain(folder), config).eval()
    adapted.save_pretrained(saved)
    with torch.no_grad():
        expected = adapted(**texts()).logits
        assert torch.equal(PeftModel.from_pretrained(plain(folder), saved).eval()(**texts()).logits, expected)


@pytest.mark.parametrize("subfolder", [None, "inner"])
def test_an_adapter_in_the_hubs_cache_finds_its_feature(
    subfolder: str | None, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = write("bert"), "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--me--rep"
    snapshot = repository / "snapshots" / commit
    expected = lora_of(folder, snapshot / (subfolder or ""), "mean")
    (repository / "refs").mkdir()
    (repository / "refs" / "stable").write_text(commit)
    hub = {"cache_dir": str(tmp_path / "cache"), "revision": "stable", "local_files_only": True}
    if subfolder is not None:
        hub["subfolder"] = subfolder
    by_transformers = plain(folder)
    by_transformers.load_adapter("me/rep", adapter_kwargs=hub)
    # Offline, PEFT looks for weights in the subfolder of a subfolder: there it is asked for a folder on disk.
    by_peft = {"subfolder": subfolder, "model_id": snapshot} if subfolder else {"model_id": "me/rep", **hub}
    for loaded in (PeftModel.from_pretrained(plain(folder), **by_peft), by_transformers):
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(**texts()).logits, expected)
    (snapshot / (subfolder or "") / "inlay.json").unlink()
    assert installed(PeftModel.from_pretrained(plain(folder), **by_peft)) is None, "nothing is said, as before"


@pytest.mark.parametrize("content", ['{"a": ' * 100_000, "[]", "{", '{"pooling": NaN}'])
def test_a_note_that_cannot_be_read_is_one_clear_error(content: str, write: Write, tmp_path: Path) -> None:
    folder, saved = write("bert"), tmp_path / "adapter"
    lora_of(folder, saved, "mean")
    (saved / "inlay.json").write_text(content)
    with pytest.raises(InlayError, match=r"inlay\.json"):
        PeftModel.from_pretrained(plain(folder), saved)
    with pytest.raises(InlayError, match=r"inlay\.json"):
        plain(folder).load_adapter(saved)


@pytest.mark.parametrize("value", ["banana", "pooler", 3, ["mean"], {}])
def test_a_strangers_folder_cannot_ask_for_a_feature_that_there_is_not(
    value: Any, write: Write, tmp_path: Path
) -> None:
    folder, saved = write("bert"), tmp_path / "adapter"
    attach.save(attach.attach(load(folder).model, "lora", newly_initialised=["classifier"]), "lora", saved)
    note = json.loads((saved / "inlay.json").read_text()) | {"pooling": value}
    (saved / "inlay.json").write_text(json.dumps(sealed(note, "digest")))
    with pytest.raises(InlayError, match="pooling"):
        attach.restore(load(folder).model, "lora", saved)
    with pytest.raises(InlayError, match="pooling"):
        PeftModel.from_pretrained(load(folder).model, saved)
    note["pooling"] = "mean"
    (saved / "inlay.json").write_text(json.dumps(sealed(note, "digest")))
    tags = backbones.load(str(folder), kind="token-classification", num_labels=3).model
    with pytest.raises(InlayError, match="BertForTokenClassification is none"):
        PeftModel.from_pretrained(tags, saved)


def test_an_adapter_of_ours_that_peft_saved_knows_its_feature(write: Write, tmp_path: Path) -> None:
    folder = says(write("bert"))
    adapted = get_peft_model(inlay.load_backbone(str(folder), num_labels=3).model, inlay.BiasTuningConfig()).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    plain = hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**texts()).logits, adapted(**texts()).logits)


def test_an_adapter_from_before_there_was_a_choice_keeps_its_feature(write: Write, tmp_path: Path) -> None:
    """Its note and its config say nothing of it."""
    folder = write("bert")
    for method in ("lora", "bias", "linear-probe"):
        backbone = load(folder)
        model = attach.attach(backbone.model, method, newly_initialised=backbone.newly_initialised)
        with torch.no_grad():
            expected = model.eval()(**texts()).logits
        attach.save(model, method, tmp_path / method, fingerprint=backbone.fingerprint)
        note = json.loads((tmp_path / method / ("head.json" if method == "linear-probe" else "inlay.json")).read_text())
        assert "pooling" not in note
        says(folder)
        with pytest.raises(InlayError, match=r"pooling='own'.*load_backbone\(\.\.\., pooling='own'\)"):
            attach.restore(load(folder).model, method, tmp_path / method)
        again = attach.restore(load(folder, pooling="own").model, method, tmp_path / method)
        with torch.no_grad():
            assert torch.equal(again(**texts()).logits, expected)
        (folder / "modules.json").unlink()
        (folder / "1_Pooling" / "config.json").unlink()


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_methods_with_class_vectors_read_the_feature_that_heads_read(family: str, write: Write) -> None:
    folder = write(family)
    expected = attach.attach(load(folder).model, "infoprompt", settings={"mask_token_id": 4, "state": "mean"})
    found = attach.attach(load(folder, pooling="mean").model, "infoprompt", settings={"mask_token_id": 4})
    assert found.active_peft_config.state == "mean"
    assert found.active_peft_config.sizes == expected.active_peft_config.sizes
    for (name, mine), (other, theirs) in zip(
        attach.trained_parameters(found).items(), attach.trained_parameters(expected).items(), strict=True
    ):
        assert name == other
        mine.copy_(theirs)
    assert torch.equal(found.eval()(**texts()).logits, expected.eval()(**texts()).logits)


def test_it_trains_in_half_precision_with_checkpointing_and_behind_a_kept_trunk(write: Write) -> None:
    batch = zoo.tiny("bert")[1]
    backbone = load(write("bert"), pooling="mean")
    model = attach.attach(backbone.model, "lora", newly_initialised=backbone.newly_initialised)
    model(**batch).loss.backward()
    plain = {name: each.grad.clone() for name, each in attach.trained_parameters(model).items()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**batch).loss.backward()
    for name, each in attach.trained_parameters(model).items():
        torch.testing.assert_close(each.grad, plain[name])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = model(**texts()).logits
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(logits.float(), model(**texts()).logits, atol=0.05, rtol=0.05)
    probe = attach.attach(load(write("bert"), pooling="mean").model, "linear-probe", newly_initialised=["classifier"])
    trunk = TrunkCache.find(probe.eval(), batch)
    assert trunk.blocks_skipped == trunk.blocks == 3
    with trunk.replay(trunk.compute(batch)):
        kept = probe(**trunk.placeholders(3), labels=batch["labels"])
    assert torch.equal(kept.loss, probe(**batch).loss)


def test_a_model_for_users_by_its_name_alone(write: Write) -> None:
    text = inlay.load_backbone(str(says(write("bert"))))
    assert (type(text.model).__name__, text.pooling) == ("BertForSequenceClassification", "mean")
    assert text.model.config.num_labels == 2
    assert text.processor(["w1 w2"])["input_ids"]
    assert inlay.load_backbone(str(write("bert")), kind="regression").model.config.num_labels == 1
    assert inlay.load_backbone(str(write("bert")), label_names=["a", "b", "c"]).model.config.num_labels == 3
    assert type(inlay.load_backbone(str(write("llama"))).model).__name__ == "LlamaForCausalLM"
    assert inlay.load_backbone("embedded:vit", num_labels=5).model.config.num_labels == 5
    with pytest.raises(InlayError, match="kind of task"):
        inlay.load_backbone(str(write("bert")), kind="classify")


@pytest.mark.parametrize("epochs", [5.0, pytest.param(None, marks=pytest.mark.slow, id="as many as by default")])
def test_a_probe_on_few_real_rows_is_as_good_as_logistic_regression(
    epochs: float | None, shared: Path, tmp_path: Path
) -> None:
    """144 rows of SST-2, in the order of the file; both read the mean of MiniLM's states."""
    from sklearn.linear_model import LogisticRegression

    try:
        backbone = inlay.load_backbone("embedded:minilm")
    except InlayError as error:
        pytest.skip(f"needs the hub or the package index: {error}")

    def rows(split: str, begin: int, end: int) -> list[dict[str, Any]]:
        with gzip.open(shared / "data" / "text" / "sst2" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in islice(file, begin, end)]

    @torch.no_grad()
    def features(split: list[dict[str, Any]]) -> Any:
        tokens = backbone.processor([row["sentence"] for row in split], padding=True, return_tensors="pt")
        states = backbone.model.bert(**tokens).last_hidden_state
        return pooled_by_hand(states, tokens["attention_mask"], "mean").numpy()

    splits = {"train": rows("train", 0, 144), "validation": rows("train", 144, 152), "test": rows("validation", 0, 300)}
    lines = [
        row | {"split": split, "label": ("bad", "good")[row["label"]]} for split in splits for row in splits[split]
    ]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = Spec(
        model="embedded:minilm",
        method="linear-probe",
        data=str(tmp_path / "few.jsonl"),
        text=("sentence",),
        label="label",
        epochs=epochs,
        batch_size=None if epochs is None else 8,
        evaluations=1,
    )
    run = inlay.tune(spec, tmp_path / "runs", progress=False)
    assert run.record["examples"] == {"train": 144, "validation": 8, "test": 300}
    assert run.record["backbone"]["pooling"] == "mean"
    labels = {split: [row["label"] for row in found] for split, found in splits.items()}
    regression = LogisticRegression(max_iter=1000).fit(features(splits["train"]), labels["train"])
    expected = regression.score(features(splits["test"]), labels["test"])
    assert run.metrics["test"]["accuracy"] > expected - 0.02
    assert expected > 0.7, "the feature is worth reading"
