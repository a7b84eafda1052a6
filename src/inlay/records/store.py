"""Runs on disk: one folder a run, found again by the digest of its spec.

    <out>/<id>/spec.json       what to do, and the digest that identifies it: written first
               versions.json   what it ran on
               state.json      running, interrupted or failed, and why: only while unfinished
               checkpoints/    to resume from: only while unfinished
               metrics.jsonl   metrics over time
               log.txt         what happened, for people
               adapter/        what was trained, as its method saves it
               predictions/    the rows that were held out and what was said of them, a file a task (predictions.py)
               record.json     the result: written last, so that it never stands for less than a whole run

`record.json` holds the digest of every file of the adapter and of the predictions, of `versions.json`, of
`metrics.jsonl` and of itself, and the spec once more. `spec.json`, `versions.json` and `state.json` are sealed too (see
sealed.py). Runs from before that are read as they are; `Run.unvouched` names the files of theirs that nothing vouches
for. Every file carries the version of this format: a newer one is refused, an older one is read with today's defaults
for what it does not say.
"""

from __future__ import annotations

import builtins
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from inlay.errors import InlayError, unknown
from inlay.records import predictions
from inlay.records.atomic import (
    WINDOWS,
    Unwritable,
    append_line,
    clear_leftovers,
    file_digest,
    new_name,
    remove,
    sync_tree,
    writing,
)
from inlay.records.lock import Busy, Lock, held
from inlay.records.sealed import is_intact, parse_object, read_object, read_plain, write_sealed
from inlay.records.shape import misfit
from inlay.records.spec import BEFORE, Spec
from inlay.records.spec_values import shown
from inlay.records.versions import versions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMAT", "FailedBefore", "Run", "Store", "load", "name", "now", "read_json"]

