"""What `predict` takes and gives: images in every form, the likeliest classes, and what cannot be read left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import inlay
from inlay import InlayError, Spec, tune

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
QUICK: dict[str, Any] = {"max_steps": 4, "batch_size": 8, "learning_rate": 0.05}


@pytest.fixture
def of_images(image_model: Path, photos: Path, tmp_path: Path) -> Any:
    run = tune(
        Spec(model=str(image_model), data=str(photos), method="bias", **QUICK), tmp_path / "runs", progress=False
    )
    return inlay.load(run)


@pytest.fixture
def of_texts(review_spec: Spec, tmp_path: Path) -> Any:
    return inlay.load(tune(review_spec, tmp_path / "runs", progress=False))


def test_a_photo_that_is_not_loaded_yet_is_read_whole(of_images: Any, tmp_path: Path) -> None:
    """A JPEG that Pillow has only opened is the same photo as its file; and it is not made smaller for its owner."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((400, 300)).save(tmp_path / "photo.jpg")
    opened = Image.open(tmp_path / "photo.jpg")
    (wanted,), (found,) = of_images.predict([str(tmp_path / "photo.jpg")]), of_images.predict([opened])
    assert (found["label"], found["score"]) == (wanted["label"], pytest.approx(wanted["score"], abs=1e-6))
    assert np.asarray(opened).shape == (300, 400, 3)


def test_an_image_in_every_form(of_images: Any, photos: Path) -> None:
    """Paths, Pillow's, arrays, bytes; one, a list, a batch of arrays, a column of a table."""
    pandas = pytest.importorskip("pandas")
    paths = sorted((photos / "bright").glob("*.png"))[:3]
    images = [Image.open(path).convert("RGB").resize((30, 30)) for path in paths]
    arrays = [np.asarray(image) for image in images]
    wanted = of_images.predict(images)
    assert [list(each) for each in wanted] == [["label", "score"]] * 3, "the image itself does not come back"
    for given in (
        arrays,
        np.stack(arrays),
        tuple(arrays),
        [{"image": array} for array in arrays],
        {"image": arrays},
        pandas.DataFrame({"image": images}),
    ):
        assert of_images.predict(given) == wanted
    (alone,) = of_images.predict(images[0])
    assert [alone] == of_images.predict(arrays[0])
    assert (alone["label"], alone["score"]) == (wanted[0]["label"], pytest.approx(wanted[0]["score"], abs=1e-6))
    grey = np.asarray(images[0].convert("L"))
    assert of_images.predict(grey) == of_images.predict(grey[..., None]) == of_images.predict([images[0].convert("L")])
    by_path = of_images.predict(paths)
    assert [each["image"] for each in by_path] == paths, "as it was given"
    assert [{**each, "image": str(each["image"])} for each in by_path] == of_images.predict([*map(str, paths)])
    assert [each["label"] for each in of_images.predict([path.read_bytes() for path in paths])] == [
        each["label"] for each in by_path
    ]
    frame = pandas.DataFrame({"id": [7, 8, 9], "image": [str(path) for path in paths], "who": ["a", "b", "c"]})
    found = of_images.predict(frame)
    assert [(each["id"], each["who"], each["image"]) for each in found] == [
        (7, "a", str(paths[0])), (8, "b", str(paths[1])), (9, "c", str(paths[2]))
    ]  # fmt: skip
    assert [each["score"] for each in found] == [each["score"] for each in by_path]


@pytest.mark.parametrize("array", [np.zeros((4, 4, 3)), np.zeros((4, 4, 5), np.uint8), np.zeros((0, 4), np.uint8)])
def test_an_array_that_is_no_image(array: np.ndarray, of_images: Any) -> None:
    with pytest.raises(InlayError, match=r"an array of shape .* Give uint8"):
        of_images.predict([array])


def test_the_likeliest_classes(of_texts: Any, typed: Any, tmp_path: Path) -> None:
    rows = [{"id": 7, "body": "w1 w1 w8"}, {"id": 8, "body": "w2 w2"}]
    every = of_texts.predict(rows, probabilities=True)
    for count in (1, 2, 3, 9):
        for answer, whole in zip(of_texts.predict(rows, top_k=count), every, strict=True):
            assert list(answer) == ["id", "body", "label", "score", "top_k"]
            shares = sorted(whole["probabilities"].items(), key=lambda item: -item[1])[:count]
            assert [(each["label"], each["score"]) for each in answer["top_k"]] == shares
            assert answer["top_k"][0] == {"label": answer["label"], "score": answer["score"]}
    both = of_texts.predict(rows, probabilities=True, top_k=2)
    assert list(both[0]) == ["id", "body", "label", "score", "top_k", "probabilities"]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, err = typed("predict", "--run", of_texts.run.folder, "--input", "new.jsonl", "--top-k", "2")
    assert status == 0, err
    assert [json.loads(line) for line in out.splitlines()] == of_texts.predict(rows, top_k=2)
    assert typed("predict", "--run", of_texts.run.folder, "--input", "new.jsonl", "--top-k", "0")[0] == 2
    with pytest.raises(InlayError, match="top_k=0"):
        of_texts.predict(rows, top_k=0)


