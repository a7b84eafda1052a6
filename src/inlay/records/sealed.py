"""JSON files that vouch for themselves, and reading any JSON file without trusting it.

A sealed file holds the SHA-256 of the rest of it. The seal tells damage, an edit by hand and a half-copied file; it is
no signature, as whoever rewrites a file can seal it again. What was written before there were seals has none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.records.atomic import file_digest, open_plain, write_json

SEAL = "checksum"
MOST_BYTES = 2**26  # no JSON file that inlay writes comes near
DEEPEST = 50


def checksum(data: Mapping[str, Any], seal: str = SEAL) -> str:
    """SHA-256 over an object without its own seal."""
    canonical = json.dumps({key: value for key, value in data.items() if key != seal}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def sealed(data: Mapping[str, Any], seal: str = SEAL) -> dict[str, Any]:
    """The object as JSON will give it back, with its seal."""
    text = json.dumps({key: value for key, value in data.items() if key != seal}, ensure_ascii=False)
    plain = json.loads(text.encode(errors="replace"))
    return plain | {seal: checksum(plain, seal)}


def is_intact(data: Mapping[str, Any], seal: str = SEAL) -> bool | None:
    """Whether an object is as it was sealed; None where it has no seal."""
    return data[seal] == checksum(data, seal) if seal in data else None


def write_sealed(path: Path, data: Mapping[str, Any], seal: str = SEAL) -> dict[str, Any]:
    """Replace `path` by the sealed object, whole or not at all; what was written comes back."""
    whole = sealed(data, seal)
    write_json(path, whole)
    return whole


def write_digests(path: Path, files: Mapping[str, Path]) -> None:
    """Write a sealed list of what files hash to, by their names."""
    write_sealed(path, {"format": 1, "files": {name: file_digest(file) for name, file in files.items()}})


def read_digests(path: Path) -> dict[str, str] | None:
    """What `write_digests` wrote; None where the list was changed since."""
    noted = read_object(path)
    known = noted.get("files") if is_intact(noted) else None
    return known if isinstance(known, dict) else None


def read_object(path: Path, most: int = MOST_BYTES, *, finite: bool = False) -> dict[str, Any]:
    """The JSON object in an ordinary file of a reasonable size: an `OSError` or a `ValueError` otherwise.

    With `finite`, a number that is infinite or none is a `ValueError`, too.
    """
    return parse_object(read_plain(path, most), finite=finite)


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of an ordinary file of a reasonable size; anything else is an `OSError`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(0, f"it has {size:,} bytes where at most {most:,} are read", str(path))
        return file.read(most)


def parse(raw: bytes | str, *, finite: bool = False) -> Any:
    """What JSON says. Everything that cannot be worked with is a `ValueError`: other bytes than UTF-8, nesting beyond
    reason, half a character, and with `finite` a number that is not."""
    how: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    try:
        data = json.loads(raw.decode("utf-8") if isinstance(raw, bytes) else raw, **how)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    layer: list[Any] = [data]
    for _ in range(DEEPEST):
        layer = [inner for value in layer for inner in _inside(value)]
        if not layer:
            return data
    raise ValueError("it is nested too deeply")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is not a finite number")
    return value


def parse_object(raw: bytes | str, *, finite: bool = False) -> dict[str, Any]:
    """What JSON says, where that is an object; a `ValueError` otherwise."""
    data = parse(raw, finite=finite)
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, not a JSON object")
    return data


def _inside(value: Any) -> list[Any]:
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair can be written nowhere; UnicodeEncodeError is a ValueError
        return []
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []
