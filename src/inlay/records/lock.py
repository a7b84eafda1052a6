"""One process at a time works on a run.

The lock is the system's own (`filelock` knows which), on a file in the run's folder: the kernel drops it with the
process, so that a killed run leaves no stale lock behind. Who holds it stands in the file, for the message only; on
Windows nobody else can read it meanwhile, and the message does without.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from pathlib import Path
from weakref import WeakSet

from filelock import lock_descriptor, unlock_descriptor

from inlay.errors import InlayError
from inlay.records.atomic import OURS, writing
from inlay.records.sealed import read_object

PATIENCE = 0.5  # seconds; `held` takes the lock for an instant, and must not make another process give up
LOOKS, PAUSE = 6, 0.02  # several processes may ask at once whether a lock is held, and each takes it for an instant


class Busy(InlayError):
    """Another process holds the lock."""


class Lock:
    """An exclusive lock, held from `acquire` to `release` or to the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def acquired(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or raise `Busy` with the holder's name."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | OURS, 0o644)
            try:
                taken = lock_descriptor(descriptor, blocking=False)
            except BaseException:
                os.close(descriptor)
                raise
            if not taken:
                os.close(descriptor)
                if time.monotonic() > deadline:
                    raise Busy(self._holder())
                time.sleep(0.02)
                continue
            if self._is_current(descriptor):
                break
            os.close(descriptor)  # the folder was removed while we waited: lock its successor instead
        note = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%F %T")})
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, note.encode())
        self._descriptor = descriptor
        _acquired.add(self)

    def release(self) -> None:
        """Let the lock go; harmless when it is not held."""
        if self._descriptor is not None:
            unlock_descriptor(self._descriptor)
            self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _acquired.discard(self)

    def _is_current(self, descriptor: int) -> bool:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        mine = os.fstat(descriptor)
        return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)

    def _holder(self) -> str:
        try:
            note = read_object(self.path)
            who = f"process {note['pid']} on {note['host']}, since {note['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            who = "another process"
        return (
            f"The run {self.path.parent.name} is being worked on by {who}. Wait for it to end, or stop it: the run can "
            "be resumed."
        )


def held(path: Path) -> bool:
    """Whether some process (this one included) holds the lock at `path`.

    Where a disk does not let us lock what we may only read, nobody is seen to hold it.
    """
    descriptor = _opened(path)
    if descriptor is None:
        return False
    try:
        for look in range(LOOKS):
            if look:
                time.sleep(PAUSE)
            if lock_descriptor(descriptor, blocking=False):
                unlock_descriptor(descriptor)
                return False
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _opened(path: Path) -> int | None:
    for mode in (os.O_RDWR, os.O_RDONLY):  # NFS locks for us alone only what we may write
        with contextlib.suppress(OSError):
            return os.open(path, mode | OURS)
    return None


_acquired: WeakSet[Lock] = WeakSet()


def _close_in_child() -> None:
    # A forked child shares the lock with its parent, and a data loader's worker may outlive a killed parent by
    # seconds: closing the child's copy leaves the parent's lock alone and lets it die with the parent.
    for lock in list(_acquired):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
