"""A sign of life from whoever waits: after a minute, two, four, ... and in the end every quarter of an hour."""

from __future__ import annotations

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
