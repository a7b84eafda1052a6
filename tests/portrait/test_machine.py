"""How busy the machine was: counted from its own counters, and called contended where others were in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from inlay.cli import show
from inlay.portrait import Machine, was_contended

BURN = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"


def test_its_own_work_and_that_of_others_are_told_apart() -> None:
    machine = Machine()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    own = machine.portrait()
    assert own["cores"] == os.cpu_count()
    assert 0.25 <= own["processor_seconds"] <= 1.5
    # Another process, that is not one of its own: its parent has ended.
    machine = Machine()
    subprocess.run(f'("{sys.executable}" -c "$BURN" &)', shell=True, check=True, env={**os.environ, "BURN": BURN})
    before = time.perf_counter()
    while machine.portrait()["others_processor_seconds"] < 0.3 and time.perf_counter() - before < 30:
        time.sleep(0.05)
    found = machine.portrait()
    assert found["others_processor_seconds"] >= 0.3
    assert found["processor_seconds"] < 0.3
    assert found["seconds"] > 0


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [(2.0, 18.0, True), (10.0, 9.0, True), (19.0, 1.0, False), (1.0, 10.0, False), (19.0, 0.0, False)],
)
def test_contended_is_where_nearly_all_was_in_use_and_not_by_it_alone(
    own: float, others: float, expected: bool
) -> None:
    machine = {"cores": 2, "load": 1.0, "seconds": 10.0, "processor_seconds": own, "others_processor_seconds": others}
    assert was_contended(machine) is expected
    ((_, told),) = show.machine({"machine": machine})
    assert told.startswith(f"2 processors, {show.figure(own / 10)} busy with this run, {show.figure(others / 10)} with")
    assert ("times vary" in told) is expected


def test_a_record_from_before_says_nothing() -> None:
    assert not was_contended(None)
    assert show.machine({}) == []
    assert show.machines([{"portrait": {}}]) == [None]
