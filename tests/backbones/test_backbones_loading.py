"""Loading tiny checkpoints of every family: what is new, what is kept, what is refused."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import zoo
from checkpoints import Write, write_tokenizer
from inlay import backbones
from inlay.backbones.skeleton import load_skeleton
from inlay.errors import InlayError

# What each family's classification model must learn anew on a bare encoder's or decoder's checkpoint.
NEW_ON_BASE = {
    "bert": ["classifier"],
    "roberta": ["classifier"],
    "distilbert": ["pre_classifier", "classifier"],
    "electra": ["classifier"],
    "modernbert": ["head", "classifier"],
    "mpnet": ["classifier"],
    "deberta-v2": ["pooler", "classifier"],
    "gpt2": ["score"],
    "opt": ["score"],
    "llama": ["score"],
    "gemma": ["score"],
    "vit": ["classifier"],
    "deit": ["classifier"],
    "dinov2": ["classifier"],
    "swin": ["classifier"],
    "resnet": ["classifier"],
    "convnext": ["classifier"],
}


def kind_of(family: str) -> str:
    return "image-classification" if zoo.FAMILIES[family].modality == "image" else "classification"


def edit_weights(folder: Path, change: Any) -> None:
    """Rewrite a checkpoint's weights."""
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    """Set some keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("family", NEW_ON_BASE)
def test_base_checkpoint_gets_a_new_head(family: str, write: Write) -> None:
    folder = write(family)
    backbone = backbones.load(str(folder), kind=kind_of(family), label_names=["a", "b", "c"])
    assert backbone.newly_initialised == NEW_ON_BASE[family]
    assert backbone.modality == zoo.FAMILIES[family].modality == backbones.modality(str(folder))
    new = tuple(f"{name}." for name in backbone.newly_initialised)
    written, loaded = zoo.tiny(family, "base")[0].state_dict(), backbone.model.state_dict()
    for key, value in loaded.items():
        assert value.isfinite().all()
        if not key.startswith(new):
            # A task model sets its backbone's name before the bare model's.
            (same,) = (kept for name, kept in written.items() if key == name or key.partition(".")[2] == name)
            assert torch.equal(same, value), key
    assert not backbone.model.training
    # Without this loader the new parts are found by Transformers' own marks: they must say the same.
    parameters = dict(backbone.model.named_parameters())
    unmarked = {key for key, value in parameters.items() if not getattr(value, "_is_hf_initialized", False)}
    assert unmarked == {key for key in parameters if key.startswith(new)}


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "t5", "vit", "resnet", "clip"])
def test_other_number_of_labels_renews_only_the_output_layer(family: str, write: Write) -> None:
    folder = write(family, "classification")
    backbone = backbones.load(str(folder), kind=kind_of(family), num_labels=5)
    (output,) = backbone.newly_initialised
    written = zoo.tiny(family, "classification")[0].state_dict()
    for key, value in backbone.model.state_dict().items():
        if key.startswith(f"{output}."):
            assert value.shape[0] == 5
            assert written[key].shape[0] == 3
        else:
            assert torch.equal(value, written[key]), key
    assert backbone.model.config.num_labels == 5


def test_same_shape_but_other_labels_is_not_kept(write: Write) -> None:
    folder = write("bert", "classification")
    edit_json(folder / "config.json", id2label={0: "low", 1: "mid", 2: "high"})
    stored = load_file(folder / "model.safetensors")["classifier.weight"]
    other = backbones.load(str(folder), kind="classification", label_names=["a", "b", "c"])
    assert not torch.equal(other.model.classifier.weight, stored)
    assert other.newly_initialised == ["classifier"]
    same = backbones.load(str(folder), kind="classification", label_names=["low", "mid", "high"])
    assert torch.equal(same.model.classifier.weight, stored)
    assert same.newly_initialised == ["classifier"], "a kept head is trained and saved all the same"
    assert any("goes on from it" in note for note in same.notes)
    assert same.fingerprint == other.fingerprint, "the head is no part of the base"


def test_labels_and_problem_stand_in_the_config(write: Write) -> None:
    config = backbones.load(str(write("bert")), kind="classification", label_names=["no", "yes"]).model.config
    assert config.id2label == {0: "no", 1: "yes"}
    assert config.label2id == {"no": 0, "yes": 1}
    assert config.problem_type == "single_label_classification"


def test_regression_has_one_output_and_its_loss(write: Write) -> None:
    backbone = backbones.load(str(write("roberta")), kind="regression")
    assert backbone.model.config.num_labels == 1
    inputs = {"input_ids": torch.tensor([[0, 7, 2]]), "labels": torch.tensor([0.5])}
    output = backbone.model(**inputs)
    torch.testing.assert_close(output.loss, (output.logits.squeeze() - 0.5) ** 2)


def test_masked_language_model_gets_a_new_pooler(write: Write) -> None:
    folder = write("bert")
    hf.BertForMaskedLM(zoo.FAMILIES["bert"].config()).save_pretrained(folder)
    backbone = backbones.load(str(folder), kind="classification", num_labels=2)
    assert backbone.newly_initialised == ["bert.pooler", "classifier"]


def test_tied_output_embedding_is_not_new(write: Write) -> None:
    folder = write("gpt2", "causal-lm")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    backbone = backbones.load(str(folder), kind="causal-lm")
    assert backbone.newly_initialised == []
    assert backbone.model.lm_head.weight is backbone.model.transformer.wte.weight


def test_untied_output_embedding_that_is_missing_is_new_and_told(write: Write) -> None:
    backbone = backbones.load(str(write("llama")), kind="causal-lm")
    assert backbone.newly_initialised == ["lm_head"]
    assert any("lm_head" in note for note in backbone.notes)


@pytest.mark.parametrize("kind", ["causal-lm", "data-to-text"])
def test_encoder_decoder_generates(kind: str, write: Write) -> None:
    folder = write("t5", "classification")
    backbone = backbones.load(str(folder), kind=kind)
    assert isinstance(backbone.model, hf.T5ForConditionalGeneration)
    assert backbone.newly_initialised == []


def test_distilled_deit_is_loaded_as_the_class_that_trains(tmp_path: Path) -> None:
    config = zoo.FAMILIES["deit"].config()
    hf.DeiTForImageClassificationWithTeacher(config).save_pretrained(tmp_path)
    backbone = backbones.load(str(tmp_path), kind="image-classification", num_labels=4)
    assert type(backbone.model) is hf.DeiTForImageClassification


@pytest.mark.parametrize("family", ["roberta", "resnet", "modernbert"])
def test_head_comes_from_the_seed_alone(family: str, write: Write) -> None:
    folder, kind = str(write(family)), kind_of(family)

    def head(seed: int) -> list[torch.Tensor]:
        backbone = backbones.load(folder, kind=kind, num_labels=3, seed=seed)
        return [
            p.detach() for name in backbone.newly_initialised for p in backbone.model.get_submodule(name).parameters()
        ]

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = head(7)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, head(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, head(8), strict=True))


def test_checkpoint_in_half_precision_is_loaded_in_single(write: Write) -> None:
    folder = write("bert")
    edit_weights(folder, lambda weights: {key: value.half() for key, value in weights.items()})
    backbone = backbones.load(str(folder), kind="classification", num_labels=2)
    assert {p.dtype for p in backbone.model.parameters()} == {torch.float32}
    assert "stored as float16, loaded as float32" in backbone.notes
    in_bfloat = backbones.load(str(folder), kind="classification", num_labels=2, dtype=torch.bfloat16)
    assert {p.dtype for p in in_bfloat.model.parameters()} == {torch.bfloat16}


def test_dead_dimensions_are_told(write: Write) -> None:
    folder = write("bert")

    def kill(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["encoder.layer.2.output.LayerNorm.weight"][[3, 11]] = 1e-30
        return weights

    alive = backbones.load(str(folder), kind="classification", num_labels=2)
    assert not any("dead" in note for note in alive.notes)
    edit_weights(folder, kill)
    (note,) = (n for n in backbones.load(str(folder), kind="classification", num_labels=2).notes if "dead" in n)
    assert "(3, 11)" in note


def test_fingerprint_is_of_the_frozen_weights(write: Write) -> None:
    folder = write("bert")
    two = backbones.load(str(folder), kind="classification", num_labels=2, seed=0)
    five = backbones.load(str(folder), kind="classification", num_labels=5, seed=1)
    assert two.fingerprint == five.fingerprint
    assert backbones.fingerprint(two.model, two.newly_initialised) == two.fingerprint
    with torch.no_grad():
        weight = two.model.bert.embeddings.word_embeddings.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))
    assert backbones.fingerprint(two.model, two.newly_initialised) != five.fingerprint


def test_fingerprint_sees_batch_statistics_and_not_the_cut_into_shards(write: Write, tmp_path: Path) -> None:
    folder = write("resnet", "classification")
    whole = backbones.load(str(folder), kind="image-classification", num_labels=2)
    hf.ResNetForImageClassification.from_pretrained(folder).save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert (tmp_path / "cut" / "model.safetensors.index.json").exists()
    cut = backbones.load(str(tmp_path / "cut"), kind="image-classification", num_labels=2)
    assert cut.fingerprint == whole.fingerprint
    cut.model.resnet.embedder.embedder.normalization.running_mean += 1
    assert backbones.fingerprint(cut.model, cut.newly_initialised) != whole.fingerprint


def test_loaded_model_does_not_hang_on_the_file(write: Write) -> None:
    folder = write("bert")
    backbone = backbones.load(str(folder), kind="classification", num_labels=2)
    before = backbone.fingerprint
    (folder / "model.safetensors").write_bytes(b"")
    assert backbones.fingerprint(backbone.model, backbone.newly_initialised) == before


def test_adapters_will_name_the_backbone_as_the_user_did(write: Write) -> None:
    folder = str(write("bert"))
    model = backbones.load(folder, kind="classification", num_labels=2).model
    assert model.config._name_or_path == model.name_or_path == folder


def test_nothing_is_printed_and_the_log_level_is_as_before(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    folder = write("bert", "token-classification")
    level, out, err = hf.utils.logging.get_verbosity(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(err)
    logging.getLogger("transformers").addHandler(handler)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            backbones.load(str(folder), kind="classification", num_labels=2)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert out.getvalue() + err.getvalue() == ""
    assert hf.utils.logging.get_verbosity() == level
    assert hf.utils.logging.is_progress_bar_enabled()


def test_downloads_keep_their_progress_bars() -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    from inlay.console import quiet

    assert not are_progress_bars_disabled()
    with quiet():
        assert not are_progress_bars_disabled()
        assert not hf.utils.logging.is_progress_bar_enabled()
    assert hf.utils.logging.is_progress_bar_enabled()


def test_model_with_its_own_code_runs_only_when_trusted(write: Write) -> None:
    folder = write("bert")
    (folder / "own.py").write_text(
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class Own(BertForSequenceClassification):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.Own"}
    edit_json(folder / "config.json", model_type="own", auto_map=auto_map)
    with pytest.raises(InlayError, match="brings its own Python code"):
        backbones.load(str(folder), kind="classification", num_labels=2)
    backbone = backbones.load(str(folder), kind="classification", num_labels=2, trust_remote_code=True)
    assert type(backbone.model).__name__ == "Own"
    assert backbone.newly_initialised == ["classifier"]


def test_what_is_read_from_a_config_alone_runs_no_code(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where somebody would answer Transformers' question with yes."""
    folder = write("vit", "classification")
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import ViTConfig\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class OwnConfig(ViTConfig):\n    model_type = 'own'\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForImageClassification": "own.Own"}
    edit_json(folder / "config.json", model_type="own", auto_map=auto_map)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert backbones.own_side(str(folder)) is None
    with pytest.raises(InlayError, match=r"cannot be built from its config\.json"):
        load_skeleton(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("family", "kind", "can"),
    [
        ("vit", "classification", "image-classification"),
        ("bert", "image-classification", "token-classification"),
        ("bert", "causal-lm", "reads in both directions"),
        ("opt", "token-classification", "causal-lm, data-to-text"),
    ],
)
def test_what_an_architecture_cannot_do_is_refused_with_what_it_can(
    family: str, kind: str, can: str, write: Write
) -> None:
    with pytest.raises(InlayError, match=f"cannot do {kind}.*{can}"):
        backbones.load(str(write(family)), kind=kind, num_labels=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "clasification", "num_labels": 2}, "Did you mean 'classification'"),
        ({"kind": "classification"}, "needs num_labels"),
        ({"kind": "classification", "num_labels": 3, "label_names": ["a", "b"]}, "there are 2 label names"),
        ({"kind": "regression", "num_labels": 2}, "one number"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, write: Write) -> None:
    with pytest.raises(InlayError, match=message):
        backbones.load(str(write("bert")), **arguments)


