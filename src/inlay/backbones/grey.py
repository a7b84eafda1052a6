"""An image processor for models that read one channel: whatever the image's mode, it comes out grey."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from transformers import ViTImageProcessorPil

# What is taken over from the processor that the checkpoint came with.
_KEPT = ("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize")


class GreyImageProcessor(ViTImageProcessorPil):
    """Transformers' processors turn images to RGB or leave them; this one turns them to grey at the same point."""

    do_convert_rgb = True

    def convert_to_rgb(self, image: Any, input_data_format: Any = None) -> np.ndarray:
        """One channel, by the luma transform of ITU-R 601 that PIL uses."""
        if isinstance(image, Image.Image):
            return np.asarray(image.convert("L"))
        values = np.asarray(image)
        if values.ndim == 2:
            return values
        last = str(getattr(input_data_format, "value", input_data_format) or "").endswith("last")
        values = np.moveaxis(values, -1, 0) if last or values.shape[-1] in (1, 3) else values
        weights = np.array([0.299, 0.587, 0.114]) if len(values) == 3 else np.ones(1)
        return np.tensordot(weights, values[: len(weights)], axes=1).astype(values.dtype)


def grey(processor: Any) -> GreyImageProcessor:
    """The same preparation for one channel, with the mean of the channels' normalisation."""
    kept = {name: getattr(processor, name) for name in _KEPT if getattr(processor, name, None) is not None}
    for name in ("image_mean", "image_std"):
        values = np.atleast_1d(np.asarray(getattr(processor, name), dtype=float))
        kept[name] = [float(values.mean())]
    return GreyImageProcessor(**kept)
