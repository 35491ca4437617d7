"""How often something is done for each of any number of others, and for all of them: identities are free."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable


class Quota:
    """In each period of `seconds`: `each` times for one name, `most` times in all."""

    def __init__(self, seconds: float, most: int, each: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._most, self._each, self._clock = seconds, most, each, clock
        self._began = clock()
        self._done: Counter[str] = Counter()
        self.passed_over = 0  # in this period

    def may(self, name: str) -> bool:
        """Whether to do it for `name` now; if so, it counts as done."""
        self.renew()
        if self._done[name] >= self._each or self._done.total() >= self._most:
            self.passed_over += 1
            return False
        self._done[name] += 1
        return True

    def renew(self) -> tuple[int, float] | None:
        """Begin the next period, if this one is over: how often it was not done in it, and how long it lasted."""
        lasted = self._clock() - self._began
        if lasted < self._seconds:
            return None
        passed_over, self.passed_over = self.passed_over, 0
        self._began = self._clock()
        self._done.clear()
        return passed_over, lasted
