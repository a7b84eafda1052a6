"""Images: modes, orientation, faults, and a cache that changes nothing."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inlay.errors import InlayError
from inlay.tasks import images
from inlay.tasks.images import EncodedImages, ImageCollator


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def noise(size: tuple[int, int] = (20, 30), seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def colour(data: bytes, at: tuple[int, int] = (1, 1)) -> tuple[int, ...]:
    picture = images.open_rgb(data)
    assert picture.mode == "RGB"
    return picture.getpixel(at)


def test_transparency_is_over_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert colour(encoded(clear)) == (255, 255, 255)
    assert all(abs(value - 127) <= 1 for value in colour(encoded(half)))
    assert colour(encoded(Image.new("LA", (4, 4), (10, 0)))) == (255, 255, 255)
    assert colour(encoded(Image.new("LA", (4, 4), (10, 255)))) == (10, 10, 10)


def test_palettes_with_and_without_transparency() -> None:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, 200, 30, 40])
    assert colour(encoded(picture)) == (200, 30, 40)
    assert colour(encoded(picture, transparency=1)) == (255, 255, 255)
    assert colour(encoded(picture, "GIF", transparency=1)) == (255, 255, 255)


def test_grey_black_and_white_cmyk_and_sixteen_bits() -> None:
    assert colour(encoded(Image.new("L", (4, 4), 77))) == (77, 77, 77)
    assert colour(encoded(Image.new("1", (4, 4), 1))) == (255, 255, 255)
    red = colour(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert red[0] > 200
    assert max(red[1:]) < 60
    deep = Image.fromarray(np.full((4, 4), 32768, dtype=np.uint16))
    assert colour(encoded(deep)) == (128, 128, 128)
    dark = Image.fromarray(np.full((4, 4), 257, dtype=np.uint16))
    assert colour(encoded(dark)) == (1, 1, 1)
    assert images.to_rgb(Image.fromarray(np.full((4, 4), 65535, dtype=np.int32))).getpixel((0, 0)) == (255, 255, 255)
    assert images.to_rgb(Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32))).getpixel((0, 0)) == (128, 128, 128)


def test_the_orientation_tag_is_applied() -> None:
    picture = Image.new("RGB", (8, 4), "black")
    picture.paste((255, 255, 255), (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter to the right
    turned = images.open_rgb(encoded(picture, "PNG", exif=exif))
    assert turned.size == (4, 8)
    assert turned.getpixel((1, 1)) == (255, 255, 255)
    assert turned.getpixel((1, 6)) == (0, 0, 0)


def test_every_source_of_a_picture_opens(tmp_path: Path) -> None:
    data = encoded(noise())
    (tmp_path / "a.png").write_bytes(data)
    sources = [data, tmp_path / "a.png", str(tmp_path / "a.png"), {"bytes": data, "path": None}, noise()]
    sources.append({"bytes": None, "path": str(tmp_path / "a.png")})
    shown = {images.open_rgb(source).tobytes() for source in sources}
    assert len(shown) == 1


def test_faults_are_named(tmp_path: Path) -> None:
    good = tmp_path / "good.jpg"
    good.write_bytes(encoded(noise((200, 200)), "JPEG"))
    cases = {
        "text.jpg": (b"not an image at all", "is not an image"),
        "empty.png": (b"", "is an empty file"),
        "cut.jpg": (good.read_bytes()[:-2000], "damaged or truncated"),
        "cut.png": (encoded(noise((100, 100)))[:2000], "damaged or truncated"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InlayError, match=f"{name}' .*{message}|{name}' {message}"):
            images.open_rgb(tmp_path / name)
    with pytest.raises(InlayError, match="No such file"):
        images.open_rgb(tmp_path / "absent.png")
    with pytest.raises(InlayError, match=r"4 images of 5 cannot be read\..*cut\.jpg.*cut\.png.*empty\.png.*text\.jpg"):
        images.check_all([good, *(tmp_path / name for name in sorted(cases))])
    images.check_all([good])


def test_many_faults_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"9 images of 9 cannot be read.*And 4 more"):
        images.check_all([b"x"] * 9)


def test_warnings_of_the_library_are_kept_from_the_user() -> None:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, 200, 30, 40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images.open_rgb(encoded(picture, transparency=bytes([0, 128])))


def test_the_filters_of_warnings_are_left_as_they_were(processor: Any) -> None:
    before = list(warnings.filters)
    sources = [encoded(noise(seed=i)) for i in range(40)]
    images.check_all(sources)
    EncodedImages(sources, None, processor)
    assert warnings.filters == before


def test_the_cache_gives_the_processors_own_tensors(processor: Any) -> None:
    sources = [encoded(noise((20 + i, 40 - i), i)) for i in range(6)]
    kept = EncodedImages(sources, [0, 1, 0, 1, 0, 1], processor)
    lazy = EncodedImages(sources, [0, 1, 0, 1, 0, 1], processor, limit=0)
    assert kept._kept is not None
    assert kept._kept.dtype == torch.uint8
    assert lazy._kept is None
    for i, source in enumerate(sources):
        direct = processor(images.open_rgb(source), return_tensors="pt")["pixel_values"][0]
        assert torch.equal(kept[i]["pixel_values"], direct)
        assert torch.equal(lazy[i]["pixel_values"], direct)
        assert kept[i]["labels"] == i % 2


def test_a_processor_that_is_not_value_by_value_is_cached_as_it_is() -> None:
    class Centred:
        """Subtracts the image's own mean: no table of values can do that."""

        def __call__(self, image: Image.Image, return_tensors: str, **_: Any) -> dict[str, torch.Tensor]:
            pixels = torch.from_numpy(np.asarray(image.resize((8, 8)), dtype=np.float32)).permute(2, 0, 1)
            return {"pixel_values": (pixels - pixels.mean())[None]}

    sources = [encoded(noise(seed=i)) for i in range(3)]
    kept = EncodedImages(sources, None, Centred())
    assert kept._kept is not None
    assert kept._kept.dtype == torch.float32
    direct = Centred()(images.open_rgb(sources[2]), "pt")["pixel_values"][0]
    assert torch.equal(kept[2]["pixel_values"], direct)
    assert "labels" not in kept[2]


def test_batches_of_pictures(processor: Any) -> None:
    data = EncodedImages([encoded(noise(seed=i)) for i in range(2)], [3, 4], processor)
    batch = ImageCollator()([data[0], data[1]])
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    assert batch["labels"].tolist() == [3, 4]
    at_once = data.__getitems__([1, 0, 1])
    together = ImageCollator()(at_once)
    assert together["pixel_values"].data_ptr() == at_once[0]["pixel_values"].data_ptr()  # nothing was copied
    assert torch.equal(together["pixel_values"], batch["pixel_values"][[1, 0, 1]])
    assert together["labels"].tolist() == [4, 3, 4]


def test_pictures_that_come_out_unequal_are_refused() -> None:
    from transformers import CLIPImageProcessorPil

    uncropped = CLIPImageProcessorPil(size={"shortest_edge": 16}, do_center_crop=False)
    sources = [encoded(noise((20, 30))), encoded(noise((30, 20)))]
    with pytest.raises(InlayError, match="images of different sizes"):
        EncodedImages(sources, None, uncropped)
    lazy = EncodedImages(sources, None, uncropped, limit=0)
    with pytest.raises(InlayError, match="images of different sizes"):
        ImageCollator()([lazy[0], lazy[1]])
