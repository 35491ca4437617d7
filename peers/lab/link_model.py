"""One direction of a line: what becomes of a packet that is put on it. Pure: the time is an argument.

    backlog      the packet waits until those before it have left; where too much waits already, it is dropped
    rate         it leaves in size / rate
    delay        it travels for that long, and for the jitter of the moment
    loss         it may be lost on the way, and has used the rate all the same

Nothing overtakes. The jitter is drawn anew every `JITTER_SECONDS`, not for each packet: where nothing overtakes, a busy
line with a draw for each packet would only be slower by the largest of them.

The forwarder puts packets on it, the in-memory network frames. A frame of a megabyte is not one large packet: its first
bytes are on the second line of its way while the last still wait for the first line. So `put` also takes the moment
from which on the bytes came in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

JITTER_SECONDS = 0.02


@dataclass(slots=True)
class LinkCounters:
    """What was put on a line since it was made."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    lost: int = 0
    busy_seconds: float = 0.0


class LinkModel:
    """One direction.

    Args:
        bytes_per_second: None is no limit.
        delay, jitter: seconds; a packet travels for the delay and up to so much more.
        loss: the probability for each packet.
        buffer_bytes: the most that can wait, what is just leaving included; None is no limit.
        seed: of losses and jitter.
    """

    def __init__(
        self,
        bytes_per_second: float | None = None,
        delay: float = 0.0,
        jitter: float = 0.0,
        loss: float = 0.0,
        buffer_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.delay, self.jitter, self.loss = delay, jitter, loss
        self.buffer_bytes = buffer_bytes
        self.counters = LinkCounters()
        self.busy_until = 0.0
        self._random = random.Random(seed)
        self._last_arrival = 0.0
        self._jitter_now, self._jitter_until = 0.0, float("-inf")

    @property
    def is_free(self) -> bool:
        """Whether it holds nothing up: what is put on it is at the other end."""
        return not (self.bytes_per_second or self.delay or self.jitter or self.loss)

    def put(self, size: int, now: float, since: float | None = None) -> float | None:
        """When the last of `size` bytes is at the other end; None: never, they were dropped or lost.

        Args:
            now: when the last of them is here.
            since: when the first of them was here (None: `now`).
        """
        counters, rate, left = self.counters, self.bytes_per_second, now
        if rate:
            if self.buffer_bytes is not None and (self.busy_until - now) * rate + size > self.buffer_bytes:
                counters.dropped += 1
                return None
            took = size / rate
            left = max(now, max(now if since is None else since, self.busy_until) + took)
            self.busy_until = left
            counters.busy_seconds += took
        counters.packets += 1
        counters.bytes += size
        if self.loss and self._random.random() < self.loss:
            counters.lost += 1
            return None
        arrival = left + self.delay
        if self.jitter:
            arrival += self._jitter(left)
        if arrival < self._last_arrival:
            arrival = self._last_arrival
        self._last_arrival = arrival
        return arrival

    def _jitter(self, now: float) -> float:
        if now >= self._jitter_until:
            self._jitter_now, self._jitter_until = self._random.uniform(0.0, self.jitter), now + JITTER_SECONDS
        return self._jitter_now

    def first_arrival(self, size: int, last: float) -> float:
        """When the first byte of what has just been put on was at the other end, if its last byte is so at `last`."""
        return last - size / self.bytes_per_second if self.bytes_per_second else last
