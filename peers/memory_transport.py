"""A network in one process, for tests and simulations: seeded delay, bandwidth, loss, reorder, duplicates and crash.

    network = MemoryNetwork(seed=1, delay=(0.01, 0.05), loss=0.01)
    a, b = network.join("a"), network.join("b")

One `random.Random` decides everything in the order of the sends. Time is the running loop's. A frame is sent onto
its link when the link is free (`bandwidth_bytes_per_second`), then travels for a random delay, in order unless
reordered. Its payload is copied on arrival, not before: a sender that reuses a buffer too early corrupts its frame
here as it would on a real socket.

A peer may have a line of its own, `network.join("a", access=...)`, with a rate each way that all its links share: a
frame then goes up the sender's line and down the receiver's, as in `peers.lab`, first.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from peers.lab.access import Access
from peers.lab.link_model import LinkModel
from peers.limits import Limits, check_outgoing
from peers.memory_wire import Doorstep, Wire
from peers.transport import (
    FrameReceived,
    FrameRefused,
    LinkLost,
    LinkRestored,
    OneNetwork,
    RecordGuard,
    TrafficCounters,
    TransportEvent,
    TransportLost,
)
from protocol.errors import NetworkError
from protocol.frame import HEADER_BYTES, Frame, Kind
from protocol.link_measure import LinkMeasure

# Keeps two frames of one link apart: the loop does not promise the order of timers that are due at the same time.
_TICK_SECONDS = 1e-6


class MemoryNetwork:
    """Where memory transports meet.

    Args:
        seed: of every random decision.
        delay: least and most seconds that a frame travels.
        bandwidth_bytes_per_second: of each direction between two peers; None is unlimited.
        loss, reorder, duplicate: probability for each frame.
    """

    def __init__(
        self,
        seed: int,
        delay: tuple[float, float] = (0.0, 0.0),
        bandwidth_bytes_per_second: float | None = None,
        loss: float = 0.0,
        reorder: float = 0.0,
        duplicate: float = 0.0,
    ) -> None:
        self._random = random.Random(seed)
        self._delay = delay
        self._bandwidth = bandwidth_bytes_per_second
        self._loss, self._reorder, self._duplicate = loss, reorder, duplicate
        self._peers: dict[str, MemoryTransport] = {}
        self._crashed: set[str] = set()
        self._wires: dict[tuple[str, str], Wire] = {}
        self._accesses: dict[str, Access] = {}
        self._at_hub: dict[str, float] = {}  # when the last frame of each peer was at the hub
        self._records: dict[str, tuple[bytes, float]] = {}

    def join(self, name: str, record_guard: RecordGuard | None = None, access: Access | None = None) -> MemoryTransport:
        """A new peer called `name`, with a line of its own or none. A name is free again after `close`."""
        if name in self._peers:
            raise ValueError(f"expected a name that is not in the network, got {name!r}")
        self._accesses[name], self._at_hub[name] = access or Access(LinkModel(), LinkModel()), 0.0
        self._peers[name] = MemoryTransport(self, name, record_guard)
        self._tell_others(name, LinkRestored(name))
        return self._peers[name]

    def crash(self, name: str) -> None:
        """Silence `name`: what it sends, what is sent to it and what is on its way to it vanishes."""
        if self.alive(name):
            self._crashed.add(name)
            self._tell_others(name, LinkLost(name, "the peer crashed"))

    def restore(self, name: str) -> None:
        """End the silence. What vanished stays lost."""
        if name in self._crashed:
            self._crashed.discard(name)
            self._tell_others(name, LinkRestored(name))

    def lose(self, name: str) -> None:
        """Break the transport of `name`, as the end of its p2pd would: it is silent from now on and is told so."""
        self.crash(name)
        self._peers[name].lost("the network daemon ended")

    def alive(self, name: str) -> bool:
        """Whether `name` has joined and is not crashed."""
        return name in self._peers and name not in self._crashed

    def leave(self, name: str) -> None:
        """Take `name` out, as its process's end would."""
        if self.alive(name):
            self._tell_others(name, LinkLost(name, "the peer closed the stream"))
        self._peers.pop(name, None)
        self._crashed.discard(name)

    def _tell_others(self, name: str, event: LinkLost | LinkRestored) -> None:
        for other, transport in self._peers.items():
            if other != name and self.alive(other):
                transport.link_changed(event)

    def transmit(self, source: str, destination: str, frame: Frame) -> None:
        """Put one frame on the wire; the network decides whether and when it arrives."""
        # All four are drawn for every frame, so that one knob's setting does not shift another's decisions.
        loss, reorder, duplicate = (self._random.random() for _ in range(3))
        delay = self._random.uniform(*self._delay)
        if not self.alive(source):
            return
        size = HEADER_BYTES + len(frame.payload)
        left = self._occupy(source, destination, size)
        if loss < self._loss or not self.alive(destination):
            return
        target, late, twice = self._peers[destination], reorder < self._reorder, duplicate < self._duplicate

        def arrive(at: float) -> None:
            self._schedule(source, target, frame, at + delay, in_order=not late)
            if twice:
                self._schedule(source, target, frame, at + delay, in_order=False)

        self._carry(source, destination, size, left, arrive)

    def _occupy(self, source: str, destination: str, size: int) -> float:
        """Keep the wire busy for `size` bytes. Returns when the last of them has left."""
        wire = self._wires.setdefault((source, destination), Wire())
        now = asyncio.get_running_loop().time()
        wire.busy_until = max(now, wire.busy_until) + (size / self._bandwidth if self._bandwidth else 0.0)
        wire.sent_bytes += size
        wire.use(now, wire.busy_until)
        return wire.busy_until

    def _carry(self, source: str, destination: str, size: int, now: float, arrive: Callable[[float], None]) -> None:
        """Put `size` bytes on the line up and, when the first of them is at the hub, on the line down."""
        up, down, wire = self._accesses[source].up, self._accesses[destination].down, self._wires[source, destination]
        if up.is_free and down.is_free:
            arrive(now)
            return
        last = up.put(size, now)
        if last is None:
            return
        wire.use(now, last)
        first = self._at_hub[source] = max(up.first_arrival(size, last), self._at_hub[source] + _TICK_SECONDS)

        def go_down() -> None:
            end = down.put(size, max(first, last), first)
            if end is not None:
                wire.use(first, end)
                arrive(end)

        asyncio.get_running_loop().call_at(first, go_down)

    def _schedule(self, source: str, target: MemoryTransport, frame: Frame, arrival: float, *, in_order: bool) -> None:
        wire = self._wires[source, target.peer_id]
        if in_order:
            arrival = wire.last_arrival = max(arrival, wire.last_arrival + _TICK_SECONDS)
        else:
            arrival += self._random.uniform(_TICK_SECONDS, max(0.01, 2 * self._delay[1]))
        asyncio.get_running_loop().call_at(arrival, self._arrive, source, target, frame)

    def _arrive(self, source: str, target: MemoryTransport, frame: Frame) -> None:
        # A peer that closed and joined again is another process: it does not get the old one's frames.
        if self._peers.get(target.peer_id) is target and self.alive(target.peer_id):
            target.deliver(source, frame)

    def measure(self, source: str, destination: str) -> LinkMeasure:
        """The wire from `source` to `destination` as it is."""
        wire = self._wires.get((source, destination), Wire())
        own, other = self._accesses[source], self._accesses.get(destination, self._accesses[source])
        rates = [r for r in (self._bandwidth, own.up.bytes_per_second, other.down.bytes_per_second) if r]
        rate = min(rates, default=None)
        rtt = sum(self._delay) + sum(way.delay for access in (own, other) for way in (access.up, access.down))
        busy = wire.busy_seconds(asyncio.get_running_loop().time())
        return LinkMeasure(rtt, rate, busy if rate else 0.0, wire.sent_bytes)

    def busy_until(self, source: str) -> float:
        """When the last byte that `source` has sent so far leaves it."""
        wires = [wire.busy_until for (name, _), wire in self._wires.items() if name == source]
        return max(self._accesses[source].up.busy_until, *wires, 0.0)

    def refused(self, source: str, destination: str) -> None:
        """`destination` closed the stream of `source`, which opens another one."""
        if self.alive(source):
            self._peers[source].link_changed(LinkLost(destination, "the peer closed the stream"))
            self._peers[source].link_changed(LinkRestored(destination))

    def put_record(self, key: str, value: bytes, expires: float) -> bool:
        """Keep the record that expires last, as the DHT does."""
        if key in self._records and self._records[key][1] >= max(expires, time.time()):
            return False
        self._records[key] = (value, expires)
        return True

    def get_record(self, key: str) -> tuple[bytes, float] | None:
        """The live record under `key`, and when it expires."""
        record = self._records.get(key)
        return record if record is not None and record[1] > time.time() else None


