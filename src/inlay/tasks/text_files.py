"""From the bytes of a file to its text: UTF-8, or UTF-16 and UTF-32 where the file shows that it is."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path

from inlay.errors import InlayError

# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LOOKED_AT = 1 << 14  # bytes
# Of the bytes at even or at odd places, how many are 0 in UTF-16 without a mark: most in Latin script, a few elsewhere.
_MANY, _FEW = 0.2, 0.02


def check_regular(path: Path) -> None:
    """Refuse what is there and is not a file: reading a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise InlayError(f"{str(path)!r} is {what}, not a file. Give a file.")


def decode(path: Path, otherwise: str | None = None) -> tuple[str, list[str]]:
    """The file's text, and a note where it is not UTF-8. `otherwise` is the encoding of a file that is nothing else."""
    check_regular(path)
    raw = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        try:
            raw = gzip.decompress(raw)
        except (gzip.BadGzipFile, EOFError) as error:
            raise InlayError(f"{str(path)!r} is not a complete gzip file ({error}).") from error
    wide = _wide_encoding(raw)
    try:
        if wide is not None:
            return raw.decode(wide).removeprefix("\ufeff"), [f"{path.name}: read as {wide[:6].upper()}"]
        return raw.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        if otherwise is not None:
            return raw.decode(otherwise), []
        if wide is not None:
            raise InlayError(
                f"{str(path)!r} begins as {wide[:6].upper()} and is not: {error.reason} at byte {error.start:,}. Save "
                "it as UTF-8."
            ) from None
        line = raw.count(b"\n", 0, error.start) + 1
        raise InlayError(
            f"{str(path)!r} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}. Save it as UTF-8, or convert "
            f"it, e.g. `iconv -f latin1 -t utf-8`."
        ) from None


def _wide_encoding(raw: bytes) -> str | None:
    """The encoding of a file of two or four bytes a character; None for UTF-8 and all else."""
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return encoding
    start = raw[:_LOOKED_AT]
    places = len(start) // 2
    if len(raw) % 2 or not places:
        return None
    even, odd = start[0::2].count(0) / places, start[1::2].count(0) / places
    if odd >= _MANY and even <= _FEW:
        return "utf-16-le"
    if even >= _MANY and odd <= _FEW:
        return "utf-16-be"
    return None
