"""What a peer has sent and may have to send again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.frame import Kind


class Outbox:
    """Payloads by (direction, step, microbatch), in the order in which they were sent."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Kind, int, int], Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, kind: Kind, step: int, microbatch: int, payload: Any) -> None:
        """Keep what is being sent."""
        self._kept[kind, step, microbatch] = payload

    def find(self, kind: Kind, step: int, microbatch: int) -> Any | None:
        """What was sent, if it is still kept."""
        return self._kept.get((kind, step, microbatch))

    def forget(self, kind: Kind, step: int, microbatch: int) -> None:
        """It is known to have arrived."""
        self._kept.pop((kind, step, microbatch), None)

    def forget_before(self, step: int) -> None:
        """Everything of earlier steps is known to have arrived."""
        self._kept = {key: payload for key, payload in self._kept.items() if key[1] >= step}

    def kept(self, gradients: bool) -> Iterator[tuple[Kind, int, int, Any]]:
        """What is kept: forwards, and gradients too if asked for."""
        for (kind, step, microbatch), payload in list(self._kept.items()):
            if gradients or kind is Kind.FORWARD:
                yield kind, step, microbatch, payload
