"""LoRAs of a language model over real HTTP, as OpenAI's clients ask: streamed, and each as PEFT generates alone."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hosts import call
from test_process import service

from inlay.serve.adapters import Adapters
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from inlay.serve.stops import Cut
from loras import TEMPLATE, alone, base_model, lora, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
NAMES = ("support", "legal")
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("writers") / "llama-base", "llama", "causal-lm", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    for seed, name in enumerate(NAMES):
        lora(base, place / name, "CAUSAL_LM", seed=seed, target_modules="all-linear")
    lora(base, place / "mood", "SEQ_CLS", 3, seed=2)
    lora(base, place / "vectors", "FEATURE_EXTRACTION", seed=3)
    return place


@pytest.fixture(scope="module")
def hosted(made: Path) -> Adapters:
    return Adapters([str(made)])


@pytest.fixture(scope="module")
def address(hosted: Adapters) -> Iterator[str]:
    """One service for all tests that leave it as it was."""
    with serving(hosted, ServiceSettings(port=0, max_tokens=20)) as found:
        yield found


@torch.no_grad()
def written(base: Path, folder: Path | None, text: str, most: int = 8) -> tuple[str, int]:
    """What PEFT's own generate writes with one adapter alone, and how many tokens."""
    model, tokenizer = alone(base, folder, "CAUSAL_LM"), hf.AutoTokenizer.from_pretrained(base)
    given = tokens(base, text)
    ids = {key: given[key] for key in ("input_ids", "attention_mask")}
    found = model.generate(**ids, do_sample=False, max_new_tokens=most, pad_token_id=tokenizer.pad_token_id)
    new = found[0, ids["input_ids"].shape[1] :]
    whole = tokenizer.decode(found[0], skip_special_tokens=True)
    return whole[len(tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True)) :], len(new)


