"""What the papers' tables share: lines, runs, and the processes that make them."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.papers.reproduce import kept

NO_LIMIT = 1e6  # seconds; a system call that waits takes some two millions at most

Key = tuple[Any, ...]
Entry = dict[str, Any]  # of one run: what names it, and what was found or the error
NAMES = ("group", "line", "task", "rate", "seed")  # what tells one run from another


@dataclass(frozen=True)
class MethodLine:
    """A line of a table: a method with settings. Without a method: the model as it comes."""

    name: str
    method: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableRun:
    """One run to make, where its model and data lie, and how many steps it has where they are not the protocol's."""

    group: str
    line: str
    task: str
    rate: float
    seed: int
    models_dir: str
    data_dir: str
    steps: int | None = None

    @property
    def named(self) -> dict[str, Any]:
        """What tells it from others."""
        return {name: getattr(self, name) for name in NAMES}


Measure = Callable[[Any], dict[str, Any]]  # from a work to what was found


def where(model: str, models_dir: str) -> str:
    """The folder of a model, or its embedded name."""
    found = [Path(models_dir) / model, *sorted(Path(models_dir).glob(f"{model}-*"))]
    return next((str(folder) for folder in found if folder.is_dir()), f"embedded:{model}")


def attempt(measure: Measure, work: Any) -> Entry:
    """One run: what the tables need of it, or why there is none."""
    import torch

    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        found = measure(work)
    except Exception as error:  # one run must not stop the others
        found = {"error": f"{type(error).__name__}: {error}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the card is shared
    return work.named | found | {"seconds": round(time.perf_counter() - begin, 1)}


def serve(measure: Measure, todo: Any, done: Any) -> None:
    """What a worker does until it is killed: one run after another."""
    while True:
        done.put(attempt(measure, todo.get()))


def run_all(
    measure: Measure,
    wanted: Callable[[dict[Key, Entry]], Iterable[Any]],
    names: Sequence[str],
    args: argparse.Namespace,
    usable: Callable[[Entry], bool] = lambda entry: "error" not in entry,
) -> None:
    """Make runs until none is wanted or the time is over, and keep what they found in a file.

    `wanted` is asked again after each run, with all that is known: works that it names twice are done once. Entries are
    identified by the fields `names`. Of those that are known from before, only the `usable` ones are not made again.
    Each entry has the commit that it was made at: known ones keep theirs. A name that an entry does not have is None.
    """
    import torch  # noqa: F401 (once it is loaded, `versions` knows the GPU)

    from inlay.records.versions import versions

    end = time.monotonic() + args.seconds
    made_with = versions()
    known = with_commits(json.loads(Path(args.known).read_text())) if args.known else []

    def key(named: Mapping[str, Any]) -> Key:
        return tuple(named.get(name) for name in names)

    entries: dict[Key, Entry] = {key(entry): entry for entry in known if usable(entry)}
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    workers = [context.Process(target=serve, args=(measure, todo, done), daemon=True) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    given: set[Key] = set(entries)
    pending = 0

    def submit() -> None:
        nonlocal pending
        for work in wanted(entries):
            if key(work.named) not in given:
                given.add(key(work.named))
                pending += 1
                todo.put(work)

    submit()
    while pending:
        try:
            entry = done.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            break
        pending -= 1
        entries[key(entry)] = entry | {"commit": made_with["commit"]}
        print(f"[{len(entries)}, {pending} to go]", json.dumps(entry), flush=True)
        found = {"versions": made_with, "runs": list(entries.values())}
        Path(args.results).write_text(kept.as_text(kept.rounded(found)) + "\n")
        submit()
    for worker in workers:
        worker.kill()  # a run that is asked to end would finish its step first
    todo.cancel_join_thread()
    failed = sum("error" in entry for entry in entries.values())
    print(f"{len(entries)} runs in {args.results}, {failed} of them failed; {pending} were cut off")


def with_commits(found: Mapping[str, Any]) -> list[Entry]:
    """The runs of a results file, each with its commit: its own or, where it names none, that of the file."""
    return [{"commit": found["versions"]["commit"]} | entry for entry in found["runs"]]


def run_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """The options that every `run` has."""
    parser.add_argument("--models-dir", required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=NO_LIMIT, help="stop waiting for more after this long")
    parser.add_argument("--known", help="results of an earlier call: what they have is not run again")
    parser.add_argument("--results", default=str(results), help="where they are kept: with the paper by default")
