"""LoRAs from anywhere on one model, over real HTTP: all kinds in one pass, each as PEFT answers it alone."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosts import TEXTS, call, rows, until, write
from typer.testing import CliRunner

import zoo
from inlay import Spec, predict, tune
from inlay.cli.app import app
from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, WEIGHTS
from inlay.records.atomic import file_digest
from inlay.serve.adapters import Adapters
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from inlay.serve.watching import Watched
from inlay.workflow.answer import Tasks
from loras import alone, base_model, lora, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
SIZES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("adapters") / "bert-base")


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of every kind, to be copied."""
    place = tmp_path_factory.mktemp("made")
    for seed, (name, labels) in enumerate(SIZES.items()):
        lora(base, place / name, labels=labels, seed=seed)
    lora(base, place / "value", labels=1, seed=7)
    lora(base, place / "tagger", "TOKEN_CLS", 3, seed=8)
    lora(base, place / "vectors", "FEATURE_EXTRACTION", seed=9)
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "loras"))


@pytest.fixture(scope="module")
def hosted(made: Path) -> Adapters:
    return Adapters([str(made)])


@pytest.fixture(scope="module")
def address(hosted: Adapters) -> Iterator[str]:
    """One service for all tests that leave it as it was."""
    with serving(hosted, ServiceSettings(port=0, max_characters=500)) as found:
        yield found


def at_once(action: Any) -> Any:
    return action()


@torch.no_grad()
def logits(base: Path, folder: Path, text: str, kind: str = "SEQ_CLS", labels: int = 2) -> torch.Tensor:
    return alone(base, folder, kind, labels)(**tokens(base, text)).logits[0]


def revision(folder: Path) -> str:
    return file_digest(folder / WEIGHTS["peft"])[:12]


# ---- answers


def test_heads_of_all_sizes_in_one_pass_are_pefts_alone(base: Path, made: Path) -> None:
    """Six classifiers, a regression, a tagger, an embedding and the model alone: one batch, one pass."""
    hosted = Adapters([str(made)])
    asked = [{"model": name, "text": f"w{3 * i} w5 w{i}", "probabilities": True} for i, name in enumerate(SIZES)]
    asked += [{"model": name, "text": "w4 w9 w2"} for name in ("value", "tagger", "vectors", hosted.name)]
    passes = []
    run = hosted.loras.run
    hosted.loras.run = lambda batch, names: (passes.append(list(names)), run(batch, names))[1]  # type: ignore
    with (
        serving(hosted, ServiceSettings(port=0, max_wait=60.0, max_batch=len(asked))) as address,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        found = list(pool.map(lambda body: call(address, "/predict", body), asked))
        text = call(address, "/metrics")[1]
    assert [status for status, _ in found] == [200] * len(asked), found
    assert len(passes) == 1
    assert sorted(passes[0], key=str) == sorted([*SIZES, "value", "tagger", "vectors", None], key=str)
    assert "inlay_batch_rows_count 1\n" in text
    assert f"inlay_adapters {len(hosted.served)}\n" in text
    said = {each["model"]: each for _, each in found}
    for body in asked[: len(SIZES)]:
        name = body["model"]
        wanted = logits(base, made / name, body["text"], labels=SIZES[name]).softmax(-1)
        assert list(said[name]["probabilities"]) == [f"LABEL_{i}" for i in range(SIZES[name])]
        torch.testing.assert_close(torch.tensor(list(said[name]["probabilities"].values())), wanted, atol=1e-6, rtol=0)
        assert said[name]["label"] == f"LABEL_{int(wanted.argmax())}"
        assert said[name]["adapter"] == {"name": name, "revision": revision(made / name)}
    value = logits(base, made / "value", "w4 w9 w2", labels=1).item()
    assert said["value"]["value"] == pytest.approx(value, abs=1e-6)
    tags = logits(base, made / "tagger", "w4 w9 w2", "TOKEN_CLS", 3).argmax(-1).tolist()
    assert said["tagger"]["tags"] == [f"LABEL_{tag}" for tag in tags]
    for name, own in (("vectors", made / "vectors"), (hosted.name, None)):
        with torch.no_grad():
            states = alone(base, own, "FEATURE_EXTRACTION")(**tokens(base, "w4 w9 w2")).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(said[name]["embedding"]), wanted, atol=1e-5, rtol=0)
    assert said[hosted.name]["adapter"] is None


