"""When a wait has become so long that what was sent may be lost. Pure: the clock is an argument.

The waits of a run show how long its steps take, so nobody guesses a timeout. But a wait may also have been long
because others waited for a lost frame, and patience that learned from that would grow without end: so it has a
ceiling, and it fades with every wait that was shorter: one long pause must not make a lossy line slow for good. Asking
again costs bytes on a slow line, so each further time comes later. Only progress counts as news: a neighbour that is
stalled too keeps sending what is known already.
"""

from __future__ import annotations

FACTOR = 2.0  # times the longest wait that ended by itself
CEILING_SECONDS = 60.0  # what is lost that rarely may cost that much; links that break are told apart without this
MOST_BACKOFF = 4.0  # times the patience
FADING = 0.95  # of the patience, with each wait


class StallTimer:
    """Says when to ask again. `patience` is the shortest wait (seconds) that counts as a stall."""

    def __init__(self, patience: float, now: float) -> None:
        self._least, self._patience = patience, patience
        self._since, self._next, self._asked = now, now + patience, False

    def progressed(self, now: float) -> None:
        """What was awaited has come."""
        if not self._asked:  # a wait that only asking ended says nothing about how long steps take
            learned = min(FACTOR * (now - self._since), max(self._least, CEILING_SECONDS))
            self._patience = max(self._least, FADING * self._patience, learned)
        self._since, self._next, self._asked = now, now + self._patience, False

    def due(self, now: float) -> bool:
        """Whether to ask again now; if so, the next time is later."""
        if now < self._next:
            return False
        self._next = now + min(2 * (now - self._since), MOST_BACKOFF * self._patience)
        self._asked = True
        return True

    def waited(self, now: float) -> float:
        """Seconds since the last progress."""
        return now - self._since