class MemoryTransport(OneNetwork):
    """A `peers.transport.Transport` in a `MemoryNetwork`. Make it with `network.join`."""

    def __init__(self, network: MemoryNetwork, name: str, record_guard: RecordGuard | None) -> None:
        self.peer_id = name
        self.counters = TrafficCounters()
        self._network = network
        self._guard = record_guard
        self._limits, self._doorstep = Limits(), Doorstep()
        self._links: dict[str, bool] = {}  # peer -> whether LinkLost is its last report
        self._inbox: asyncio.Queue[TransportEvent] = asyncio.Queue()
        self._lost = False
        self._closed = False

    async def addresses(self) -> list[str]:
        """One made-up address."""
        return [f"/memory/{self.peer_id}/p2p/{self.peer_id}"]

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Open the link to `peer`; see `Transport.connect`."""
        if not self._network.alive(peer) or not self._network.alive(self.peer_id):
            raise NetworkError(f"expected peer {peer} at {', '.join(addresses)}, nobody answered: check that it runs")
        self._links.setdefault(peer, False)

    def forget(self, peer: str) -> None:
        """Drop the link to `peer`; see `Transport.forget`. What was sent to it is on the wire already."""
        self._links.pop(peer, None)

    def send(self, peer: str, frame: Frame) -> None:
        """Queue `frame`; see `Transport.send`. After `close`, does nothing."""
        check_outgoing(frame)
        if self._closed:
            return
        self._links.setdefault(peer, False)
        self.counters.sent[frame.header.kind].add(frame)
        self._network.transmit(self.peer_id, peer, frame)
        if not self._network.alive(peer) and self._network.alive(self.peer_id):
            self.link_changed(LinkLost(peer, "no stream to the peer"))

    def limit(self, kind: Kind, payload_bytes: int) -> None:
        """Set the longest payload of incoming frames of `kind`."""
        self._limits.set(kind, payload_bytes)

    def trust(self, peers: Collection[str], control_only: Collection[str] = (), patience: float = 0.0) -> None:
        """Set who is a member; see `Transport.trust`. Nobody is slowed down here, nor given turns."""
        self._doorstep.patience = patience
        self._doorstep.standing.trust(frozenset(control_only).union(peers))
        self._take()

    async def receive(self) -> TransportEvent:
        """The next event, from any peer."""
        return await self._inbox.get()

    async def store(self, key: str, value: bytes, seconds: float) -> bool:
        """Put a record into the network's dictionary. False if a later-expiring one is there, or the guard refuses."""
        expires = time.time() + seconds
        if not self._network.alive(self.peer_id) or not self._genuine(key, value, expires):
            return False
        return self._network.put_record(key, bytes(value), expires)

    async def fetch(self, key: str) -> bytes | None:
        """The record under `key` that expires last."""
        if not self._network.alive(self.peer_id):
            return None
        record = self._network.get_record(key)
        return record[0] if record is not None and self._genuine(key, *record) else None

    def _genuine(self, key: str, value: bytes, expires: float) -> bool:
        return self._guard is None or self._guard(key, value, expires)

    def links(self) -> dict[str, LinkMeasure]:
        """What the network was made with, for it is not measured here."""
        return {peer: self._network.measure(self.peer_id, peer) for peer in self._links}

    def queued(self) -> int:
        """None: a line of this network takes all at once, and gives it late."""
        return 0

    async def drain(self, seconds: float) -> None:
        """Wait until the last byte has left, at most `seconds`."""
        left = self._network.busy_until(self.peer_id) - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, min(seconds, left)))

    async def close(self) -> None:
        """Leave the network. Can be called twice."""
        if not self._closed:
            self._closed = True
            self._network.leave(self.peer_id)

    def deliver(self, source: str, frame: Frame) -> None:
        """Called by the network when a frame arrives."""
        frame = replace(frame, payload=bytes(frame.payload))
        self._doorstep.put(source, frame)
        self._take()

    def _take(self) -> None:
        for source, frame, reason in self._doorstep.take():
            if reason := reason or self._limits.refusal(frame.header):
                self._inbox.put_nowait(FrameRefused(source, reason))
                self._network.refused(source, self.peer_id)
            else:
                self.counters.received[frame.header.kind].add(frame)
                self._inbox.put_nowait(FrameReceived(source, frame))

    def link_changed(self, event: LinkLost | LinkRestored) -> None:
        """Called by the network. Reports a change of a link that this peer uses, and only a change."""
        lost = isinstance(event, LinkLost)
        if self._links.get(event.peer, lost) != lost:
            self._links[event.peer] = lost
            self._inbox.put_nowait(event)

    def lost(self, reason: str) -> None:
        """Called by the network when it ends this transport. Reports it once."""
        if not self._lost:
            self._lost = True
            self._inbox.put_nowait(TransportLost(reason))
