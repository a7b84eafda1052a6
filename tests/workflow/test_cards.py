"""What is given away names no path of the machine it was made on, and its card says what it is and loads it.

The folders come from the commands that make them: `tune` by every form of method, of one task and of several, `export`,
`compress`. Their models are named from the root of the file system, as a user's would be.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import Spec, fetch, tune
from inlay.backbones import loading, locate
from inlay.backbones.pooling import written
from inlay.cli.app import app
from inlay.errors import InlayError
from inlay.methods.card import About, card
from inlay.methods.registry import get
from inlay.records.store import Run, read_json
from inlay.tasks import TaskSchema
from inlay.workflow.answer import Tasks, answer
from inlay.workflow.export import export
from inlay.workflow.predict import restore
from probing import logits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WORDS = ["good", "bad", "odd"]
SINGLE = ("bias", "lora", "idpg", "multi-lora", "linear-probe", "full")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data as a user has them, and a working folder with a link to one of the models."""
    folder = tmp_path_factory.mktemp("made")
    zoo.tiny("bert", "base")[0].save_pretrained(folder / "my-model")
    write_tokenizer(folder / "my-model")
    (folder / "my-model" / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n\n# Mine\n")
    zoo.tiny("llama", "causal-lm")[0].save_pretrained(folder / "my-decoder")
    write_tokenizer(folder / "my-decoder")
    for name, count in (("first", 3), ("second", 2)):
        rows = [{"body": f"w{6 + i % count} w{8 + i}", "mood": WORDS[i % count]} for i in range(30)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def spec(place: Path, **changes: Any) -> Spec:
    given = {"model": str(place / "my-model"), "data": str(place / "first.jsonl"), "text": ("body",), "label": "mood"}
    return Spec(**{"max_steps": 2, "batch_size": 8, "evaluations": 1, "seed": 3, **given, **changes})


@pytest.fixture(scope="module")
def runs(place: Path) -> Callable[[str], Run]:
    """A run of each method, made once."""
    made: dict[str, Run] = {}

    def run(method: str) -> Run:
        if method not in made:
            made[method] = tune(spec(place, method=method), place / "runs", progress=False)
        return made[method]

    return run


@pytest.fixture(scope="module")
def joint(place: Path) -> Run:
    for name, kind in (("cola", 2), ("cb", 3)):
        (place / "data" / name).mkdir(parents=True)
        labels = ["unacceptable", "acceptable"] if name == "cola" else ["entailment", "contradiction", "neutral"]
        for split in ("train", "test"):
            rows = [
                {"sentence": f"w{i}", "premise": f"w{i}", "hypothesis": f"w{9 + i}", "label": labels[i % kind]}
                for i in range(9)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (place / "data" / name / f"{split}.jsonl").write_text(text)
    given = {"data": None, "text": (), "label": None, "tasks": ("cola", "cb"), "data_dir": str(place / "data")}
    return tune(spec(place, method="multi-lora", **given), place / "runs", progress=False)


def leaks(folder: Path, place: Path) -> list[str]:
    """Files that hold a path of this machine; of tensors only what describes them can."""
    package = str(Path(inlay.__file__).parent)
    forbidden = {str(place), tempfile.gettempdir(), str(Path.home()), str(fetch.cache_root()), package}
    found = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            data = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
        text = data.decode()
        found += [f"{file.relative_to(folder)}: {path}" for path in forbidden if path in text]
    return found


def loaded_by_its_card(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the code in the card makes, run where the model's folder lies."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(code.replace("this/folder", str(folder)), names)  # what a reader of the card would type
    return names["model"]


@pytest.mark.parametrize("method", SINGLE)
def test_a_run_leaves_an_adapter_without_paths_and_with_a_card(
    method: str, runs: Callable[[str], Run], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs(method)
    assert not leaks(run.adapter, place)
    text = (run.adapter / "README.md").read_text()
    scored = f"accuracy {run.metrics['test']['accuracy']:.4g}"
    for said in ("bad, good, odd", "./my-model", "mit", "seed 3", scored, method):
        assert said in text, said
    assert f"{run.record['examples']['test']} test examples" in text
    data = ModelCard.load(run.adapter / "README.md").data
    assert data.license == "mit"
    assert data.base_model is None  # which no hub has
    # What the card loads answers as the run's own model does.
    model = loaded_by_its_card(run.adapter, place, monkeypatch)
    monkeypatch.undo()
    schema = TaskSchema.from_json(run.record["task"]["schema"])
    own, tokenizer = restore(run, schema, None)
    row = schema.encode_inputs([{"body": "w3 w7"}], tokenizer, None)[0]
    batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(logits(model, batch), logits(own, batch), atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["lora", "norm"])
def test_the_card_of_a_sentence_encoder_loads_what_its_head_reads(
    method: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = place / "my-encoder"
    if not encoder.exists():
        shutil.copytree(place / "my-model", encoder)
        for file, content in written("mean", 16).items():
            (encoder / file).parent.mkdir(exist_ok=True)
            (encoder / file).write_text(json.dumps(content))
    run = tune(spec(place, model=str(encoder), method=method), place / "runs", progress=False)
    assert "| the head reads | mean |" in (run.adapter / "README.md").read_text()
    assert not leaks(run.adapter, place)
    own, _ = restore(run, TaskSchema.from_json(run.record["task"]["schema"]), None)
    batch = zoo.tiny("bert")[1]
    found = logits(loaded_by_its_card(run.adapter, place, monkeypatch), batch)
    torch.testing.assert_close(found, logits(own, batch), atol=1e-6, rtol=0)


def test_tasks_have_a_card_each_and_one_together(joint: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not leaks(joint.adapter, place)
    together = (joint.adapter / "README.md").read_text()
    for name in ("cola", "cb"):
        metric = next(key for key in joint.metrics["test"] if key.startswith(f"{name}/"))
        for text in (together, (joint.adapter / name / "README.md").read_text()):
            assert f"{joint.metrics['test'][metric]:.4g}" in text
            assert "on 9 test examples, seed 3" in text
    assert "entailment, contradiction, neutral" in together
    assert loaded_by_its_card(joint.adapter / "cb", place, monkeypatch).config.num_labels == 3


def test_exported_folders_have_cards_and_no_paths(joint: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = export(joint.folder, "cb", place / "cb-lora")
    tasks = export(joint.folder, "cb=nli,cola", place / "some", to="tasks")
    for folder in (lora, tasks):
        assert not leaks(folder, place)
    text = (lora / "README.md").read_text()
    assert "lora" in text
    assert "import inlay" not in text  # PEFT alone loads it
    assert "entailment, contradiction, neutral" in text
    assert read_json(lora / "adapter_config.json")["base_model_name_or_path"] == "./my-model"
    assert "| nli | cb (" in (tasks / "README.md").read_text()
    batch = {"input_ids": torch.tensor([[0, 8, 12, 2]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    wanted = loaded_by_its_card(joint.adapter / "cb", place, monkeypatch)
    found = loaded_by_its_card(lora, place, monkeypatch)
    torch.testing.assert_close(logits(found, batch), logits(wanted, batch), atol=1e-6, rtol=0)


def test_the_base_of_several_tasks_is_found_or_asked_for(
    joint: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its run by the run's record; on this machine by its fingerprint; elsewhere by its name in the working folder,
    or by what --model says."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"task": "cb", "premise": "w1", "hypothesis": "w2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    in_the_run = answer(joint.folder, requests)
    moved = export(joint.folder, "cb", tmp_path / "moved", to="tasks")
    assert answer(moved, requests) == in_the_run
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "another machine's"))
    with pytest.raises(InlayError, match=r"'my-model'.*--model"):
        answer(moved, requests)
    assert answer(moved, requests, model=str(place / "my-model")) == in_the_run
    monkeypatch.chdir(place)
    assert answer(moved, requests) == in_the_run


def test_a_folder_of_tasks_that_holds_a_path_still_loads_and_is_exported_without(
    joint: Run, place: Path, tmp_path: Path
) -> None:
    """As an earlier inlay wrote it: tasks.json with the model's folder."""
    from inlay.records.atomic import write_json
    from inlay.records.sealed import checksum

    old = export(joint.folder, "cb", tmp_path / "old", to="tasks")
    facts = read_json(old / "tasks.json") | {"model": str(place / "my-model")}
    del facts["checksum"]
    write_json(old / "tasks.json", facts | {"checksum": checksum(facts)})
    assert list(Tasks(old).schemas) == ["cb"]
    assert not leaks(export(old, "cb", tmp_path / "new", to="tasks"), place)


def test_a_compressed_prompt_has_a_card(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "prompt.txt").write_text(" ".join(f"w{number}" for number in range(12)))
    words = ["--model", place / "my-decoder", "--prompt", place / "prompt.txt", "--out", place / "compressed"]
    quick = ["--steps", "1", "--count", "10", "--length", "6"]
    done = CliRunner().invoke(app, ["compress", *map(str, words), *quick])
    assert done.exit_code == 0, done.output
    folder = place / "compressed"
    assert not leaks(folder, place)
    text = (folder / "README.md").read_text()
    assert "a prompt of 12 tokens" in text
    assert "held-out texts" in text
    assert "w7" not in text  # the prompt itself is not given away
    batch = zoo.tiny("llama", "causal-lm")[1]
    base = zoo.tiny("llama", "causal-lm")[0]
    assert not torch.equal(logits(loaded_by_its_card(folder, place, monkeypatch), batch), logits(base, batch))


def test_an_embedded_model_of_images(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Spec(model="embedded:vit", data=str(photos), method="norm", max_steps=1, batch_size=4)
    run = tune(given, tmp_path / "runs", progress=False)
    assert not leaks(run.adapter, tmp_path)
    config = read_json(run.adapter / "adapter_config.json")
    assert config["base_model_name_or_path"] == "embedded:vit"
    model = loaded_by_its_card(run.adapter, tmp_path, monkeypatch)
    assert model.config.num_labels == 2
    assert "apache-2.0" in (run.adapter / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("embedded:minilm", "sentence-transformers/all-MiniLM-L6-v2"),
        ("embedded:smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("embedded:resnet", "embedded:resnet"),
        ("google/vit-base-patch16-224", "google/vit-base-patch16-224"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("/home/me/models/mine", "./mine"),
        ("/home/me/models/mine/", "./mine"),
        ("/home/me/models/old/../mine", "./mine"),
        ("~/models/mine", "./mine"),
        ("./models/mine", "./models/mine"),
        ("../mine", "../mine"),
    ],
)
def test_what_transformers_finds_a_base_by(name: str, address: str) -> None:
    """The weights of an embedded model may lie in a cache, converted: their folder is nobody's business."""
    found = locate.Location(name, "/cache/models/it", {}, "package index it==1, converted from GGUF", frozenset())
    assert loading._address(found) == address


def test_a_folder_is_never_taken_for_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert locate.portable("gpt2") == "./gpt2"
    assert locate.portable("gpt3") == "gpt3"


def test_a_card_survives_odd_names() -> None:
    about = About(
        base="embedded:minilm",
        address="sentence-transformers/all-MiniLM-L6-v2",
        model_class="BertForSequenceClassification",
        licence="Apache-2.0",
        task="a|b",
        kind="classification",
        labels=("yes | no", "line\nbreak"),
        seed=0,
        examples={"train": 4, "test": 2},
        metrics={"test": {"accuracy": 0.5, "loss": None}},
    )
    assert About.from_json(json.loads(json.dumps(about.to_json()))) == about
    text = card(get("bias"), {"default": about})
    assert r"yes \| no, line break" in text
    assert "accuracy 0.5, loss not finite on 2 test examples, seed 0" in text
    assert (
        'inlay.load_backbone("embedded:minilm", kind="classification", label_names=["yes | no", "line\\nbreak"])'
        in text
    )
    data = ModelCard(text).data
    assert data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert data.license == "apache-2.0"
    assert data.library_name == "peft"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n\n# Mine\n", "apache-2.0"),
        ("---\n" + "license: \n" * 50_000, None),  # a head without an end, and many lines that look like it
        ("# A card without a head\nlicense: mit\n", None),
        ("---\ntags: [x]\n---\nlicense: mit\n", None),
        ("---\nlicense: <b>mit</b>\n---\n", None),
        ("", None),
    ],
)
def test_a_licence_is_read_off_the_head_of_a_card(text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert locate.licence(locate.Location("m", str(tmp_path), {}, "", frozenset(), folder=tmp_path)) == expected
