"""Files that are whole or absent: write beside the target, force to disk, rename, force the folder.

A rename within one folder is atomic on POSIX file systems, and what was forced to disk before it survives a crash after
it. Whatever goes wrong on the way (disk full, no permission) leaves the earlier file as it was, removes the temporary
one, and is said as an `InlayError` with the path and the next step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inlay.errors import InlayError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
TEMPORARY = ".tmp-"
ASIDE = f"{TEMPORARY}old-"


class Unwritable(InlayError):
    """The disk refused: it is full, or not ours. Nothing is wrong with what was to be written."""


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
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (creations, renames, removals) to disk."""
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
    """Replace `path` by `text`, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, whole or not at all."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` as JSON, whole or not at all."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Replace the folder `path` by what `fill` puts into an empty one, whole or not at all."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with writing(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(temporary)
            _let_others_read(temporary)
            sync_tree(temporary)
            if path.exists():
                # A folder cannot be replaced in one step: the old one is put aside, and back if the new one does not
                # come to take its place. After a kill in between, `clear_leftovers` puts it back.
                aside = path.with_name(f"{ASIDE}{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
                try:
                    os.replace(temporary, path)
                except BaseException:
                    os.replace(aside, path)
                    raise
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
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
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
