"""Runs on disk: whole or absent, one process at a time, found again, checked, and clear about what is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inlay.errors import InlayError
from inlay.records import FORMAT, Run, Spec, Store
from inlay.records.atomic import clear_leftovers, write_folder, write_json, write_text, writing
from inlay.records.lock import held
from inlay.records.sealed import checksum
from inlay.records.store import FailedBefore, name, now

SPEC = Spec(model="embedded:minilm", method="lora", task="rotten-tomatoes")
DIGEST = SPEC.digest()
RECORD = {"metrics": {"test": {"accuracy": 0.75}}, "portrait": {"saved_bytes": 7}}


def finished(store: Store, spec: Spec = SPEC) -> Run:
    with store.open(spec, spec.digest()) as run:
        run.adapter.mkdir()
        (run.adapter / "adapter_model.safetensors").write_bytes(b"weights")
        (run.folder / "checkpoints").mkdir()
        run.finish(RECORD)
    return run


def edit_record(run: Run, change: Callable[[dict], None]) -> None:
    data = json.loads((run.folder / "record.json").read_text())
    change(data)
    (run.folder / "record.json").write_text(json.dumps(data))


def test_a_finished_run_is_found_and_holds_what_it_was_given(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    run = finished(store)
    again = store.find(DIGEST)
    assert again is not None
    assert (again.id, again.status, again.spec) == (run.id, "finished", SPEC)
    assert again.metrics == RECORD["metrics"]
    assert again.portrait == RECORD["portrait"]
    assert again.record["format"] == FORMAT
    assert not (run.folder / "checkpoints").exists()
    assert json.loads((run.folder / "versions.json").read_text())["torch"]
    with store.open(SPEC, DIGEST) as opened:
        assert opened.status == "finished"
    assert store.find("0" * 64) is None
    assert Store(tmp_path / "nowhere").list() == []


def test_id_is_readable_and_safe() -> None:
    spec = Spec(model="/home/me/My Model/", method="lora", data="../Überraschung (1).csv", seed=3)
    assert name(spec, "abcdef0123456789") == "berraschung-1-my-model-lora-s3-abcdef0123"
    assert name(SPEC, DIGEST) == f"rotten-tomatoes-minilm-lora-s0-{DIGEST[:10]}"


def test_statuses(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.open(SPEC, DIGEST) as run:
        assert run.status == "running"
        assert store.list()[0].status == "running"
    assert run.status == "interrupted"
    with pytest.raises(InlayError, match="lower learning rate"), store.open(SPEC, DIGEST):
        raise InlayError("try a lower learning rate")
    assert (run.status, run.error) == ("failed", "try a lower learning rate")
    with pytest.raises(KeyboardInterrupt), store.open(SPEC, DIGEST):
        raise KeyboardInterrupt
    assert (run.status, run.error) == ("interrupted", None)
    assert "failed: try a lower" in (run.folder / "log.txt").read_text()
    with pytest.raises(InlayError, match="not finished"):
        run.record  # noqa: B018


def refuse(store: Store, then: Any = lambda run: None, error: type[Exception] = InlayError) -> Run:
    """A run that is refused; `then` is what happens before."""
    run = store.open(SPEC, DIGEST)
    run.keeps_refusals = False
    then(run)
    with pytest.raises(error, match="does not fit"), run:
        raise error("it does not fit")
    return run


def test_a_refusal_takes_back_the_folder_that_it_made_itself(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert not refuse(store).folder.exists()
    assert list(tmp_path.iterdir()) == []
    assert not refuse(store).folder.exists(), "the lock was let go"


@pytest.mark.parametrize("made", ["metrics.jsonl", "checkpoints/step-1/x", "mine.txt"])
def test_a_refusal_keeps_whatever_was_made(tmp_path: Path, made: str) -> None:
    def make(run: Run) -> None:
        (run.folder / made).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / made).write_text("x")

    run = refuse(Store(tmp_path), make)
    assert (run.folder / made).read_text() == "x"
    assert (run.status, run.error) == ("failed", "it does not fit")


def test_a_refusal_keeps_a_folder_that_was_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.open(SPEC, DIGEST) as run:
        raise KeyboardInterrupt
    assert refuse(store).status == "failed"
    shutil.rmtree(run.folder)
    run.folder.mkdir()
    assert refuse(store).folder.is_dir()
    shutil.rmtree(run.folder)
    assert refuse(store, error=ValueError).status == "failed", "a defect is no refusal"


def test_whether_a_run_failed_is_asked_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process fails the run between the look at it and the lock: it is not tried again all the same."""
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="no"), store.open(SPEC, SPEC.digest()):
        raise ValueError("no")
    monkeypatch.setattr(Run, "status", property(lambda run: "running"))
    with pytest.raises(FailedBefore, match=r"no \(It failed before") as told:
        store.open(SPEC, SPEC.digest(), retry_failed=False)
    assert told.value.run == store.list()[0].id
    monkeypatch.undo()
    assert store.list()[0].status == "failed", "the lock is let go, and the reason kept"
    with store.open(SPEC, SPEC.digest()) as run:
        assert run.status == "running"


