"""What is known of a link: measured by the transport as it works, used by credits, rates and the floor. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """One direction, from this peer to another.

    Attributes:
        rtt_seconds: the least round trip of late, without queues; None: not known yet.
        bytes_per_second: the most that the link delivered of late; None: it never had enough to do to tell.
        busy_seconds: how long, since the link was opened, something waited to be sent or to arrive. Grows only.
        sent_bytes: what was handed to the socket since then, headers included. Grows only.
    """

    rtt_seconds: float | None = None
    bytes_per_second: float | None = None
    busy_seconds: float = 0.0
    sent_bytes: int = 0