FORMAT = 1
SPEC, VERSIONS, METRICS, RECORD, STATE = "spec.json", "versions.json", "metrics.jsonl", "record.json", "state.json"
LOCK, LOG = ".lock", "log.txt"
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

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        digest: str,
        *,
        created: str = "",
        follower: bool = False,
        spec_is_sealed: bool = True,
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.digest = digest
        self.created = created
        self.follower = follower
        self._spec_is_sealed = spec_is_sealed
        self.keeps_refusals = True  # where False, one that is refused before it has made anything leaves no folder
        self._new = False
        self._lock = Lock(folder / LOCK)
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
    def predictions(self) -> dict[str, Path]:
        """The Parquet files of what was predicted of the held-out rows, by task; none of a run from before."""
        return predictions.files(self.folder)

    def read_predictions(self, name: str) -> pa.Table:
        """The table of what was predicted of one task, once its file is as it was written."""
        path = self.predictions[name]
        kept = path.relative_to(self.folder).as_posix()
        if kept in (self.record.get("files") or {}):
            self._verify(kept)
        return predictions.read(path)

    def keep(self, tables: Mapping[str, pa.Table]) -> None:
        """Write what was predicted of the held-out rows, a table for each task."""
        if tables and not self.follower:
            predictions.write(self.folder, {slug(name) or "task": table for name, table in tables.items()})

    @property
    def status(self) -> Status:
        """finished; running (some process is at it); failed; or interrupted (also: killed)."""
        if self._record is not None or (self.folder / RECORD).exists():
            return "finished"
        if self._lock.acquired or held(self._lock.path):
            return "running"
        return "failed" if self._state().get("status") == "failed" else "interrupted"

    @property
    def error(self) -> str | None:
        """Why the run failed, where it did."""
        error = self._state().get("error") if self.status == "failed" else None
        return None if error is None else str(error)

    @property
    def record(self) -> dict[str, Any]:
        """The finished run's record; the file is checked against its own digest when it is first read."""
        return self.read()

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The final metrics by split."""
        return self.record.get("metrics") or {}

    @property
    def failed_tasks(self) -> dict[str, str]:
        """Of a finished run of several tasks those that failed, and why; the others' results stand."""
        return self.record.get("failed") or {} if self.status == "finished" else {}

    @property
    def portrait(self) -> dict[str, Any]:
        """What the run cost."""
        return self.record.get("portrait") or {}

    @property
    def unvouched(self) -> list[str]:
        """The files with no digest of theirs on record: an earlier inlay wrote none, so that an edit would not show."""
        if self.status != "finished":
            return [] if self._spec_is_sealed else [SPEC]
        known = {*(self.record.get("files") or {}), *([SPEC] if self.record.get("spec") else [])}
        return [file for file in (SPEC, VERSIONS, METRICS) if file not in known and (self.folder / file).exists()]

    def read(self) -> dict[str, Any]:
        """Read and check the record, once."""
        if self._record is None:
            self._record = self._read_record()
        return self._record

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the record is shown: an entry that is not there, or null, is an error that names the run."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if isinstance(error, InlayError):
                raise
            raise InlayError(f"The record of the run {self.id} lacks what a result has: {error!r}.") from None

    def history(self) -> list[dict[str, Any]]:
        """Metrics over time; a line that a killed process left half-written is passed over."""
        path = self.folder / METRICS
        try:
            lines = read_plain(path).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._damaged(f"{METRICS} cannot be read ({error.strerror})") from None
        entries = []
        for line in lines:
            try:
                entries.append(parse_object(line))
            except ValueError:
                continue
        return entries

    def log(self, text: str) -> None:
        """Add a line to log.txt."""
        if not self.follower:
            append_line(self.folder / LOG, f"{now()} {text}")

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
            "files": self._digests(),
        }
        self.log("finished")
        self._record = write_sealed(self.folder / RECORD, whole)
        self.clean()

    def fail(self, error: BaseException | str) -> None:
        """Note that the run failed, and why. Its checkpoints stay: the same command tries again from there."""
        self._set_state("failed", str(error) or type(error).__name__)

    def interrupt(self) -> None:
        """Note that the run was stopped before its end and can be resumed."""
        self._set_state("interrupted", None)

    def verify(self) -> None:
        """Check that a finished run is as it was when it finished; a clear error otherwise."""
        for name in self.record.get("files") or {}:
            self._verify(name)

    def clean(self) -> None:
        """Remove what only an unfinished run needs."""
        remove(self.folder / "checkpoints")
        remove(self.folder / STATE)
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
                if isinstance(error, InlayError) and not self.keeps_refusals and self._is_untouched():
                    _remove(self.folder, self._lock)
                elif isinstance(error, Exception) and not isinstance(error, Unwritable):
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
        new = not os.path.lexists(self.folder)
        self._lock.acquire()
        try:
            self._new = new and os.listdir(self.folder) == [LOCK]
            done = (self.folder / RECORD).exists()
            if not retry_failed and not done:
                state = self._state()
                if state.get("status") == "failed":
                    raise FailedBefore(self.id, str(state.get("error")))
            if not (self.folder / SPEC).exists() or not (done or self._spec_is_sealed):
                self.created = self.created or now()
                facts = {"format": FORMAT, "digest": self.digest, "created": self.created, "spec": self.spec.to_json()}
                write_sealed(self.folder / SPEC, facts)
                self._spec_is_sealed = True
            if done:
                self.verify()
                self.clean()
                return
            clear_leftovers(self.folder)
            write_sealed(self.folder / VERSIONS, versions())
            self._set_state("running", None)
        except BaseException:
            self._lock.release()
            raise

    def _is_untouched(self) -> bool:
        """Whether this process made the folder, and nothing is in it but what opening a run writes."""
        opened = {LOCK, LOG, SPEC, VERSIONS, STATE}
        return self._new and self.folder.is_dir() and opened.issuperset(os.listdir(self.folder))

    def take(self, spec: Spec) -> None:
        """This is the spec: it has the run's digest. A spec.json that says otherwise is written anew: it has no seal
        and was edited, or names the same data by another path."""
        self._spec_is_sealed = self._spec_is_sealed and self.spec == spec
        self.spec = spec

    def _set_state(self, status: str, error: str | None) -> None:
        if self.follower:
            return
        write_sealed(self.folder / STATE, {"format": FORMAT, "status": status, "error": error, "updated": now()})
        self.log(status if error is None else f"{status}: {error}")

    def _state(self) -> dict[str, Any]:
        path = self.folder / STATE
        state = read_json(path) if os.path.lexists(path) else {}
        if is_intact(state) is False:
            raise self._damaged(f"{STATE} was changed after it was written")
        return state

    def _read_record(self) -> dict[str, Any]:
        path = self.folder / RECORD
        if not path.exists():
            raise InlayError(
                f"The run {self.id} is not finished ({self.status}): it has no result yet. Give its command again to "
                "resume it."
            )
        record = read_json(path)
        if not is_intact(record):
            raise self._damaged(f"{RECORD} was changed after it was written")
        if record.get("digest") != self.digest:
            raise self._damaged(f"{RECORD} belongs to another run")
        if wrong := misfit(record):
            raise self._damaged(f"in {RECORD} {wrong}")
        if record.get("spec") and _spec(record["spec"]) != self.spec:
            raise self._damaged(f"{SPEC} is not the spec that {RECORD} says was run")
        if METRICS in (record.get("files") or {}):
            self._verify(METRICS, record["files"])
        return record

    def _verify(self, name: str, files: Mapping[str, Any] | None = None) -> None:
        """Check one file against the digest that is on record."""
        path, entry = self.folder / name, (files or self.record["files"])[name] or {}
        if not path.is_file():
            raise self._damaged(f"{name} is missing")
        if path.stat().st_size != entry.get("bytes"):
            raise self._damaged(f"{name} has {path.stat().st_size} bytes where {entry.get('bytes')} were written")
        if file_digest(path) != entry.get("sha256"):
            raise self._damaged(f"{name} was changed after it was written")

    def _digests(self) -> dict[str, dict[str, Any]]:
        small = [path for path in (self.folder / VERSIONS, self.folder / METRICS) if path.is_file()]
        files = small + sorted(path for path in self.adapter.rglob("*") if path.is_file())
        files += predictions.files(self.folder).values()
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
            if (folder / SPEC).is_file():
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
        if run.status != "finished":
            run.take(spec)
        if int(os.environ.get("RANK", "0")) > 0:
            run.follower = True
            return run
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        run.begin(retry_failed=retry_failed)
        return run

    def get(self, id: str) -> Run:
        """The run called `id`: a name, an unambiguous part of one, or a path to its folder."""
        if (Path(id) / SPEC).is_file():
            return load(Path(id))
        return load(self.match(id))

    def list(self) -> builtins.list[Run]:
        """Every readable run, oldest first."""
        return self.read()[0]

    def problems(self) -> builtins.list[str]:
        """What is wrong with the runs that cannot be read, one line each."""
        return list(self.read()[1].values())

    def remove(self, id: str) -> None:
        """Delete a run of this store, readable or not; refused while a process works on it."""
        folder = self.match(id)
        if folder.is_symlink():
            raise InlayError(
                f"Not removed: {folder} is a link to {os.readlink(folder)}. Remove the link itself with `rm`, or the "
                "run where it lies."
            )
        lock = Lock(folder / LOCK)
        try:
            lock.acquire()
        except Busy as busy:
            raise InlayError(f"Not removed. {busy}") from None
        try:
            _remove(folder, lock)
        finally:
            lock.release()

    def match(self, id: str) -> Path:
        """The folder of the run called `id`: its name, its path, or an unambiguous part of its name.

        A part that one name begins or ends with is that one's, though others have it in their middle.
        """
        if not id.strip():
            raise InlayError(f"No run is named: give a name, or a part of one, of those in {self.out}.")
        path = Path(id)
        if len(path.parts) > 1 and path.resolve().parent == self.out.resolve():
            id = path.name
        ids = [folder.name for folder in self._folders()]
        found = (
            [one for one in ids if one == id]
            or [one for one in ids if one.startswith(id) or one.endswith(id)]
            or [one for one in ids if id in one]
        )
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
            if not folder.name.startswith(".") and os.path.lexists(folder / SPEC)
        )

    def read(self) -> tuple[builtins.list[Run], dict[str, str]]:
        """Every readable run, oldest first, and what is wrong with the others, by their names."""
        runs, problems = [], {}
        for folder in self._folders():
            try:
                run = load(folder)
                if run.status == "finished":
                    run.read()
                runs.append(run)
            except InlayError as error:
                problems[folder.name] = str(error)
        return sorted(runs, key=lambda run: (run.created, run.id)), problems


