"""A budget that fills up with time: so much a second, and no more at once than the bucket holds."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """`rate` tokens a second, at most `burst` of them kept."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left, self._at = burst, clock()

    def take(self, tokens: float = 1.0) -> bool:
        """Take `tokens` if they are there."""
        if self._filled() < tokens:
            return False
        self._left -= tokens
        return True

    def borrow(self, tokens: float = 1.0) -> float:
        """Take `tokens`, whether they are there or not. Returns the seconds until they would have been."""
        self._left = self._filled() - tokens
        return max(0.0, -self._left / self._rate)

    def _filled(self) -> float:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left
