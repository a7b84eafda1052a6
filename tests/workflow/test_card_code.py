"""The code in the card of an adapter, pasted as it is, gives what the run itself predicts: for every kind of task.

The folder has all that it needs beside the base model: label names, tokenizer or image processor, template.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import Spec, tune
from inlay.methods import registry
from inlay.methods.folder import preprocessing_in
from inlay.records.store import Run, read_json
from inlay.report.collect import collect
from inlay.report.loading import HERE, loads, place_of
from inlay.tasks.kinds import KINDS
from inlay.workflow.export import export
from inlay.workflow.gather import gather

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WORDS = ["good", "bad", "odd"]
TAGS = ["O", "B-x", "I-x"]
Rows = list[dict[str, Any]]

# Rows of each kind, what names their columns, and the row that the card's code asks about.
DATA: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "classification": (
        lambda i: {"body": f"w{6 + i % 3} w{8 + i % 20}", "mood": WORDS[i % 3]},
        {"text": ("body",), "label": "mood", "template": "w9 {body} w7"},
        {"body": "the body"},
    ),
    "pair-classification": (
        lambda i: {"one": f"w{6 + i % 3}", "two": f"w{8 + i % 20}", "same": ["no", "yes"][i % 2]},
        {"text": ("one", "two"), "label": "same"},
        {"one": "the one", "two": "the two"},
    ),
    "regression": (
        lambda i: {"body": f"w{6 + i % 9} w{8 + i % 31}", "price": 100.0 + 37.5 * (i % 9)},
        {"text": ("body",), "label": "price"},
        {"body": "the body"},
    ),
    "token-classification": (
        lambda i: {"tokens": [f"w{6 + i % 3}", "w9", f"w{8 + i % 20}"], "tags": [TAGS[i % 3], "O", TAGS[1]]},
        {"text": ("tokens",), "label": "tags"},
        {"tokens": ["a", "few", "words"]},
    ),
    "span-classification": (
        lambda i: {"text": f"w7 w{6 + i % 3} w9 w{8 + i}", "start": 3, "end": 5, "role": WORDS[i % 3]},
        {"text": ("text",), "label": "role"},
        {"text": "the first and the last", "start": 4, "end": 9},
    ),
    "question-answering": (
        lambda i: {
            "question": f"w{6 + i % 3}",
            "context": f"w9 w{6 + i % 3} w{8 + i % 20}",
            "answer": f"w9 w{6 + i % 3}",
        },
        {"kind": "question-answering"},
        {"question": "Who wrote it?", "context": "It was written by Ada Lovelace in 1843."},
    ),
    "causal-lm": (
        lambda i: {"question": f"w{6 + i % 3} w{8 + i % 20}", "answer": f"w{6 + i % 3}"},
        {"text": ("question",), "label": "answer", "kind": "causal-lm"},
        {"question": "the question"},
    ),
    "data-to-text": (
        lambda i: {"facts": f"w{6 + i % 3} w{8 + i % 20}", "said": f"w{6 + i % 3} w7"},
        {"text": ("facts",), "label": "said", "kind": "data-to-text"},
        {"facts": "the source"},
    ),
    "sequence-to-sequence": (
        lambda i: {"source": f"w{6 + i % 3} w{8 + i % 20}", "target": f"w{6 + i % 3} w7"},
        {"kind": "sequence-to-sequence"},
        {"source": "the source"},
    ),
    "masked-lm": (
        lambda i: {"text": f"w{6 + i % 3} w{8 + i % 20} w{6 + i % 3}"},
        {"text": ("text",), "kind": "masked-lm"},
        {"text": "the text <mask>"},
    ),
    "embedding": (
        lambda i: {"anchor": f"w{6 + i % 9} w{8 + i % 20}", "positive": f"w{6 + i % 9} w{9 + i}"},
        {"text": ("anchor", "positive"), "kind": "embedding"},
        {"text": "a text"},
    ),
    "image-classification": (lambda i: {}, {}, {}),
    "multi-label": (
        lambda i: {"body": f"w{6 + i % 4} w{8 + i % 20}", "about": [WORDS[k] for k in range(2) if (i >> k) & 1]},
        {"text": ("body",), "label": "about", "kind": "multi-label"},
        {"body": "the body"},
    ),
    "image-multi-label": (
        lambda i: {"image": f"{i}.png", "about": [WORDS[k] for k in range(2) if (i >> k) & 1]},
        {"image": "image", "label": "about"},
        {"image": Image.new("RGB", (64, 64))},
    ),
    "soft-labels": (
        lambda i: {"body": f"w{6 + i % 4} w{8 + i % 20}", "votes": {"no": 0.1 * (i % 11), "yes": 1 - 0.1 * (i % 11)}},
        {"text": ("body",), "label": "votes", "kind": "soft-labels"},
        {"body": "the body"},
    ),
    "image-soft-labels": (
        lambda i: {"image": f"{i}.png", "votes": [0.1 * (i % 11), 1 - 0.1 * (i % 11)]},
        {"image": "image", "label": "votes", "classes": ("no", "yes")},
        {"image": Image.new("RGB", (64, 64))},
    ),
    "ordinal": (
        lambda i: {"body": f"w{6 + i % 4} w{8 + i % 20}", "grade": WORDS[i % 3]},
        {"text": ("body",), "label": "grade", "kind": "ordinal", "classes": ("bad", "odd", "good")},
        {"body": "the body"},
    ),
    "image-ordinal": (
        lambda i: {"image": f"{i}.png", "grade": i % 4},
        {"image": "image", "label": "grade", "kind": "ordinal"},
        {"image": Image.new("RGB", (64, 64))},
    ),
    "multi-regression": (
        lambda i: {"body": f"w{6 + i % 4} w{8 + i % 20}", "price": 10.0 + i % 9, "size": 0.5 * (i % 7)},
        {"text": ("body",), "label": "price,size"},
        {"body": "the body"},
    ),
    "image-regression": (
        lambda i: {"image": f"{i}.png", "weight": 0.25 * (i % 9)},
        {"image": "image", "label": "weight"},
        {"image": Image.new("RGB", (64, 64))},
    ),
}
# Whose answers Transformers' outputs do not say by themselves: the code does not depend on the method.
OURS = (
    *("multi-label", "image-multi-label", "soft-labels", "image-soft-labels", "ordinal", "image-ordinal"),
    *("multi-regression", "image-regression"),
)
WRITE = ("causal-lm", "data-to-text", "sequence-to-sequence")
# What PEFT has and what inlay has, a head alone and a whole model.
FORMS = [
    method.name
    for method in registry.all_methods().values()
    if method.name in ("lora", "norm", "vera") or method.form != "peft"
]


# Of images and texts: test_image_text.py.
ELSEWHERE = ("image-text", "image-text-classes")


def test_every_kind_is_here() -> None:
    assert {*DATA, *ELSEWHERE} == set(KINDS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("cards"))


def lay_out(folder: Path) -> Path:
    """Models and data of every kind as a user has them."""
    zoo.tiny("bert", "base")[0].save_pretrained(folder / "encoder")
    zoo.tiny("llama", "causal-lm")[0].save_pretrained(folder / "decoder")
    # The checkpoint has a head of its own, of more classes than the task has.
    zoo.tiny("vit", "classification", num_labels=10)[0].save_pretrained(folder / "eye")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.BertForMaskedLM(zoo.FAMILIES["bert"].config()).save_pretrained(folder / "filler")
    zoo.tiny("t5", "sequence-to-sequence", seed=5)[0].save_pretrained(folder / "both")
    for name in ("encoder", "decoder", "filler", "both"):
        write_tokenizer(folder / name)
    for kind, (row, _, _) in DATA.items():
        if kind in OURS and "image" in kind:
            (folder / kind).mkdir()
            (folder / kind / "list.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(40)))
            for i in range(40):
                Image.new("RGB", (40, 50), (60 * (i % 4), 9 * (i % 20), 40)).save(folder / kind / f"{i}.png")
        elif kind == "image-classification":
            for i in range(30):
                (folder / kind / WORDS[i % 3]).mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40, 50), (80 * (i % 3), 9 * (i % 20), 40)).save(
                    folder / kind / WORDS[i % 3] / f"{i}.png"
                )
        else:
            (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(40)))
    return folder


def run_of(place: Path, kind: str, method: str, **changes: Any) -> Run:
    _, columns, _ = DATA[kind]
    own = {"causal-lm": "decoder", "data-to-text": "decoder", "sequence-to-sequence": "both", "masked-lm": "filler"}
    model = own.get(kind, "eye" if "image" in kind else "encoder")
    data = f"{kind}.jsonl"
    if "image" in kind:
        data = f"{kind}/list.jsonl" if kind in OURS else kind
    rate = 1e-4 if kind == "sequence-to-sequence" else 0.05  # with more it writes nothing
    given = {"max_steps": 3, "batch_size": 8, "evaluations": 1, "learning_rate": rate, "seed": 3}
    spec = Spec(model=str(place / model), data=str(place / data), method=method, **{**given, **columns, **changes})
    return tune(spec, place / "runs", progress=False)


def pasted(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The answer that the code in the card gives, run where the model's folder lies, with its own place filled in."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(code.replace("this/folder", str(folder)), names)
    return names["answer"]


def expected(run: Run, kind: str) -> Any:
    """What the run itself says of the row in the card."""
    loaded = inlay.load(run)
    if kind == "embedding":
        return pytest.approx(loaded.embed(["a text", "another one"]), abs=1e-5)
    if kind == "image-classification":
        return loaded.predict([{"image": Image.new("RGB", (64, 64))}], probabilities=True)[0]["probabilities"]
    (found,) = loaded.predict([DATA[kind][2]], probabilities="label_names" in dir(loaded) and kind in ONE_LABEL)
    if kind == "token-classification":
        return list(zip(DATA[kind][2]["tokens"], found["tags"], strict=True))
    if kind == "span-classification":
        return found["label"]
    if kind == "masked-lm":
        return [(mask["token"], pytest.approx(mask["score"], rel=1e-4)) for mask in found["masks"]]
    if kind == "question-answering":
        return found["answer"]
    return found.get("probabilities", found.get("value", found.get("text")))


@pytest.mark.parametrize("kind", DATA)
def test_the_code_on_the_page_of_a_report(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inlay it prints an answer that is one of this kind; that of the card is the card's, with the run's place."""
    run = run_of(place, kind, "lora", **state_of(kind))
    (found,) = loads(collect([run]))
    Image.new("RGB", (64, 64)).save(place / "photo.jpg")
    monkeypatch.chdir(place)
    assert len(found["short"].splitlines()) <= 10
    said: list[Any] = []
    exec(found["short"].replace(HERE, place_of(Path("runs") / run.id)), {"print": said.append})
    (answers,) = said
    if kind == "embedding":
        assert len(answers) == 2
    else:
        assert answers[0].keys() & {"label", "labels", "value", "values", "tags", "text", "masks", "answer"}
    names: dict[str, Any] = {}
    exec(found["card"].replace(HERE, str(run.folder)), names)
    assert "this/folder" not in found["card"]
    assert str(names["answer"]) == str(pasted(run.adapter, place, monkeypatch))