def test_history_passes_over_a_torn_line(tmp_path: Path) -> None:
    with Store(tmp_path).open(SPEC, DIGEST) as run:
        assert run.history() == []
        (run.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
        assert run.history() == [{"step": 1}, {"step": 2}]


HOLDER = """
import sys, time
from inlay.records import Spec, Store
spec = Spec(model="embedded:minilm", method="lora", task="rotten-tomatoes")
run = Store(sys.argv[1]).open(spec, spec.digest())
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_told_who_works_on_the_run_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(InlayError, match=f"process {other.pid} on"):
            store.open(SPEC, DIGEST)
        with pytest.raises(InlayError, match="Not removed"):
            store.remove(store.list()[0].id)
        assert store.list()[0].status == "running"
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert store.list()[0].status == "interrupted"
    with store.open(SPEC, DIGEST) as run:
        assert run.status == "running"


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with Store(tmp_path).open(SPEC, DIGEST) as run:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        assert not held(run.folder / ".lock")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_followers_neither_lock_nor_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with store.open(SPEC, DIGEST):
        monkeypatch.setenv("RANK", "1")
        with store.open(SPEC, DIGEST) as follower:
            follower.log("nothing")
            follower.finish(RECORD)
        assert follower.metrics == RECORD["metrics"]
        assert not (follower.folder / "record.json").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run.adapter / "adapter_model.safetensors").write_bytes(b"weight"), "has 6 bytes where 7"),
        (lambda run: (run.adapter / "adapter_model.safetensors").write_bytes(b"Weights"), "was changed after"),
        (lambda run: (run.adapter / "adapter_model.safetensors").unlink(), "is missing"),
        (lambda run: (run.folder / "record.json").write_text('{"metrics": {'), "not JSON"),
        (lambda run: edit_record(run, lambda r: r["metrics"]["test"].update(accuracy=1.0)), "record.json was changed"),
        (lambda run: edit_record(run, lambda r: r.update(format=FORMAT + 1)), "newer inlay"),
    ],
)
def test_damage_and_newer_formats_are_said_clearly(tmp_path: Path, damage: Callable[[Run], None], message: str) -> None:
    store = Store(tmp_path)
    run = finished(store)
    damage(run)
    with pytest.raises(InlayError, match=message):
        store.open(SPEC, DIGEST)
    assert not held(run.folder / ".lock")
    store.remove(run.id)
    assert store.list() == []


def test_one_bad_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path)
    good = finished(store)
    for seed, text in ((1, "{"), (2, '{"format": 99}'), (3, '{"format": 1, "spec": {"model": "m"}}')):
        bad = finished(store, SPEC.with_(seed=seed))
        (bad.folder / "spec.json").write_text(text)
    (tmp_path / "not-a-run").mkdir()
    assert [run.id for run in store.list()] == [good.id]
    assert len(store.problems()) == 3
    assert any("newer inlay" in problem for problem in store.problems())


def test_an_older_record_is_read_with_todays_defaults(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = finished(store)

    def age(data: dict) -> None:
        for key in ("portrait", "created", "files"):
            del data[key]
        del data["spec"]["gradient_checkpointing"]
        data["checksum"] = checksum(data)

    edit_record(run, age)
    spec = json.loads((run.folder / "spec.json").read_text())
    del spec["spec"]["gradient_checkpointing"], spec["created"], spec["checksum"]
    (run.folder / "spec.json").write_text(json.dumps(spec))
    with store.open(SPEC, DIGEST) as again:
        assert (again.metrics, again.portrait, again.spec) == (RECORD["metrics"], {}, SPEC)


def test_get_by_part_of_the_name_and_never_outside_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    first, second = finished(store), finished(store, SPEC.with_(seed=1))
    assert store.get(first.id).id == first.id
    assert store.get(DIGEST[:10]).id == first.id
    assert store.get(str(second.folder)).id == second.id
    with pytest.raises(InlayError, match="could be any of"):
        store.get("rotten")
    with pytest.raises(InlayError, match="Did you mean"):
        store.get(first.id + "x")
    for elsewhere in ("..", "", str(tmp_path / "elsewhere" / second.id)):
        with pytest.raises(InlayError):
            store.remove(elsewhere)
    store.remove(first.id)
    assert [run.id for run in store.list()] == [second.id]
    assert list(store.out.glob(".tmp-*")) == []


def test_removal_and_locking_anew_do_not_race(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = finished(store)
    store.remove(run.id)
    with store.open(SPEC, DIGEST) as again:
        assert again.status == "running"
        assert held(again.folder / ".lock")


FULL_DISK = """
import resource, sys
from pathlib import Path
from inlay.errors import InlayError
from inlay.records import Spec, Store
spec = Spec(model="m", method="lora", task="t")
with Store(sys.argv[1]).open(spec, spec.digest()) as run:
    run.adapter.mkdir()
    (run.adapter / "weights").write_bytes(b"w" * 100)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        run.finish({"metrics": {"test": {"x": 1.0}}, "history": list(range(10_000))})
    except InlayError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(run.status, (run.adapter / "weights").stat().st_size, [p.name for p in run.folder.glob(".tmp*")])
"""


def test_a_full_disk_is_said_and_costs_nothing_that_was_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert done[0].startswith(f"No room to write {tmp_path}")
    assert "--out" in done[0]
    assert done[1] == "running 100 []"
    assert not list(tmp_path.rglob("record.json"))


def test_every_way_the_disk_refuses_names_the_path() -> None:
    class SafetensorError(Exception):
        """Same name and text as the library's own, which cannot be made to happen without a small file system."""

    path = Path("/somewhere/adapter")
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ):
        with pytest.raises(InlayError, match="No room to write /somewhere/adapter"), writing(path):
            raise error
    with pytest.raises(InlayError, match="No permission"), writing(path):
        raise SafetensorError("I/O error: Permission denied (os error 13)")
    with pytest.raises(InlayError, match="Check the disk"), writing(path):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(ValueError, match="ours"), writing(path):
        raise ValueError("ours")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's identity for a moment")