def events(address: str, path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """A streamed answer: the status, and what came after each `data: `."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    sent = json.dumps(body | {"stream": True})
    connection.request("POST", path, sent, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        return answer.status, [json.loads(text)]
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    found = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
    return answer.status, [each if each == "[DONE]" else json.loads(each) for each in found]


def test_two_loras_and_the_model_alone_in_one_batch(base: Path, made: Path) -> None:
    hosted = Adapters([str(made)])
    asked = [(name, f"w{n} w{3 * n + 1}") for n in range(2, 4) for name in (*NAMES, hosted.name)]
    with (
        serving(hosted, ServiceSettings(port=0, max_wait=60.0, max_batch=len(asked) + 2)) as address,
        ThreadPoolExecutor(len(asked) + 2) as pool,
    ):
        texts = [
            pool.submit(call, address, "/v1/completions", {"model": name, "prompt": text, **GREEDY})
            for name, text in asked
        ]
        mood = pool.submit(call, address, "/predict", {"model": "mood", "text": "w4 w9", "probabilities": True})
        vector = pool.submit(call, address, "/v1/embeddings", {"model": "vectors", "input": "w4 w9"})
        for (name, text), each in zip(asked, texts, strict=True):
            status, said = each.result()
            assert status == 200, said
            own = None if name == hosted.name else made / name
            wanted, count = written(base, own, text)
            assert said["choices"][0]["text"] == wanted
            assert said["usage"] == {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count}
            assert (said["adapter"] or {}).get("name") == (None if own is None else name)
        assert "inlay_batch_rows_count 1\n" in call(address, "/metrics")[1]
    assert len({written(base, each, "w2 w7")[0] for each in (None, *(made / name for name in NAMES))}) == 3
    with torch.no_grad():
        logits = alone(base, made / "mood", "SEQ_CLS", 3)(**read(base, "w4 w9")).logits[0].softmax(-1)
        states = alone(base, made / "vectors", "FEATURE_EXTRACTION")(**read(base, "w4 w9")).last_hidden_state[0, -1]
    torch.testing.assert_close(
        torch.tensor(list(mood.result()[1]["probabilities"].values())), logits, atol=1e-6, rtol=0
    )
    found = torch.tensor(vector.result()[1]["data"][0]["embedding"])
    torch.testing.assert_close(found, torch.nn.functional.normalize(states, dim=0), atol=1e-5, rtol=0)


def read(base: Path, text: str) -> dict[str, Any]:
    found = tokens(base, text)
    return {key: found[key] for key in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("name", [*NAMES, "./llama-base"])
def test_a_stream_has_the_same_text_in_pieces(address: str, base: Path, made: Path, name: str) -> None:
    body = {"model": name, "prompt": "w3 w5", **GREEDY}
    whole = call(address, "/v1/completions", body)[1]
    status, parts = events(address, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert status == 200
    *pieces, last, usage, done = parts
    assert done == "[DONE]"
    assert "".join(each["choices"][0]["text"] for each in pieces) == whole["choices"][0]["text"]
    assert len(pieces) > 1
    assert {each["choices"][0]["finish_reason"] for each in pieces} == {None}
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {each["id"] for each in parts[:-1]} == {last["id"]}
    assert {each["object"] for each in parts[:-1]} == {"text_completion"}
    assert all(each["adapter"] == whole["adapter"] for each in parts[:-1])
    assert whole["choices"][0]["text"] == written(base, None if name.startswith(".") else made / name, "w3 w5")[0]


def test_a_chat_goes_by_the_models_template(address: str, base: Path, made: Path) -> None:
    messages = [{"role": "w2", "content": "w3"}, {"role": "w4", "content": [{"type": "text", "text": "w5"}]}]
    wanted, count = written(base, made / "legal", "w2 w3 w4 w5 w7")
    body = {"model": "legal", "messages": messages, "temperature": 0, "max_completion_tokens": 8}
    status, said = call(address, "/v1/chat/completions", body)
    assert status == 200
    assert said["object"] == "chat.completion"
    assert said["choices"][0]["message"] == {"role": "assistant", "content": wanted}
    assert said["usage"] == {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
    assert re.fullmatch(r"[0-9a-f]{12}", said["adapter"]["revision"])
    status, parts = events(address, "/v1/chat/completions", body)
    deltas = [each["choices"][0]["delta"] for each in parts[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert deltas[-1] == {}
    assert "".join(each.get("content", "") for each in deltas) == wanted
    assert {each["object"] for each in parts[:-1]} == {"chat.completion.chunk"}


def test_predict_writes_too(address: str, base: Path, made: Path) -> None:
    status, said = call(address, "/predict", {"model": "support", "text": "w3 w5", "max_tokens": 8})
    assert status == 200
    assert said["text"] == written(base, made / "support", "w3 w5")[0]
    assert said["adapter"]["name"] == "support"


def test_stops_and_seeds(address: str, base: Path, made: Path) -> None:
    body = {"model": "legal", "prompt": "w3 w5", "temperature": 0, "max_tokens": 12}
    whole = call(address, "/v1/completions", body)[1]["choices"][0]["text"]
    words = whole.split()
    assert len(words) > 4
    stop = next(word for word in words[2:] if words.index(word) >= 2)
    wanted = whole[: whole.index(stop)]
    status, said = call(address, "/v1/completions", body | {"stop": ["never", stop]})
    assert status == 200
    assert said["choices"][0] == {"index": 0, "finish_reason": "stop", "logprobs": None, "text": wanted}
    assert said["usage"]["completion_tokens"] < 12
    parts = events(address, "/v1/completions", body | {"stop": stop})[1]
    assert "".join(each["choices"][0]["text"] for each in parts[:-1]) == wanted
    assert parts[-2]["choices"][0]["finish_reason"] == "stop"
    hot = body | {"temperature": 2.0}
    found = [call(address, "/v1/completions", hot | {"seed": s})[1]["choices"][0]["text"] for s in (1, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert len(set(found)) > 2
    several = call(address, "/v1/completions", body | {"prompt": ["w3 w5", "w9"], "max_tokens": 8})[1]
    assert [each["index"] for each in several["choices"]] == [0, 1]
    assert several["choices"][1]["text"] == written(base, made / "legal", "w9")[0]


def test_a_text_is_cut_at_a_stop_however_it_comes() -> None:
    text = "one END of a text END and more"
    for size in range(1, 12):
        cut = Cut(["END", "nd "])
        told = "".join(cut.add(text[i : i + size]) for i in range(0, len(text), size)) + cut.rest()
        assert told == cut.whole() == "one ", size
        assert cut.found
    cut = Cut(["END"])
    assert cut.add("all E") + cut.add("N") == "all "
    assert cut.rest() == "EN"
    assert not cut.found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", {"model": "legall", "prompt": "w3"}, 404, "Unknown model 'legall'. Did you mean 'legal'"),
        ("completions", {"prompt": "w3"}, 400, "body.model"),
        ("completions", {"model": "legal"}, 400, "body.prompt"),
        ("completions", {"model": "legal", "prompt": ""}, 400, "needs a first token"),
        ("completions", {"model": "legal", "prompt": []}, 400, "Give a prompt"),
        ("completions", {"model": "legal", "prompt": "w3 " * 45}, 413, "45 tokens"),
        ("completions", {"model": "legal", "prompt": "w3", "max_tokens": 21}, 400, "at most 20 (--max-tokens)"),
        ("completions", {"model": "legal", "prompt": "w3", "max_tokens": 0}, 400, "max_tokens=0"),
        ("completions", {"model": "legal", "prompt": "w3", "temperature": -1}, 400, "temperature=-1"),
        ("completions", {"model": "legal", "prompt": "w3", "n": 2}, 400, "n=2 is not served here"),
        ("completions", {"model": "legal", "prompt": "w3", "logprobs": 5}, 400, "logprobs=5"),
        ("completions", {"model": "legal", "prompt": "w3", "stop": [""]}, 400, "stop="),
        ("completions", {"model": "mood", "prompt": "w3"}, 400, "'mood' is served for classification"),
        ("chat/completions", {"model": "mood", "messages": [{"role": "w2", "content": "w"}]}, 400, "writes no texts"),
        ("chat/completions", {"model": "none", "messages": [{"role": "w2", "content": "w"}]}, 404, "Unknown model"),
        ("chat/completions", {"model": "legal", "messages": []}, 400, "body.messages"),
        (
            "chat/completions",
            {"model": "legal", "messages": [{"role": "w2", "content": [{"type": "image_url"}]}]},
            400,
            "may be texts",
        ),
        ("nothing", {"model": "legal"}, 404, "Not Found"),
    ],
)
def test_errors_have_openais_shape(
    address: str, path: str, body: dict[str, Any], status: int, says: str, stream: bool
) -> None:
    found, said = call(address, f"/v1/{path}", body | {"stream": stream})
    assert found == status, said
    assert says in said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"
    assert set(said["error"]) == {"message", "type", "param", "code"}


def test_settings_that_ask_for_nothing_are_taken(address: str) -> None:
    body = {"model": "legal", "prompt": "w3", **GREEDY, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    assert call(address, "/v1/completions", body | {"user": "me", "logit_bias": {}, "echo": False})[0] == 200


def test_as_a_process_with_a_token_and_its_page(base: Path, made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "loras")
    (tmp_path / "token").write_text("a-token-of-some-length")
    options = ("--token-file", str(tmp_path / "token"), "--max-tokens", "30")
    with service(Path(folder), *options, flag="--adapters") as (process, address, line):
        assert "serving ./llama-base at" in line
        assert "4 adapters: legal, mood, support, vectors" in line
        told = {"Authorization": "Bearer a-token-of-some-length"}
        body = {"model": "legal", "prompt": "w3 w5", **GREEDY}
        status, said = call(address, "/v1/completions", body)
        assert (status, said["error"]["code"]) == (401, "invalid_api_key")
        status, said = call(address, "/v1/completions", body, headers=told)
        assert said["choices"][0]["text"] == written(base, made / "legal", "w3 w5")[0]
        status, page = call(address, "/")
        assert status == 200
        assert page.startswith("<!doctype html>")
        assert not re.findall(r"""(?:src|href)=["'](?:\w+:)?//""", page), "nothing is fetched from elsewhere"
        process.terminate()
        assert process.wait(60) == 0