def _remove(folder: Path, lock: Lock) -> None:
    """Remove a run whose lock is held.

    It is renamed first: a removal that is cut short leaves nothing that looks like a run.
    """
    doomed = new_name(folder.parent)
    with writing(folder):
        if WINDOWS:
            lock.release()  # no folder is renamed there that has an open file
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


def load(folder: Path) -> Run:
    """The run in `folder`, for reading."""
    path = folder / SPEC
    data = read_json(path)
    intact = is_intact(data)
    if intact is False:
        raise InlayError(
            f"{path} was changed after it was written. Restore it from a copy, or remove the run with `inlay runs rm "
            f"{folder.name}` and run it again."
        )
    digest, created = data.get("digest"), data.get("created", "")
    if not isinstance(digest, str) or not isinstance(created, str) or "spec" not in data:
        raise InlayError(f"{path} is not a run's spec: its digest, its time or the spec itself is wrong or missing.")
    try:
        spec = _spec(data["spec"])
    except InlayError as error:
        raise InlayError(f"{path} is not a run's spec: {error}") from None
    return Run(folder, spec, digest, created=created, spec_is_sealed=bool(intact))


def _spec(data: Any) -> Spec:
    """A spec as it was written down; a field that it lacks meant then what `BEFORE` says."""
    return Spec.from_json({**BEFORE, **data} if isinstance(data, dict) else data)


