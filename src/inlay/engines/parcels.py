"""A run's folder in the post: what another machine needs to go on with a run, and what it sends home of it.

A parcel is names and contents of files, relative to the run's folder. On the way there go the spec, the log, the
metrics so far and the newest checkpoint. On the way home, again and again, the log, the metrics and every new
checkpoint; at the end the adapter, the predictions and, last of all, the record. It is unpacked in the order that a run
itself writes in, each file or folder whole or not at all: a sender that dies in the middle leaves at home a run that
can be resumed.
"""

from __future__ import annotations

from pathlib import Path

from inlay.records.atomic import remove, write_bytes, write_folder, writing
from inlay.records.predictions import FOLDER as PREDICTIONS
from inlay.records.steps import BEST, BEST_OF_TASK, STEP, damage, oldest_first
from inlay.records.store import Run

Parcel = dict[str, bytes]
SMALL = ("spec.json", "versions.json", "log.txt", "metrics.jsonl")
RECORD, ADAPTER, CHECKPOINTS = "record.json", "adapter", "checkpoints"


def unfinished(folder: Path, *, but: str | None = None) -> tuple[Parcel, str | None]:
    """What a run in the middle of its work is resumed from, and the name of the checkpoint that is in it.

    A checkpoint called `but` is known and left out, one that is damaged is passed over. One that is replaced while it
    is read is left for the next time.
    """
    parcel = {name: (folder / name).read_bytes() for name in SMALL if (folder / name).exists()}
    newest_first = reversed(oldest_first(folder / CHECKPOINTS))
    newest = next((each for each in newest_first if each.name == but or damage(each) is None), None)
    if newest is None or newest.name == but:
        return parcel, but
    try:
        files = {f"{CHECKPOINTS}/{newest.name}/{file.name}": file.read_bytes() for file in newest.iterdir()}
        best = [*(folder / CHECKPOINTS).glob(f"{BEST}*"), *(folder / CHECKPOINTS).glob(f"{BEST_OF_TASK}*")]
        files |= {f"{CHECKPOINTS}/{file.name}": file.read_bytes() for file in best}
    except FileNotFoundError:
        return parcel, but
    if not newest.exists():  # it may have lost files while they were read
        return parcel, but
    return parcel | files, newest.name


def finished(folder: Path) -> Parcel:
    """All of a finished run."""
    parcel = {name: (folder / name).read_bytes() for name in (*SMALL, RECORD) if (folder / name).exists()}
    whole = [file for name in (ADAPTER, PREDICTIONS) for file in (folder / name).rglob("*") if file.is_file()]
    return parcel | {file.relative_to(folder).as_posix(): file.read_bytes() for file in whole}


def unpack(parcel: Parcel, folder: Path) -> None:
    """Put a parcel into a run's folder; older checkpoints than the one in it are removed when it is whole."""
    for name in SMALL:
        if name in parcel:
            _write(folder / name, parcel[name])
    checkpoints = {name: data for name, data in parcel.items() if name.startswith(f"{CHECKPOINTS}/")}
    steps = {name.split("/")[1] for name in checkpoints if name.count("/") == 2}
    for name, data in checkpoints.items():
        if name.count("/") == 1:
            _write(folder / name, data)
    for step in steps:
        _write_folder(folder / CHECKPOINTS / step, f"{CHECKPOINTS}/{step}/", checkpoints)
        for older in (folder / CHECKPOINTS).iterdir():
            if older.name.startswith(STEP) and older.name not in steps:
                remove(older)
            elif older.is_file() and f"{CHECKPOINTS}/{older.name}" not in checkpoints:
                older.unlink(missing_ok=True)
    for whole in (ADAPTER, PREDICTIONS):
        if any(name.startswith(f"{whole}/") for name in parcel):
            _write_folder(folder / whole, f"{whole}/", parcel)
    if RECORD in parcel:
        _write(folder / RECORD, parcel[RECORD])


def receive(parcel: Parcel, run: Run) -> None:
    """Unpack what came home for a run that this process holds; a finished one is checked and tidied up."""
    unpack({name: data for name, data in parcel.items() if name != "spec.json"}, run.folder)
    if RECORD in parcel:
        run.verify()
        run.clean()


def _write(path: Path, data: bytes) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)


def _write_folder(path: Path, prefix: str, parcel: Parcel) -> None:
    def fill(folder: Path) -> None:
        for name, data in parcel.items():
            if name.startswith(prefix):
                place = folder / name.removeprefix(prefix)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)

    write_folder(path, fill)
