"""The transport: how frames and small records reach other peers. Everything above this line is network-free.

Two implementations: `peers.hivemind_transport` (libp2p streams and a Kademlia DHT) and `peers.memory_transport`
(an in-process network with seeded delay, bandwidth, loss, reorder and crash).

`send` never waits: it puts the frame on the link's queue, which the step protocol's credits bound. A link that
breaks reconnects by itself and reports `LinkLost`, then `LinkRestored`; frames on their way meanwhile may be lost,
and the step protocol sends them again. Order is not promised. After `TransportLost` nothing works any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protocol.frame import HEADER_BYTES, Frame, Kind
from protocol.link_measure import LinkMeasure

# Says whether a DHT record is genuine: its key, its value and when it expires, in seconds since the epoch.
RecordGuard = Callable[[str, bytes, float], bool]


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """`frame` came from `peer`, whose identity the channel has proved."""

    peer: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """`peer` sent what the limits or the layout forbid; its stream was closed."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The outgoing link to `peer` broke, or could not be opened; the transport keeps trying."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkRestored:
    """The outgoing link to `peer` works again; what was sent since before `LinkLost` may be lost."""

    peer: str


@dataclass(frozen=True, slots=True)
class TransportLost:
    """The transport itself broke, though nobody closed it: no frame or record goes in or out any more. Comes once."""

    reason: str


TransportEvent = FrameReceived | FrameRefused | LinkLost | LinkRestored | TransportLost


@dataclass(slots=True)
class Traffic:
    """Bytes of one frame kind, counted where they are handed to the socket. `header_bytes`: all that is not payload."""

    frames: int = 0
    header_bytes: int = 0
    payload_bytes: int = 0

    def add(self, frame: Frame) -> None:
        """Count one frame that travels whole."""
        self.count(1, HEADER_BYTES, len(frame.payload))

    def count(self, frames: int, header_bytes: int, payload_bytes: int) -> None:
        """Count a piece: of no frame, or of the frame that begins with it."""
        self.frames += frames
        self.header_bytes += header_bytes
        self.payload_bytes += payload_bytes


def _empty() -> dict[Kind, Traffic]:
    return {kind: Traffic() for kind in Kind}


@dataclass(slots=True)
class TrafficCounters:
    """What one transport has sent and received since it started, by frame kind."""

    sent: dict[Kind, Traffic] = field(default_factory=_empty)
    received: dict[Kind, Traffic] = field(default_factory=_empty)


class Transport(Protocol):
    """What a daemon needs of a network."""

    peer_id: str
    counters: TrafficCounters

    async def addresses(self) -> list[str]:
        """The addresses at which others can reach this peer, each with its peer id."""

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Tell the transport where `peer` is and open the link to it. Idempotent.

        Raises:
            NetworkError: `peer` is no peer id, or no address of it answered.
        """

    def forget(self, peer: str) -> None:
        """Drop the outgoing link and the addresses of `peer`, once what is queued for it has been written or 5 s have
        passed; without waiting for that. What `peer` sends still comes in. `send` or `connect` make a new link.
        """

    def send(self, peer: str, frame: Frame) -> None:
        """Queue `frame` for `peer`, which was connected before or has sent us something."""

    def limit(self, kind: Kind, payload_bytes: int) -> None:
        """Refuse incoming frames of `kind` with a longer payload. Until set: tensors 0, control `MAX_CONTROL_BYTES`."""

    def trust(self, peers: Collection[str], control_only: Collection[str] = (), patience: float = 0.0) -> None:
        """From now on `peers` and those in `control_only`, with whom no tensor is exchanged, are the run's members.

        Until the first call nobody is one. From others come only control frames of at most `MAX_STRANGER_BYTES`, few a
        second, behind all else. What only a member may send waits for `patience` seconds for its sender to become one.
        """

    def source_of(self, peer: str) -> str:
        """The IP address from which the newest connection of `peer` came; "": not known."""

    async def dials(self, peer: str, addresses: Sequence[str]) -> bool:
        """Whether somebody who has no connection to `peer` can get one at `addresses`. May take some seconds.

        Raises:
            NetworkError: this machine cannot try.
        """

    async def receive(self) -> TransportEvent:
        """The next event, from any peer."""

    async def store(self, key: str, value: bytes, seconds: float) -> bool:
        """Put a small record into the DHT for `seconds`. False: no node took it, or one that expires later is there."""

    async def fetch(self, key: str) -> bytes | None:
        """The newest record under `key`, or None."""

    def links(self) -> dict[str, LinkMeasure]:
        """What is known of each outgoing link, by peer."""

    def queued(self) -> int:
        """Frames that wait to be written, to all peers together."""

    async def drain(self, seconds: float) -> None:
        """Wait until the queues are written out, at most `seconds`."""

    async def close(self) -> None:
        """Close links and the DHT, end child processes, remove sockets."""


class OneNetwork:
    """For transports in whose network everybody reaches everybody, and nobody comes from anywhere."""

    def source_of(self, peer: str) -> str:
        """See `Transport.source_of`."""
        return ""

    async def dials(self, peer: str, addresses: Sequence[str]) -> bool:
        """See `Transport.dials`."""
        return True
