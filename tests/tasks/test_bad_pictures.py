"""Images as people have them: odd sizes and modes are handled, what cannot be is one clear error, nothing is lost."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPImageProcessorPil, ConvNextImageProcessorPil, ViTImageProcessorPil

from inlay import Spec, predict, tasks, tune
from inlay.errors import InlayError
from inlay.records.store import Run
from inlay.tasks import folders, images
from inlay.tasks.images import EncodedImages, check_all, open_rgb, pixels, trimmed

MakeSpec = Callable[..., Spec]
Maker = Callable[..., Path]
FIXED = ViTImageProcessorPil(size={"height": 16, "width": 16})
BY_EDGE = [
    ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.9),
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
]


def noise(width: int = 12, height: int = 9, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Maker:
    """Folders of class folders with a few images each."""

    def make(name: str = "photos", classes: tuple[str, ...] = ("cat", "dog"), count: int = 6) -> Path:
        for place, each in enumerate(classes):
            (tmp_path / name / each).mkdir(parents=True)
            for number in range(count):
                noise(seed=100 * place + number).save(tmp_path / name / each / f"{number}.png")
        return tmp_path / name

    return make


# ------------------------------------------------------------------------------------------------ sizes and modes


@pytest.mark.parametrize("processor", [FIXED, *BY_EDGE], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 3), (5000, 3), (3, 5000), (40000, 1)], ids=str)
def test_any_size_comes_out_as_the_model_reads_it(processor: Any, size: tuple[int, int]) -> None:
    """Also where the height is three, as many as there are channels. The longest would be 7.7 million pixels wide."""
    picture = Image.new("RGB", size, (250, 120, 10))
    encoded = EncodedImages([picture, noise()], None, processor)[0]["pixel_values"]
    assert encoded.shape == (3, 16, 16)
    levels = encoded.mean(dim=(1, 2))
    assert torch.allclose(encoded, levels[:, None, None].expand_as(encoded), atol=1e-5)
    assert levels[0] > levels[1] > levels[2]


@pytest.mark.parametrize("processor", BY_EDGE, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("size", [(900, 20), (20, 901), (700, 40)], ids=str)
def test_what_is_trimmed_would_have_been_cut_off(processor: Any, size: tuple[int, int]) -> None:
    across, down = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    waves = np.stack([np.sin(across / wide + down / 15) for wide in (13, 17, 19)], axis=-1)
    picture = Image.fromarray(np.rint(127 + 127 * waves).astype(np.uint8))
    assert max(trimmed(processor, picture).size) < max(size)
    found, wanted = pixels(processor, trimmed(processor, picture)), pixels(processor, picture)
    assert wanted.std() > 0.3
    # Up to the fraction of a pixel by which rounding the resized length moves the middle.
    torch.testing.assert_close(found, wanted, atol=0.12, rtol=0)


def test_nothing_is_trimmed_where_all_of_a_picture_is_read() -> None:
    long, usual = noise(900, 20), noise(300, 20)
    assert trimmed(FIXED, long) is long
    assert trimmed(BY_EDGE[0], usual) is usual


@given(st.lists(st.floats(-1e4, 1e5), min_size=2, max_size=12), st.sampled_from(["I", "F"]))
def test_grey_values_of_any_range_keep_their_order(values: list[float], mode: str) -> None:
    array = np.array([values], dtype=np.int32 if mode == "I" else np.float32)
    found = np.asarray(images.to_rgb(Image.fromarray(array)))[0, :, 0].astype(int)
    order = np.argsort(array[0], kind="stable")
    assert (np.diff(found[order]) >= 0).all()
    if array.min() < 0 < array.max() or array.max() > 65535:
        assert found.max() == 255


def test_values_that_are_no_numbers_are_found_before_any_work() -> None:
    stream = io.BytesIO()
    Image.fromarray(np.array([[0.5, np.nan], [np.inf, 0]], dtype=np.float32)).save(stream, "TIFF")
    with pytest.raises(InlayError, match=r"1 image of 2 cannot be read.*not finite numbers"):
        images.check_all([noise(), stream.getvalue()])


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(form: str) -> None:
    stream = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(stream, form, save_all=True, append_images=frames[1:], lossless=True)
    images.check_all([stream.getvalue()])
    assert images.open_rgb(stream.getvalue()).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "JPEG", "TIFF", "BMP"])
def test_half_a_picture_is_refused_in_every_format(form: str) -> None:
    stream = io.BytesIO()
    noise(80, 80).save(stream, form)
    images.check_all([stream.getvalue()])
    with pytest.raises(InlayError, match=r"damaged or truncated|not an image"):
        images.check_all([stream.getvalue()[: len(stream.getvalue()) // 2]])


# ----------------------------------------------------------------------------------------------------- folders


def names(found: Path) -> list[str]:
    (table,) = folders.read_folder(found).values()
    return [str(Path(row["image"]).relative_to(found)) for row in table.rows]


def test_what_systems_leave_behind_is_no_picture_at_any_depth(folder: Maker) -> None:
    photos = folder(count=1)
    for hidden in ("cat/.cache/t.png", "cat/__MACOSX/t.png", "cat/._0.png", "__MACOSX/cat/t.png", "dog/Thumbs.db"):
        (photos / hidden).parent.mkdir(parents=True, exist_ok=True)
        (photos / hidden).write_bytes(b"x")
    assert names(photos) == ["cat/0.png", "dog/0.png"]
    assert folders.read_folder(photos)["all"].notes == ["photos: each folder is a class: cat, dog"]


def test_pictures_beside_the_class_folders_are_said_to_be_left_out(folder: Maker) -> None:
    photos = folder(count=1)
    noise().save(photos / "loose.png")
    assert names(photos) == ["cat/0.png", "dog/0.png"]
    assert folders.read_folder(photos)["all"].notes == [
        "photos: each folder is a class: cat, dog",
        "1 file that is no example was left out (loose.png)",
    ]


def test_links_are_followed_once_and_those_to_nowhere_are_refused(
    folder: Maker, tmp_path: Path, spec: MakeSpec
) -> None:
    photos, elsewhere = folder(), folder("elsewhere", ("more",), 2)
    (photos / "cat" / "linked").symlink_to(elsewhere / "more")
    (photos / "cat" / "linked" / "back").symlink_to(photos / "cat")
    (photos / "cat" / "dir.png").mkdir()
    assert len(names(photos)) == 14
    (photos / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(InlayError, match=r"1 image of 15 cannot be read\. .*gone\.png': No such file"):
        tasks.load(spec(data=photos))


def test_a_folder_around_the_classes_is_not_taken_for_a_class(folder: Maker, tmp_path: Path, spec: MakeSpec) -> None:
    inner = folder("wrapped/photos")
    with pytest.raises(InlayError, match=r"only the folder 'photos'.*\(cat, dog\) are the classes, give '.*photos'"):
        tasks.load(spec(data=tmp_path / "wrapped"))
    assert len(tasks.load(spec(data=inner)).train)
    with pytest.raises(InlayError, match="has only 'cat': a classifier needs at least two classes"):
        tasks.load(spec(data=folder("single", ("cat",))))


def test_a_picture_is_no_data_set(folder: Maker, spec: MakeSpec) -> None:
    with pytest.raises(InlayError, match=r"not a table that can be read.*a folder for each class"):
        tasks.load(spec(data=folder() / "cat" / "0.png"))


def test_class_folders_whose_names_are_nearly_the_same(folder: Maker, spec: MakeSpec) -> None:
    task = tasks.load(spec(data=folder("case", ("Cat", "cat", "dog"))))
    assert task.label_names == ("Cat", "cat", "dog")
    assert any("'Cat' and 'cat'; rename them if they are not" in note for note in task.notes)
    task = tasks.load(spec(data=folder("space", ("cat", "cat ", "dog"))))
    assert task.label_names == ("cat", "dog")
    assert "the folders 'cat', 'cat ' are one class" in task.notes
    assert not any("capital" in note for note in task.notes)


@pytest.mark.parametrize("where", ["validation", "test", "new"])
def test_classes_that_the_head_does_not_know(folder: Maker, spec: MakeSpec, where: str) -> None:
    train = folder("photos/train")
    other = folder(f"photos/{where}" if where != "new" else "new", ("cat", "emu"), 2)
    options = {"data": train, "test_data": other} if where == "new" else {"data": train.parent}
    with pytest.raises(InlayError, match=r"labels that do not occur in training: 'emu' \(2 rows\)\. Known: cat, dog"):
        tasks.load(spec(**options))


def test_a_test_set_may_lack_classes(folder: Maker, spec: MakeSpec) -> None:
    task = tasks.load(spec(data=folder(), test_data=folder("new", ("dog",), 2)))
    assert list(task.test["label"]) == [1, 1]


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that everybody can reach, with the rights of nobody where the tests are run by the superuser."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o777)
        superuser = os.geteuid() == 0
        if superuser:
            os.seteuid(65534)
        try:
            yield Path(made)
        finally:
            if superuser:
                os.seteuid(0)


def test_what_may_not_be_read_is_named(as_nobody: Path) -> None:
    for each in ("cat", "dog"):
        (as_nobody / "photos" / each / "deep").mkdir(parents=True)
        noise().save(as_nobody / "photos" / each / "0.png")
    secret = as_nobody / "photos" / "cat" / "0.png"
    secret.chmod(0)
    rows = folders.read_folder(as_nobody / "photos")["all"].rows
    with pytest.raises(InlayError, match=r"1 image of 2 cannot be read\. .*cat/0\.png': Permission denied"):
        images.check_all([row["image"] for row in rows])
    deep = as_nobody / "photos" / "cat" / "deep"
    for closed in (deep, as_nobody / "photos"):
        closed.chmod(0)
        with pytest.raises(InlayError, match=f"Cannot read the folder '{closed}': Permission denied"):
            folders.read_folder(as_nobody / "photos")
        closed.chmod(0o700)


# -------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def run(image_model: Path, folder: Maker, tmp_path: Path) -> Run:
    """A run on images of every size and mode."""
    photos = folder()
    for number, mode in enumerate(("L", "LA", "1", "P", "RGBA", "CMYK", "I;16")):
        grey = noise().convert("L")
        picture = Image.fromarray(np.asarray(grey, dtype=np.uint16) * 256) if mode == "I;16" else noise().convert(mode)
        picture.save(photos / "cat" / f"mode{number}.{'tiff' if mode == 'CMYK' else 'png'}")
    noise(1, 1).save(photos / "dog" / "dot.png")
    noise(2000, 3).save(photos / "dog" / "line.png")
    turned = Image.Exif()
    turned[0x112] = 6
    noise().save(photos / "dog" / "turned.jpg", exif=turned)
    spec = Spec(model=str(image_model), data=str(photos), method="linear-probe", max_steps=1, batch_size=8)
    return tune(spec, tmp_path / "runs", progress=False)


def test_a_run_on_odd_pictures_and_its_predictions(run: Run, folder: Maker, tmp_path: Path) -> None:
    assert all(np.isfinite(value) for found in run.record["metrics"].values() for value in found.values())
    assert sum(run.record["examples"].values()) == 22
    photos = Path(run.spec.data or "")
    answers = predict(run.folder, photos)
    assert len(answers) == 22
    assert all(np.isfinite(answer["score"]) for answer in answers)
    assert len(predict(run.folder, folder("strange", ("emu",), 3))) == 3  # classes of new data do not matter
    one = predict(run.folder, photos / "dog" / "line.png")
    (same,) = (answer for answer in answers if answer["image"].endswith("line.png"))
    assert one == [same | {"score": pytest.approx(same["score"], abs=1e-6)}]

    output = tmp_path / "answers.jsonl"
    (photos / "dog" / "empty.png").touch()
    (photos / "dog" / "text.jpg").write_text("no image")
    with pytest.raises(InlayError, match=r"2 images of 24 cannot be read.*empty file.*not an image"):
        predict(run.folder, photos, output)
    assert not output.exists()


def test_inputs_that_are_no_pictures(run: Run, tmp_path: Path) -> None:
    refused: dict[str, tuple[str, str]] = {
        "a.psd": ("x", "is neither an image .* nor a table of images"),
        "gaps.csv": ('image,label\n"",cat\n', "'gaps.csv', row 1: there is no image in the column 'image'"),
        "other.csv": ("photo\nx\n", "lacks the column 'image'"),
        "absent.csv": ("image\nx.png\n", "1 image of 1 cannot be read.*No such file"),
    }
    for name, (text, message) in refused.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InlayError, match=message):
            predict(run.folder, tmp_path / name)
    (tmp_path / "nothing").mkdir()
    for name, message in {"nothing": "There is no image in", "gone": "There is no file"}.items():
        with pytest.raises(InlayError, match=message):
            predict(run.folder, tmp_path / name)


def test_no_picture_starts_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's reader of EPS calls Ghostscript, which is a language of its own: what is sent in is not given to it."""
    called = tmp_path / "called"
    fake = tmp_path / "gs"
    fake.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    for use in (open_rgb, lambda data: check_all([data])):
        with pytest.raises(InlayError, match="not an image"):
            use(eps)
    assert not called.exists()
