"""Images: opened with their faults named, turned to RGB, preprocessed once, kept compactly.

A processor's rescaling and normalisation act on each value of each channel by itself. So what is kept of an image is
the resized 8-bit pixels, a quarter of the float tensor, and a table of 256 values a channel gives the processor's own
result to the bit. Where a processor does anything else, the tensors themselves are kept.
"""

from __future__ import annotations

import functools
import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from inlay.errors import InlayError, unknown
from inlay.records.spec import AUGMENTS
from inlay.tasks import heif
from inlay.tasks.tables import check_regular

AREAS = (0.08, 1.0)  # of the image
SHAPES = (3 / 4, 4 / 3)  # width / height
TRIES = 10
BICUBIC = Image.Resampling.BICUBIC


@dataclass(frozen=True)
class Augmentation:
    """What is done to the images of a training split: half of them mirrored, all of them cropped, or both."""

    kind: str
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in AUGMENTS:
            raise unknown("augment", self.kind, AUGMENTS)

    @property
    def crops(self) -> bool:
        return "crop" in self.kind

    def __call__(
        self,
        image: Image.Image,
        size: tuple[int, int],
        epoch: int,
        index: int,
        resample: int = Image.Resampling.BICUBIC,
    ) -> Image.Image:
        """The image as epoch `epoch` sees it; a cropped one has `size`, width and height."""
        draws = np.random.default_rng([self.seed, epoch, index])
        if self.crops:
            image = image.resize(size, resample, box=crop_box(image.size, draws))
        if "flip" in self.kind and draws.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image


def crop_box(size: tuple[int, int], draws: np.random.Generator) -> tuple[int, int, int, int]:
    """A part of an image: left, top, right and bottom.

    Its share of the area is drawn evenly from `AREAS`, the logarithm of its width over its height evenly from that of
    `SHAPES`. Where none of ten draws fits into the image, which is then very long or very small, it is the largest
    part in the middle whose shape is allowed.
    """
    width, height = size
    for _ in range(TRIES):
        area = width * height * draws.uniform(*AREAS)
        shape = math.exp(draws.uniform(math.log(SHAPES[0]), math.log(SHAPES[1])))
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(draws.integers(width - wide + 1)), int(draws.integers(height - high + 1))
            return left, top, left + wide, top + high
    wide = max(1, min(width, round(height * SHAPES[1])))
    high = max(1, min(height, round(width / SHAPES[0])))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


