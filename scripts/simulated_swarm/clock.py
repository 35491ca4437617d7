"""The virtual clock: what happens next, in the order of its time. Nothing waits for real time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A heap of things that are due. Of those due at one time, the one that was planned first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def after(self, delay: float, happen: Callable[[], object]) -> None:
        """Let `happen` be called in `delay` seconds."""
        self._order += 1
        heapq.heappush(self._due, (self.now + delay, self._order, happen))

    def step(self) -> bool:
        """Let the next thing happen; whether there was one."""
        if not self._due:
            return False
        self.now, _, happen = heapq.heappop(self._due)
        happen()
        return True
