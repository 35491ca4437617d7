"""When a wait counts as a stall."""

from __future__ import annotations

import itertools

from protocol.stall import CEILING_SECONDS, StallTimer


def times_asked(timer: StallTimer, start: float, seconds: float) -> list[float]:
    """When the timer asks within `seconds`, looked at ten times a second."""
    ticks = [start + tick / 10 for tick in range(round(seconds * 10))]
    return [tick for tick in ticks if timer.due(tick)]


def test_asks_after_its_patience_and_then_ever_later_up_to_a_bound() -> None:
    asked = times_asked(StallTimer(2.0, now=100.0), 100.0, 60.0)
    assert asked[0] == 102.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps == sorted(gaps)
    assert max(gaps) <= 8.2


def test_learns_from_waits_that_ended_by_themselves() -> None:
    timer = StallTimer(2.0, now=0.0)
    timer.progressed(1.9)
    assert times_asked(timer, 1.9, 3.7) == []
    assert times_asked(timer, 5.7, 1.0)


def test_does_not_learn_from_a_wait_that_asking_ended() -> None:
    timer = StallTimer(2.0, now=0.0)
    assert timer.due(5.0)
    timer.progressed(6.0)
    assert timer.due(8.1)


def test_patience_has_a_ceiling() -> None:
    timer, now = StallTimer(2.0, now=0.0), 0.0
    for _ in range(20):  # each wait as long as patience allows, as if others always asked first
        wait = 1.9 * 2 ** min(_, 10)
        now += wait
        timer.progressed(now)
    assert times_asked(timer, now, CEILING_SECONDS + 1)


def test_waited_counts_from_the_last_progress() -> None:
    timer = StallTimer(2.0, now=0.0)
    timer.due(3.0)
    assert timer.waited(5.0) == 5.0
    timer.progressed(5.0)
    assert timer.waited(7.0) == 2.0
