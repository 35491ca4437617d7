"""When a wait has become so long that what was sent may be lost. Pure: the clock is an argument.

The first waits of a run show how long its steps take, so nobody guesses a timeout. Asking again costs bytes on a
slow line, so each further time comes twice as late. Only progress counts as news: a neighbour that is stalled too
keeps sending what is known already.
"""

from __future__ import annotations

FACTOR = 4.0  # times the longest wait that ended by itself


class StallTimer:
    """Says when to ask again. `patience` is the shortest wait (seconds) that counts as a stall."""

    def __init__(self, patience: float, now: float) -> None:
        self._patience, self._longest = patience, 0.0
        self._since, self._next, self._asked = now, now + patience, False

    def progressed(self, now: float) -> None:
        """What was awaited has come."""
        if not self._asked:  # a wait that only asking ended says nothing about how long steps take
            self._longest = max(self._longest, now - self._since)
        self._since, self._next, self._asked = now, now + max(self._patience, FACTOR * self._longest), False

    def due(self, now: float) -> bool:
        """Whether to ask again now; if so, the next time is twice as far off."""
        if now < self._next:
            return False
        self._next, self._asked = now + 2 * (now - self._since), True
        return True

    def waited(self, now: float) -> float:
        """Seconds since the last progress."""
        return now - self._since
