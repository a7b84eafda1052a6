"""Adapters given away: pushed to a hub on this machine, and loaded from there by another process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import inlay
import zoo
from checkpoints import write_tokenizer
from hub_server import Hub
from inlay import InlayError, Spec, tune
from inlay.records.store import Run
from inlay.workflow.pull import _check, pull
from inlay.workflow.push import push, wilson

TOKEN = "hf_secretsecretsecret"
BASE, REPOSITORY = "someone/tiny-bert", "me/moods"
METHODS = ("lora", "ssf", "linear-probe", "full")
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with a head for two classes of its own, and data with three."""
    folder = tmp_path_factory.mktemp("pushed")
    zoo.tiny("bert", "classification", num_labels=2)[0].save_pretrained(folder / "my-model")
    write_tokenizer(folder / "my-model")
    rows = [{"body": f"w{6 + i % 3} w{8 + i % 20}", "mood": ["good", "bad", "odd"][i % 3]} for i in range(60)]
    (folder / "moods.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[str, Run]:
    given: dict[str, Any] = {"text": ("body",), "label": "mood", "max_steps": 3, "learning_rate": 0.02}
    spec = Spec(model=str(place / "my-model"), data=str(place / "moods.jsonl"), method="lora", **given)
    made = {name: tune(spec.with_(method=name), place / "runs", progress=False) for name in METHODS}
    tune(spec.with_(seed=1), place / "runs", progress=False)
    return made


@pytest.fixture
def hub(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process pushes to, as somebody who is logged in."""
    server = Hub(tmp_path / "hub")
    server.folders[BASE] = place / "my-model"
    server.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    yield server
    server.stop()


def answers(run: Run) -> list[float]:
    (row,) = inlay.predict(run, [{"body": "the body"}], probabilities=True)
    return list(row["probabilities"].values())


ASK = """
import torch
from transformers import AutoTokenizer
with torch.no_grad():
    batch = AutoTokenizer.from_pretrained("me/{name}")("the body", return_tensors="pt")
    print(model(**batch).logits.softmax(-1)[0].tolist())
"""


def test_what_is_pushed_is_loaded_by_its_card_in_another_process(
    runs: dict[str, Run], hub: Hub, place: Path, typed: Typed
) -> None:
    script, wanted = "import json\n", []
    for name, run in runs.items():
        status, out, errors = typed("push", "--run", run.folder, "--base", BASE, "--private", "--to", f"me/{name}")
        assert (status, f"pushed: {hub.address}/me/{name}" in out + errors) == (0, True), errors
        folder = hub.folders[f"me/{name}"]
        assert hub.private[f"me/{name}"]
        written = b"".join(path.read_bytes() for path in folder.iterdir())
        for secret in (str(place), TOKEN):
            assert secret not in out + errors
            assert secret.encode() not in written
        *first, code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        assert len(first) == (name in ("lora", "ssf"))
        for each in first:  # of the fresh process, `import inlay` is the first line but for that of json
            script += f"names = {{}}; exec({each!r}, names); assert names['model'].config.id2label[2] == 'odd'\n"
            script += f"exec({ASK.format(name=name)!r}, names)\n"
        script += f"names = {{}}; exec({code!r}, names); print(json.dumps(list(names['answer'].values())))\n"
        wanted += [answers(run)] * (1 + len(first))
    script += f"from inlay.workflow.pull import pull\npull('me/lora', {str(place / 'fetched')!r})\n"
    found = [json.loads(line) for line in hub.run(script) if line.startswith("[")]
    assert hub.commits == [f"{name} adapter, written by inlay push" for name in runs]
    assert len(found) == len(wanted) == 6
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert contents(place / "fetched") == contents(hub.folders["me/lora"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_card_has_results_with_intervals_and_how_it_was_made(runs: dict[str, Run], tmp_path: Path) -> None:
    push(runs["lora"], REPOSITORY, folder=tmp_path / "look", base=BASE)
    card = (tmp_path / "look" / "README.md").read_text()
    assert 'base_model: "someone/tiny-bert"' in card
    assert "https://arxiv.org/abs/2106.09685" in card
    assert f"inlay tune --model {BASE} --data moods.jsonl --method lora --seed 0" in card
    assert f"{runs['lora'].portrait['parameters']['trained']:,} trained of" in card
    assert re.search(r"\| accuracy \| \S+ \| \S+ to \S+ \(mean \S+ of 2 seeds, t\) \|", card)
    assert "import inlay" in card
    push(runs["ssf"], REPOSITORY, folder=tmp_path / "one", base=BASE)
    accuracy = runs["ssf"].metrics["test"]["accuracy"]
    low, high = wilson(accuracy, 12)
    shown = f"| accuracy | {accuracy:.4g} | {low:.4g} to {high:.4g} (one seed; Wilson, over the examples) |"
    assert shown in (tmp_path / "one" / "README.md").read_text()


@pytest.mark.parametrize(("share", "count"), [(0.0, 7), (1.0, 7), (0.25, 40), (0.9, 1000)])
def test_wilson_s_interval_is_where_the_score_test_just_rejects(share: float, count: int) -> None:
    for bound in wilson(share, count):
        if abs(bound - share) > 1e-6:
            z = (share - bound) / math.sqrt(bound * (1 - bound) / count)
            assert abs(z) == pytest.approx(1.959964, rel=1e-6)
    low, high = wilson(share, count)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1


def test_a_merged_checkpoint(runs: dict[str, Run], place: Path, tmp_path: Path) -> None:
    spec = runs["lora"].spec.with_(pooling="own")
    inlay.merge(tune(spec, place / "runs", progress=False), tmp_path / "merged")
    (tmp_path / "merged" / "training_args.bin").write_bytes(b"a pickle")
    made = push(tmp_path / "merged", "me/moods-bert", folder=tmp_path / "look")
    names = {path.name for path in Path(made).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert "training_args.bin" not in names
    assert 'from_pretrained("me/moods-bert")' in (tmp_path / "look" / "README.md").read_text()


def test_a_repository_that_is_there_is_not_written_over(
    runs: dict[str, Run], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.folders[REPOSITORY] = hub.home / "there"
    hub.folders[REPOSITORY].mkdir(parents=True)
    (hub.folders[REPOSITORY] / "model.safetensors").write_bytes(b"somebody's")
    with pytest.raises(InlayError, match="is there already, with 1 files"):
        push(runs["ssf"], REPOSITORY, base=BASE)
    assert not hub.commits
    push(runs["ssf"], REPOSITORY, base=BASE, update=True)
    assert len(hub.commits) == 1
    assert (hub.folders[REPOSITORY] / "model.safetensors").read_bytes() == b"somebody's"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InlayError, match=r"you may not|none of this name") as refused:
        push(runs["ssf"], REPOSITORY, base=BASE, update=True)
    assert "hf_wrong" not in str(refused.value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InlayError, match=r"me/moods was not pushed: http://127\.0\.0\.1:9 could not be reached"):
        push(runs["ssf"], REPOSITORY, base=BASE, update=True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--to", "me"], "is no repository of the Hub: give owner/name"),
        (["--to", "me/x/y"], "is no repository"),
        ([], "Give --to owner/name"),
        (["--to", "me/moods"], "a folder of the machine it was trained on"),
        (["--to", "me/moods", "--base", BASE], "HF_HUB_OFFLINE is set"),
    ],
)
def test_one_error_says_what_is_missing(
    arguments: list[str], wanted: str, runs: dict[str, Run], typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, errors = typed("push", "--run", runs["lora"].folder, *arguments)
    assert status == 2
    assert wanted in errors
    assert errors.strip().count("\n") == 0


def test_pull_refuses_what_is_damaged_and_writes_nothing(runs: dict[str, Run], hub: Hub, tmp_path: Path) -> None:
    damaged = Path(push(runs["lora"], REPOSITORY, folder=tmp_path / "damaged", base=BASE))
    assert "adapter of lora for someone/tiny-bert" in next(_check(damaged, REPOSITORY))
    tensors = load_file(damaged / "adapter_model.safetensors")
    save_file({name: torch.zeros_like(each) for name, each in tensors.items()}, damaged / "adapter_model.safetensors")
    with pytest.raises(InlayError, match="is not the file that was saved"):
        next(_check(damaged, REPOSITORY))
    with pytest.raises(InlayError, match="me/absent was not pulled"):
        pull("me/absent", tmp_path / "got")
    assert not (tmp_path / "got").exists()
    with pytest.raises(InlayError, match="name two revisions"):
        pull("me/x@one", revision="two")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InlayError, match="is there already"):
        pull("me/x", tmp_path / "full")
