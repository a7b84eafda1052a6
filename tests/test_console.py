"""How far work has come, in words, by a clock that the test turns."""

from __future__ import annotations

import pytest

from inlay.console import WrittenProgress, duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_now_and_then_with_share_count_and_time_left() -> None:
    clock, said = Clock(), {}
    pace = WrittenProgress(1000, "steps", clock=clock)
    for step in range(1, 1001):
        clock.now += 1
        if line := pace.line(step):
            said[step] = line
    assert said[10] == "1%: 10 of 1,000 steps, about 16 min left"
    assert said[20] == "2%: 20 of 1,000 steps, about 16 min left"
    assert min(said) == 10
    assert 1000 not in said  # the result says that
    gaps = [after - before for before, after in zip(list(said), list(said)[1:], strict=False)]
    assert min(gaps) == 10
    assert gaps == sorted(gaps)
    assert max(gaps) > 40  # the longer it takes, the fewer


def test_what_was_done_before_took_no_time() -> None:
    clock = Clock()
    pace = WrittenProgress(100, "steps", done=90, clock=clock)
    clock.now += 30
    assert pace.line(95) == "95%: 95 of 100 steps, about 30 s left"
    assert pace.left(90) == ""
    assert pace.left(100) == ""


def test_parts_of_a_run_count() -> None:
    clock = Clock()
    pace = WrittenProgress(4, "runs", clock=clock)
    clock.now += 60
    assert pace.line(0.5) == "12%: 0.5 of 4 runs, about 7 min left"
    assert pace.line(0.6) is None


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (5300, "88 min"), (5400, "1 h 30 min")]
)
def test_times_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