def test_hole_in_the_backbone_is_an_error(write: Write) -> None:
    folder = write("bert", "classification")

    def drop(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value for key, value in weights.items() if "layer.1.attention" not in key}

    edit_weights(folder, drop)
    with pytest.raises(InlayError, match=r"does not hold 10 of the \d+ weights.*layer\.1\.attention"):
        backbones.load(str(folder), kind="classification", num_labels=2)


def test_config_that_does_not_fit_the_weights_is_an_error(write: Write) -> None:
    folder = write("bert")
    edit_json(folder / "config.json", intermediate_size=32)
    with pytest.raises(InlayError, match=r"\(24,?\) in the file, \(32,?\) by config.json"):
        backbones.load(str(folder), kind="classification", num_labels=2)


def test_missing_batch_statistics_are_an_error_and_missing_counters_are_not(write: Write) -> None:
    folder = write("resnet")

    def without(ending: str) -> Any:
        return lambda weights: {key: value for key, value in weights.items() if not key.endswith(ending)}

    edit_weights(folder, without("num_batches_tracked"))
    backbone = backbones.load(str(folder), kind="image-classification", num_labels=2)
    assert all(int(value) == 0 for name, value in backbone.model.named_buffers() if name.endswith("tracked"))
    edit_weights(folder, without("running_var"))
    with pytest.raises(InlayError, match="running_var"):
        backbones.load(str(folder), kind="image-classification", num_labels=2)


