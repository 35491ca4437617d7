"""A token bucket: so many at once, so many a second in the long run. Pure; the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Holds at most `burst` tokens, is full at first, and gets `rate` of them a second."""

    rate: float
    burst: float
    _tokens: float = field(init=False)
    _filled: float | None = None  # when the tokens were last counted

    def __post_init__(self) -> None:
        self._tokens = self.burst

    def take(self, now: float, tokens: float = 1.0) -> float:
        """Take `tokens` if they are there. Returns the seconds to wait until they are; 0: they were taken."""
        if self._filled is not None:
            self._tokens = min(self.burst, self._tokens + max(0.0, now - self._filled) * self.rate)
        self._filled = now

        missing = min(tokens, self.burst) - self._tokens
        if missing > 0:
            return missing / self.rate
        self._tokens -= tokens
        return 0.0

    def borrow(self, now: float, tokens: float = 1.0) -> float:
        """Take `tokens`, whether they are there or not. Returns the seconds until they would have been."""
        if self._filled is not None:
            self._tokens = min(self.burst, self._tokens + max(0.0, now - self._filled) * self.rate)
        self._filled = now
        self._tokens -= tokens
        return max(0.0, -self._tokens / self.rate)