CACHE_LIMIT = 1 << 30
# As Pillow names them.
FORMATS = ("JPEG", "MPO", "HEIF", "JPEG2000", "PNG", "WEBP", "AVIF", "BMP", "DIB", "GIF", "TIFF", "PPM", "ICO", "TGA")
LONGEST = 16  # times as long as it is wide an image needs to be for its middle
_THREADS = min(4, os.cpu_count() or 1)
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image as 8-bit RGB: turned as its EXIF data say, transparency over white, deeper values scaled down.

    Of several frames the first is taken.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F", *_SIXTEEN_BITS):
        image = Image.fromarray(_eight_bits(np.asarray(image, dtype=np.float64), image.mode))
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey values of other ranges as 0 to 255.

    "I" and "F" do not say their range: it is the smallest usual one that holds the values, and where some are negative
    (heights, temperatures) what lies between the least and the greatest.
    """
    if not np.isfinite(values).all():
        raise ValueError("some of its values are not finite numbers")
    least, greatest = float(values.min()), float(values.max())
    usual = {"I": (255, 65535), "F": (1, 255, 65535)}.get(mode, (65535,))
    if least < 0:
        values, greatest = values - least, greatest - least
    top = greatest if least < 0 else next((value for value in usual if greatest <= value), greatest)
    return np.rint(values * (255.0 / top if top else 0.0)).astype(np.uint8)


def trimmed(processor: Any, image: Image.Image) -> Image.Image:
    """A very long image without ends that the processor would cut off anyway, but only after enlarging them.

    Processors that resize the shorter edge and keep the middle would make gigabytes of an image of 5000 x 3.
    """
    size = getattr(processor, "size", None)
    by_edge = size.get("shortest_edge") if isinstance(size, Mapping) else getattr(size, "shortest_edge", None)
    width, height = image.size
    over = max(width, height) - LONGEST * min(width, height)
    if not by_edge or over <= 0:
        return image
    cut = over // 2  # on either side: the middle stays where it is
    return image.crop((cut, 0, width - cut, height) if width > height else (0, cut, width, height - cut))


def name_of(source: Any) -> str:
    """What to call an image in a message."""
    if isinstance(source, Mapping):
        return str(source.get("path") or "an image inside the table")
    return str(source) if isinstance(source, str | Path) else "an image inside the table"


def raw_bytes(source: Any) -> bytes | None:
    """The encoded image, if `source` (a path, bytes, or the hub's {"bytes", "path"}) has one; None for PIL images."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str | Path):
        try:
            check_regular(Path(source))
            return Path(source).read_bytes()
        except OSError as error:
            raise InlayError(f"Cannot read the image {str(source)!r}: {error.strerror or error}.") from error
    return source if isinstance(source, bytes) else None


def open_image(data: bytes) -> Image.Image:
    """The image in these bytes, its pixels not read yet. Only by readers that run in this process: Pillow's reader of
    EPS starts Ghostscript on whatever it is given."""
    return Image.open(io.BytesIO(data), formats=_formats())


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    heif.register()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def open_rgb(source: Any) -> Image.Image:
    """The image as 8-bit RGB, or a clear error that names it."""
    with _quietly():
        return _opened(source, to_rgb)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without Pillow's warnings of palettes and odd EXIF blocks, which are handled.

    Filters of warnings belong to the whole process: around a pool of threads, never inside one of them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _opened(source: Any, use: Callable[[Image.Image], Any]) -> Any:
    data: bytes | None = None
    try:
        if isinstance(source, Image.Image):
            return use(source)
        data = raw_bytes(source)
        if not data:
            raise InlayError(f"{name_of(source)!r} is an empty file, not an image.")
        with open_image(data) as image:
            return use(image)
    except InlayError:
        raise
    except Image.UnidentifiedImageError:
        raise InlayError(f"{name_of(source)!r} is {heif.describe(data)}.") from None
    except Image.DecompressionBombError as error:
        raise InlayError(f"{name_of(source)!r} is too large to open safely: {error}.") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise InlayError(f"{name_of(source)!r} is a damaged or truncated image: {error}.") from None


def _decode_cheaply(image: Image.Image) -> str:
    """Read the whole image; JPEGs at an eighth of their size, which finds truncation all the same. Its format."""
    image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
    return _decode(image)


def _decode(image: Image.Image) -> str:
    """Read the whole image. Its format."""
    image.load()
    if image.mode == "F":
        to_rgb(image)  # it may hold values that are no numbers
    return image.format or ""


def from_array(values: np.ndarray, where: str) -> Image.Image:
    """The image in an array of NumPy's: whole numbers from 0 to 255, height x width, perhaps x 1, 3 or 4 channels."""
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    fits = values.ndim == 2 or (values.ndim == 3 and values.shape[-1] in (3, 4))
    if values.dtype != np.uint8 or not fits or 0 in values.shape:
        raise InlayError(
            f"{where}: an array of shape {values.shape} and type {values.dtype} is taken for no image. Give uint8, "
            "from 0 to 255, as height x width or height x width x 3 (RGB)."
        )
    return Image.fromarray(np.ascontiguousarray(values))


def faults(sources: Sequence[Any]) -> list[str | None]:
    """Why each image cannot be read; None for those that can."""
    return [fault for fault, _ in _tried(sources)]


def _tried(sources: Sequence[Any]) -> list[tuple[str | None, str]]:
    """Of each image why it cannot be read, None where it can, and its format."""

    def tried(source: Any) -> tuple[str | None, str]:
        try:
            # An image of the user's that is not loaded yet would stay at an eighth of its size.
            return None, _opened(source, _decode if isinstance(source, Image.Image) else _decode_cheaply)
        except InlayError as error:
            return str(error), ""

    with _quietly(), ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(tried, sources))