def test_short_and_long_texts_are_not_padded_to_one_another(base: Path, made: Path) -> None:
    hosted = Adapters([str(made)])
    widths = []
    run = hosted.loras.run
    hosted.loras.run = lambda batch, names: (widths.append(tuple(batch["input_ids"].shape)), run(batch, names))[1]  # type: ignore
    rows = [hosted.rows.read(hosted.get("two"), {"text": "w3 " * n}, None)[0] for n in (20, 1, 20, 1, 2)]
    found = hosted.answer(rows)
    assert sorted(widths) == [(2, 20), (3, 2)]
    for row, said in zip(rows, found, strict=True):
        wanted = logits(base, made / "two", row.given["text"]).softmax(-1)
        assert said["score"] == pytest.approx(wanted.max().item(), abs=1e-6)


def test_lists_pairs_and_what_is_served(address: str, base: Path, made: Path) -> None:
    status, said = call(
        address,
        "/predict",
        [{"model": "two", "text": "w3"}, {"model": "none", "text": "w3"}, {"model": "two"}, 7, {"model": "tagger"}],
    )
    assert status == 200
    assert [each.get("status") for each in said] == [None, 404, 400, 400, 400]
    pair = call(address, "/predict", {"model": "two", "text": "w3 w4", "text_pair": "w5", "id": 9})[1]
    with torch.no_grad():
        read = tokens(base, "w3 w4")  # the tokenizer of words puts nothing between two texts
        read = {"input_ids": torch.cat([read["input_ids"], tokens(base, "w5")["input_ids"]], 1)}
        wanted = alone(base, made / "two", "SEQ_CLS")(**read).logits[0].softmax(-1)
    assert pair["score"] == pytest.approx(wanted.max().item(), abs=1e-6)
    assert pair["id"] == 9
    listed = {each["adapter"]: each for each in call(address, "/adapters")[1]["adapters"]}
    assert set(listed) == {*SIZES, "value", "tagger", "vectors"}
    assert listed["three"] == {
        "adapter": "three",
        "revision": revision(made / "three"),
        "kind": "classification",
        "fields": ["text"],
        "labels": ["LABEL_0", "LABEL_1", "LABEL_2"],
        "rank": 3,
        "source": "./three",
    }
    assert [listed[name]["kind"] for name in ("value", "tagger", "vectors")] == [
        "regression",
        "token-classification",
        "embedding",
    ]
    assert call(address, "/health")[1] == {"status": "ok", "adapters": 9, "waiting": 0}
    models = call(address, "/v1/models")[1]["data"]
    assert [each["id"] for each in models] == ["./bert-base", *sorted(listed)]
    assert call(address, "/v1/models/two")[1]["parent"] == "./bert-base"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "twoo", "text": "w3"}, 404, "Unknown model 'twoo'. Did you mean 'two'"),
        ({"model": "../two", "text": "w3"}, 404, "Unknown model"),
        ({"text": "w3"}, 400, "names no 'model'. Known: ./bert-base, five"),
        ({"model": 7, "text": "w3"}, 400, "names no 'model'"),
        ({"model": "two"}, 400, "'text'"),
        ({"model": "two", "text": ["w3"]}, 400, "text"),
        ({"model": "two", "text": "\ud800"}, 400, "lone surrogate"),
        ({"model": "two", "text": "w" * 501}, 413, "501 characters; 'two' reads at most 500"),
        ({"model": "two", "text": "w3", "probabilities": 1}, 400, "true or false"),
        ({"model": "vectors", "text": 7}, 400, "a string"),
        (b"[", 400, "cannot be read"),
    ],
)
def test_a_bad_request_has_one_clear_error(address: str, body: Any, status: int, says: str) -> None:
    found, said = call(address, "/predict", body)
    assert found == status, said
    assert says in said["error"]


