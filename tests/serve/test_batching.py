"""The queue and its thread, without HTTP: when a batch leaves, in which order, and what becomes of those who wait."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
from hosts import TEXTS, until

from inlay.serve.batching import FAILING, SHARE, Batcher
from inlay.serve.fairness import Client
from inlay.serve.refusals import Refusal, missing_task
from inlay.workflow.answer import Request

PATIENCE = 20


class Echo:
    """A model that says its rows back, and waits where it is told to."""

    folder = Path()

    def __init__(self) -> None:
        self.schemas = dict(TEXTS)
        self.go, self.taken = threading.Event(), threading.Semaphore(0)
        self.batches: list[list[int]] = []

    def describe(self) -> dict[str, str]:
        return {"model": "echo", "method": "none"}

    def missing(self, task: str) -> Refusal | None:
        return missing_task(task, self.schemas)

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        self.batches.append([each.row["number"] for each in requests])
        self.taken.release()
        assert self.go.wait(PATIENCE)
        if any(each.row["number"] < 0 for each in requests):
            raise ValueError("negative")
        return [dict(each.row) for each in requests]

    def check(self, folder: Path, task: str) -> None: ...

    def add(self, folder: Path, task: str) -> None: ...

    def remove(self, task: str) -> None:
        del self.schemas[task]


def request(number: int, task: str = "cola") -> Request:
    return Request(task, {}, {"number": number})


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def batcher(echo: Echo) -> Iterator[Batcher]:
    found = Batcher(echo, max_batch=4, max_wait=0.0, max_queue=10)
    yield found
    echo.go.set()
    found.close()


def held(batcher: Batcher, echo: Echo) -> Future[dict[str, Any]]:
    """Let a first row occupy the model."""
    (first,) = batcher.submit([request(0)])
    assert echo.taken.acquire(timeout=PATIENCE)
    return first


def test_batches_are_full_in_order_and_no_larger(batcher: Batcher, echo: Echo) -> None:
    first = held(batcher, echo)
    rest = batcher.submit([request(i) for i in range(1, 11)])
    with pytest.raises(Refusal, match="full") as refusal:
        batcher.submit([request(11)])
    assert refusal.value.status == 503
    assert batcher.waiting == 10
    echo.go.set()
    assert [each.result(PATIENCE)["number"] for each in (first, *rest)] == list(range(11))
    assert echo.batches == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert batcher.waiting == 0
    assert batcher.metrics.refused.total == 1
    assert batcher.metrics.rows.value("cola") == 11


def test_a_list_is_taken_whole_or_not_at_all(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    batcher.submit([request(i) for i in range(1, 9)])
    with pytest.raises(Refusal, match="full"):
        batcher.submit([request(i) for i in range(3)])
    assert batcher.waiting == 8
    batcher.submit([request(9), request(10)])


def test_a_first_row_waits_for_others_but_not_for_ever(echo: Echo) -> None:
    echo.go.set()
    patient = Batcher(echo, max_batch=3, max_wait=0.3, max_queue=10)
    begin = time.monotonic()
    patient.submit([request(0)])[0].result(PATIENCE)
    assert time.monotonic() - begin >= 0.3
    patient.close()
    # A full batch leaves at once: its rows would wait longer than anybody waits for them here.
    stubborn = Batcher(echo, max_batch=3, max_wait=10 * PATIENCE, max_queue=10)
    for each in [*stubborn.submit([request(1)]), *stubborn.submit([request(2)]), *stubborn.submit([request(3)])]:
        each.result(PATIENCE)
    stubborn.close()
    assert echo.batches == [[0], [1, 2, 3]]


def test_who_hurries_waits_for_nobody(echo: Echo) -> None:
    echo.go.set()
    patient = Batcher(echo, max_batch=3, max_wait=10 * PATIENCE, max_queue=10)
    (first,) = patient.submit([request(0)])
    patient.hurry()
    first.result(PATIENCE)
    patient.submit([request(1)])[0].result(PATIENCE)  # more is taken all the same
    patient.close()
    assert echo.batches == [[0], [1]]


def test_what_came_before_a_removal_is_answered_and_what_came_after_is_told(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    (before,) = batcher.submit([request(1, "sst")])
    removal = batcher.change(lambda: echo.remove("sst"))
    after, other = batcher.submit([request(2, "sst"), request(3)])
    echo.go.set()
    assert before.result(PATIENCE)["number"] == 1
    assert removal.result(PATIENCE) is None
    with pytest.raises(Refusal, match="Known: cb, cola, stsb") as refusal:
        after.result(PATIENCE)
    assert refusal.value.status == 404
    assert other.result(PATIENCE)["number"] == 3


def test_a_change_that_fails_says_so_and_the_thread_goes_on(batcher: Batcher, echo: Echo) -> None:
    echo.go.set()
    with pytest.raises(Refusal, match="KeyError"):
        batcher.change(lambda: echo.remove("nope")).result(PATIENCE)
    assert batcher.submit([request(1)])[0].result(PATIENCE) == {"number": 1}


def test_what_is_cancelled_does_not_reach_the_model(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    one, two = batcher.submit([request(1), request(2)])
    assert one.cancel()
    echo.go.set()
    assert two.result(PATIENCE) == {"number": 2}
    with pytest.raises(CancelledError):
        one.result()
    assert echo.batches == [[0], [2]]
    assert batcher.metrics.cancelled.total == 1


def test_what_is_cancelled_gives_up_its_place(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    given_up = batcher.submit([request(i) for i in range(1, 11)])
    for each in given_up[:9]:
        assert each.cancel()
        assert each.cancel()  # once more makes no more room
    assert batcher.waiting == 1
    rest = batcher.submit([request(i) for i in range(11, 20)])
    with pytest.raises(Refusal, match="full"):
        batcher.submit([request(20)])
    echo.go.set()
    assert [each.result(PATIENCE)["number"] for each in (given_up[9], *rest)] == list(range(10, 20))
    assert echo.batches == [[0], [10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]  # full, though nine had stood before
    assert batcher.metrics.cancelled.total == 9
    assert batcher.waiting == 0


def test_a_first_row_that_is_cancelled_while_its_batch_fills(echo: Echo) -> None:
    echo.go.set()
    batcher = Batcher(echo, max_batch=2, max_wait=10 * PATIENCE, max_queue=10)
    (first,) = batcher.submit([request(1)])
    assert first.cancel()
    (second,) = batcher.submit([request(2)])
    batcher.hurry()
    assert second.result(PATIENCE) == {"number": 2}
    batcher.close()
    assert echo.batches == [[2]]


def test_rows_that_break_a_batch_are_found(batcher: Batcher, echo: Echo) -> None:
    first = held(batcher, echo)
    rest = batcher.submit([request(i) for i in (1, -2, 3, 4, -5)])
    echo.go.set()
    assert first.result(PATIENCE) == {"number": 0}
    for number, each in zip((1, -2, 3, 4, -5), rest, strict=True):
        if number > 0:
            assert each.result(PATIENCE) == {"number": number}
        else:
            assert isinstance(each.exception(PATIENCE), Refusal)
    assert batcher.metrics.failed.total == 2


class Large:
    """What a pass of the model holds."""


class Short(Echo):
    """Runs out of memory with more than one row; takes note of how much earlier passes still hold."""

    def __init__(self) -> None:
        super().__init__()
        self.go.set()
        self.passes: list[weakref.ref[Large]] = []
        self.held: list[tuple[int, int]] = []

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        self.held.append((len(requests), sum(each() is not None for each in self.passes)))
        large = Large()
        self.passes.append(weakref.ref(large))
        if len(requests) > 1:
            raise MemoryError
        if requests[0].row["number"] == 3:
            raise Refusal(404, "not here")
        return super().answer(requests)


def test_halves_run_when_the_pass_that_failed_has_let_go() -> None:
    short = Short()
    batcher = Batcher(short, max_batch=8, max_wait=PATIENCE, max_queue=10)
    found = batcher.submit([request(i) for i in range(8)])
    refusal = found[3].exception(PATIENCE)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 404
    assert refusal.__traceback__ is None
    assert [each.result(PATIENCE)["number"] for each in found if each is not found[3]] == [0, 1, 2, 4, 5, 6, 7]
    batcher.close()
    assert [rows for rows, _ in short.held] == [8, 4, 2, 1, 1, 2, 1, 1, 4, 2, 1, 1, 2, 1, 1]
    assert not any(held for _, held in short.held)


def test_a_model_that_fails_whatever_it_is_asked_is_found_out(batcher: Batcher, echo: Echo) -> None:
    echo.go.set()

    def ask(*numbers: int) -> None:
        for each in batcher.submit([request(i) for i in numbers]):
            each.exception(PATIENCE)

    for _ in range(FAILING - 1):
        ask(-1)
    ask(-1, 2)  # the half that is well shows that the model is
    for _ in range(FAILING - 1):
        ask(-1)
    assert not batcher.failing
    ask(-1)
    assert batcher.failing
    ask(1)
    assert not batcher.failing


def test_at_the_end_what_waits_is_answered_and_no_more_is_taken(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    waiting = batcher.submit([request(i) for i in range(1, 8)])
    ending = threading.Thread(target=batcher.close)
    ending.start()
    until(lambda: not batcher.alive)
    with pytest.raises(Refusal, match="stopping"):
        batcher.submit([request(9)])
    with pytest.raises(Refusal, match="stopping"):
        batcher.change(lambda: None)
    echo.go.set()
    ending.join(PATIENCE)
    assert [each.result(0)["number"] for each in waiting] == list(range(1, 8))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)

    def end() -> None:
        raise SystemExit

    batcher.change(end)
    (late,) = batcher.submit([request(1)])
    echo.go.set()
    with pytest.raises(Refusal, match="stopping"):
        late.result(PATIENCE)
    assert not batcher.alive


# ---- whose turn it is


def test_addresses_take_turns_and_so_do_their_connections(echo: Echo) -> None:
    batcher = Batcher(echo, max_batch=3, max_wait=0.0, max_queue=20)
    first = held(batcher, echo)
    one, two, other = Client("a", 1), Client("a", 2), Client("b", 1)
    asked = batcher.submit([request(i) for i in (10, 11, 12, 13)], one)
    asked += batcher.submit([request(i) for i in (20, 21)], two)
    asked += batcher.submit([request(i) for i in (30, 31, 32)], other)
    echo.go.set()
    for each in (first, *asked):
        each.result(PATIENCE)
    batcher.close()
    # a, b in turns; of a, the first and the second connection in turns; each connection's rows in order.
    assert echo.batches == [[0], [10, 30, 20], [31, 11, 32], [21, 12, 13]]


def test_who_has_little_waiting_finds_room_in_a_queue_that_others_filled(echo: Echo) -> None:
    batcher = Batcher(echo, max_batch=4, max_wait=0.0, max_queue=2 * SHARE)
    first = held(batcher, echo)
    heavy, light = Client("a", 1), Client("b", 1)
    asked = batcher.submit([request(i) for i in range(1, 2 * SHARE + 1)], heavy)
    for client in (heavy, Client("a", 2)):
        with pytest.raises(Refusal, match="full"):
            batcher.submit([request(100)], client)
    with pytest.raises(Refusal, match="full"):
        batcher.submit([request(i) for i in (101, 102, 103)], light)
    asked += batcher.submit([request(101), request(102)], light)
    with pytest.raises(Refusal, match="full"):
        batcher.submit([request(103)], light)
    echo.go.set()
    for each in (first, *asked):
        each.result(PATIENCE)
    assert batcher.waiting == 0
    batcher.close()
    assert echo.batches[1] == [1, 101, 2, 102]  # though thirty-two came before


def test_what_came_before_a_change_comes_before_it_whoever_sent_it(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    before = batcher.submit([request(i, "sst") for i in range(1, 7)], Client("a", 1))
    removal = batcher.change(lambda: echo.remove("sst"))
    (after,) = batcher.submit([request(7, "sst")], Client("b", 1))
    echo.go.set()
    assert [each.result(PATIENCE)["number"] for each in before] == [1, 2, 3, 4, 5, 6]
    assert removal.result(PATIENCE) is None
    assert isinstance(after.exception(PATIENCE), Refusal)


def test_a_batch_takes_no_more_load_than_it_carries(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    asked = batcher.submit([request(i) for i in range(1, 6)], Client("a", 1), [0.6, 0.4, 0.1, 3.0, 0.0])
    echo.go.set()
    for each in asked:
        each.result(PATIENCE)
    assert echo.batches == [[0], [1, 2], [3], [4], [5]]


def test_what_is_cancelled_leaves_no_trace_of_its_client(batcher: Batcher, echo: Echo) -> None:
    held(batcher, echo)
    given_up = batcher.submit([request(i) for i in range(1, 5)], Client("a", 1))
    (stays,) = batcher.submit([request(5)], Client("b", 1))
    for each in given_up:
        assert each.cancel()
    assert batcher.waiting == 1
    echo.go.set()
    assert stays.result(PATIENCE)["number"] == 5
    assert not batcher._by_address