def test_one_bad_file_does_not_halt_a_folder(of_images: Any, photos: Path, typed: Any, tmp_path: Path) -> None:
    new = tmp_path / "new"
    shutil.copytree(photos / "dark", new)
    whole = {Path(each["image"]).name: each for each in of_images.predict(new)}
    (new / "3.png").write_bytes((new / "3.png").read_bytes()[:40])
    (new / "note.jpg").write_text("no image")
    with pytest.raises(InlayError, match="2 images of 16 cannot be read"):
        of_images.predict(new)
    run = of_images.run.folder
    status, _, err = typed("predict", "--run", run, "--input", "new", "--skip-unreadable", "--output", "o.jsonl")
    assert status == 0, err
    assert "left out 2 of 16 rows" in err
    assert "3.png" in err
    assert "note.jpg" in err
    found = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(found) == 14
    for each in found:
        assert each["label"] == whole[Path(each["image"]).name]["label"]
        assert each["score"] == pytest.approx(whole[Path(each["image"]).name]["score"], abs=1e-6)
    paths = [str(new / name) for name in ("1.png", "3.png", "2.png")]
    assert [each["image"] for each in of_images.predict(paths, skip_unreadable=True)] == [paths[0], paths[2]]
    assert list(of_images.left_out) == [1]
    of_images.predict(paths[:1], skip_unreadable=True)
    assert of_images.left_out == {}
    with pytest.raises(InlayError, match="None of the 1 rows can be read"):
        of_images.predict([new / "note.jpg"], skip_unreadable=True)


def test_rows_without_a_text_are_left_out(of_texts: Any) -> None:
    rows = [{"id": 1, "body": "w1"}, {"id": 2, "body": None}, {"id": 3}, {"id": 4, "body": "w2"}]
    with pytest.raises(InlayError):
        of_texts.predict(rows)
    found = of_texts.predict(rows, skip_unreadable=True)
    assert [each["id"] for each in found] == [1, 4]
    assert sorted(of_texts.left_out) == [1, 2]
    assert found == of_texts.predict([rows[0], rows[3]])


def test_only_classes_have_likeliest_ones(review_spec: Spec, tmp_path: Path) -> None:
    rows = [{"body": f"w{6 + i % 9} w{8 + i % 31}", "price": 100.0 + 37.5 * (i % 9)} for i in range(60)]
    (tmp_path / "prices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = review_spec.with_(data=str(tmp_path / "prices.jsonl"), label="price")
    run = tune(spec, tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match=r"the likeliest classes are those of a row's classes.*--top-k"):
        inlay.load(run).predict(["w1"], top_k=2)


def test_a_table_of_paths_for_a_run_trained_on_a_folder(of_images: Any, photos: Path, tmp_path: Path) -> None:
    """The column may have any name; the others come back. Two that may be meant, and none, are errors."""
    paths = sorted((photos / "bright").glob("*.png"))[:3]
    wanted = of_images.predict(paths)
    rows = [f"{number},photos/bright/{path.name},bright" for number, path in enumerate(paths)]
    for name in ("path", "image", "file name"):
        table = tmp_path / "paths.csv"
        table.write_text("\n".join([f"id,{name},label", *rows]) + "\n")
        found = of_images.predict(table)
        assert [each["id"] for each in found] == ["0", "1", "2"]
        assert [each[name] for each in found] == [f"photos/bright/{path.name}" for path in paths], "as it was given"
        assert [each["predicted_label"] for each in found] == [each["label"] for each in wanted]
        scored = of_images.evaluate(table)
        assert scored.examples == 3
        assert scored.metrics["accuracy"] == np.mean([each["label"] == "bright" for each in wanted])
    assert [each["label"] for each in of_images.predict([{"file": path} for path in paths])] == [
        each["label"] for each in wanted
    ]
    table.write_text(f"id,one,two\n1,{paths[0]},{paths[1]}\n")
    with pytest.raises(InlayError, match=r"'paths.csv' lacks the column 'image'.*several do \('one', 'two'\)"):
        of_images.predict(table)
    table.write_text("id,words\n1,no image\n")
    with pytest.raises(InlayError, match=r"columns \('id', 'words'\) one should hold images .*: none does"):
        of_images.predict(table)
    with pytest.raises(InlayError, match="rows lacks the column 'image'"):
        of_images.predict([{"a": 1}])
    table.write_text("id,path\n1,photos/bright/0.png\n2,\n3,photos/none.png\n")
    assert [each["id"] for each in of_images.predict(table, skip_unreadable=True)] == ["1"]
    assert set(of_images.left_out) == {1, 2}
