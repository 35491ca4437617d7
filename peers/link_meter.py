"""How fast a link is: from what was sent and what was acknowledged, at which times. Pure; the times are arguments.

As in BBR (Cardwell et al. 2016, "BBR: congestion-based congestion control", section "Delivery rate"): what was
acknowledged between the moment a segment was sent and the moment its own acknowledgement came, over that time, is a
sample of the rate. It tells the link's bandwidth only if the sender never ran out of things to send meanwhile; if it
did, the sample is a lower bound. The bandwidth is the largest sample of late, the round trip the smallest: that of a
segment which met no queue.

From both follows how much should be under way: twice what the line holds. Less would leave it idle while
acknowledgements come in bunches; more would only wait in the buffers of this machine and of the home's router, where
nothing urgent can overtake it.

On a line that is never idle every segment meets the queue that the window makes, and a window that follows from such
round trips doubles without end. So the round trip is taken from segments with next to nothing under way before them,
and where there was none for `RTT_SECONDS` the window is next to nothing until there is one (BBR's ProbeRTT).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protocol.link_measure import LinkMeasure

RATE_SECONDS = 10.0  # how long a sample counts
RTT_SECONDS = 30.0
FIRST_WINDOW_BYTES = 1 << 20  # while the rate is not known
LEAST_WINDOW_BYTES = 1 << 18
MOST_WINDOW_BYTES = 1 << 26
CLEAR_BYTES = 1 << 17  # no more before a segment: it met no queue
_GAIN = 2
_SHORTEST_SECONDS = 1e-3  # a sample over less says more about the scheduler than about the link


@dataclass(frozen=True, slots=True)
class Stamp:
    """What was known when a segment was sent."""

    size: int
    behind: int  # bytes under way before it
    sent_at: float
    delivered: int
    delivered_at: float
    first_sent_at: float
    limited: bool


@dataclass(slots=True)
class _Extreme:
    """The largest value of late, as a queue of those that no later one exceeds."""

    seconds: float
    _values: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, value: float) -> None:
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        # The last stays however old it is: an idle link is as fast as it was.
        while len(self._values) > 1 and self._values[0][0] < now - self.seconds:
            self._values.popleft()

    @property
    def value(self) -> float | None:
        return self._values[0][1] if self._values else None


class LinkMeter:
    """Measures one direction of one link."""

    def __init__(self) -> None:
        self.inflight = 0
        self.sent_bytes = 0
        self._delivered, self._delivered_at, self._first_sent_at = 0, 0.0, 0.0
        self._rate, self._minus_rtt = _Extreme(RATE_SECONDS), _Extreme(RTT_SECONDS)
        self._rtt_at, self._rtt_is_old = 0.0, False
        self._bound = False  # whether a sample has been taken while there always was something to send
        self._busy, self._busy_since = 0.0, 0.0

    def sent(self, now: float, size: int, limited: bool) -> Stamp:
        """A segment of `size` bytes goes out. `limited`: nothing waits behind it."""
        if not self.inflight:
            self._delivered_at = self._first_sent_at = self._busy_since = now
        stamp = Stamp(size, self.inflight, now, self._delivered, self._delivered_at, self._first_sent_at, limited)
        self.inflight += size
        self.sent_bytes += size
        return stamp

    def acknowledged(self, now: float, stamp: Stamp) -> None:
        """It has arrived."""
        self.inflight -= stamp.size
        self._delivered += stamp.size
        self._delivered_at, self._first_sent_at = now, stamp.sent_at
        self._round_trip(now, stamp)
        # Whichever is longer: bytes may be taken at once by a buffer, and acknowledgements may come in a bunch.
        seconds = max(now - stamp.delivered_at, stamp.sent_at - stamp.first_sent_at)
        if seconds > _SHORTEST_SECONDS:
            self._sample(now, (self._delivered - stamp.delivered) / seconds, stamp.limited)
        if not self.inflight:
            self._busy += now - self._busy_since

    def _round_trip(self, now: float, stamp: Stamp) -> None:
        seconds, least = now - stamp.sent_at, self.rtt
        if stamp.behind <= CLEAR_BYTES or least is None or seconds <= least:
            self._minus_rtt.add(now, -seconds)
            self._rtt_at = now
        self._rtt_is_old = now - self._rtt_at > RTT_SECONDS

    def _sample(self, now: float, rate: float, limited: bool) -> None:
        if not limited or rate > (self._rate.value or 0.0):
            self._rate.add(now, rate)
            self._bound |= not limited

    def lost(self, now: float) -> None:
        """The streams broke: what was under way is not coming any more."""
        if self.inflight:
            self._busy += now - self._busy_since
        self.inflight = 0

    @property
    def rtt(self) -> float | None:
        """The least of late, in seconds."""
        least = self._minus_rtt.value
        return None if least is None else -least

    @property
    def window(self) -> int:
        """The most bytes that should be under way."""
        if self._rtt_is_old:
            return CLEAR_BYTES
        least = LEAST_WINDOW_BYTES if self._bound else FIRST_WINDOW_BYTES
        line = (self._rate.value or 0.0) * (self.rtt or 0.0)
        return int(min(max(_GAIN * line, least), MOST_WINDOW_BYTES))

    def measure(self, now: float) -> LinkMeasure:
        """What is known by now."""
        busy = self._busy + (now - self._busy_since if self.inflight else 0.0)
        return LinkMeasure(self.rtt, self._rate.value if self._bound else None, busy, self.sent_bytes)