def state_of(kind: str) -> dict[str, Any]:
    """What the head reads where the card loads it by Transformers alone."""
    return (
        {}
        if kind in ("embedding", "question-answering", *OURS) or any(each in kind for each in ("image", "lm", "text"))
        else {"pooling": "own"}
    )


ONE_LABEL = ("classification", "pair-classification", "span-classification")


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", OURS)
def test_the_code_of_kinds_that_inlay_reads(
    kind: str, method: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = run_of(place, kind, method), DATA[kind][2]
    answer = pasted(run.adapter, place, monkeypatch)
    (wanted,) = inlay.load(run).predict([asked])
    assert flat(answer) == pytest.approx(flat({key: wanted[key] for key in wanted.keys() - asked.keys()}), abs=1e-5)


def flat(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without lists and objects within it."""
    found: dict[str, Any] = {}
    for name, value in answer.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found |= {f"{name} {key}": each for key, each in inner.items()} if isinstance(inner, dict) else {name: inner}
    return found


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (kind, method)
        for kind in DATA
        for method in FORMS
        if kind not in OURS
        and not (method == "linear-probe" and kind in (*WRITE, "masked-lm", "embedding"))  # no new head
    ],
)
def test_the_code_gives_what_the_run_predicts(
    kind: str, method: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(place, kind, method, **state_of(kind))
    answer, wanted = pasted(run.adapter, place, monkeypatch), expected(run, kind)
    if isinstance(answer, dict) and "label" in answer:
        answer = answer["label"]
    if isinstance(wanted, dict):
        assert answer == pytest.approx(wanted, abs=1e-5)
    elif isinstance(wanted, float):
        assert answer == pytest.approx(wanted, rel=1e-4)
    elif isinstance(wanted, str) and kind in WRITE:
        shorter, longer = sorted((answer.strip(), wanted), key=len)
        assert shorter
        assert longer.startswith(shorter), "as many tokens as there is room for"
    else:
        assert (answer.numpy() if kind == "embedding" else answer) == wanted
    auto = AutoImageProcessor if kind == "image-classification" else AutoTokenizer
    assert type(auto.from_pretrained(run.adapter)) is type(auto.from_pretrained(run.adapter))
    held = preprocessing_in(run.adapter)
    assert held
    whole = sum(path.stat().st_size for path in run.adapter.rglob("*") if path.is_file())
    beside = sum((run.adapter / name).stat().st_size for name in held)
    assert run.portrait["saved_bytes"] == whole - beside, "what belongs to the base model does not count"


@pytest.mark.parametrize("kind", ["classification", "image-classification"])
def test_the_code_of_a_calibrated_run(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(place, kind, "lora", calibrate=True, **state_of(kind))
    wanted = expected(run, kind)
    temperature = run.record["calibration"]["temperature"]
    assert abs(temperature - 1) > 0.01
    assert pasted(run.adapter, place, monkeypatch) == pytest.approx(wanted, abs=1e-5)


# A process that has imported what is heavy, but nothing of inlay: each card's code is run in a fork of it.
PASTED = """
import gc, json, os, re, sys
gc.disable()
import transformers, peft
assert "inlay" not in sys.modules
gc.freeze()
gc.enable()
for folder, out in json.load(open(sys.argv[1])):
    if (child := os.fork()) == 0:
        (code,) = re.findall("```python\\n(.*?)```", open(folder + "/README.md").read(), re.DOTALL)
        names = {}
        exec(code.replace("this/folder", folder), names)
        json.dump(names["answer"], open(out, "w"), default=str)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system does not have")
def test_the_code_of_every_kind_in_a_fresh_process(place: Path) -> None:
    """What the code needs it imports itself: by a method of PEFT's and by one of ours."""
    ours = [("norm", kind) for kind in ("classification", "causal-lm", "image-classification")]
    runs = [
        run_of(place, kind, method, **state_of(kind)) for method, kind in [*(("lora", kind) for kind in DATA), *ours]
    ]
    work = [(str(run.adapter), str(place / f"answer-{number}.json")) for number, run in enumerate(runs)]
    (place / "work.json").write_text(json.dumps(work))
    command = [sys.executable, "-c", PASTED, str(place / "work.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr[-2000:]
    for run, (_, out) in zip(runs, work, strict=True):
        answer = json.loads(Path(out).read_text())
        kind = run.record["task"]["schema"]["kind"]
        if kind in ("classification", "pair-classification", "image-classification"):
            assert answer == pytest.approx(expected(run, kind), abs=1e-5)
        assert answer


@pytest.mark.parametrize("method", ["lora", "full", "linear-probe", "norm"])
def test_a_head_that_reads_another_state(method: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(place, "classification", method, pooling="mean")
    assert pasted(run.adapter, place, monkeypatch) == pytest.approx(expected(run, "classification"), abs=1e-5)


@pytest.mark.parametrize("method", list(registry.names_where(lambda method: method.prompts_in_text)))
def test_texts_with_places_for_prompts(method: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(place, "classification", method, template=None)
    answer = pasted(run.adapter, place, monkeypatch)
    (wanted,) = inlay.load(run).predict([{"body": "the body"}])
    assert answer == pytest.approx(wanted | {"body": None}, abs=1e-5) or answer["label"] == wanted["label"]
    assert answer["score"] == pytest.approx(wanted["score"], abs=1e-5)


def test_an_embedded_model_of_images(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(model="embedded:vit", data=str(place / "image-classification"), method="ssf", max_steps=2, batch_size=8)
    run = tune(spec, place / "runs", progress=False)
    assert pasted(run.adapter, place, monkeypatch) == pytest.approx(expected(run, "image-classification"), abs=1e-5)


def test_what_is_made_of_a_run_has_a_card_that_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(place, "classification", "vera", pooling="own")
    wanted = pytest.approx(expected(run, "classification"), abs=1e-5)
    lora = export(run.folder, None, place / "lora")
    assert pasted(lora, place, monkeypatch) == wanted
    found = gather([f"mood={lora}"], place / "set", model=str(place / "encoder"))
    assert pasted(found.folder / "mood", place, monkeypatch) == wanted
    shutil.rmtree(place / "set")
    assert read_json(lora / "inlay.json")["about"]["labels"] == sorted(WORDS)
