"""Runs on disk: one folder a run, found again by the digest of its spec.

    <out>/<id>/spec.json       what to do, and the digest that identifies it: written first
               versions.json   what it ran on
               state.json      running, interrupted or failed, and why: only while unfinished
               checkpoints/    to resume from: only while unfinished
               metrics.jsonl   metrics over time
               log.txt         what happened, for people
               adapter/        what was trained, as its method saves it
               record.json     the result: written last, so that it never stands for less than a whole run

`record.json` holds the digest of every file of the adapter and of itself. Every file carries the version of this
format: a newer one is refused, an older one is read with today's defaults for what it does not say.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from inlay.errors import InlayError, unknown
from inlay.records.atomic import (
    TEMPORARY,
    Unwritable,
    clear_leftovers,
    file_digest,
    sync_tree,
    write_json,
    writing,
)
from inlay.records.lock import Busy, Lock, held
from inlay.records.spec import Spec
from inlay.records.versions import versions

FORMAT = 1
Status = Literal["finished", "interrupted", "failed", "running"]


class FailedBefore(InlayError):
    """The run is on record as failed, and nobody asked to try it again; `run` is its name."""

    def __init__(self, run: str, error: str | None) -> None:
        super().__init__(f"{error} (It failed before and was not tried again.)")
        self.run = run


class Run:
    """One run's folder. As a context manager it lets the lock go at the end and notes why it ended early.

    Made by a `Store`. `follower` is a run opened by another process than the first of several that train it together:
    it reads, and its writes do nothing.
    """

    def __init__(self, folder: Path, spec: Spec, digest: str, *, created: str = "", follower: bool = False) -> None:
        self.folder = folder
        self.spec = spec
        self.digest = digest
        self.created = created
        self.follower = follower
        self._lock = Lock(folder / ".lock")
        self._record: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def adapter(self) -> Path:
        """Where what was trained is saved."""
        return self.folder / "adapter"

    @property
    def status(self) -> Status:
        """finished; running (some process is at it); failed; or interrupted (also: killed)."""
        if self._record is not None or (self.folder / "record.json").exists():
            return "finished"
        if self._lock.acquired or held(self._lock.path):
            return "running"
        return "failed" if self._state().get("status") == "failed" else "interrupted"

    @property
    def error(self) -> str | None:
        """Why the run failed, where it did."""
        return self._state().get("error") if self.status == "failed" else None

    @property
    def record(self) -> dict[str, Any]:
        """The finished run's record; the file is checked against its own digest when it is first read."""
        return self.read()

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The final metrics by split."""
        return self.record.get("metrics", {})

    @property
    def failed_tasks(self) -> dict[str, str]:
        """Of a finished run of several tasks those that failed, and why; the others' results stand."""
        return self.record.get("failed", {}) if self.status == "finished" else {}

    @property
    def portrait(self) -> dict[str, Any]:
        """What the run cost."""
        return self.record.get("portrait", {})

    def read(self) -> dict[str, Any]:
        """Read and check the record, once."""
        if self._record is None:
            self._record = self._read_record()
        return self._record

    def history(self) -> list[dict[str, Any]]:
        """Metrics over time; a line that a killed process left half-written is passed over."""
        entries = []
        path = self.folder / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def log(self, text: str) -> None:
        """Add a line to log.txt."""
        if not self.follower:
            with writing(self.folder / "log.txt"), open(self.folder / "log.txt", "a", encoding="utf-8") as file:
                file.write(f"{now()} {text}\n")

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the result, last of all; then nothing of the way there is needed any more."""
        if self.follower:
            self._record = dict(record)
            return
        if self.adapter.is_dir():
            with writing(self.adapter):
                sync_tree(self.adapter)
        whole = {
            **record,
            "format": FORMAT,
            "status": "finished",
            "id": self.id,
            "digest": self.digest,
            "spec": self.spec.to_json(),
            "created": self.created,
            "finished": now(),
            "files": self._adapter_digests(),
        }
        whole = json.loads(json.dumps(whole))
        whole["checksum"] = checksum(whole)
        self.log("finished")
        write_json(self.folder / "record.json", whole)
        self._record = whole
        self.clean()

    def fail(self, error: BaseException | str) -> None:
        """Note that the run failed, and why. Its checkpoints stay: the same command tries again from there."""
        self._set_state("failed", str(error) or type(error).__name__)

    def interrupt(self) -> None:
        """Note that the run was stopped before its end and can be resumed."""
        self._set_state("interrupted", None)

    def verify(self) -> None:
        """Check that a finished run is as it was when it finished; a clear error otherwise."""
        expected = self.record.get("files", {})
        for name, entry in expected.items():
            path = self.folder / name
            if not path.is_file():
                raise self._damaged(f"{name} is missing")
            if path.stat().st_size != entry["bytes"]:
                raise self._damaged(f"{name} has {path.stat().st_size} bytes where {entry['bytes']} were written")
            if file_digest(path) != entry["sha256"]:
                raise self._damaged(f"{name} was changed after it was written")

    def clean(self) -> None:
        """Remove what only an unfinished run needs."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        (self.folder / "state.json").unlink(missing_ok=True)
        clear_leftovers(self.folder)

    def close(self) -> None:
        """Let go of the run: another process may take it up."""
        self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self.status != "finished":
                if isinstance(error, Exception) and not isinstance(error, Unwritable):
                    self.fail(error)
                else:
                    self.interrupt()
        except InlayError:
            # The disk that refused the run may refuse the note about it too; the first error is the one to show.
            pass
        finally:
            self.close()

    def begin(self, *, retry_failed: bool = True) -> None:
        """Take the lock and lay out the folder, or find it as it was left.

        Whether it failed before is asked under the lock: another process may have had it until now.
        """
        self._lock.acquire()
        try:
            if not retry_failed and not (self.folder / "record.json").exists():
                state = self._state()
                if state.get("status") == "failed":
                    raise FailedBefore(self.id, state.get("error"))
            if not (self.folder / "spec.json").exists():
                self.created = now()
                write_json(
                    self.folder / "spec.json",
                    {"format": FORMAT, "digest": self.digest, "created": self.created, "spec": self.spec.to_json()},
                )
            if (self.folder / "record.json").exists():
                self.verify()
                self.clean()
                return
            clear_leftovers(self.folder)
            write_json(self.folder / "versions.json", versions())
            self._set_state("running", None)
        except BaseException:
            self._lock.release()
            raise

    def _set_state(self, status: str, error: str | None) -> None:
        if self.follower:
            return
        write_json(self.folder / "state.json", {"format": FORMAT, "status": status, "error": error, "updated": now()})
        self.log(status if error is None else f"{status}: {error}")

    def _state(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        return read_json(path) if path.exists() else {}

    def _read_record(self) -> dict[str, Any]:
        path = self.folder / "record.json"
        if not path.exists():
            raise InlayError(
                f"The run {self.id} is not finished ({self.status}): it has no result yet. Give its command again to "
                "resume it."
            )
        record = read_json(path)
        if record.get("checksum") != checksum(record):
            raise self._damaged("record.json was changed after it was written")
        if record.get("digest") != self.digest:
            raise self._damaged("record.json belongs to another run")
        return record

    def _adapter_digests(self) -> dict[str, dict[str, Any]]:
        files = sorted(path for path in self.adapter.rglob("*") if path.is_file())
        return {
            path.relative_to(self.folder).as_posix(): {"sha256": file_digest(path), "bytes": path.stat().st_size}
            for path in files
        }

    def _damaged(self, what: str) -> InlayError:
        return InlayError(
            f"The run {self.id} is damaged: {what} ({self.folder}). Remove it with `inlay runs rm {self.id}` and run "
            "it again, or restore the folder from a copy."
        )


class Store:
    """A folder of runs."""

    def __init__(self, out: Path | str) -> None:
        self.out = Path(out)

    def find(self, digest: str) -> Run | None:
        """The run with this digest, whatever its status."""
        for folder in sorted(self.out.glob(f"*-{digest[:10]}")):
            if (folder / "spec.json").is_file():
                run = load(folder)
                if run.digest == digest:
                    return run
        return None

    def open(self, spec: Spec, digest: str, *, retry_failed: bool = True) -> Run:
        """The run of this spec, locked for this process: a new one, an unfinished one to resume, or the finished one.

        One that failed is resumed too, or, without `retry_failed`, an error that says why it failed. Under `accelerate
        launch` the first process owns the run and the others follow.
        """
        run = self.find(digest) or Run(self.out / name(spec, digest), spec, digest)
        if int(os.environ.get("RANK", "0")) > 0:
            run.follower = True
            return run
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        run.begin(retry_failed=retry_failed)
        return run

    def get(self, id: str) -> Run:
        """The run called `id`: a name, an unambiguous beginning or end of one, or a path to its folder."""
        if (Path(id) / "spec.json").is_file():
            return load(Path(id))
        return load(self.match(id))

    def list(self) -> builtins.list[Run]:
        """Every readable run, oldest first."""
        return self.read()[0]

    def problems(self) -> builtins.list[str]:
        """What is wrong with the runs that cannot be read, one line each."""
        return self.read()[1]

    def remove(self, id: str) -> None:
        """Delete a run of this store, readable or not; refused while a process works on it."""
        folder = self.match(id)
        lock = Lock(folder / ".lock")
        try:
            lock.acquire()
        except Busy as busy:
            raise InlayError(f"Not removed. {busy}") from None
        try:
            # Renamed first: a removal that is cut short leaves nothing that looks like a run.
            doomed = folder.with_name(f"{TEMPORARY}removed-{os.getpid()}-{folder.name}")
            with writing(folder):
                os.replace(folder, doomed)
                shutil.rmtree(doomed)
        finally:
            lock.release()

    def match(self, id: str) -> Path:
        """The folder of the run called `id`: its name, an unambiguous beginning or end of it, or its path."""
        if not id.strip():
            raise InlayError(f"No run is named: give a name, or a part of one, of those in {self.out}.")
        path = Path(id)
        if len(path.parts) > 1 and path.resolve().parent == self.out.resolve():
            id = path.name
        ids = [folder.name for folder in self._folders()]
        found = [one for one in ids if one == id] or [one for one in ids if one.startswith(id) or one.endswith(id)]
        if len(found) > 1:
            raise InlayError(f"{id!r} could be any of {', '.join(found)}. Give more of the name.")
        if not found:
            raise unknown("run", id, ids, f"`inlay runs list` shows those in {self.out}.")
        return self.out / found[0]

    def _folders(self) -> builtins.list[Path]:
        if not self.out.is_dir():
            return []
        return sorted(
            folder
            for folder in self.out.iterdir()
            if not folder.name.startswith(".") and (folder / "spec.json").is_file()
        )

    def read(self) -> tuple[builtins.list[Run], builtins.list[str]]:
        """Every readable run, oldest first, and what is wrong with the others, one line each."""
        runs, problems = [], []
        for folder in self._folders():
            try:
                run = load(folder)
                if run.status == "finished":
                    run.read()
                runs.append(run)
            except InlayError as error:
                problems.append(str(error))
        return sorted(runs, key=lambda run: (run.created, run.id)), problems


def load(folder: Path) -> Run:
    """The run in `folder`, for reading."""
    data = read_json(folder / "spec.json")
    try:
        return Run(folder, Spec.from_json(data["spec"]), data["digest"], created=data.get("created", ""))
    except (KeyError, TypeError) as error:
        raise InlayError(f"{folder / 'spec.json'} is not a run's spec: {error!r} is wrong or missing in it.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A file of ours, refused clearly when it is not whole or comes from a newer inlay."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        raise InlayError(f"{path} is missing: {path.parent} is not a run's folder, or not a whole one.") from None
    except OSError as error:
        raise InlayError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from error
    except ValueError as error:
        raise InlayError(
            f"{path} is damaged (not JSON: {error}). Remove the run with `inlay runs rm {path.parent.name}` and run it "
            "again."
        ) from None
    version = data.get("format", FORMAT)
    if not isinstance(version, int) or version > FORMAT:
        raise InlayError(
            f"{path} was written by a newer inlay (format {version}; this one reads up to {FORMAT}). "
            "Upgrade with `pip install --upgrade inlay`."
        )
    return data


def checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 over a record without its own checksum."""
    canonical = json.dumps({k: v for k, v in record.items() if k != "checksum"}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def name(spec: Spec, digest: str) -> str:
    """A run's name: readable, safe as a folder, and its own by the digest's first ten digits."""
    task = spec.task or "-".join(spec.tasks) or Path(spec.data or "data").stem
    model = spec.model.rstrip("/").rpartition("/")[2].removeprefix("embedded:")
    parts = [slug(task), slug(model), slug(spec.method), f"s{spec.seed}", digest[:10]]
    return "-".join(part for part in parts if part)


def slug(text: str) -> str:
    """Lower-case letters, digits, dots and hyphens, at most 40 of them."""
    return re.sub(r"[^a-z0-9.]+", "-", text.casefold()).strip("-.")[:40]


def now() -> str:
    """The time, to the millisecond, in UTC."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