def test_embeddings_as_openai_has_them(address: str, base: Path, made: Path) -> None:
    body = {"model": "vectors", "input": ["w3 w4", "w5"]}
    status, said = call(address, "/v1/embeddings", body)
    assert status == 200
    assert said["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [each["index"] for each in said["data"]] == [0, 1]
    assert np.linalg.norm(said["data"][0]["embedding"]) == pytest.approx(1)
    coded = call(address, "/v1/embeddings", body | {"encoding_format": "base64"})[1]["data"][1]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), said["data"][1]["embedding"], atol=1e-6)
    bare = call(address, "/v1/embeddings", {"model": "./bert-base", "input": "w5"})[1]
    assert bare["adapter"] is None
    assert bare["data"][0]["embedding"] != said["data"][1]["embedding"]
    for wrong, status, says in (
        ({"model": "two", "input": "w3"}, 400, "gives no embeddings"),
        ({"model": "none", "input": "w3"}, 404, "Unknown model"),
        ({"model": "vectors", "input": []}, 400, "from 1 to"),
        ({"model": "vectors", "input": "w3", "dimensions": 3}, 400, "dimensions=3"),
        ({"model": "vectors", "input": "w3", "encoding_format": "hex"}, 400, "hex"),
        ({"model": "vectors"}, 400, "body.input"),
    ):
        found, said = call(address, "/v1/embeddings", wrong)
        assert found == status, said
        assert says in said["error"]["message"]
        assert said["error"]["type"] == "invalid_request_error"
    found, said = call(
        address, "/v1/chat/completions", {"model": "two", "messages": [{"role": "user", "content": "w3"}]}
    )
    assert found == 400
    assert "no chat template" in said["error"]["message"]
    found, said = call(address, "/v1/completions", {"model": "two", "prompt": "w3"})
    assert found == 400
    assert "'two' is served for classification: it writes no texts" in said["error"]["message"]


# ---- inlay's own runs


def test_runs_answer_as_predict_does(base: Path, made: Path, tmp_path: Path) -> None:
    """Their labels, fields and scales come from the run; heads that read another feature stand beside plain ones."""
    words = [f"w{i % 30} w{(7 * i) % 30}" for i in range(40)]
    (tmp_path / "mood.csv").write_text(
        "body,mood\n" + "\n".join(f"{text},{'good' if i % 2 else 'bad'}" for i, text in enumerate(words))
    )
    (tmp_path / "stars.csv").write_text("body,stars\n" + "\n".join(f"{t},{100 + i / 7}" for i, t in enumerate(words)))
    how = {"model": str(base), "method": "lora", "text": ["body"], "epochs": 1, "batch_size": 8, "max_length": 8}
    runs = {
        "mood": tune(Spec(data=str(tmp_path / "mood.csv"), label="mood", pooling="mean", **how), out=tmp_path / "runs"),
        "stars": tune(Spec(data=str(tmp_path / "stars.csv"), label="stars", **how), out=tmp_path / "runs"),
    }
    assert runs["mood"].spec.pooling == "mean"
    sources = [f"{name}={run.folder}" for name, run in runs.items()]
    asked = [{"body": text} for text in words[:9]]
    for given in ([*sources, str(made)], sources, [sources[0], str(made / "two")]):
        hosted = Adapters(given)
        assert hosted.refused == {}
        with serving(hosted, ServiceSettings(port=0)) as address:
            for name in set(runs) & set(hosted.served):
                wanted = predict(runs[name], asked)
                status, found = call(address, "/predict", [{"model": name, **row} for row in asked])
                assert status == 200
                for said, right in zip(found, wanted, strict=True):
                    assert said.get("label") == right.get("label")
                    key = "score" if name == "mood" else "value"
                    assert said[key] == pytest.approx(right[key], abs=1e-4)
                    assert said["adapter"]["revision"] == revision(runs[name].adapter)
                assert call(address, "/predict", {"model": name, "text": words[0]})[0] == 200, "the only field"
            if "two" in hosted.served:
                wanted_two = logits(base, made / "two", "w3 w8").softmax(-1).max().item()
                found = call(address, "/predict", {"model": "two", "text": "w3 w8"})[1]
                assert found["score"] == pytest.approx(wanted_two, abs=1e-6)
    # Of another base model, which its fingerprint says.
    other = base_model(tmp_path / "bert-base", seed=1)
    hosted = Adapters([*sources, str(made)], model=str(other))
    assert "belongs to another base model" in hosted.refused["mood"][1]
    assert "belongs to another base model" in hosted.refused["stars"][1]


