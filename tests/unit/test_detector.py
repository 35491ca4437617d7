"""Who is away or stuck, by the rhythm that each peer has shown."""

from __future__ import annotations

import pytest

from protocol.detector import (
    BROKEN_FLOOR_SECONDS,
    CEILING_SECONDS,
    FLOOR_SECONDS,
    HEARTBEAT_SECONDS,
    UNKNOWN_SECONDS,
    WORK_CEILING_SECONDS,
    WORK_FLOOR_SECONDS,
    WORK_UNKNOWN_SECONDS,
    Detector,
    Standing,
)


class Clock:
    """A detector that is asked every second, as the daemon does."""

    def __init__(self) -> None:
        self.now, self.detector = 0.0, Detector()
        self.detector.passed(0.0)
        self.detector.expect("ann", 0.0)

    def wait(self, seconds: float) -> Standing:
        """The standing after `seconds` of silence."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1, end)
            self.detector.passed(self.now)
        return self.detector.standing("ann", self.now)[0]

    def beats(self, count: int, gap: float = HEARTBEAT_SECONDS) -> None:
        for _ in range(count):
            self.wait(gap)
            self.detector.heard("ann", self.now)

    @property
    def deadline(self) -> float:
        return self.detector.deadline("ann")


def test_a_regular_peer_is_suspected_at_half_its_deadline_and_overdue_after_it() -> None:
    clock = Clock()
    clock.beats(20)
    assert clock.deadline == FLOOR_SECONDS
    assert clock.wait(FLOOR_SECONDS / 2) is Standing.WELL
    assert clock.wait(0.1) is Standing.SUSPECT
    assert clock.wait(FLOOR_SECONDS / 2 - 0.1) is Standing.SUSPECT
    assert clock.wait(0.1) is Standing.OVERDUE
    clock.detector.heard("ann", clock.now)
    assert clock.wait(1) is Standing.WELL


def test_an_irregular_peer_gets_more_time() -> None:
    clock = Clock()
    for _ in range(10):
        clock.beats(4)
        clock.beats(1, gap=9)
    assert FLOOR_SECONDS + 3 < clock.deadline < CEILING_SECONDS
    assert clock.wait(12) is Standing.SUSPECT


def test_a_silence_that_ended_is_remembered_among_many_short_gaps() -> None:
    clock = Clock()
    clock.beats(10)
    clock.beats(1, gap=9.5)
    clock.beats(400, gap=0.05)  # the reports of short steps
    assert clock.deadline > FLOOR_SECONDS + 3


def test_no_deadline_is_beyond_the_ceiling() -> None:
    clock = Clock()
    clock.beats(8, gap=50)
    assert clock.deadline == CEILING_SECONDS


def test_a_peer_whose_rhythm_is_unknown_gets_more_time() -> None:
    clock = Clock()
    assert clock.deadline == UNKNOWN_SECONDS
    clock.detector.expect("ann", 0.0, patient=True)
    assert clock.deadline == CEILING_SECONDS
    clock.beats(1)
    assert clock.deadline == UNKNOWN_SECONDS


def test_a_broken_link_or_a_complaint_halves_the_deadline_until_it_is_mended() -> None:
    clock = Clock()
    clock.beats(20)
    clock.detector.link_broken("ann")
    assert clock.deadline == BROKEN_FLOOR_SECONDS
    assert clock.wait(BROKEN_FLOOR_SECONDS + 0.1) is Standing.OVERDUE
    assert "its link is broken" in clock.detector.standing("ann", clock.now)[1]
    clock.detector.heard("ann", clock.now)
    assert clock.wait(1) is Standing.WELL
    clock.beats(128)
    clock.detector.expect("ben", clock.now)
    clock.detector.complained("ben", ("ann", "ben", "stranger"))
    assert clock.deadline == BROKEN_FLOOR_SECONDS and clock.detector.complaints("ann") == {"ben"}
    assert not clock.detector.complaints("ben"), "nobody complains of himself"
    clock.detector.complained("ben", ())
    assert clock.deadline == FLOOR_SECONDS
    clock.detector.complained("ben", ("ann",))
    clock.detector.forget("ben")
    assert clock.deadline == FLOOR_SECONDS, "what a lost peer complained of is forgotten"


def test_the_detectors_own_sleep_is_nobodys_silence() -> None:
    clock = Clock()
    clock.beats(20)
    clock.wait(4)
    clock.now += 1000
    clock.detector.passed(clock.now)
    assert clock.detector.standing("ann", clock.now)[0] is Standing.WELL
    assert clock.wait(FLOOR_SECONDS - 3.9) is Standing.OVERDUE, "the silence before it still counts"


def working(clock: Clock, seconds: float, actions: int, count: int = 10) -> int:
    """Busy for `count` actions of `seconds`."""
    for _ in range(count):
        clock.wait(seconds)
        actions += 1
        clock.detector.heard("ann", clock.now)
        clock.detector.worked("ann", clock.now, actions, idle=False)
    return actions


@pytest.mark.parametrize(
    ("seconds", "deadline"), [(0.1, WORK_FLOOR_SECONDS), (5.0, 100.0), (100.0, WORK_CEILING_SECONDS)]
)
def test_who_finishes_nothing_for_many_times_its_usual_action_is_stuck(seconds: float, deadline: float) -> None:
    clock = Clock()
    actions = working(clock, seconds, 0)
    since = clock.now
    while clock.now - since < deadline - 2:
        clock.wait(2)
        clock.detector.heard("ann", clock.now)
        clock.detector.worked("ann", clock.now, actions, idle=False)
    assert clock.detector.standing("ann", clock.now)[0] is Standing.SUSPECT
    clock.wait(2.5)
    clock.detector.heard("ann", clock.now)
    standing, why = clock.detector.standing("ann", clock.now)
    assert standing is Standing.OVERDUE and "has finished nothing for" in why


def test_who_waits_for_others_is_not_stuck() -> None:
    clock = Clock()
    actions = working(clock, 0.1, 0)
    for _ in range(400):
        clock.wait(2)
        clock.detector.heard("ann", clock.now)
        clock.detector.worked("ann", clock.now, actions, idle=True)
    assert clock.detector.standing("ann", clock.now)[0] is Standing.WELL
    clock.detector.worked("ann", clock.now, actions, idle=False)
    assert clock.wait(2) is Standing.WELL, "its work began just now"


def test_a_first_action_may_take_long() -> None:
    clock = Clock()
    clock.detector.worked("ann", 0.0, 0, idle=False)
    while clock.now < WORK_UNKNOWN_SECONDS / 2 - 2:
        clock.wait(2)
        clock.detector.heard("ann", clock.now)
        clock.detector.worked("ann", clock.now, 0, idle=False)
    assert clock.detector.standing("ann", clock.now)[0] is Standing.WELL
