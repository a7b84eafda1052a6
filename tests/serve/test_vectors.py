"""A service of a run for vectors answers as the run does, and as OpenAI's clients ask."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import numpy as np
import pytest
from hosts import call

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import Spec, tune
from inlay.serve.adapters import Adapters
from inlay.serve.hosting import host
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("method", ["full", "bias", "lora"])
def test_a_service_answers_with_the_vectors_of_the_run(method: str, tmp_path: Path) -> None:
    model, pairs, rng = tmp_path / "model", tmp_path / "pairs.csv", random.Random(0)
    zoo.tiny("bert", "base")[0].save_pretrained(model)
    write_tokenizer(model)
    words = [[f"w{rng.randrange(40)}" for _ in range(4)] for _ in range(40)]
    pairs.write_text("query,positive\n" + "".join(f"{a} {b},{c} {d}\n" for a, b, c, d in words))
    spec = Spec(model=str(model), data=str(pairs), method=method, max_steps=3, batch_size=8, learning_rate=0.01)
    tuned = tune(spec, tmp_path / "runs", progress=False, say=lambda line: None)
    texts = ["w1 w2", "w3 w4 w5"]
    wanted = inlay.load(tuned).embed(texts)
    with serving(host(tuned.folder, batch=4), ServiceSettings(port=0)) as address:
        check_answers(address, "pairs", texts, wanted)
        assert call(address, "/tasks")[1]["tasks"][0]["fields"] == ["text"]
        found = call(address, "/predict", {"task": "pairs", "text": texts[1], "id": 7})[1]
        assert (found["id"], found["tokens"]) == (7, 3)
        assert found["embedding"] == pytest.approx(wanted[1].tolist(), abs=1e-5)
    if method == "lora":
        with serving(Adapters([f"mine={tuned.folder}"], model=str(model)), ServiceSettings(port=0)) as address:
            check_answers(address, "mine", texts, wanted)


def test_vectors_of_another_pooling_are_refused_beside_others(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("query,positive\n" + "".join(f"w{i},w{i + 1}\n" for i in range(30)))
    zoo.tiny("bert", "base")[0].save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    how = {"model": str(tmp_path / "model"), "data": str(pairs), "method": "lora", "max_steps": 1, "batch_size": 4}
    tuned = tune(Spec(**how, pooling="first"), tmp_path / "runs", progress=False, say=lambda line: None)
    hosted = Adapters([f"mine={tuned.folder}"], model=str(tmp_path / "model"))
    assert "pooling='first'" in hosted.refused["mine"][1]


def check_answers(address: str, name: str, texts: list[str], wanted: np.ndarray) -> None:
    """What OpenAI's clients are answered, right and wrong."""
    body = {"model": name, "input": texts}
    status, said = call(address, "/v1/embeddings", body)
    assert (status, said["model"], said["usage"]["total_tokens"]) == (200, name, 5), said
    found = np.array([each["embedding"] for each in said["data"]])
    assert found == pytest.approx(wanted, abs=1e-5)
    coded = call(address, "/v1/embeddings", body | {"encoding_format": "base64"})[1]["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(wanted[0], abs=1e-5)
    for wrong, code in (({"model": "other", "input": "w1"}, 404), ({"model": name, "input": []}, 400)):
        assert call(address, "/v1/embeddings", wrong)[0] == code