def read_json(path: Path) -> dict[str, Any]:
    """A file of ours, refused clearly when it is not whole or comes from a newer inlay."""
    try:
        data = read_object(path)
    except FileNotFoundError:
        raise InlayError(f"{path} is missing: {path.parent} is not a run's folder, or not a whole one.") from None
    except OSError as error:
        raise InlayError(f"Cannot read {path}: {error.strerror}. Check what it is, and its permissions.") from error
    except ValueError as error:
        raise InlayError(
            f"{path} is damaged (not JSON: {error}). Remove the run with `inlay runs rm {path.parent.name}` and run it "
            "again."
        ) from None
    version = data.get("format", FORMAT)
    if not isinstance(version, int) or version > FORMAT:
        raise InlayError(
            f"{path} was written by a newer inlay (format {shown(version)}; this one reads up to {FORMAT}). "
            "Upgrade with `pip install --upgrade inlay`."
        )
    return data


def name(spec: Spec, digest: str) -> str:
    """A run's name: readable, safe as a folder, and its own by the digest's first ten digits."""
    task = spec.task or "-".join(spec.tasks) or Path(spec.data or "data").stem
    parts = [slug(task), model_slug(spec.model), slug(spec.method), f"s{spec.seed}", digest[:10]]
    return "-".join(part for part in parts if part)


def model_slug(model: str) -> str:
    """A model in the names of its runs."""
    return slug(model.rstrip("/").rpartition("/")[2].removeprefix("embedded:"))


def slug(text: str) -> str:
    """Lower-case letters, digits, dots and hyphens, at most 40 of them."""
    return re.sub(r"[^a-z0-9.]+", "-", text.casefold()).strip("-.")[:40]


def now() -> str:
    """The time, to the millisecond, in UTC."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
