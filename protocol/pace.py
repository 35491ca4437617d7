"""How long a step takes, from when the steps were reported: what margins in seconds are in steps."""

from __future__ import annotations

import math
import statistics
from collections import deque

MARGIN_SECONDS = 2.0
STEPS_KEPT = 9
MOST_MARGIN_STEPS = 2000


class Pace:
    """The median of the last steps' seconds: one long step, or a pause, moves nothing."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._since = 0.0
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)

    def restart(self) -> None:
        """The run goes back; the time until its next step is no step's."""
        self._step = None

    def note(self, step: int, now: float) -> None:
        """The newest step that was reported by `now`."""
        if self._step is None:
            self._step, self._since = step, now
        elif step > self._step:
            self._seconds.append(max(0.0, now - self._since) / (step - self._step))
            self._step, self._since = step, now

    @property
    def step_seconds(self) -> float:
        """Seconds a step takes; 1 while nothing is known."""
        return statistics.median(self._seconds) if self._seconds else 1.0

    @property
    def margin(self) -> int:
        """Steps that are begun within the time that a view needs to reach every peer, at least 1."""
        return min(MOST_MARGIN_STEPS, math.ceil(MARGIN_SECONDS / max(self.step_seconds, 1e-3)))
