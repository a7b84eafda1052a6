"""A run's folder in the post: what arrives is whole, in order, and enough to go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay import Spec, tune
from inlay.engines import parcels
from inlay.engines.job import work
from inlay.records.store import Store
from inlay.workflow.compare import job_of


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_an_unfinished_run_goes_on_elsewhere_and_comes_home_whole(review_spec: Spec, tmp_path: Path) -> None:
    """Stopped here, sent there, finished there, sent home: the same files as a run that was left alone."""
    spec = review_spec.with_(early_stopping=3, evaluations=6)
    home, there = tmp_path / "home", tmp_path / "there"
    asked: list[int] = []

    def stop() -> bool:
        """After a few updates: it is asked at least once for each, and once for each batch that is evaluated."""
        asked.append(1)
        return len(asked) > 5

    cut = work(job_of(spec, str(home)), lambda done, total: None, lambda line: None, stop, signals_stop=True)
    assert cut.status == "interrupted"
    folder = home / str(cut.run)
    parcel, checkpoint = parcels.unfinished(folder)
    assert checkpoint is not None
    assert any(name.startswith("checkpoints/best-") for name in parcel), "the state to return to is part of it"
    assert parcels.unfinished(folder, but=checkpoint)[0].keys() == parcel.keys() & set(parcels.SMALL)
    parcels.unpack(parcel, there / folder.name)
    done = tune(spec, there, progress=False)
    assert done.id == folder.name
    assert done.record["resumed_from"] > 0
    last = parcels.finished(done.folder)
    with Store(home).open(done.spec, done.digest) as run:
        parcels.receive(last, run)
        assert run.status == "finished"
    alone = tune(spec, tmp_path / "alone", progress=False)
    mine = files_in(folder)
    assert mine.keys() == files_in(alone.folder).keys()
    assert {k: v for k, v in mine.items() if k.startswith("adapter/")} == {
        k: v for k, v in files_in(alone.folder).items() if k.startswith("adapter/")
    }
    Store(home).get(folder.name).verify()


def test_a_newer_checkpoint_replaces_the_older_when_it_is_whole(tmp_path: Path) -> None:
    first = {"checkpoints/step-00000010/a": b"1", "checkpoints/best-00000008.safetensors": b"b", "log.txt": b"x"}
    second = {"checkpoints/step-00000020/a": b"2", "checkpoints/best-00000016.safetensors": b"c", "log.txt": b"xy"}
    parcels.unpack(first, tmp_path)
    parcels.unpack(second, tmp_path)
    assert files_in(tmp_path) == second
    assert parcels.unfinished(tmp_path)[1] == "step-00000020"
    (tmp_path / "checkpoints" / "step-00000020.1").mkdir()
    assert parcels.unfinished(tmp_path)[1] == "step-00000020.1", "the second of the same step is newer"


def test_the_record_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home whose disk fills up in the middle has no record."""
    written: list[str] = []
    real = parcels._write_folder

    def full(path: Path, prefix: str, parcel: parcels.Parcel) -> None:
        written.append(path.name)
        real(path, prefix, parcel)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parcels, "_write_folder", full)
    with pytest.raises(OSError, match="No space"):
        parcels.unpack({"record.json": b"{}", "adapter/a": b"1", "log.txt": b"x"}, tmp_path)
    assert written == ["adapter"]
    assert not (tmp_path / "record.json").exists()