def test_weights_of_another_model_are_an_error(write: Write, tmp_path: Path) -> None:
    folder = write("bert")
    edit_weights(folder, lambda weights: {f"other.{key}": value for key, value in weights.items()})
    with pytest.raises(InlayError, match="does not hold"):
        backbones.load(str(folder), kind="classification", num_labels=2)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys; from inlay.backbones import EMBEDDED, modality; assert modality('embedded:vit') == 'image';"
        "assert set(EMBEDDED) == {'minilm', 'smollm2', 'vit', 'resnet'};"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shards_are_read_and_a_missing_one_is_named(write: Write, tmp_path: Path) -> None:
    model, _ = zoo.tiny("bert", "base")
    model.save_pretrained(tmp_path / "cut", max_shard_size="10KB")  # type: ignore[operator]
    write_tokenizer(tmp_path / "cut")
    whole = backbones.load(str(write("bert")), kind="classification", num_labels=2)
    assert backbones.load(str(tmp_path / "cut"), kind="classification", num_labels=2).fingerprint == whole.fingerprint
    gone = sorted((tmp_path / "cut").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(InlayError, match=f"lacks the shard '{gone.name}'"):
        backbones.load(str(tmp_path / "cut"), kind="classification", num_labels=2)


def test_timm_model(write: Write) -> None:
    folder = write("resnet")
    config = {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": {"input_size": [3, 224, 224]}}
    (folder / "config.json").write_text(json.dumps(config))
    assert backbones.modality(str(folder)) == "image"
    if importlib.util.find_spec("timm") is None:
        with pytest.raises(InlayError, match=r"inlay\[timm\]"):
            backbones.load(str(folder), kind="image-classification", num_labels=3)
        assert backbones.own_side(str(folder)) is None
        return
    import timm
    from timm.models import save_for_hf

    save_for_hf(timm.create_model("resnet18"), str(folder), safe_serialization=True)
    backbone = backbones.load(str(folder), kind="image-classification", num_labels=3)
    assert backbone.newly_initialised == ["timm_model.fc"]
    assert backbone.model(torch.zeros(1, 3, 224, 224)).logits.shape == (1, 3)