# ---- what is refused


def test_what_cannot_be_served_is_said_and_the_others_go_on(base: Path, folder: Path, tmp_path: Path) -> None:
    lora(base, folder / "dora", use_dora=True)
    lora(base, folder / "biased", bias="lora_only")
    lora(base_model(tmp_path / "other-bert", seed=1), folder / "foreign")
    for name in ("cut", "wide", "headless", "unnamed", "nan", "prompted"):
        shutil.copytree(folder / "two", folder / name)
    with (folder / "cut" / WEIGHTS["peft"]).open("r+b") as file:
        file.truncate(300)
    from safetensors.torch import load_file, save_file

    def change(name: str, how: Any) -> None:
        path = folder / name / WEIGHTS["peft"]
        held = load_file(path)
        save_file({key: how(key, value) for key, value in held.items() if how(key, value) is not None}, path)

    change("wide", lambda key, value: value.repeat(1, 2) if key.endswith("classifier.weight") else value)
    change("headless", lambda key, value: None if "classifier" in key else value)
    change("nan", lambda key, value: value * float("nan") if "lora_B" in key else value)
    settings = json.loads((folder / "two" / CONFIG["peft"]).read_text())
    (folder / "unnamed" / CONFIG["peft"]).write_text(json.dumps(settings | {"task_type": None}))
    (folder / "prompted" / CONFIG["peft"]).write_text(json.dumps(settings | {"peft_type": "PROMPT_TUNING"}))
    (folder / "notes").mkdir()
    (folder / "readme.txt").write_text("no adapter")
    hosted = Adapters([str(folder), f"two={folder / 'three'}", "org/away", "again=org/away@main"])
    with serving(hosted, ServiceSettings(port=0)) as address:
        said = call(address, "/adapters")[1]
        assert call(address, "/predict", {"model": "cut", "text": "w3"})[0] == 404
        assert call(address, "/predict", {"model": "five", "text": "w3"})[0] == 200
        three = call(address, "/predict", {"model": "two", "text": "w3"})[1]
    assert three["label"] in ("LABEL_0", "LABEL_1", "LABEL_2")
    assert three["adapter"]["revision"] == revision(folder / "three"), "what is named comes before what is found"
    assert {each["adapter"] for each in said["adapters"]} == {*SIZES, "value", "tagger", "vectors"}
    refused = {each["adapter"]: each["error"] for each in said["refused"]}
    for name, why in {
        "dora": "it is a DoRA",
        "biased": "biases of the base model",
        "foreign": "belongs to another base model",
        "cut": "truncated or damaged",
        "wide": "classifier.weight",
        "headless": "has no head",
        "unnamed": "set task_type",
        "nan": "not finite",
        "prompted": "'PROMPT_TUNING'; LORA alone",
        "two": "has the name of another adapter",
        "away": "could not be fetched from the hub",
        "again": "could not be fetched from the hub",
    }.items():
        assert why in refused[name], (name, refused[name])
    assert len(refused) == 12
    assert not any(str(tmp_path) in each for each in refused.values())
    # Mended, it is served.
    shutil.rmtree(folder / "cut")
    shutil.copytree(folder / "three", folder / "cut")
    for _ in range(2):
        hosted.look_again(at_once)
    assert "cut" in hosted.served
    assert "cut" not in hosted.refused


