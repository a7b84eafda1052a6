"""What is on record of a run cannot be edited unseen; runs from before there were seals are read, and said to be so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import recorded
from inlay.errors import InlayError
from inlay.records import Run, Spec, Store
from inlay.records.atomic import append_line, clear_leftovers, write_bytes, write_folder
from inlay.records.sealed import is_intact, parse, read_plain, sealed

Typed = Callable[..., tuple[int, str, str]]
SPEC = recorded.spec_of("lora", seed=3)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def unsealed(run: Run) -> None:
    """As an earlier inlay left it: no seals, and of the files only the adapter's on record."""
    from inlay.records.sealed import checksum

    for name in ("spec.json", "versions.json"):
        edit(run.folder / name, lambda data: data.pop("checksum"))
    if (run.folder / "record.json").exists():

        def age(data: dict[str, Any]) -> None:
            data["files"] = {name: entry for name, entry in data["files"].items() if name.startswith("adapter/")}
            data["checksum"] = checksum(data)

        edit(run.folder / "record.json", age)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("spec.json", lambda data: data["spec"].update(method="bias")),
        ("spec.json", lambda data: data["spec"].update(seed=4)),
        ("state.json", lambda data: data.update(status="failed", error="it was you")),
    ],
)
def test_an_edit_to_an_unfinished_run_shows(file: str, change: Callable[[Any], None], typed: Typed) -> None:
    with Store("runs").open(SPEC, SPEC.digest()) as run:
        pass
    edit(run.folder / file, change)
    status, _, error = typed("runs", "show", run.id)
    assert status == 2
    assert f"{file} was changed after it was written" in error
    status, out, error = typed("runs", "list")
    assert status == 0
    assert f"{run.id}\tunreadable" in out
    assert "was changed" in error


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("spec.json", lambda data: data["spec"].update(method="bias")),
        ("versions.json", lambda data: data.update(torch="9.9")),
        ("metrics.jsonl", None),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_an_edit_to_a_finished_run_shows(
    file: str, change: Callable[[Any], None] | None, old: bool, typed: Typed, tmp_path: Path
) -> None:
    run = recorded.finished(Path("runs"), SPEC)
    recorded.finished(Path("runs"), SPEC.with_(seed=4))
    if old:
        unsealed(run)
    if change is None:
        (run.folder / file).write_text('{"step": 1, "epoch": 0.1, "loss": 0.0}\n')
    else:
        edit(run.folder / file, change)
    status, _, error = typed("runs", "show", run.id)
    if old and file != "spec.json":
        assert status == 0
        assert "Nothing vouches for versions.json and metrics.jsonl" in error
    else:
        assert status == 2
        assert f"{file}" in error
    status, _, _ = typed("report", "runs")
    assert status == 0
    page = Path("report.html").read_text()
    if file != "versions.json":
        assert ("is damaged" in page or "was changed after" in page) == (not old or file == "spec.json")
    assert ("Nothing vouches" in page) == (old and file != "spec.json")


def test_what_is_run_is_recorded_whatever_an_unsealed_spec_says(tmp_path: Path) -> None:
    """An unfinished run of an earlier inlay whose spec.json was edited: the run is what its digest says."""
    store = Store(tmp_path)
    with store.open(SPEC, SPEC.digest()) as run:
        pass
    unsealed(run)
    edit(run.folder / "spec.json", lambda data: data["spec"].update(method="bias", seed=9))
    assert store.get(run.id).unvouched == ["spec.json"]
    with store.open(SPEC, SPEC.digest()) as run:
        assert run.spec == SPEC
        run.finish(recorded.RECORD)
    assert store.get(run.id).record["spec"] == SPEC.to_json()
    assert store.get(run.id).unvouched == []


def test_data_that_moved_are_recorded_where_they_lie_now(tmp_path: Path) -> None:
    """The same digest with another path: the spec that is written and the record agree."""
    store, old = Store(tmp_path), Spec(model="m", method="lora", data="old.csv")
    digest = old.digest({"data": "d"})
    with store.open(old, digest):
        pass
    with store.open(old.with_(data="new.csv"), digest) as run:
        run.finish(recorded.RECORD)
    assert store.get(run.id).record["spec"]["data"] == "new.csv"


def test_a_seal() -> None:
    data = sealed({"a": [1, (2, 3)], "b": "\udc80 half a character"})
    assert (data["a"], data["b"], is_intact(data)) == ([1, [2, 3]], "? half a character", True)
    assert is_intact(json.loads(json.dumps(data | {"a": 1}))) is False
    assert is_intact({"a": 1}) is None


@pytest.mark.parametrize("raw", [b"\xff", b"{", b"[" * 100_000, b"[" * 60 + b"]" * 60, b'"\\ud800"', b"1" * 5000])
def test_json_that_cannot_be_worked_with_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"codec|column|deeply|digits"):
        parse(raw)
    assert parse(b"[" * 40 + b"]" * 40)


def test_only_ordinary_files_are_read_and_appended_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(bytes(100))
    for name in ("pipe", "folder", "large"):
        with pytest.raises(OSError, match="it "):
            read_plain(tmp_path / name, most=99)
    with pytest.raises(OSError, match="it "):
        read_plain(Path("/dev/zero"))
    (tmp_path / "mine").write_text("mine\n")
    (tmp_path / "log.txt").symlink_to("mine")
    for name in ("log.txt", "pipe", "folder"):
        with pytest.raises(InlayError, match="Cannot write"):
            append_line(tmp_path / name, "a line")
    assert (tmp_path / "mine").read_text() == "mine\n"


def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with Store(tmp_path / "runs").open(SPEC, SPEC.digest()) as run:
        pass
    (run.folder / ".lock").unlink()
    (run.folder / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(InlayError, match=r"Cannot write .*\.lock"):
        Store(tmp_path / "runs").open(SPEC, SPEC.digest())
    assert (tmp_path / "mine").read_text() == "mine"


def test_temporary_names_cannot_be_guessed_and_are_swept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was laid where a temporary file will be is not followed; a guess would have to be 64 bits long."""
    seen: list[str] = []
    real = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(Path(source).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    for _ in range(2):
        write_bytes(tmp_path / "file", b"whole")
        write_folder(tmp_path / f"folder-{len(seen)}", lambda folder: (folder / "in").write_text("x") and None)
    assert len(set(seen)) == 4
    assert not any("file" in name or str(os.getpid()) in name for name in seen)

    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".tmp-guessed").symlink_to(tmp_path / "mine")
    for write in (
        lambda: write_bytes(tmp_path / "new", b"x"),
        lambda: write_folder(tmp_path / "newer", lambda _: None),
    ):
        with pytest.raises(InlayError, match="Cannot write"):
            write()
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / ".tmp-old-link").symlink_to(tmp_path)  # a link where a folder was put aside
    (tmp_path / "link").symlink_to(tmp_path)
    clear_leftovers(tmp_path)
    assert list(tmp_path.glob(".tmp-*")) == []
    assert (tmp_path / "mine").exists()


def test_names_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    write_bytes(tmp_path / ("n" * 255), b"x")
    write_folder(tmp_path / ("f" * 255), lambda folder: None)


def test_a_link_to_a_run_is_not_removed(typed: Typed, tmp_path: Path) -> None:
    run = recorded.finished(tmp_path / "elsewhere", SPEC)
    Path("runs").mkdir()
    (Path("runs") / run.id).symlink_to(run.folder)
    status, _, error = typed("runs", "rm", "--yes", run.id)
    assert status == 2
    assert "is a link to" in error
    assert (run.folder / "record.json").exists()
