"""What a router at home lets in: answers to what was sent from inside, and nothing else. Pure: the time is an argument.

Addresses and ports are not rewritten, which nobody outside could tell: it is a mapping that is the same for all, with a
filter by address and port, as most routers have. Two peers that call each other at once meet, as they would at home.
"""

from __future__ import annotations

ICMP, TCP, UDP = 1, 6, 17
UDP_SECONDS = 60.0  # how long a flow of packets without connection is remembered; those of TCP are for hours
MOST_FLOWS = 8192


class Nat:
    """The flows that one home has opened. Packets are whole IPv4 ones."""

    def __init__(self) -> None:
        self._flows: dict[bytes, float] = {}  # (protocol, other's address, ports) -> last used

    def sent(self, packet: bytes, now: float) -> None:
        """A packet leaves the home: its flow is open."""
        key = self._key(packet, packet[16:20], inward=False)
        if key not in self._flows and len(self._flows) >= MOST_FLOWS:
            del self._flows[next(iter(self._flows))]  # the oldest
        self._flows[key] = now

    def lets_in(self, packet: bytes, now: float) -> bool:
        """Whether a packet for the home belongs to a flow that was opened from there."""
        key = self._key(packet, packet[12:16], inward=True)
        used = self._flows.get(key)
        if used is None or (packet[9] != TCP and now - used > UDP_SECONDS):
            return False
        self._flows[key] = now
        return True

    def _key(self, packet: bytes, other: bytes, inward: bool) -> bytes:
        start = 4 * (packet[0] & 15)
        if packet[9] == ICMP:  # an echo's number stands for both ports
            return packet[9:10] + other + packet[start + 4 : start + 6]
        source, destination = packet[start : start + 2], packet[start + 2 : start + 4]
        return packet[9:10] + other + (destination + source if inward else source + destination)
