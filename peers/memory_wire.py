"""One direction between two peers of an in-memory network: what is on it, and for how long something was; and where it
ends, what is not read yet because its sender is no member."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from peers.standing import Standing
from protocol.frame import Frame


@dataclass(slots=True)
class Wire:
    """When it is free to send, when its last frame in order arrives, what was sent."""

    busy_until: float = 0.0
    last_arrival: float = 0.0
    sent_bytes: int = 0
    used_seconds: float = 0.0  # something was on it, or waited for the lines at both ends, until `used_until`
    used_until: float = 0.0

    def use(self, since: float, until: float) -> None:
        """Something is under way from `since` to `until`, which come in no particular order."""
        start = max(since, self.used_until)
        if until > start:
            self.used_seconds, self.used_until = self.used_seconds + until - start, until

    def busy_seconds(self, now: float) -> float:
        """How long something was under way by `now`."""
        return self.used_seconds - max(0.0, self.used_until - now)


@dataclass(slots=True)
class Doorstep:
    """Frames that have come, and until when each waits for its sender to become a member."""

    standing: Standing = field(default_factory=Standing)
    patience: float = 0.0
    _waiting: list[tuple[str, Frame, float]] = field(default_factory=list)

    def put(self, source: str, frame: Frame) -> None:
        """`frame` came from `source`."""
        self._waiting.append((source, frame, asyncio.get_running_loop().time() + self.patience))

    def take(self) -> Iterator[tuple[str, Frame, str]]:
        """Each that need not wait any more: its sender, itself, and why it is refused; "": it is not."""
        if not self._waiting:
            return
        now, waiting, self._waiting = asyncio.get_running_loop().time(), self._waiting, []
        for source, frame, until in waiting:
            reason = self.standing.refusal(source, frame.header)
            if reason and now < until:
                self._waiting.append((source, frame, until))
            else:
                yield source, frame, reason
