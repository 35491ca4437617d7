"""One direction between two peers of an in-memory network: what is on it, and for how long something was."""

from __future__ import annotations

from dataclasses import dataclass


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
