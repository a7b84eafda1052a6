"""Images with texts, end to end: runs of pairs and of classes, what they predict, their vectors, and bad input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf
from PIL import Image

import image_text
import inlay
from inlay import Spec
from inlay.errors import InlayError
from inlay.records.store import Run
from inlay.report.collect import collect
from inlay.report.loading import HERE, loads
from inlay.tasks import kinds
from inlay.tasks.encode import IGNORED
from inlay.tasks.image_text import ImageTextCollator, encode_pairs, reverse, score_both
from inlay.training import Interrupted
from inlay.workflow.embed import embed
from inlay.workflow.loaded import evaluate, load
from inlay.workflow.merge import merge
from inlay.workflow.predict import predict
from inlay.workflow.tune import tune
from inlay.workflow.zero_shot import evaluate_model

Typed = Callable[..., tuple[int, str, str]]
TRAINING: dict[str, Any] = {"epochs": 6, "batch_size": 12, "evaluations": 2, "learning_rate": 0.02}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image-text")
    for family in ("clip", "siglip"):
        image_text.write_model(folder / family, family)
    image_text.write_classes(folder / "photos", each=10)
    image_text.write_pairs(folder / "pairs", each=8)
    return folder


def of_classes(place: Path, **changes: Any) -> Spec:
    given = {"model": str(place / "clip"), "method": "lora", "kind": "image-text", "data": str(place / "photos")}
    return Spec(**{**given, **TRAINING, **changes})


def of_pairs(place: Path, **changes: Any) -> Spec:
    return of_classes(place, **{"data": str(place / "pairs" / "pairs.csv"), **changes})


@pytest.fixture(scope="module")
def classes(place: Path) -> Run:
    return tune(of_classes(place), place / "runs", progress=False)


@pytest.fixture(scope="module")
def calibrated(place: Path) -> Run:
    """A run whose classes have weights, and their probabilities a temperature."""
    run = tune(of_classes(place, calibrate=True, class_weights="red=3", max_steps=2), place / "runs", progress=False)
    assert abs(run.record["calibration"]["temperature"] - 1) > 0.01
    return run


@pytest.fixture(scope="module")
def pairs(place: Path) -> Run:
    return tune(of_pairs(place, model=str(place / "siglip"), method="bias"), place / "runs", progress=False)


def test_run_of_classes_learns_and_says_what_the_frozen_model_has(classes: Run) -> None:
    record = classes.record
    assert record["task"]["schema"]["kind"] == kinds.IMAGE_TEXT_CLASSES
    assert record["metrics"]["test"]["accuracy"] > record["frozen"]["metrics"]["accuracy"]
    assert record["frozen"]["examples"] == record["examples"]["test"]
    kept = pq.read_table(next(classes.folder.glob("predictions/*.parquet"))).to_pydict()
    assert set(kept["label"]) - {None} <= set(image_text.COLOURS)


def test_frozen_score_is_that_of_the_model_by_itself(classes: Run, place: Path, tmp_path: Path) -> None:
    told = tune(of_classes(place), place / "runs", progress=False).record  # found, not made again
    tested = [row["file"] for row in _kept(classes) if row["split"] == "test"]
    for name in tested:
        (tmp_path / "test" / Path(name).parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(
            place / "photos" / Path(name).parent.name / Path(name).name, tmp_path / "test" / Path(name).parent.name
        )
    found = evaluate_model(str(place / "clip"), tmp_path / "test", kind="image-text")
    assert found.examples == len(tested)
    assert found.metrics["accuracy"] == pytest.approx(told["frozen"]["metrics"]["accuracy"])


def _kept(run: Run) -> list[dict[str, Any]]:
    return pq.read_table(next(run.folder.glob("predictions/*.parquet"))).to_pylist()


def test_prediction_with_the_classes_of_the_run_and_with_others(classes: Run, place: Path) -> None:
    own = predict(classes, place / "photos", probabilities=True)
    assert {"blue", "deep_grey", "green", "red"} == set(own[0]["probabilities"])
    assert sum(own[0]["probabilities"].values()) == pytest.approx(1)
    other = predict(classes, place / "photos", probabilities=True, labels=["red", "the photo"], template="{label}")
    assert set(other[0]["probabilities"]) == {"red", "the photo"}
    # The same two classes, by hand, in Transformers' own model with the adapter.
    from peft import PeftModel

    model = PeftModel.from_pretrained(hf.CLIPModel.from_pretrained(place / "clip"), classes.adapter).eval()
    loaded = load(classes)
    columns, _ = loaded.processor.read_texts(["red", "the photo"])
    tokens = loaded.processor.tokenizer.pad(columns, return_tensors="pt")
    pixels = loaded.processor([Image.open(other[0]["image"])], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        shares = model(**tokens, pixel_values=pixels).logits_per_image.softmax(-1)[0]
    assert other[0]["probabilities"]["red"] == pytest.approx(float(shares[0]), abs=1e-5)


def test_run_of_pairs_gives_both_ways_and_needs_classes_to_predict(pairs: Run, place: Path) -> None:
    metrics = pairs.record["metrics"]["test"]
    assert list(metrics) == list(kinds.get(kinds.IMAGE_TEXT).metrics)
    assert metrics["two-way-ndcg@10"] == pytest.approx((metrics["i2t-ndcg@10"] + metrics["t2i-ndcg@10"]) / 2)
    assert set(pairs.record["frozen"]["metrics"]) == set(metrics)
    ranked = [row for row in _kept(pairs) if row["split"] == "test"]
    assert ranked
    assert all(row["rank"] >= 1 and row["rank_of_image"] >= 1 for row in ranked)
    shown = [row for row in ranked if row["image"] is not None]
    assert shown
    captions = (place / "pairs" / "pairs.csv").read_text().splitlines()
    for row in shown:
        assert max(row["rank"], row["rank_of_image"]) > 1
        assert any(line.endswith(f",{row['text']}") and line.startswith(Path(row["file"]).name) for line in captions)
    with pytest.raises(InlayError, match=r"has no classes: name some with --labels"):
        predict(pairs, place / "photos")
    found = predict(pairs, place / "photos", labels=["red", "blue"])
    assert {row["label"] for row in found} <= {"red", "blue"}
    again = evaluate(pairs, place / "pairs" / "pairs.csv")
    assert again.examples == 64
    assert set(again.metrics) == set(metrics)


def test_run_of_pairs_that_is_asked_for_classes_is_scored_by_theirs(pairs: Run, place: Path) -> None:
    found = evaluate(pairs, place / "photos", labels=list(image_text.COLOURS))
    assert found.metric == kinds.get(kinds.IMAGE_TEXT_CLASSES).metrics[0]
    assert found.metric in found.metrics
    assert (found.test, found.test_examples, found.examples) == ({}, 0, 40)


def test_other_classes_take_nothing_that_was_fitted_to_the_run_s_own(calibrated: Run, place: Path) -> None:
    from inlay.workflow.loaded import LoadedRun

    own, told = calibrated.record["calibration"]["temperature"], []
    kept = LoadedRun(calibrated, labels=load(calibrated).label_names, say=told.append)
    assert (kept.schema, told) == (load(calibrated).schema, [])
    for given in ({"labels": [*image_text.COLOURS, "photo"]}, {"labels": ["red", "blue"]}, {"template": "the {label}"}):
        other = LoadedRun(calibrated, say=told.append, **given)
        assert (own is None, other.schema.temperature) == (False, None)
        assert (other.schema.class_weights is None) == ("labels" in given)
        assert sum("are calibrated for its own classes" in line for line in told) == 1
        told.clear()
    more = evaluate(calibrated, place / "photos", labels=[*image_text.COLOURS, "photo"])
    assert more.examples == 40


def test_rows_of_pairs_are_scored_for_a_choice_of_method(pairs: Run, place: Path) -> None:
    from inlay.tasks.row_scores import score_rows
    from inlay.training.evaluation import outputs_of

    loaded, task = load(pairs), inlay.tasks.load(pairs.spec)
    outputs, encoded = outputs_of(loaded.model, task, "test", loaded.processor, pairs.spec)
    scores = score_rows(task.schema, task.test, encoded, outputs)
    near = outputs.astype(np.float64) @ outputs.astype(np.float64).T
    images, texts = set(encoded.judged.queries), set(encoded.judged.corpus)
    ways = [
        (
            1 + sum(near[image, each] > near[image, text] for each in texts),
            1 + sum(near[text, each] > near[text, image] for each in images),
        )
        for image, text in encoded.judged.pairs
    ]
    kept = [(row["rank"], row["rank_of_image"]) for row in _kept(pairs) if row["split"] == "test"]
    assert kept == ways
    assert scores == pytest.approx([(1 / of_text + 1 / of_image) / 2 for of_text, of_image in ways])


def test_vectors_of_images_and_texts(classes: Run, pairs: Run, place: Path, tmp_path: Path) -> None:
    for run, width in ((classes, 8), (pairs, 16)):
        images = embed(place / "photos", run=run)
        texts = embed(["a red square", "a photo of blue"], run=run)
        assert images.vectors.shape == (40, width)
        assert texts.vectors.shape == (2, width)
        assert np.allclose(np.linalg.norm(images.vectors, axis=1), 1, atol=1e-5)
        assert images.ids is not None
        assert "red/0.png" in images.ids
    table = place / "pairs" / "pairs.csv"
    alone = {"model": str(place / "clip")}
    assert np.array_equal(
        embed(table, image="image", **alone).vectors[0], embed(table, **alone).vectors[0]
    )  # by the column of images
    said = embed(table, text="caption", output=tmp_path / "texts.npy", **alone)
    assert said.vectors.shape == np.load(tmp_path / "texts.npy").shape
    loaded = load(classes)
    before = loaded.predict([str(place / "photos" / "red" / "0.png")], probabilities=True)
    assert loaded.embed([image_text.draw("red", 0)]).shape == (1, 8)
    assert loaded.predict([str(place / "photos" / "red" / "0.png")], probabilities=True) == before
    with pytest.raises(InlayError, match=r"--text \(caption\) or --image \(image\)"):
        embed(table, text="caption", image="image", **alone)


def test_images_in_every_form_of_rows_are_embedded_as_images(place: Path) -> None:
    import pandas as pd

    model, names = str(place / "clip"), [str(place / "photos" / "red" / f"{i}.png") for i in range(2)]
    wanted = embed(names, model=model).vectors
    table = pd.DataFrame({"image": names})
    for source in (
        tuple(names),
        iter(names),
        {"image": names},
        {"file": names},
        table,
        table["image"],
        np.array(names),
    ):
        assert np.array_equal(embed(source, model=model).vectors, wanted)
    said = ["a red square", "blue"]
    texts = embed(said, model=model).vectors
    for source in (tuple(said), iter(said), {"text": said}, pd.DataFrame({"text": said, "image": names})):
        assert np.array_equal(embed(source, model=model).vectors, texts)


def test_copies_of_an_image_stay_in_one_split(tmp_path: Path) -> None:
    rows = ["image,caption"]
    for i in range(30):
        image_text.draw("red", i).save(tmp_path / f"a{i}.png")
        shutil.copy(tmp_path / f"a{i}.png", tmp_path / f"b{i}.png")
        rows += [f"a{i}.png,the photo {i}", f"b{i}.png,a red square {i}"]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    task = inlay.tasks.load(Spec(model="m", method="lora", kind="image-text", data=str(tmp_path / "pairs.csv")))
    found = [{row["image"].tobytes() for row in split} for split in (task.train, task.validation, task.test)]
    assert all(found)
    assert sum(map(len, found)) == 30


def test_towers_are_trained_apart_and_are_another_run(place: Path, classes: Run) -> None:
    run = tune(of_classes(place, towers="text", max_steps=2), place / "runs", progress=False)
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["exclude_modules"] == r"(vision_model|visual_projection)(\..*)?"
    assert len(predict(run, place / "photos")) == 40
    assert of_classes(place).digest() == of_classes(place, towers="both").digest()
    with pytest.raises(InlayError, match=r"towers='text'.*--kind image-text"):
        tune(of_classes(place, kind=None, towers="text"), place / "runs", progress=False)


def test_run_that_was_stopped_goes_on_to_the_same_bits(place: Path, tmp_path: Path) -> None:
    spec = of_pairs(place, max_steps=6, evaluations=3)
    whole = tune(spec, tmp_path / "whole", progress=False)
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) > 4

    with pytest.raises(Interrupted):
        tune(spec, tmp_path / "parts", progress=False, stop=stop)
    again = tune(spec, tmp_path / "parts", progress=False)
    assert again.record["metrics"] == whole.record["metrics"]
    assert (again.adapter / "adapter_model.safetensors").read_bytes() == (
        whole.adapter / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("which", ["classes", "pairs"])
def test_merged_checkpoint_is_a_model_of_transformers(
    which: str, request: pytest.FixtureRequest, place: Path, tmp_path: Path
) -> None:
    run: Run = request.getfixturevalue(which)
    merge(run, tmp_path / "merged")
    filled = "texts are filled up to 12 tokens" in (tmp_path / "merged" / "README.md").read_text()
    assert filled == (which == "pairs"), "SigLIP reads texts of one length, CLIP does not"
    kind = hf.CLIPModel if which == "classes" else hf.SiglipModel
    plain = kind.from_pretrained(tmp_path / "merged").eval()
    assert plain.config.architectures == [kind.__name__]
    loaded = load(run)
    columns, _ = loaded.processor.read_texts(["a red square", "a photo of blue"])
    tokens = loaded.processor.tokenizer.pad(columns, return_tensors="pt")
    with torch.no_grad():
        found = plain(**tokens, pixel_values=torch.zeros(1, 3, 32, 32))
    torch.testing.assert_close(
        found.text_embeds.numpy(), loaded.embed(["a red square", "a photo of blue"]), atol=1e-5, rtol=1e-4
    )
    assert len(evaluate_model(str(tmp_path / "merged"), place / "photos", kind="image-text").metrics) == 3


@pytest.mark.parametrize("which", ["classes", "pairs"])
def test_code_of_the_card_runs_as_pasted(which: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(which)
    text = (run.adapter / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    base = run.spec.model
    code = code.replace(f"./{Path(base).name}", base).replace("this/folder", str(run.adapter))
    space: dict[str, Any] = {}
    exec(code, space)
    names = list(image_text.COLOURS) if which == "classes" else ["a text", "another one"]
    assert sorted(space["answer"]) == sorted(names)
    assert sum(space["answer"].values()) == pytest.approx(1)


def test_code_of_the_card_of_a_calibrated_run(calibrated: Run) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (calibrated.adapter / "README.md").read_text(), re.DOTALL)
    base = calibrated.spec.model
    space: dict[str, Any] = {}
    exec(code.replace(f"./{Path(base).name}", base).replace("this/folder", str(calibrated.adapter)), space)
    (wanted,) = load(calibrated).predict([Image.new("RGB", (64, 64))], probabilities=True)
    assert space["answer"] == pytest.approx(wanted["probabilities"], abs=1e-5)


@pytest.mark.parametrize("which", ["classes", "pairs"])
def test_code_on_the_page_of_a_report(which: str, request: pytest.FixtureRequest, place: Path) -> None:
    run: Run = request.getfixturevalue(which)
    (found,) = loads(collect([run]))
    code = found["short"].replace(HERE, str(run.folder))
    photo = next(iter((place / "photos").rglob("*.png")))
    said: list[Any] = []
    exec(code.replace("photo.jpg", str(photo)), {"print": said.append})
    (answers,) = said
    assert len(answers) == 1
    assert which == "pairs" or answers[0]["label"] in image_text.COLOURS


def test_commands(place: Path, classes: Run, typed: Typed, tmp_path: Path) -> None:
    base = str(place / "clip")
    status, out, err = typed("evaluate", "--model", base, "--data", place / "photos", "--kind", "image-text")
    assert status == 0, err
    assert "accuracy" in out
    status, out, err = typed(
        *("predict", "--run", classes.folder, "--input", place / "photos" / "red"),
        *("--labels", "red,blue", "--template", "the {label}", "--top-k", 2),
    )
    assert status == 0, err
    assert {each["label"] for each in json.loads(out.splitlines()[0])["top_k"]} == {"red", "blue"}
    status, _, err = typed("embed", place / "photos", "--model", base, "--output", tmp_path / "v.parquet")
    assert status == 0, err
    assert pq.read_table(tmp_path / "v.parquet").column_names == ["id", "embedding"]
    alone = ("evaluate", "--model", base, "--data", place / "photos", "--kind", "image-text")
    for more in (("--adapter", place), ("--task", "x"), ("--limit", 3), ("--shots", 0)):
        status, _, err = typed(*alone, *more)
        assert (status, more[0] in err, "leave" in err) == (2, True, True)
    status, _, err = typed("evaluate", "--model", base, "--data", place / "photos", "--kind", "classification")
    assert status != 0
    assert "image-text" in err


def test_service_answers_with_classes_and_refuses_pairs(classes: Run, pairs: Run, place: Path) -> None:
    from inlay.serve.hosting import host
    from inlay.workflow.answer import Request

    hosted = host(classes.folder, batch=4)
    image = (place / "photos" / "red" / "0.png").read_bytes()
    (answer,) = hosted.answer([Request(next(iter(hosted.schemas)), {}, {"image": image})])
    assert answer["label"] in image_text.COLOURS
    with pytest.raises(InlayError, match=r"has no classes, and a service answers with those"):
        host(pairs.folder, batch=4)


# ---------------------------------------------------------------------------------------------- pairs and duplicates


def test_what_belongs_together_is_no_negative(place: Path) -> None:
    backbone = inlay.load_backbone(str(place / "clip"), kind=kinds.IMAGE_TEXT)
    red, blue = (str(place / "photos" / name / "0.png") for name in ("red", "blue"))
    copied = Path(place / "again.png")
    shutil.copy(red, copied)  # another file with the same bytes is the same image
    rows = encode_pairs(
        [red, red, blue, str(copied)], ["red", "a red square", "red", "the photo"], backbone.processor, judged=False
    )
    assert len(rows.pictures) == 2
    batch = ImageTextCollator(backbone.processor)([rows[i] for i in range(4)])
    off = IGNORED
    # Rows: red (with three texts), red, blue (with one), red.
    wanted = [[1, off, off, off], [off, 1, off, off], [off, 0, 1, 0], [off, off, off, 1]]
    assert batch["labels"].tolist() == wanted
    assert batch["pixel_values"].shape[0] == batch["input_ids"].shape[0] == 4
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 3, 4]


def test_metrics_of_both_ways_against_a_count_by_hand(place: Path) -> None:
    backbone = inlay.load_backbone(str(place / "clip"), kind=kinds.IMAGE_TEXT)
    sources = [str(place / "photos" / name / "0.png") for name in ("red", "red", "blue", "green")]
    judged = encode_pairs(sources, ["a", "the", "photo", "a"], backbone.processor, judged=True).judged
    draws = np.random.default_rng(0)
    vectors = draws.normal(size=(6, 5))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    belong = {0: {3, 4}, 1: {5}, 2: {3}}  # images 0 to 2, texts 3 to 5
    found = score_both(
        ("i2t-recall@1", "t2i-recall@1", "two-way-ndcg@10", "i2t-ndcg@10", "t2i-ndcg@10"), vectors, judged
    )

    def recall(queries: dict[int, set[int]], corpus: range) -> float:
        best = {q: max(corpus, key=lambda each: vectors[q] @ vectors[each]) for q in queries}
        return float(np.mean([(best[q] in own) / len(own) for q, own in queries.items()]))

    turned = {text: {image for image, own in belong.items() if text in own} for text in range(3, 6)}
    assert found["i2t-recall@1"] == pytest.approx(recall(belong, range(3, 6)))
    assert found["t2i-recall@1"] == pytest.approx(recall(turned, range(3)))
    assert found["two-way-ndcg@10"] == pytest.approx((found["i2t-ndcg@10"] + found["t2i-ndcg@10"]) / 2)
    assert {q: set(own) for q, own in zip(reverse(judged).queries, reverse(judged).relevant, strict=True)} == turned


# ----------------------------------------------------------------------------------------------------- bad input


def test_model_with_one_tower(place: Path, tmp_path: Path) -> None:
    hf.CLIPVisionModel.from_pretrained(place / "clip").save_pretrained(tmp_path / "half")
    with pytest.raises(InlayError, match=r"cannot do image-text"):
        tune(of_classes(place, model=str(tmp_path / "half")), tmp_path / "runs", progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": "linear-probe"},
            r"trains a head alone.*`inlay evaluate --model` scores the model without training",
        ),
        ({"method": "idpg"}, r"answers by classes of its own|do not fit|has none"),
        ({"template": "a photo"}, r"uses none of the fields label"),
        ({"template": "{label} {sep}"}, r"has \{sep\}, which a caption cannot have"),
        ({"text": ("image",), "label": "label"}, r"has a text .* or a class"),
    ],
)
def test_settings_that_do_not_fit(change: dict[str, Any], message: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=message):
        tune(of_classes(place, **change), tmp_path, progress=False)


def test_rows_that_do_not_fit(place: Path, pairs: Run, tmp_path: Path) -> None:
    table = place / "pairs" / "wrong.csv"
    lines = (place / "pairs" / "pairs.csv").read_text().splitlines()
    table.write_text("\n".join([*lines[:9], "red0.png,   "]))
    told: list[str] = []
    tune(of_pairs(place, data=str(table), max_steps=1), tmp_path, progress=False, say=told.append)
    assert "wrong.csv: 1 of 9 rows dropped for missing values in 'caption' or 'image'" in told
    rows = [{"image": str(place / "pairs" / "red0.png"), "caption": each} for each in ("a red square", "  ")]
    with pytest.raises(InlayError, match=r"row 2: there is no text in the column 'caption'"):
        evaluate(pairs, rows)
    (place / "pairs" / "broken.png").write_bytes(b"\x89PNG not much of one")
    table.write_text("\n".join([*lines, "broken.png,a red square"]))
    with pytest.raises(InlayError, match=r"1 image of 65 cannot be read.*broken\.png"):
        tune(of_pairs(place, data=str(table)), tmp_path, progress=False)
    image_text.write_classes(tmp_path / "one", each=4, names=("red",))
    with pytest.raises(InlayError, match=r"one class"):
        evaluate_model(str(place / "clip"), tmp_path / "one", kind="image-text")
    with pytest.raises(InlayError, match=r"class"):
        tune(of_classes(place, data=str(tmp_path / "one")), tmp_path / "runs", progress=False)
    image_text.write_classes(tmp_path / "two", each=4, names=("red", "deep_grey"))
    (tmp_path / "two" / "red").rename(tmp_path / "two" / "deep grey")
    with pytest.raises(InlayError, match=r"have one caption, 'a photo of a deep grey'"):
        tune(of_classes(place, data=str(tmp_path / "two")), tmp_path / "runs", progress=False)


def test_a_batch_of_one_pair_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"Each part of a batch has 1 pair"):
        tune(of_pairs(place, batch_size=1), tmp_path, progress=False)


def test_labels_are_for_models_that_read_texts(place: Path, classes: Run) -> None:
    with pytest.raises(InlayError, match=r"two or more different classes"):
        load(classes, labels=["red"])
    plain = replace(load(classes).schema, kind=kinds.IMAGES)
    from inlay.workflow.loaded import with_classes

    with pytest.raises(InlayError, match=r"of kind 'image-classification'.*leave --labels"):
        with_classes(plain, ["a", "b"], None, "The run x")
