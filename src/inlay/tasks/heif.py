"""HEIC, the format of telephones, by pillow-heif where that is installed; and what an unreadable image is."""

from __future__ import annotations

import functools

BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
JPEG_2000 = (b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51")
NEEDED = "a HEIC image, which needs pillow-heif"
REMEDY = "pip install 'inlay[heif]', or save them as JPEG"
NAMES = {"HEIF": "HEIC", "JPEG2000": "JPEG 2000"}  # of Pillow's formats that people do not expect to be read


@functools.cache
def register() -> bool:
    """Let Pillow read HEIC in this process, if pillow-heif is installed; whether it is."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def describe(data: bytes | None) -> str:
    """What the bytes of a file are that Pillow does not know, in words."""
    data = data or b""
    if data[4:8] == b"ftyp" and data[8:12] in BRANDS and not register():
        return NEEDED
    if data.startswith(JPEG_2000):
        return "a JPEG 2000 image, which this build of Pillow cannot read: save it as PNG or JPEG"
    return "not an image"