def check_all(sources: Sequence[Any], remedy: str = "Mend or remove the files and try again.") -> list[str]:
    """One error that counts and names the images that cannot be read, before any work is done on the others, and says
    what to do. Notes of formats that were read and that people may not expect to be."""
    tried = _tried(sources)
    if found := [fault for fault, _ in tried if fault]:
        lacking = sum(heif.NEEDED in fault for fault in found)
        others = [fault for fault in found if heif.NEEDED not in fault]
        shown = " ".join(others[:5]) + (f" And {len(others) - 5} more." if len(others) > 5 else "")
        told = [shown, remedy] if others else []
        if lacking:
            first = next(fault for fault in found if heif.NEEDED in fault)
            verb = "is HEIC, which needs" if lacking == 1 else "are HEIC, which need"
            told.insert(0, f"{lacking} {verb} pillow-heif ({first.partition(' is a')[0]}): {heif.REMEDY}.")
        count = "1 image" if len(found) == 1 else f"{len(found)} images"
        raise InlayError(f"{count} of {len(sources)} cannot be read. {' '.join(told)}")
    counts = Counter(heif.NAMES[form] for _, form in tried if form in heif.NAMES)
    return [
        f"{count:,} of {len(sources):,} images {'is' if count == 1 else 'are'} {name}" for name, count in counts.items()
    ]


# ---------------------------------------------------------------------------------------------- for the processor


def pixels(processor: Any, image: Image.Image, **changes: Any) -> torch.Tensor:
    """One image through the processor: a tensor without the batch dimension."""
    return processor(image, return_tensors="pt", **changes)["pixel_values"][0]


class _Compact:
    """8-bit pixels to the processor's floats and back; only for processors that work value by value."""

    def __init__(self, processor: Any) -> None:
        ramp = Image.fromarray(np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2))
        self.table = pixels(processor, ramp, do_resize=False, do_center_crop=False)[:, 0, :].numpy()
        self.processor = processor

    def pack(self, image: Image.Image, **changes: Any) -> torch.Tensor:
        packed = pixels(self.processor, image, do_rescale=False, do_normalize=False, **changes)
        return packed if packed.dtype == torch.uint8 else packed.to(torch.float32)

    def unpack(self, packed: torch.Tensor, out: np.ndarray | None = None) -> torch.Tensor:
        found = np.empty(packed.shape, dtype=np.float32) if out is None else out
        for channel, values in enumerate(packed.numpy()):
            # Every index is in range; NumPy takes three times as fast when it need not check, and as torch does.
            np.take(self.table[channel], values, out=found[channel], mode="clip")
        return torch.from_numpy(found)


def _compact(processor: Any, image: Image.Image) -> _Compact | None:
    """The compact form for this processor, if it gives exactly the processor's own result on an image of the data."""
    try:
        made = _Compact(processor)
        packed = made.pack(image)
        exact = packed.dtype == torch.uint8 and torch.equal(made.unpack(packed), pixels(processor, image))
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return None
    return made if exact else None


class _Together(list[dict[str, Any]]):
    """Items whose images lie side by side in one tensor: a batch that need not be put together."""

    together: torch.Tensor


