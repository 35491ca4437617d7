"""A home's two ways to the hub, as they are while a laboratory runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.lab.link_model import LinkModel

BYTES_PER_SECOND = 1e6 / 8  # in a Mbit/s


@dataclass(slots=True)
class Access:
    """`up`: from the home to the hub; `down`: back."""

    up: LinkModel
    down: LinkModel

    def change(self, line: Mapping[str, float]) -> None:
        """Change what `line` says, by the names and in the units of a laboratory's file.

        What is on its way, or waits in a buffer, is not changed any more.
        """
        for way, rate in ((self.up, "up_mbit"), (self.down, "down_mbit")):
            if rate in line:
                way.bytes_per_second = line[rate] * BYTES_PER_SECOND or None
            way.delay = line.get("delay_ms", way.delay * 1e3) / 1e3
            way.jitter = line.get("jitter_ms", way.jitter * 1e3) / 1e3
            way.loss = line.get("loss", way.loss)

    def without_losses(self) -> Access:
        """For whole frames instead of packets: what TCP sends again is not lost, and its senders wait."""
        for way in (self.up, self.down):
            way.buffer_bytes, way.loss = None, 0.0
        return self
