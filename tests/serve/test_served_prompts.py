"""One model with many compressed prompts over real HTTP: mixed in a batch, streamed, while prompts come and go."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hosts import call, until
from typer.testing import CliRunner

from inlay.cli.app import app
from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, WEIGHTS
from inlay.serve.prompts import NO_PROMPT, Prompts
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from inlay.workflow.generation import Sampling
from prompted import adapter, decoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = ("legal", "sales", "support-v2")
LONG = 1500  # tokens that take long enough to be looked at meanwhile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder(tmp_path_factory.mktemp("prompts") / "model", "llama")


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, with a context that long answers fit into."""
    place = decoder(tmp_path_factory.mktemp("roomy") / "model", "llama")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4 * LONG}))
    return place


def folder_of(model: Path, place: Path, names: tuple[str, ...] = NAMES) -> Path:
    for number, name in enumerate(names):
        adapter(model, place / name, 1 + 4 * number, stands_for=100 * (number + 1))
    return place


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return folder_of(model, tmp_path / "prompts")


@pytest.fixture(scope="module")
def hosted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(folder_of(model, tmp_path_factory.mktemp("served")), model=str(model))


@pytest.fixture(scope="module")
def address(hosted: Prompts) -> Iterator[str]:
    """One service for all tests that leave it as it was."""
    with serving(hosted, ServiceSettings(port=0, max_tokens=20, max_characters=500)) as found:
        yield found


def alone(prompts: Prompts, prompt: str | None, text: str, most: int = 8) -> str:
    """What a row by itself is answered."""
    row = prompts.begin(prompt, text, Sampling(most))
    return str(prompts.answer([row])[0]["text"])