class EncodedImages(torch.utils.data.Dataset[dict[str, Any]]):
    """Images ready for a model: {"pixel_values", "labels"}. Preprocessed once when they fit in `limit` bytes.

    With an `augmentation` they are made anew whenever they are asked for, as the current `epoch` sees them; whoever
    goes through the data more than once sets that before each time.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        labels: Sequence[Any] | None,
        processor: Any,
        limit: int = CACHE_LIMIT,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.sources = sources
        self.labels = labels
        self.processor = processor
        self.augmentation = augmentation
        self.epoch = 0
        self._kept: torch.Tensor | None = None
        self._form: _Compact | None = None
        if len(sources) == 0:
            return
        first = trimmed(processor, open_rgb(sources[0]))
        self._form = _compact(processor, first)
        sample = self._pack(first)
        self._size = (sample.shape[-1], sample.shape[-2])
        if augmentation is None and sample.numel() * sample.element_size() * len(sources) <= limit:
            self._kept = torch.empty((len(sources), *sample.shape), dtype=sample.dtype)
            self._fill(range(len(sources)))

    @property
    def in_memory(self) -> bool:
        """Whether everything is preprocessed already, so that no process need read ahead."""
        return self._kept is not None

    @property
    def deterministic(self) -> bool:
        """Whether an image is the same in every epoch."""
        return self.augmentation is None

    def _augmented(self, index: int) -> torch.Tensor:
        """An image as this epoch sees it. A cropped one has its size already, and must not be cut a second time."""
        assert self.augmentation is not None
        resample = getattr(self.processor, "resample", None)
        how = {"resample": int(resample)} if isinstance(resample, int) else {}
        image = open_rgb(self.sources[index])
        if not self.augmentation.crops:
            image = trimmed(self.processor, image)
        image = self.augmentation(image, self._size, self.epoch, index, **how)
        if self._form is None:
            return pixels(self.processor, image)
        whole = {"do_resize": False, "do_center_crop": False} if self.augmentation.crops else {}
        return self._form.unpack(self._form.pack(image, **whole))

    def _pack(self, image: Image.Image) -> torch.Tensor:
        return self._form.pack(image) if self._form else pixels(self.processor, image)

    def _fill(self, indices: Iterable[int]) -> None:
        kept = self._kept
        assert kept is not None

        def one(i: int) -> None:
            packed = self._pack(trimmed(self.processor, _opened(self.sources[i], to_rgb)))
            if packed.shape != kept[i].shape:
                raise _unequal([tuple(packed.shape), tuple(kept[i].shape)])
            kept[i] = packed

        with _quietly(), ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(one, indices):
                pass

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.augmentation is not None:
            values = self._augmented(index)
        elif self._kept is None:
            values = pixels(self.processor, trimmed(self.processor, open_rgb(self.sources[index])))
        else:
            values = self._form.unpack(self._kept[index]) if self._form else self._kept[index]
        return self._item(index, values)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if self._kept is None or self._form is None:
            return [self[index] for index in indices]
        images = np.empty((len(indices), *self._kept.shape[1:]), dtype=np.float32)
        items = _Together(
            self._item(index, self._form.unpack(self._kept[index], out=image))
            for index, image in zip(indices, images, strict=True)
        )
        items.together = torch.from_numpy(images)
        return items

    def _item(self, index: int, values: torch.Tensor) -> dict[str, Any]:
        item: dict[str, Any] = {"pixel_values": values}
        if self.labels is not None:
            label = self.labels[index]
            item["labels"] = label if isinstance(label, list) else int(label)
        return item


def _unequal(shapes: Iterable[tuple[int, ...]]) -> InlayError:
    return InlayError(
        f"The image processor gives images of different sizes ({', '.join(map(str, sorted(shapes)))}), which cannot "
        "be in one batch. Give it a fixed size to resize or crop to."
    )


class ImageCollator:
    """A batch of images."""

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        shapes = {tuple(item["pixel_values"].shape) for item in items}
        if len(shapes) > 1:
            raise _unequal(shapes)
        images = items.together if isinstance(items, _Together) else torch.stack([i["pixel_values"] for i in items])
        batch = {"pixel_values": images}
        if "labels" in items[0]:
            batch["labels"] = torch.tensor([item["labels"] for item in items])
        return batch
