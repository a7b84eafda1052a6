"""Damage for files, from an explicit seed: what a bad disk, a stranger or an older program may leave.

A case is a random generator of its own, made of the seed and the case's number: a case that failed is run again alone.

    for number, rng in cases(seed=19, count=300):
        damage_file(path, rng)      # as its name asks: JSON, lines of JSON, or bytes

`mutate_json` changes data and keeps it JSON; `mutate_bytes` changes a file's bytes, whatever they mean. All of them
return what they did, in words, for the message of a test that fails.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One of each kind that a reader may trip over: other types, numbers beyond every range, text that is no file's name,
# no terminal's and no page's.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**400,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "1",
    "nan",
    "../../etc/passwd",
    "/dev/zero",
    "a/b\\c",
    "a\x00b",
    "\x1b[31mred\x1b]0;title\x07",
    "\ud800",
    "\u202egnp.exe",
    "<script>alert(1)</script>",
    "{{script}}",
    "=1+1",
    "[bold]",
    "%s{}{0}",
    "x" * 5000,
    [],
    [[]],
    [None],
    [1, 2, 3],
    {},
    {"": None},
    {"a": {"b": []}},
)

BAD_FILES: tuple[bytes, ...] = (
    b"",
    b"\n",
    b"null",
    b"[]",
    b"0",
    b'""',
    b"{",
    b"{}",
    b"NaN",
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b'{"a": 1, "a": 2}',
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x00" * 4096,
)


def cases(seed: int, count: int) -> Iterator[tuple[int, random.Random]]:
    """The numbers from 0 to `count`, each with its own generator."""
    for number in range(count):
        yield number, random.Random(f"{seed}/{number}")


def odd_value(rng: random.Random) -> Any:
    """A value that hardly any field expects."""
    return copy.deepcopy(rng.choice(ODD_VALUES))


def mutate_json(data: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy of JSON-ready data with one to three places changed, and what was done."""
    data = copy.deepcopy(data)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data, what = _mutate_once(data, rng)
        done.append(what)
    return data, "; ".join(done)


def _mutate_once(data: Any, rng: random.Random) -> tuple[Any, str]:
    path = rng.choice(list(places(data)))
    where = "/".join(map(str, path)) or "the whole"
    if not path:
        return odd_value(rng), "the whole is another value"
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    last, value = path[-1], holder[path[-1]]
    kind = rng.choice(("replace", "replace", "replace", "remove", "rename", "nudge", "wrap", "repeat"))
    if kind == "remove":
        del holder[last]
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(rng.choice(("", "x", f"{last} ", "__class__", "\ud800", str(last).upper())))] = holder.pop(last)
    elif kind == "nudge":
        holder[last] = _nudged(value, rng)
    elif kind == "wrap":
        holder[last] = rng.choice(([value], {"value": value}, json.dumps(value)))
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(last, copy.deepcopy(value))
    else:
        kind = "replace"
        holder[last] = odd_value(rng)
    return data, f"{kind} {where}"


def _nudged(value: Any, rng: random.Random) -> Any:
    """Nearly the same value: what an edit by hand or a flipped bit makes."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return rng.choice((value + 1, -value, value * 1000, value / 7 if abs(value) < 2**53 else 0.5, str(value)[:99]))
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", "0", "z", "\u00e9", value[at] * 2)) + value[at + 1 :]
    if isinstance(value, list):
        return value[::-1] if len(value) > 1 else [*value, 0]
    return odd_value(rng)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in JSON-ready data, the whole first."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


def mutate_bytes(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A file's bytes, damaged in one of the ways that disks and people have, and what was done."""
    changed, what = rng.choice(_BYTES)(raw, rng)
    return changed, what


def _flip(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    if not raw:
        return b"\x01", "one byte in an empty file"
    at, bit = rng.randrange(len(raw)), rng.randrange(8)
    return raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :], f"bit {bit} of byte {at} is flipped"


def _cut(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    at = rng.randrange(len(raw) + 1)
    return raw[:at], f"cut after {at} bytes"


def _zeroed(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    start = rng.randrange(len(raw) + 1)
    end = min(len(raw), start + rng.choice((1, 16, 4096)))
    return raw[:start] + bytes(end - start) + raw[end:], f"bytes {start} to {end} are zero"


def _grown(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    more = rng.choice((b"\x00", b"}", b"\n{}", raw[:64], bytes(4096)))
    return raw + more, f"{len(more)} bytes are appended"


def _other(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    number = rng.randrange(len(BAD_FILES))
    return BAD_FILES[number], f"another file: {BAD_FILES[number][:20]!r}"


_BYTES: tuple[Callable[[bytes, random.Random], tuple[bytes, str]], ...] = (_flip, _flip, _cut, _zeroed, _grown, _other)


def damage_file(path: Path, rng: random.Random) -> str:
    """Change one file in one way; what was done, with the file's name."""
    kind = rng.random()
    if kind < 0.06:
        path.unlink()
        return f"{path.name}: removed"
    if kind < 0.10:
        return f"{path.name}: {_other_kind(path, rng)}"
    if kind < 0.65 and path.suffix in (".json", ".jsonl"):
        try:
            what = _damage_json(path, rng)
        except (ValueError, RecursionError):
            pass  # it is not JSON any more: its bytes can still be damaged
        else:
            return f"{path.name}: {what}"
    raw, what = mutate_bytes(path.read_bytes(), rng)
    path.write_bytes(raw)
    return f"{path.name}: {what}"


def _damage_json(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
    at = rng.randrange(len(lines)) if lines else 0
    data, what = mutate_json(json.loads(lines[at]) if lines else {}, rng)
    text = json.dumps(data)
    if rng.random() < 0.06:
        # Lists in lists in lists, in place of the first value of the text that is empty or null: written as text,
        # for what Python itself can write is not as deep as what it is given to read.
        depth = rng.choice((50, 500, 990, 20_000))
        text = re.sub(r"\bnull\b|\[\]|\{\}|\btrue\b|\bfalse\b", "[" * depth + "]" * depth, text, count=1)
        what += f"; lists {depth} deep"
    lines[at : at + 1] = [text]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return what


def _other_kind(path: Path, rng: random.Random) -> str:
    """In place of the file: a folder, a link to nowhere, a link to itself, a pipe that nobody writes to."""
    path.unlink()
    kind = rng.choice(("folder", "dangling link", "link to itself", "pipe"))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "link to itself" else "nowhere")
    return f"a {kind} in its place"
