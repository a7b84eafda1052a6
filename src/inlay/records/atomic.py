"""Files that are whole or absent: write beside the target, force to disk, rename, force the folder.

A rename within one folder is atomic on POSIX file systems, and what was forced to disk before it survives a crash after
it. Whatever goes wrong on the way (disk full, no permission) leaves the earlier file as it was, removes the temporary
one, and is said as an `InlayError` with the path and the next step.

A temporary name cannot be guessed and is only taken where nothing has it: in a folder that others write to, nobody can
lay a link there first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inlay.errors import InlayError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
TEMPORARY = ".tmp-"
ASIDE = f"{TEMPORARY}old-"
WINDOWS = os.name == "nt"


def _flags(*names: str) -> int:
    """Flags of `os.open` by their names, those that this system has."""
    return sum(getattr(os, name, 0) for name in names)


# A link would be written through, a pipe waited for, and Windows would translate the ends of lines.
OURS = _flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")
READ = os.O_RDONLY | _flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")


class Unwritable(InlayError):
    """The disk refused: it is full, or not ours. Nothing is wrong with what was to be written."""


class NotPlain(OSError):
    """A folder, a pipe or a device where a file should be."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk may refuse while `path` is being written into an error a user can act on.

    safetensors reports the system's error as text, not as an `OSError`: the number is read back from it.
    """
    try:
        yield
    except OSError as error:
        raise _refused(path, error.errno, error) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        number = next((code for code in FULL | FORBIDDEN if f"os error {code})" in str(error)), None)
        raise _refused(path, number, error) from error


def _refused(path: Path, number: int | None, error: Exception) -> Unwritable:
    if number in FULL:
        existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
        left = shutil.disk_usage(existing).free / 2**20
        return Unwritable(
            f"No room to write {path} ({left:.0f} MiB left, or a quota or size limit reached). What was there before "
            "is unharmed. Free some space or choose another folder with --out, then give the same command again: it "
            "goes on from the last checkpoint."
        )
    if number in FORBIDDEN:
        return Unwritable(
            f"No permission to write {path}. Choose a folder of your own with --out, or change the permissions of "
            f"{path.parent}."
        )
    return Unwritable(f"Cannot write {path}: {error}. Check the disk and the path, then give the same command again.")


def sync_file(path: Path) -> None:
    """Force a file's contents to disk."""
    with open(path, "r+b" if WINDOWS else "rb") as file:  # Windows forces only what is open for writing
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (creations, renames, removals) to disk. Windows cannot open a folder, nor needs to."""
    if WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force every file below `folder`, and the folders themselves, to disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(place) / name)
        sync_folder(Path(place))


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all. Half a character, which no file can hold, becomes a `?`."""
    write_bytes(path, text.encode(errors="replace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, whole or not at all."""

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_file(path, fill)


def write_file(path: Path, fill: Callable[[Path], None]) -> None:
    """Replace `path` by the file that `fill` writes under the name it is given, whole or not at all."""
    temporary = new_name(path.parent)
    with writing(path):
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OURS, 0o666))
        try:
            fill(temporary)
            sync_file(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def new_name(folder: Path) -> Path:
    """A name in `folder` that nobody can know beforehand, and that `clear_leftovers` knows as a temporary one."""
    return folder / f"{TEMPORARY}{secrets.token_hex(8)}"


def append_line(path: Path, text: str) -> None:
    """Add a line to a file of ours, or begin it. A link or a pipe in its place is refused."""
    with writing(path), open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | OURS, 0o666), "ab") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotPlain(0, "it is not an ordinary file", str(path))
        file.write(text.encode(errors="replace") + b"\n")


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` as JSON, whole or not at all."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Replace the folder `path` by what `fill` puts into an empty one, whole or not at all."""
    temporary = new_name(path.parent)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            fill(temporary)
            _let_others_read(temporary)
            sync_tree(temporary)
            if path.exists():
                # A folder cannot be replaced in one step: the old one is put aside, and back if the new one does not
                # come to take its place. After a kill in between, `clear_leftovers` puts it back.
                aside = path.with_name(f"{ASIDE}{path.name}")
                remove(aside)
                os.replace(path, aside)
                try:
                    os.replace(temporary, path)
                except BaseException:
                    os.replace(aside, path)
                    raise
                remove(aside)
            else:
                os.replace(temporary, path)
        except BaseException:
            remove(temporary)
            raise
        sync_folder(path.parent)


def _let_others_read(folder: Path) -> None:
    """safetensors writes files for their owner alone: they get the mode that any new file has here."""
    probe = folder / f"{TEMPORARY}mode"
    probe.touch()
    usual = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        path.chmod(usual)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written in `folder`. Only the run's lock holder may call this.

    A whole folder that had been put aside, and not been replaced yet, is put back.
    """
    for aside in folder.glob(f"{ASIDE}*"):
        place = aside.with_name(aside.name.removeprefix(ASIDE))
        if not place.exists():
            os.replace(aside, place)
    for leftover in folder.glob(f"{TEMPORARY}*"):
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, as far as that can be done; what a link points at stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_plain(path: Path) -> io.BufferedReader:
    """An ordinary file, to be read. Pipes, devices and folders are `NotPlain`, and not waited for."""
    descriptor = os.open(path, READ)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(0, "it is not an ordinary file", str(path))
    return open(descriptor, "rb")