def test_no_permission_as_root(tmp_path: Path) -> None:
    _forbidden(tmp_path, lambda: os.seteuid(65534), lambda: os.seteuid(0))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_as_a_user(tmp_path: Path) -> None:
    _forbidden(tmp_path, lambda: None, lambda: None)


def _forbidden(tmp_path: Path, lower: Callable[[], None], restore: Callable[[], None]) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    for parent in list(tmp_path.parents)[:3]:
        if os.geteuid() == 0:
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    lower()
    try:
        with pytest.raises(InlayError, match="No permission to write"):
            Store(folder).open(SPEC, DIGEST)
        with pytest.raises(InlayError, match="No permission to write"):
            Store(folder / "deeper").open(SPEC, DIGEST)
    finally:
        restore()


def test_writes_replace_whole_files_and_folders(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "new"

    def good(folder: Path) -> None:
        (folder / "inside").write_text("whole")

    def bad(folder: Path) -> None:
        (folder / "inside").write_text("half")
        raise RuntimeError("stopped")

    write_folder(tmp_path / "folder", good)
    with pytest.raises(RuntimeError):
        write_folder(tmp_path / "folder", bad)
    assert (tmp_path / "folder" / "inside").read_text() == "whole"
    write_folder(tmp_path / "folder", lambda folder: (folder / "other").write_text("new") and None)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "folder"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames that replace a folder neither has its name: the old one comes back, after a kill too."""

    def written(text: str) -> None:
        write_folder(tmp_path / "folder", lambda folder: (folder / "inside").write_text(text) and None)

    written("old")
    real, calls = os.replace, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", second_fails)
        with pytest.raises(InlayError, match="broken"):
            written("new")
    assert len(calls) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "inside").read_text() == "old"

    child = os.fork()
    if child == 0:
        os.replace = lambda source, target: (real(source, target), os._exit(9))  # type: ignore[assignment]
        written("new")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "folder").exists()
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "inside").read_text() == "old"
    written("new")
    assert (tmp_path / "folder" / "inside").read_text() == "new"


def test_importing_the_store_is_light() -> None:
    code = "import sys, inlay.records; print(sorted({'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_time_is_sortable() -> None:
    first = now()
    time.sleep(0.002)
    assert first < now()


def test_a_copy_without_history_is_told_its_commit(tmp_path: Path) -> None:
    """INLAY_COMMIT names the commit, also before a .git whose history may be older than the files."""
    copy = tmp_path / "src" / "inlay" / "records" / "versions.py"
    copy.parent.mkdir(parents=True)
    copy.write_text((Path(__file__).parents[2] / "src" / "inlay" / "records" / "versions.py").read_text())
    ask = [sys.executable, "-P", "-c", "import runpy, sys; print(runpy.run_path(sys.argv[1])['_commit']())", str(copy)]
    for told, expected in (("abc123", "abc123"), ("", "None")):
        shown = subprocess.run(ask, env=os.environ | {"INLAY_COMMIT": told}, capture_output=True, text=True, check=True)
        assert shown.stdout.strip() == expected