def test_where_the_base_model_comes_from(base: Path, made: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(InlayError, match=r"no adapter that says which base model .*Give --model"):
        Adapters([str(tmp_path / "none")])
    hosted = Adapters([str(tmp_path / "none")], model=str(base))
    assert hosted.served == {}
    with serving(hosted, ServiceSettings(port=0)) as address:
        assert call(address, "/v1/embeddings", {"model": hosted.name, "input": "w3"})[0] == 200
        shutil.copytree(made / "four", tmp_path / "none" / "four")
        until(lambda: call(address, "/predict", {"model": "four", "text": "w3"})[0] == 200)
        assert call(address, "/predict", {"text": "w3"})[1]["adapter"]["name"] == "four"
    # The same model by another name: what most adapters were made of is what --model is.
    moved = shutil.copytree(base, tmp_path / "moved-bert")
    assert set(Adapters([str(made)], model=str(moved)).served) == {*SIZES, "value", "tagger", "vectors"}
    for arguments, says in (
        (["--adapters", str(tmp_path / "nowhere")], "is no folder, and no hub id"),
        (["--adapters", str(made), "--prompts", str(made)], "one of the three"),
        (["--adapters", str(made), "--tasks", "two"], "--tasks is for --adapter"),
        (["--adapters", "a/b=" + str(made / "two")], "name=source"),
        ([], "Give --adapter"),
    ):
        found = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
        assert isinstance(found.exception, InlayError), found.output
        assert says in str(found.exception)


# ---- they come and go


def test_adapters_come_and_go_under_load(base: Path, folder: Path, made: Path) -> None:
    hosted = Adapters([str(folder)])
    ends, failed = threading.Event(), []
    wanted = {
        name: hosted.answer([hosted.rows.read(hosted.get(name), {"text": "w3 w5"}, None)[0]])[0] for name in SIZES
    }

    def ask(address: str, name: str) -> None:
        while not ends.is_set():
            status, said = call(address, "/predict", {"model": name, "text": "w3 w5"})
            if (
                status != 200
                or said["label"] != wanted[name]["label"]
                or abs(said["score"] - wanted[name]["score"]) > 1e-5
            ):
                failed.append(said)

    with serving(hosted, ServiceSettings(port=0)) as address, ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, address, name) for name in ("two", "five", "seven")]
        shutil.copytree(made / "six", folder / "new")
        until(lambda: call(address, "/predict", {"model": "new", "text": "w3"})[0] == 200)
        shutil.copytree(made / "six", folder / "a\nline")
        shutil.rmtree(folder / "three")
        until(lambda: call(address, "/predict", {"model": "three", "text": "w3"})[0] == 404)
        assert not any("\n" in name for name in hosted.served), "it goes into lines of logs"
        shutil.copytree(made / "value", folder / "three")  # another one by the same name, of another kind
        until(lambda: "value" in call(address, "/predict", {"model": "three", "text": "w3"})[1])
        # By requests.
        assert call(address, "/adapters/new", method="DELETE")[1]["removed"] == "new"
        assert call(address, "/predict", {"model": "new", "text": "w3"})[0] == 404
        refused = {each["adapter"]: each["error"] for each in call(address, "/adapters")[1]["refused"]}
        assert "removed by a request" in refused["new"]
        assert call(address, "/adapters", {"name": "new"})[0] == 201, "again from where it lies"
        assert call(address, "/predict", {"model": "new", "text": "w3"})[0] == 200
        status, said = call(address, "/adapters", {"name": "copy", "source": "four"})
        assert (status, said["kind"], said["adapter"]) == (
            201,
            "classification",
            {"name": "copy", "revision": revision(made / "four")},
        )
        assert call(address, "/predict", {"model": "copy", "text": "w3"})[0] == 200
        for body, status, says in (
            ({"name": "copy", "source": "four"}, 409, "already"),
            ({"name": "other", "source": ".."}, 403, "--add-from"),
            ({"name": "other", "source": "/etc"}, 403, "--add-from"),
            ({"name": "other", "source": "nowhere"}, 400, "no folder"),
            ({"name": "other"}, 400, "'source'"),
            ({"name": "a/b", "source": "four"}, 400, "slashes"),
            ({"name": "..", "source": "four"}, 400, "dot"),
            ({"name": "a\nb", "source": "four"}, 400, "name="),
            ({"name": hosted.name.replace("/", ""), "source": "four", "x": 1}, 400, "body.x"),
        ):
            found = call(address, "/adapters", body)
            assert found[0] == status, found
            assert says in found[1]["error"]
        assert call(address, "/adapters/copy", method="DELETE")[0] == 200
        assert call(address, "/adapters/copy", method="DELETE")[0] == 404
        assert call(address, "/adapters", {"name": "copy"})[0] == 400, "it was added by a request alone"
        ends.set()
        for each in asking:
            each.result()
    assert failed == [], "who was there all the time was served all the time"
    assert sorted(hosted.loras.names) == sorted(hosted.served)
    assert len(hosted.loras.pool) == len(hosted.served), "nothing is left behind"


