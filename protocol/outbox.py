"""What a peer has sent and may have to send again: to the same neighbour, or to the one that takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.frame import Kind


class Outbox:
    """Payloads by (direction, step, microbatch), in the order in which they were sent."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Kind, int, int], Any] = {}
        self._answered: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, kind: Kind, step: int, microbatch: int, payload: Any) -> None:
        """Keep what is being sent."""
        self._kept[kind, step, microbatch] = payload

    def find(self, kind: Kind, step: int, microbatch: int) -> Any | None:
        """What was sent, if it is still kept."""
        return self._kept.get((kind, step, microbatch))

    def answered(self, step: int, microbatch: int) -> None:
        """The gradient of a forward is here: who got it needs it no more, but an heir of his might."""
        self._answered.add((step, microbatch))

    def forget_before(self, step: int) -> None:
        """Nobody can need anything of earlier steps."""
        self._kept = {key: payload for key, payload in self._kept.items() if key[1] >= step}
        self._answered = {key for key in self._answered if key[0] >= step}

    def unanswered(self) -> Iterator[tuple[Kind, int, int, Any]]:
        """The gradients, and the forwards whose gradient is not here."""
        for (kind, step, microbatch), payload in list(self._kept.items()):
            if kind is Kind.BACKWARD or (step, microbatch) not in self._answered:
                yield kind, step, microbatch, payload
