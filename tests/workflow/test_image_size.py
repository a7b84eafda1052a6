"""Runs on images of another size than the model's own: the size is part of the run, and of what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

import inlay
import zoo
from inlay import Spec, tune
from inlay.errors import InlayError
from inlay.methods.folder import NOTE
from inlay.records.store import Run
from inlay.workflow.adapted import find_source, load_adapted
from inlay.workflow.merge import merge
from inlay.workflow.settle import settle

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SIDE = 64  # the tiny model's own is 32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    zoo.tiny("vit", "classification", num_labels=10)[0].save_pretrained(folder / "eye")
    for i in range(30):
        (folder / "photos" / f"c{i % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 70), (80 * (i % 3), 9 * (i % 20), 40)).save(folder / "photos" / f"c{i % 3}" / f"{i}.png")
    return folder


def spec(place: Path, method: str = "lora", side: int | None = SIDE, **more: Any) -> Spec:
    given = {"max_steps": 3, "batch_size": 8, "evaluations": 1, "learning_rate": 0.05, **more}
    return Spec(model=str(place / "eye"), data=str(place / "photos"), method=method, image_size=side, **given)


def made(place: Path, method: str = "lora", **more: Any) -> Run:
    return tune(spec(place, method, **more), place / "runs", progress=False)


@pytest.mark.parametrize("method", ["lora", "full", "linear-probe", "activation-prompt", "visual-prompt", "vpt-deep"])
def test_what_a_run_of_another_size_is_used_by_is_of_that_size(
    method: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(place, method)
    loaded = inlay.load(run)
    pixels = loaded.processor(images=Image.new("RGB", (70, 70)), return_tensors="pt")["pixel_values"]
    assert pixels.shape[-2:] == (SIDE, SIDE)
    assert AutoImageProcessor.from_pretrained(run.adapter).size == {"height": SIDE, "width": SIDE}
    image = Image.new("RGB", (64, 64))
    (wanted,) = loaded.predict([image], probabilities=True)
    code = (run.adapter / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(code.replace("this/folder", str(run.adapter)), names)
    assert names["answer"] == pytest.approx(wanted["probabilities"], abs=1e-5)


def test_the_size_is_part_of_a_run_where_it_is_another(place: Path) -> None:
    own, spelled, other = (settle(spec(place, side=side)).digest for side in (None, zoo.IMAGE_SIZE, SIDE))
    assert own == spelled
    assert own != other
    plain = spec(place, side=None)
    before = {name: value for name, value in plain.to_json().items() if name != "image_size"}
    assert Spec.from_json(before).digest() == plain.digest()


def test_an_adapter_by_itself_is_put_into_a_model_of_its_size(place: Path, tmp_path: Path) -> None:
    run = made(place)
    (tmp_path / "alone").mkdir()
    for file in run.adapter.iterdir():
        (tmp_path / "alone" / file.name).write_bytes(file.read_bytes())
    adapted = load_adapted(find_source(tmp_path / "alone"), model=str(place / "eye"))
    image = Image.new("RGB", (64, 64), (9, 80, 200))
    pixels = adapted.processor(images=image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        shares = adapted.model(pixels).logits.softmax(-1)[0].tolist()
    (wanted,) = inlay.load(run).predict([image], probabilities=True)
    assert shares == pytest.approx(list(wanted["probabilities"].values()), abs=1e-5)
    note = json.loads((run.adapter / NOTE["peft"]).read_text())
    assert note["about"]["image_size"] == SIDE


def test_what_is_merged_is_a_model_of_that_size(place: Path, tmp_path: Path) -> None:
    run = made(place)
    merge(run, tmp_path / "merged")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "merged").eval()
    assert model.config.image_size == SIDE
    processor = AutoImageProcessor.from_pretrained(tmp_path / "merged")
    image = Image.new("RGB", (64, 64), (9, 80, 200))
    with torch.no_grad():
        shares = model(**processor(images=image, return_tensors="pt")).logits.softmax(-1)[0].tolist()
    (wanted,) = inlay.load(run).predict([image], probabilities=True)
    assert shares == pytest.approx(list(wanted["probabilities"].values()), abs=1e-4)


def test_several_tasks_keep_the_size(place: Path) -> None:
    own = {name: {"data": str(place / "photos")} for name in ("one", "two")}
    given = {"max_steps": 2, "batch_size": 8, "evaluations": 1, "image_size": SIDE}
    both = Spec(model=str(place / "eye"), method="lora", tasks=("one", "two"), task_fields=own, **given)  # type: ignore[arg-type]
    run = tune(both, place / "runs", progress=False)
    assert json.loads((run.adapter / "tasks.json").read_text())["image_size"] == SIDE
    from inlay.workflow.answer import Tasks

    tasks = Tasks(run.adapter)
    assert tasks.model.config.image_size == SIDE
    image = str(place / "photos" / "c0" / "0.png")
    (answer,) = tasks.answer([tasks.request({"task": "one", "image": image})])
    assert answer["label"] == inlay.load(run, task="one").predict([image])[0]["label"]


def test_the_option(place: Path, typed: Callable[..., tuple[int, str, str]]) -> None:
    words = ("--model", str(place / "eye"), "--data", str(place / "photos"), "--method", "linear-probe")
    status, _, said = typed("tune", *words, "--image-size", "50")
    assert status == 2
    assert "image_size=50: the model reads patches of" in said
    status, shown, _ = typed("tune", *words, "--image-size", str(SIDE), "--print-config")
    assert status == 0
    assert f"image_size: {SIDE}" in shown


def test_a_model_of_texts_has_none(place: Path) -> None:
    with pytest.raises(InlayError, match=r"image_size=64: the model 'embedded:minilm' reads texts\. Leave it out"):
        settle(Spec(model="embedded:minilm", data="x.csv", method="lora", image_size=64))
    with pytest.raises(InlayError, match=r"image_size=0 must be greater than 0"):
        Spec(model="embedded:vit", data="x", method="lora", image_size=0)