def test_an_adapter_is_exchanged_between_two_batches(base: Path, folder: Path, made: Path) -> None:
    hosted = Adapters([str(folder)])
    shutil.rmtree(folder / "two")
    shutil.copytree(made / "five", folder / "two")
    hosted.look_again(at_once)
    assert hosted.served["two"].outputs == 2, "it has been seen once, and may not be whole"
    row = hosted.rows.read(hosted.get("two"), {"text": "w3"}, None)[0]
    hosted.look_again(at_once)
    assert hosted.served["two"].outputs == 5
    with pytest.raises(InlayError, match="has just become another adapter"):
        hosted.answer([row])
    shutil.move(folder, folder.parent / "gone")
    hosted.look_again(at_once)
    assert len(hosted.served) == 9, "a disk that is away takes no adapters with it"
    assert isinstance(hosted, Watched)


# ---- of every architecture

TARGETS = {"gpt2": ["c_attn"], "distilbert": ["q_lin", "v_lin"], "modernbert": ["Wqkv"], "deberta-v2": ["query_proj"]}
NEW = {"modernbert": ["head"], "deberta-v2": ["pooler"]}  # more of the head than PEFT saves by itself
FAMILIES = ["roberta", "distilbert", "electra", "modernbert", "mpnet", "deberta-v2", "gpt2", "opt", "llama", "gemma"]


@pytest.mark.parametrize(
    ("family", "writes"),
    [(family, False) for family in FAMILIES]
    + [(family, True) for family in FAMILIES if "causal-lm" in zoo.FAMILIES[family].tasks],
)
def test_every_architecture_answers_as_peft_alone(family: str, writes: bool, tmp_path: Path) -> None:
    """Classifiers of two sizes, a tagger and embeddings; beside a language model too, where there is one."""
    decoder = "causal-lm" in zoo.FAMILIES[family].tasks
    base = base_model(tmp_path / f"{family}-base", family, "causal-lm" if decoder else "base")
    encoder = ["q", "v"] if family == "mpnet" else ["query", "value"]
    how = {"target_modules": TARGETS.get(family, ["q_proj", "v_proj"] if decoder else encoder)}
    place, kinds = (
        tmp_path / "loras",
        {"two": ("SEQ_CLS", 2), "five": ("SEQ_CLS", 5), "vectors": ("FEATURE_EXTRACTION", 0)},
    )
    if "token-classification" in zoo.FAMILIES[family].tasks:
        kinds["tagger"] = "TOKEN_CLS", 3
    if writes:
        kinds["writer"] = "CAUSAL_LM", 0
    for seed, (name, (kind, labels)) in enumerate(kinds.items()):
        own = {"modules_to_save": [*NEW[family], "classifier"]} if family in NEW and labels else {}
        lora(base, place / name, kind, labels, seed, **how, **own)
    if family in NEW:
        lora(base, place / "lacking", "SEQ_CLS", 2, **how)
        lora(base, place / "lacking-too", "TOKEN_CLS", 2, **how)
    hosted = Adapters([str(place)])
    lacking = [why for _, why in hosted.refused.values()]
    assert len(lacking) == (0 if family not in NEW else 2 if family == "modernbert" else 1), hosted.refused
    assert all(f"lacks {NEW[family][0]}" in why for why in lacking)
    assert (hosted.loras.writer is not None) == writes
    text = "w4 w9 w2 w7"
    asked = [{"model": name, "text": text, "probabilities": True} for name in kinds if name != "writer"]
    found = hosted.answer([hosted.rows.read(hosted.get(each["model"]), each, None)[0] for each in asked])
    for said in found:
        name = said["model"]
        kind, labels = kinds[name]
        with torch.no_grad():
            read = {key: value for key, value in tokens(base, text).items() if key != "token_type_ids"}
            own = alone(base, place / name, kind, labels)(**read)
        if kind == "SEQ_CLS":
            wanted = own.logits[0].softmax(-1)
            torch.testing.assert_close(torch.tensor(list(said["probabilities"].values())), wanted, atol=1e-5, rtol=0)
        elif kind == "TOKEN_CLS":
            assert said["tags"] == [f"LABEL_{i}" for i in own.logits[0].argmax(-1).tolist()]
        else:
            states = own.last_hidden_state[0]
            wanted = torch.nn.functional.normalize(states[-1] if decoder else states.mean(0), dim=0)
            torch.testing.assert_close(torch.tensor(said["embedding"]), wanted, atol=1e-5, rtol=0)


