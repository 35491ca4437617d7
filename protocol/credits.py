"""How many microbatches a stage needs in flight, from what it measures. Pure, local: no message says anything of it.

    forward ends --link--> later stages --link--> gradient arrives, and then one every I seconds
    |<---------------------- L ----------------------->|

A step's first microbatch travels an empty pipeline, so the least L of a step is latency without queues. While forwards
are left to do, gradients come back as fast as the slowest stage or link below lets them, one in I seconds. By Little's
law L / I microbatches are on their way then, and one more is in work here; half as many again are added for what waits
its turn at a busy stage. Both are measured in each step; of the last few the largest L and the least I count.

Too many credits cost memory only, and the window bounds that. Too few must not last, and do not. If it is for lack of
credits that gradients come slowly, then w of them come in the time of one, I = (L + f + b) / w, where f and b, the
forward and the backward here, take less than I together. So L / I > w - 1, and the next step has more than w. Only
queues, which are a sign that something else is the slowest, end the growth. A stage begins with the whole window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from protocol.events import Arrived, Computed, Event
from protocol.frame import Kind
from protocol.work import Verb

GAIN = 1.5  # of what is on its way without queues; docs/scale.md has what less and more cost
STEPS = 4  # of late, that count
FEWEST = 4  # gradients that tell how often they come
LEAST = 2  # one in work here, one on its way
SHORTEST = 1e-6  # seconds between two gradients


def credits(latency: float, interval: float) -> int:
    """Microbatches in flight for gradients that come `latency` seconds after their forwards, one every `interval`."""
    # Clocks are finer than the quotient means: 3.0000001 is 3.
    return max(LEAST, math.ceil(GAIN * latency / interval - 1e-6) + 1)


class CreditMeter:
    """Watches the events of one stage machine, `window` being its bound."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._sent: dict[int, float] = {}
        self._least: dict[str, float] = {}  # the least latency of this step, by the next stage's replica
        self._came: list[float] = []
        self._last_sent = 0.0
        self._latencies: deque[float] = deque(maxlen=STEPS)
        self._intervals: deque[float] = deque(maxlen=STEPS)

    @property
    def credits(self) -> int:
        """What the last steps call for; the window while nothing is known."""
        return min(self.needed, self._window) if self._intervals else self._window

    @property
    def needed(self) -> int:
        """The same without the bound; over the window, at least so many, as gradients would come faster. 0: unknown."""
        if not self._intervals:
            return 0
        return credits(max(self._latencies), min(self._intervals))

    def note(self, event: Event, step: int, now: float) -> int | None:
        """An event of the machine at `now`, while `step` is under way. At the step's end: the credits of the next."""
        match event:
            case Computed(action, payload) if action.verb is Verb.FORWARD and payload is not None:
                self._sent[action.microbatch] = self._last_sent = now
            case Arrived(peer, Kind.BACKWARD, _, of_step, microbatch) if of_step == step:
                self._returned(peer, microbatch, now)
            case Computed(action) if action.verb is Verb.APPLY:
                self._step_ends()
                return self.credits
        return None

    def _returned(self, peer: str, microbatch: int, now: float) -> None:
        sent = self._sent.pop(microbatch, None)
        if sent is not None:  # else it has come before
            self._least[peer] = min(now - sent, self._least.get(peer, math.inf))
            self._came.append(now)

    def _step_ends(self) -> None:
        interval = self._interval()
        if interval is not None:
            # The backwards are done in order, so the farthest replica's gradients hold the others up.
            self._latencies.append(max(self._least.values()))
            self._intervals.append(interval)
        self._sent.clear()
        self._least.clear()
        self._came.clear()

    def _interval(self) -> float | None:
        # When no forward is left the others only do backwards: they come more often then, and no credit is waited for.
        steady = [time for time in self._came if time <= self._last_sent]
        return _mean_interval(steady) or _mean_interval(self._came)


def _mean_interval(times: Sequence[float]) -> float | None:
    if len(times) < FEWEST:
        return None
    return max((times[-1] - times[0]) / (len(times) - 1), SHORTEST)
