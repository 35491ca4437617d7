"""A sign of life from whoever waits: after a minute, two, four, ... and in the end every quarter of an hour."""

from __future__ import annotations

from protocol.membership import Membership, Phase

FIRST_SECONDS, LONGEST_SECONDS = 60.0, 900.0


class Reminder:
    """Says when to tell again what is waited for. The wait began at `began`, seconds on any steady clock."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._next = FIRST_SECONDS

    def due(self, now: float) -> float | None:
        """How many seconds the wait has lasted, if that is to be told now; else None."""
        waited = now - self._began
        if waited < self._next:
            return None
        self._next = waited + min(waited, LONGEST_SECONDS)
        return waited


class RunWaits:
    """The same of a run: whoever watches one that waits sees now and then that it does, and for what."""

    def __init__(self, now: float) -> None:
        self._reminder = Reminder(now)

    def sign_of_life(self, run: Membership, now: float) -> str | None:
        """What to tell now, if anything."""
        if run.phase is not Phase.WAITING:
            self._reminder = Reminder(now)
        seconds = self._reminder.due(now)
        return None if seconds is None else f"still waiting after {seconds:.0f} s: {run.waiting[1] or 'for peers'}"
