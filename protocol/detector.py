"""Who is away or stuck: a failure detector that learns each peer's rhythm, so that nobody guesses a timeout.

    WELL --half the deadline--> SUSPECT --the deadline--> OVERDUE
      ^------------heard again------'<-----------------------'

The deadline of a silence follows the gaps between the things that were heard (accrual detectors: Chen, Toueg &
Aguilera 2002; Hayashibara et al. 2004): their mean and six deviations, and half more than the longest of them, between
a few heartbeats and a minute. Of the many reports of short steps only the longest gap in each heartbeat counts, or
they would drown the rare long ones. A link that is known to be broken halves the deadline.

A peer that is heard and computes, but finishes nothing, is stuck: its deadline is many times its own usual action.

The detector also watches itself: if nobody asked it for a while, its process slept, and the silence was its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

HEARTBEAT_SECONDS = 2.0
FLOOR_SECONDS = 5 * HEARTBEAT_SECONDS
BROKEN_FLOOR_SECONDS = 3 * HEARTBEAT_SECONDS
CEILING_SECONDS = 60.0
UNKNOWN_SECONDS = 20.0  # the deadline's floor until a peer's rhythm is known
DEVIATIONS = 6.0
LONGEST_FACTOR = 1.5
GAPS_KEPT, GAPS_NEEDED = 128, 5

ACTION_FACTOR = 20.0
WORK_FLOOR_SECONDS, WORK_CEILING_SECONDS = 30.0, 600.0
WORK_UNKNOWN_SECONDS = 300.0
ACTIONS_KEPT, ACTIONS_NEEDED = 32, 3

OWN_SLEEP_SECONDS = 4.0  # the daemon asks every second


class Standing(Enum):
    """What is thought of a peer."""

    WELL = auto()
    SUSPECT = auto()
    OVERDUE = auto()


@dataclass(slots=True)
class Pulse:
    """What is known of one peer's rhythm. All times in seconds."""

    heard: float
    patient: bool = False
    broken: bool = False
    complaints: set[str] = field(default_factory=set)
    idle: bool = True
    done: int = 0
    worked: float = 0.0
    _usual: float = 0.0
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    _longest: float = 0.0
    _window: float = 0.0
    _actions: deque[float] = field(default_factory=lambda: deque(maxlen=ACTIONS_KEPT))

    def beat(self, now: float) -> None:
        """Something was heard."""
        gap = max(0.0, now - self.heard)
        self._longest, self._window = max(self._longest, gap), self._window + gap
        if self._window >= HEARTBEAT_SECONDS / 2:
            self._gaps.append(self._longest)
            self._longest = self._window = 0.0
            self._usual = _usual(self._gaps)
        self.heard, self.patient, self.broken = now, False, False

    def work(self, now: float, done: int, idle: bool) -> None:
        """It says how many actions it has finished, and whether it waits for others."""
        finished = done - self.done
        if finished > 0 and not self.idle:
            self._actions.append(max(0.0, now - self.worked) / finished)
        if finished or idle or self.idle:
            self.worked = now
        self.done, self.idle = done, idle

    @property
    def deadline(self) -> float:
        """Seconds of silence after which it is excluded."""
        if self.patient:
            return CEILING_SECONDS
        deadline = max(UNKNOWN_SECONDS if len(self._gaps) < GAPS_NEEDED else FLOOR_SECONDS, self._usual)
        if self.broken or self.complaints:
            deadline = max(BROKEN_FLOOR_SECONDS, deadline / 2)
        return min(deadline, CEILING_SECONDS)

    @property
    def work_deadline(self) -> float:
        """Seconds of work without a result after which it is stuck."""
        if len(self._actions) < ACTIONS_NEEDED:
            return WORK_UNKNOWN_SECONDS
        return min(max(WORK_FLOOR_SECONDS, ACTION_FACTOR * max(self._actions)), WORK_CEILING_SECONDS)

    def delay(self, now: float) -> tuple[float, str]:
        """How much of its deadline has passed, and why, in words. The worse of silence and work without a result."""
        silent = now - self.heard
        how = "its link is broken and " if self.broken or self.complaints else ""
        quiet = (silent / self.deadline, f"{how}nothing was heard from it for {silent:.0f} s")
        if self.idle:
            return quiet
        busy = now - self.worked
        stuck = f"it computes, but has finished nothing for {busy:.0f} s"
        return max(quiet, (busy / self.work_deadline, stuck))


def _usual(gaps: deque[float]) -> float:
    mean = math.fsum(gaps) / len(gaps)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    return max(mean + DEVIATIONS * deviation, LONGEST_FACTOR * max(gaps))


class Detector:
    """The pulses of all members, by peer. The clock is an argument."""

    def __init__(self) -> None:
        self._pulses: dict[str, Pulse] = {}
        self._asked: float | None = None

    def passed(self, now: float) -> float:
        """To be called first at every event: a time in which nobody called was this process's own sleep.

        Returns the seconds that it slept.
        """
        slept = 0.0 if self._asked is None else now - self._asked
        self._asked = now
        if slept <= OWN_SLEEP_SECONDS:
            return 0.0
        for pulse in self._pulses.values():
            pulse.heard += slept
            pulse.worked += slept
        return slept

    def expect(self, peer: str, now: float, patient: bool = False) -> None:
        """`peer` is a member from now on. `patient`: it may need the longest deadline to be heard at first."""
        self._pulses[peer] = Pulse(now, patient, worked=now)

    def forget(self, peer: str) -> None:
        """`peer` is no member any more."""
        self._pulses.pop(peer, None)
        for pulse in self._pulses.values():
            pulse.complaints.discard(peer)

    def heard(self, peer: str, now: float) -> None:
        """Something came from `peer`."""
        self._pulses[peer].beat(now)

    def worked(self, peer: str, now: float, done: int, idle: bool) -> None:
        """`peer` says what it does."""
        self._pulses[peer].work(now, done, idle)

    def link_broken(self, peer: str) -> None:
        """The coordinator's own link to `peer` is down."""
        self._pulses[peer].broken = True

    def complained(self, peer: str, about: tuple[str, ...]) -> None:
        """`peer` has no link to those in `about`, and to all others it has."""
        for other, pulse in self._pulses.items():
            if other in about and other != peer:
                pulse.complaints.add(peer)
            else:
                pulse.complaints.discard(peer)

    def complaints(self, peer: str) -> frozenset[str]:
        """Who has no link to `peer`."""
        return frozenset(self._pulses[peer].complaints)

    def standing(self, peer: str, now: float) -> tuple[Standing, str]:
        """What is thought of `peer`, and why, in words."""
        part, why = self._pulses[peer].delay(now)
        if part > 1:
            return Standing.OVERDUE, why
        return (Standing.SUSPECT, why) if part > 0.5 else (Standing.WELL, "")

    def silence(self, peer: str, now: float) -> float:
        """Seconds since `peer` was heard."""
        return now - self._pulses[peer].heard

    def deadline(self, peer: str) -> float:
        """Seconds of silence after which `peer` is excluded."""
        return self._pulses[peer].deadline