def events(address: str, body: dict[str, Any]) -> tuple[int, list[tuple[str | None, dict[str, Any]]]]:
    """A streamed answer: the status and the events as they came."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("POST", "/generate", json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        return answer.status, [(None, json.loads(text))]
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event"), json.loads(fields["data"])))
    return answer.status, found


# ---- answers


def test_requests_of_all_prompts_in_one_batch(model: Path, tmp_path: Path) -> None:
    prompts = Prompts(folder_of(model, tmp_path / "p"), model=str(model))
    asked = [(name, f"w{number} w{2 * number}") for number in range(4) for name in (*NAMES, None)]
    expected = [alone(prompts, *each) for each in asked]
    with (
        serving(prompts, ServiceSettings(port=0, max_wait=60.0, max_batch=len(asked))) as address,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        bodies = [{"prompt": name, "text": text, "max_tokens": 8} for name, text in asked]
        found = list(pool.map(lambda body: call(address, "/generate", body), bodies))
        text = call(address, "/metrics")[1]
    assert [status for status, _ in found] == [200] * len(asked)
    assert [said["text"] for _, said in found] == expected
    assert [said["prompt"] for _, said in found] == [name for name, _ in asked]
    assert "inlay_batch_rows_count 1\n" in text, "they went together"
    assert f"inlay_batch_rows_sum {len(asked)}\n" in text
    assert "inlay_prompts 3\n" in text


def test_a_stream_has_the_same_text_in_pieces(address: str, hosted: Prompts) -> None:
    for name in (*NAMES, None):
        body = {"prompt": name, "text": "w3 w5", "max_tokens": 8}
        status, whole = call(address, "/generate", body)
        assert status == 200
        assert whole["tokens"] == 8 or whole["finish"] == "end"
        status, parts = events(address, body)
        assert status == 200
        *pieces, (last, end) = parts
        assert last == "end"
        assert {event for event, _ in pieces} <= {None}
        assert "".join(piece["text"] for _, piece in pieces) == whole["text"]
        assert len(pieces) > 1
        assert end == {key: value for key, value in whole.items() if key != "text"}


def test_seeds(address: str) -> None:
    body = {"prompt": "legal", "text": "w3", "max_tokens": 12, "temperature": 2.0}
    found = [call(address, "/generate", body | {"seed": seed})[1]["text"] for seed in (1, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert len(set(found)) > 2


def test_the_list_of_prompts(address: str) -> None:
    status, said = call(address, "/prompts")
    assert status == 200
    assert [each["prompt"] for each in said["prompts"]] == list(NAMES)
    assert [each["size"] for each in said["prompts"]] == [1, 5, 9]
    assert [each["stands_for_tokens"] for each in said["prompts"]] == [100, 200, 300]
    assert len({each["sha256"] for each in said["prompts"]}) == 3
    assert (said["refused"], said["context"], said["max_tokens"]) == ([], 40, 20)
    assert said["model"] == "./model", "no path of this machine"
    assert call(address, "/health")[1] == {"status": "ok", "prompts": 3, "waiting": 0}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": "legall", "text": "w3"}, 404, "Unknown prompt 'legall'. Did you mean 'legal'"),
        ({"prompt": NO_PROMPT, "text": "w3"}, 404, "Known: legal, sales, support-v2. `GET /prompts`"),
        ({"prompt": "../legal", "text": "w3"}, 404, "Unknown prompt"),
        ({"prompt": "legal"}, 400, "Field required (body.text)"),
        ({"prompt": "legal", "text": 7}, 400, "valid string (body.text)"),
        ({"prompt": 7, "text": "w3"}, 400, "(body.prompt)"),
        ({"prompt": "legal", "text": ""}, 400, "needs a first token"),
        ({"prompt": "legal", "text": "\ud800"}, 400, "lone surrogate"),
        ({"prompt": "legal", "text": "w3 " * 45}, 413, "The text has 45 tokens"),
        ({"prompt": "legal", "text": "w" * 501}, 413, "501 characters; at most 500"),
        ({"prompt": "legal", "text": "w3", "max_tokens": 21}, 400, "at most 20 (--max-tokens)"),
        ({"prompt": "legal", "text": "w3", "max_tokens": 0}, 400, "max_tokens=0"),
        ({"prompt": "legal", "text": "w3", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "legal", "text": "w3", "top_p": 2}, 400, "top_p=2"),
        ({"prompt": "legal", "text": "w3", "seed": 2**70}, 400, "seed="),
        ({"prompt": "legal", "text": "w3", "stop": ["w4"]}, 400, "(body.stop)"),
        (b'{"text": "w3", "temperature": NaN}', 400, "temperature=nan"),
        (b"[", 400, "cannot be read"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_has_one_clear_error(address: str, body: Any, status: int, says: str, stream: bool) -> None:
    found, said = call(address, "/generate", body | {"stream": stream} if isinstance(body, dict) else body)
    assert found == status, said
    assert says in said["error"]
    assert call(address, "/health")[1]["status"] == "ok"


# ---- time, and clients that go


def test_a_client_that_goes_ends_its_text(roomy: Path, tmp_path: Path) -> None:
    prompts = Prompts(folder_of(roomy, tmp_path / "p"), model=str(roomy))
    prompts.writer.ends = frozenset()  # or a token drawn by chance ends the text before the client goes
    rows = spied(prompts)
    body = {"prompt": "legal", "text": "w3", "max_tokens": LONG, "temperature": 1.5}
    with serving(prompts, ServiceSettings(port=0, max_tokens=LONG, timeout=50)) as address:
        for stream in (True, False):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            sent = json.dumps(body | {"stream": stream})
            connection.request("POST", "/generate", sent, {"Content-Type": "application/json"})
            until(lambda: bool(rows) and len(rows[-1].written) > 3)
            connection.close()
            if connection.sock is not None:
                connection.sock.close()
            until(lambda: rows[-1].done)
            assert len(rows[-1].written) < LONG
            rows.clear()
        assert call(address, "/generate", {"prompt": "sales", "text": "w3", "max_tokens": 2})[0] == 200


def test_an_answer_that_takes_too_long(roomy: Path, tmp_path: Path) -> None:
    prompts = Prompts(folder_of(roomy, tmp_path / "p"), model=str(roomy))
    rows = spied(prompts)
    go = threading.Event()
    take = prompts.writer.write
    prompts.writer.write = lambda rows: (go.wait(60), take(rows))[1]  # type: ignore[method-assign]
    with serving(prompts, ServiceSettings(port=0, timeout=0.3)) as address:
        for stream in (False, True):
            status, said = call(address, "/generate", {"text": "w3", "max_tokens": 20, "stream": stream})
            assert status == 504, said
            assert "within 0.3 seconds" in said["error"]
        go.set()
        until(lambda: bool(rows) and rows[0].done)
        assert rows[0].finish == "stopped"


def spied(prompts: Prompts) -> list[Any]:
    """The rows that the model is given."""
    rows: list[Any] = []
    answer = prompts.answer

    def answering(requests: Any) -> Any:
        rows.extend(each.row for each in requests)
        return answer(requests)

    prompts.answer = answering  # type: ignore[method-assign]
    return rows


def test_a_batch_that_fails_is_tried_in_halves_and_told_once(model: Path, tmp_path: Path) -> None:
    """As where memory lacks for so many rows, when some of their text was told already."""
    prompts = Prompts(folder_of(model, tmp_path / "p"), model=str(model))
    expected = {name: alone(prompts, name, "w3 w5") for name in NAMES}
    write = prompts.writer.write
    sizes = []

    def small(rows: Any) -> None:
        sizes.append(len(rows))
        if len(rows) > 1:
            for row in rows:
                for _ in range(2):
                    row.take(int(known[row.prompt][len(row.written)]))
            raise MemoryError
        write(rows)

    known: dict[str, list[int]] = {}
    for name in NAMES:
        row = prompts.begin(name, "w3 w5", Sampling(8))
        prompts.answer([row])
        known[prompts.served[name].name] = row.row.written
    prompts.writer.write = small  # type: ignore[method-assign]
    with (
        serving(prompts, ServiceSettings(port=0, max_wait=60.0, max_batch=3)) as address,
        ThreadPoolExecutor(3) as pool,
    ):
        bodies = [{"prompt": name, "text": "w3 w5", "max_tokens": 8} for name in NAMES]
        for name, (status, parts) in zip(NAMES, pool.map(lambda body: events(address, body), bodies), strict=True):
            assert status == 200
            assert "".join(piece["text"] for _, piece in parts[:-1]) == expected[name]
    assert sizes[0] == 3


# ---- prompts that come and go


def at_once(action: Any) -> Any:
    return action()


def test_prompts_come_and_go_while_it_runs(model: Path, folder: Path, tmp_path: Path) -> None:
    prompts = Prompts(folder, model=str(model))
    ends = threading.Event()
    failed: list[Any] = []

    def ask(address: str) -> None:
        while not ends.is_set():
            status, said = call(address, "/generate", {"prompt": "legal", "text": "w3 w5", "max_tokens": 8})
            if (status, said.get("text")) != (200, expected):
                failed.append(said)

    expected = alone(prompts, "legal", "w3 w5")
    with serving(prompts, ServiceSettings(port=0)) as address, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, address) for _ in range(2)]
        new = adapter(model, tmp_path / "new", 7)
        shutil.copytree(new, folder / "new")
        until(lambda: call(address, "/generate", {"prompt": "new", "text": "w3", "max_tokens": 3})[0] == 200)
        before = call(address, "/generate", {"prompt": "sales", "text": "w3", "max_tokens": 8})[1]
        shutil.rmtree(folder / "sales")
        until(lambda: call(address, "/generate", {"prompt": "sales", "text": "w3", "max_tokens": 3})[0] == 404)
        shutil.copytree(new, folder / "sales")  # another one by the same name
        until(lambda: call(address, "/generate", {"prompt": "sales", "text": "w3", "max_tokens": 3})[0] == 200)
        after = call(address, "/generate", {"prompt": "sales", "text": "w3", "max_tokens": 8})[1]
        same = call(address, "/generate", {"prompt": "new", "text": "w3", "max_tokens": 8})[1]
        assert after["text"] == same["text"] != before["text"]
        ends.set()
        for each in asking:
            each.result()
    assert failed == [], "who was there all the time was served all the time"


def test_a_prompt_is_exchanged(model: Path, folder: Path, tmp_path: Path) -> None:
    prompts = Prompts(folder, model=str(model))
    new = adapter(model, tmp_path / "new", 7)
    before, count = alone(prompts, "legal", "w3 w5"), len(prompts.writer.model.peft_config)
    shutil.rmtree(folder / "legal")
    shutil.copytree(new, folder / "legal")
    prompts.look_again(at_once)
    assert alone(prompts, "legal", "w3 w5") == before, "it has been seen once, and may not be whole"
    prompts.look_again(at_once)
    assert prompts.served["legal"].adapter.size == 7
    assert alone(prompts, "legal", "w3 w5") != before
    assert len(prompts.writer.model.peft_config) == count, "the earlier one is gone"
    prompts.look_again(at_once)
    assert prompts.served["legal"].adapter.size == 7


def test_all_go_and_one_comes_again(model: Path, folder: Path, tmp_path: Path) -> None:
    prompts = Prompts(folder, model=str(model))
    bare = alone(prompts, None, "w3 w5")
    expected = alone(prompts, "legal", "w3 w5")
    for name in NAMES:
        shutil.move(folder / name, tmp_path / name)
    prompts.look_again(at_once)
    assert prompts.served == {}
    assert alone(prompts, None, "w3 w5") == bare
    shutil.move(tmp_path / "legal", folder / "legal")
    for _ in range(2):
        prompts.look_again(at_once)
    assert alone(prompts, "legal", "w3 w5") == expected
    shutil.move(folder, tmp_path / "gone")
    prompts.look_again(at_once)
    assert list(prompts.served) == ["legal"], "a disk that is away takes no prompts with it"


def test_what_cannot_be_served_is_said_and_the_others_go_on(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    other = decoder(tmp_path / "other-model", seed=1)
    adapter(other, folder / "foreign")
    adapter(model, folder / "features", method="ntk-attention")
    adapter(model, folder / "low-rank", method="lora")
    shutil.copytree(folder / "legal", folder / "cut")
    with (folder / "cut" / WEIGHTS["peft"]).open("r+b") as file:
        file.truncate(300)
    shutil.copytree(folder / "legal", folder / "edited")
    settings = json.loads((folder / "edited" / CONFIG["peft"]).read_text())
    (folder / "edited" / CONFIG["peft"]).write_text(json.dumps(settings | {"size": 10**9}))
    (folder / "notes").mkdir()
    (folder / "readme.txt").write_text("no adapter")
    prompts = Prompts(folder)  # the base model that most are made of
    assert list(prompts.served) == list(NAMES)
    with serving(prompts, ServiceSettings(port=0)) as address:
        refused = {each["prompt"]: each["error"] for each in call(address, "/prompts")[1]["refused"]}
        assert call(address, "/generate", {"prompt": "cut", "text": "w3"})[0] == 404
        assert call(address, "/generate", {"prompt": "legal", "text": "w3"})[0] == 200
    assert sorted(refused) == ["cut", "edited", "features", "foreign", "low-rank"]
    assert "truncated or damaged" in refused["cut"]
    assert "is not the file that was saved" in refused["edited"]
    assert "belongs to another base model" in refused["foreign"]
    assert "'ntk-attention', which is not mixed" in refused["features"]
    assert "'lora', which is not mixed" in refused["low-rank"]
    assert not any(str(tmp_path) in each for each in refused.values())
    # Mended, it is served.
    shutil.rmtree(folder / "cut")
    shutil.copytree(folder / "legal", folder / "cut")
    for _ in range(2):
        prompts.look_again(at_once)
    assert "cut" in prompts.served
    assert "cut" not in prompts.refused


def test_the_first_one_may_come_later(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    with pytest.raises(InlayError, match=r"holds no prompt that can be served .it has no folder with an adapter"):
        Prompts(tmp_path / "p")
    prompts = Prompts(tmp_path / "p", model=str(model))
    with serving(prompts, ServiceSettings(port=0)) as address:
        assert call(address, "/prompts")[1]["prompts"] == []
        adapter(model, tmp_path / "p" / "legal")
        until(lambda: call(address, "/generate", {"prompt": "legal", "text": "w3", "max_tokens": 3})[0] == 200)


def test_mistakes_on_the_command_line(model: Path, folder: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ([], "one of the three"),
        (["--adapter", "a", "--prompts", "b"], "one of the three"),
        (["--prompts", str(folder), "--tasks", "x"], "are for tasks"),
        (["--prompts", str(tmp_path / "promptss")], "is no folder. Did you mean"),
        (["--prompts", str(folder / "legal")], "is one adapter itself"),
        (["--prompts", str(folder), "--max-tokens", "0"], "max_tokens"),
        (["--prompts", str(folder), "--model", str(tmp_path / "nowhere")], "does not exist"),
        (["--prompts", str(folder), "--host", "0.0.0.0"], "INLAY_TOKEN"),
    ):
        found = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
        assert isinstance(found.exception, InlayError), found.output
        assert says in str(found.exception)
