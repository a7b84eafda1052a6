"""What was read is said: how many rows, of how many classes, for what; which folders as what; HEIC and JPEG 2000."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, features

from inlay import Spec
from inlay.errors import InlayError
from inlay.tasks import heif, images, loading
from inlay.tasks.counting import count

COLOURS = {"blue": (20, 30, 200), "green": (30, 200, 40), "red": (220, 20, 30)}


def photos(folder: Path, each: int = 8, ending: str = ".png") -> Path:
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            image = Image.new("RGB", (16, 12), tuple(min(255, part + number) for part in colour))
            image.save(folder / name / f"{number}{ending}")
    return folder


def load(data: Path, **changes: object):
    return loading.load(Spec(model="x", method="bias", data=str(data), **changes))


def test_rows_classes_and_splits_are_counted(tmp_path: Path) -> None:
    task = load(photos(tmp_path / "photos", 10))
    assert count(task) == "30 images, 3 classes (10 each): 22 / 2 / 6 for training, validation, test"
    assert "photos: each folder is a class: blue, green, red" in task.notes
    shutil.rmtree(tmp_path / "photos" / "red")
    (tmp_path / "photos" / "blue" / "0.png").unlink()
    assert count(load(tmp_path / "photos")).startswith("19 images, 2 classes (9 to 10 each): ")


@pytest.mark.parametrize("folders", [("",), ("train", "val", "test")])
def test_what_a_draw_leaves_out_was_read_and_is_not_used(tmp_path: Path, folders: tuple[str, ...]) -> None:
    for name in folders:
        photos(tmp_path / "photos" / name, 30 // len(folders))
    whole, task = load(tmp_path / "photos"), load(tmp_path / "photos", shots=6)
    held = len(whole.validation) + len(whole.test)
    assert count(whole).startswith("90 images, 3 classes (30 each): ")
    assert count(task).startswith(f"90 images; used: {6 + held} images, 3 classes (")
    assert count(task).endswith(f": 6 / {len(whole.validation)} / {len(whole.test)} for training, validation, test")


def test_a_table_of_texts_and_amounts(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("body,price\n" + "".join(f"text {n},{n}.5\n" for n in range(20)))
    task = load(tmp_path / "x.csv", text=("body",), label="price", kind="regression")
    assert count(task) == "20 rows: 14 / 2 / 4 for training, validation, test"


def test_folders_are_said_by_the_split_they_are_taken_as(tmp_path: Path) -> None:
    for name, each in (("Training", 6), ("val", 2), ("holdout", 3)):
        photos(tmp_path / "d" / name, each)
    task = load(tmp_path / "d")
    assert "taken as training: 'Training', validation: 'val', test: 'holdout'" in task.notes or (
        "taken as training: 'Training', test: 'holdout', validation: 'val'" in task.notes
    )
    assert count(task) == "33 images, 3 classes (11 each): 18 / 6 / 9 for training, validation, test"


@pytest.mark.skipif(not features.check("jpg_2000"), reason="this build of Pillow has no JPEG 2000")
def test_jpeg_2000_is_read_and_named(tmp_path: Path) -> None:
    task = load(photos(tmp_path / "photos", ending=".jp2"))
    assert "24 of 24 images are JPEG 2000" in task.notes
    assert count(task).startswith("24 images, 3 classes (8 each)")


def test_heic_is_read_as_it_is_turned(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    assert heif.register()
    folder = photos(tmp_path / "photos", 4)
    photos(folder, 4, ".heic")
    task = load(folder)
    assert "12 of 24 images are HEIC" in task.notes
    turned = Image.new("RGB", (16, 12), "red")
    turned.paste((0, 0, 255), (0, 0, 8, 12))
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by a quarter, as telephones write it
    data = io.BytesIO()
    turned.save(data, "HEIF", exif=exif.tobytes(), quality=100)
    found = images.open_rgb(data.getvalue())
    assert found.size == (12, 16)
    assert found.getpixel((6, 2))[2] > 200  # what was left is above
    assert found.getpixel((6, 13))[0] > 200


WITHOUT = """
import sys
sys.modules["pillow_heif"] = None  # as where it is not installed
from pathlib import Path
from inlay import Spec
from inlay.errors import InlayError
from inlay.tasks import images, loading
try:
    loading.load(Spec(model="x", method="bias", data=sys.argv[1]))
except InlayError as error:
    print(error)
try:
    images.open_rgb(Path(sys.argv[2]).read_bytes())
except InlayError as error:
    print(error)
"""


def test_without_its_reader_heic_is_counted_in_one_error(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    assert heif.register()
    folder = photos(photos(tmp_path / "photos", 4), 3, ".heic")
    (folder / "red" / "9.png").write_bytes(b"no image")
    renamed = folder / "red" / "10.jpg"  # as some programs name them
    shutil.copy(folder / "red" / "0.heic", renamed)
    done = subprocess.run([sys.executable, "-c", WITHOUT, folder, renamed], capture_output=True, text=True, check=True)
    whole, one = done.stdout.splitlines()
    assert whole.startswith("11 images of 23 cannot be read. 10 are HEIC, which need pillow-heif ('")
    assert "pip install 'inlay[heif]', or save them as JPEG. '" in whole
    assert whole.endswith("9.png' is not an image. Mend or remove the files and try again.")
    assert one == "'an image inside the table' is a HEIC image, which needs pillow-heif."


def test_other_containers_are_not_taken_for_heic() -> None:
    with pytest.raises(InlayError, match="is not an image"):
        images.open_rgb(b"\x00\x00\x00\x18ftypmp42" + bytes(40))