# ---- tasks that were trained together


def test_tasks_of_a_folder_are_adapters_each(tmp_path: Path) -> None:
    """Of a method whose tasks can be written as LoRAs; their answers are those of the folder's own service."""
    folder = write(tmp_path, TEXTS)
    own = Tasks(folder)
    asked = [each for each in rows(12) if each["task"] != "stsb"] + [
        each for each in rows(12) if each["task"] == "stsb"
    ]
    wanted = own.answer([own.request(each) for each in asked])
    for given in (folder, folder.parent):
        hosted = Adapters([str(given)], model=str(tmp_path / "bert-model"))
        assert hosted.refused == {}
        with serving(hosted, ServiceSettings(port=0)) as address:
            listed = {each["adapter"]: each for each in call(address, "/adapters")[1]["adapters"]}
            assert {name: tuple(each["fields"]) for name, each in listed.items()} == {
                name: schema.fields for name, schema in TEXTS.items()
            }
            found = call(address, "/predict", [{**each, "model": each["task"]} for each in asked])[1]
        for said, right in zip(found, wanted, strict=True):
            assert said.get("label") == right.get("label")
            key = "score" if "score" in right else "value"
            assert said[key] == pytest.approx(right[key], abs=1e-4)
            assert said["adapter"] == {"name": right["task"], "revision": revision(folder / right["task"])}
    # Below a folder of adapters it is named, with what to give instead.
    (tmp_path / "loras").mkdir()
    shutil.copytree(folder.parent, tmp_path / "loras" / "joined")
    hosted = Adapters([str(tmp_path / "loras")], model=str(tmp_path / "bert-model"))
    assert "holds several tasks: give --adapters" in hosted.refused["joined"][1]


# ---- from the hub


def test_a_hub_id_is_served_at_its_commit(
    base: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub's library leaves it in its cache; nothing is asked of a network."""
    commits = {"main": "a" * 40, "old": "b" * 40}
    repository = tmp_path / "hub" / "models--someone--mood"
    for (ref, commit), name in zip(commits.items(), ("three", "five"), strict=True):
        shutil.copytree(made / name, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hosted = Adapters(["someone/mood", "before=someone/mood@old"])
    assert hosted.refused == {}
    with serving(hosted, ServiceSettings(port=0)) as address:
        for name, commit, own, labels in (("mood", "a", "three", 3), ("before", "b", "five", 5)):
            said = call(address, "/predict", {"model": name, "text": "w3 w8"})[1]
            assert said["adapter"] == {"name": name, "revision": 12 * commit}
            wanted = logits(base, made / own, "w3 w8", labels=labels).softmax(-1).max().item()
            assert said["score"] == pytest.approx(wanted, abs=1e-6)
        listed = {each["adapter"]: each["source"] for each in call(address, "/adapters")[1]["adapters"]}
        assert listed == {"mood": "someone/mood", "before": "someone/mood"}
        status, said = call(address, "/adapters", {"name": "new", "source": "/etc"})
        assert status == 403
        assert "--add-from" in said["error"]
        for _ in range(2):
            hosted.look_again(at_once)
        assert set(hosted.served) == {"mood", "before"}, "what the hub gave stays"
