"""The real transport: libp2p streams and a Kademlia DHT, by hivemind.

Only this module, `peers.hivemind_node`, which starts and ends what it runs on, and `peers.hivemind_records` import
hivemind. Importing one of them loads torch and hivemind (some 4 s), so others import this one inside a function.

Each peer opens its own streams to a destination and writes frames on them; on streams opened by others it reads frames
and acknowledges. So a link is one direction, and its two ends never disagree on who reconnects.

A DHT record is stored as `[key, value]`: nodes see only the key's hash, so the key travels in the record and every
node checks it against the hash. A valid record thus cannot be replayed under another key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from peers.addresses import bare, for_others, host_of, usable
from peers.fair_inbox import FairInbox
from peers.hivemind_node import (
    ANSWER_SECONDS,
    NO_ANSWER,
    SHUTDOWN_SECONDS,
    checked_id,
    dialable,
    dials,
    end_of,
    end_p2pd,
    meet,
    nobody,
    one_line,
    parsed_id,
    quieten,
    sockets_of,
    start_node,
    start_own_p2pd,
    within,
    yield_to,
)
from peers.hivemind_records import MAX_RECORD_BYTES, MAX_RECORD_SECONDS, RecordCheck
from peers.limits import Limits, check_outgoing
from peers.link import CannotOpen, Stream
from peers.links import Links
from peers.reception import Reception
from peers.trace import NO_TRACE, Tracer
from peers.transport import RecordGuard, TrafficCounters, TransportEvent, TransportLost
from protocol.errors import NetworkError
from protocol.frame import Frame, Kind
from protocol.link_measure import LinkMeasure

PROTOCOL = "isthmus/2"
# A fresh stream lets 256 KiB be under way. Eight fill 80 Mbit/s at a round trip of 200 ms before any window has grown.
STREAMS = 8
_LAST_WORD_SECONDS = 0.2

T = TypeVar("T")


class HivemindTransport:
    """A `peers.transport.Transport` over one p2pd child process. Make it with `create`."""

    def __init__(self, streams: int, record_guard: RecordGuard | None, tracer: Tracer) -> None:
        self.peer_id = ""
        self.counters = TrafficCounters()
        self._streams = streams
        self._guard = record_guard
        self._p2p: P2P | None = None
        self._node: DHTNode | None = None
        self._limits, self._inbox = Limits(), FairInbox()
        self._links = Links(self._open_streams, self._inbox.tell, self.counters.sent, tracer)
        self._reception = Reception(self._limits, self.counters, self._inbox, self._seen, self._disconnect)
        self._addresses: dict[str, list[Multiaddr]] = {}
        self._p2pd_end: asyncio.Task[str] | None = None
        self._beside: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    async def create(
        cls,
        *,
        identity: Path,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] | None = None,
        initial_peers: Sequence[str] = (),
        no_listen: bool = False,
        record_guard: RecordGuard | None = None,
        record_sizes: Mapping[str, int] | None = None,
        streams: int = STREAMS,
        tracer: Tracer = NO_TRACE,
    ) -> HivemindTransport:
        """Start p2pd and a DHT node in this loop, and meet the initial peers.

        Args:
            identity: the private key's file; made if absent.
            announce: the addresses that others should use, if p2pd cannot know them (a forwarded port).
            no_listen: accept no connections; others call back over the ones this peer opens.
            record_guard: DHT records that it refuses are neither stored nor returned by this node.
            record_sizes: the only keys of records, and the most bytes of each; None: any.
            streams: how many streams carry one link.
            tracer: gets a span for each tensor frame that is sent.

        Raises:
            UserError: a bad address, a taken port, an unusable identity file, or one in use by another peer.
            NetworkError: p2pd did not start, no initial peer answered, or its clock differs from ours.
        """
        quieten()
        met = [(parsed_id(checked_id(address)), address) for address in initial_peers]
        self = cls(streams, record_guard, tracer)
        check = RecordCheck(record_guard, record_sizes)
        try:
            self._p2p = await start_own_p2pd(identity, met, listen, announce, no_listen)
            await self._start(met, no_listen, check)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, met: list[tuple[PeerID, str]], no_listen: bool, check: RecordCheck) -> None:
        assert self._p2p is not None
        self.peer_id = self._p2p.peer_id.to_base58()
        self._p2pd_end = asyncio.create_task(end_of(self._p2p))
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)
        answered = await meet(self._p2p, met) if met else []
        self._node = await self._unless_lost(start_node(self._p2p, answered, no_listen, check))
        if self._node is None:
            raise NetworkError(f"{self._p2pd_end.result()} while this peer started")
        beside = (self._report_end(self._p2pd_end), self._reception.sweep())
        self._beside = [asyncio.create_task(work) for work in beside]

    async def _report_end(self, p2pd_end: asyncio.Task[str]) -> None:
        await self._inbox.tell(TransportLost(await asyncio.shield(p2pd_end)))

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` gives, or None as soon as p2pd has ended: hivemind would wait for its answer for ever."""
        assert self._p2pd_end is not None
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._p2pd_end), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    def sockets(self) -> list[str]:
        """The unix sockets that this transport made."""
        return [] if self._p2p is None else sockets_of(self._p2p)

    @property
    def daemon_pid(self) -> int | None:
        """The process id of p2pd."""
        child = self._p2p._child if self._p2p is not None else None
        return child.pid if child is not None else None

    async def addresses(self) -> list[str]:
        """The addresses at which others can reach this peer; none with `no_listen`.

        Raises:
            NetworkError: p2pd does not answer.
        """
        assert self._p2p is not None
        try:
            _, visible = await within(ANSWER_SECONDS, self._p2p._client.identify())
        except NO_ANSWER as error:
            raise NetworkError(f"the network daemon p2pd does not answer: {one_line(error)}") from error
        return [f"{address}/p2p/{self.peer_id}" for address in for_others(usable([bare(str(a)) for a in visible]))]

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Open the link to `peer`; see `Transport.connect`."""
        try:
            parsed_id(peer)
        except ValueError as error:
            raise NetworkError(f"expected a peer id, got {peer[:100]!r}: {one_line(error)}") from error
        self._addresses[peer] = dialable(addresses) or list(self._addresses.get(peer, []))
        link = self._links.get(peer)
        if link is not None and link.up.is_set():
            return
        try:
            await within(ANSWER_SECONDS, self._open_link(peer))
        except NO_ANSWER as error:
            if link is None:
                await self._links.end(peer)
            raise nobody(f"peer {peer} at {', '.join(addresses) or 'an open connection'}", error) from error

    async def _open_link(self, peer: str) -> None:
        await self._dial(peer)
        link = self._links.to(peer)
        link.hurry()
        await link.up.wait()

    async def _dial(self, peer: str) -> None:
        assert self._p2p is not None
        if known := self._addresses.get(peer):
            if self.peer_id > peer:
                await yield_to(self._p2p, parsed_id(peer))
            await self._p2p._client.connect(parsed_id(peer), known)

    def forget(self, peer: str) -> None:
        """Drop the link and the addresses of `peer`; see `Transport.forget`."""
        known = self._addresses.get(peer)

        def parted() -> None:
            if self._addresses.get(peer) is known:  # else `connect` has named new ones meanwhile
                self._addresses.pop(peer, None)

        if not self._closed:
            self._links.forget(peer, parted)

    async def _open_streams(self, peer: str) -> list[Stream]:
        with suppress(*NO_ANSWER):  # p2pd may be connected, or know another address
            await within(ANSWER_SECONDS, self._dial(peer))
        opening = [asyncio.create_task(self._open_stream(peer)) for _ in range(self._width(peer))]
        try:
            return await within(ANSWER_SECONDS, asyncio.gather(*opening))
        except BaseException as error:
            for task in opening:
                task.cancel()
            for stream in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(stream, tuple):
                    stream[1].close()
            if isinstance(error, (*NO_ANSWER, ValueError)):  # ValueError: `peer` is no peer id
                raise CannotOpen(f"no stream to the peer: {one_line(error)}") from error
            raise

    def _width(self, peer: str) -> int:
        """The streams of a link to `peer`: many, only where tensors go."""
        return self._streams if self._reception.takes_tensors(peer) else 1

    async def _open_stream(self, peer: str) -> Stream:
        assert self._p2p is not None
        _, reader, writer = await self._p2p.call_binary_stream_handler(parsed_id(peer), PROTOCOL)
        return reader, writer

    def send(self, peer: str, frame: Frame) -> None:
        """Queue `frame`; see `Transport.send`. After `close`, does nothing."""
        check_outgoing(frame)
        if not self._closed:
            self._links.to(peer).put(frame)

    def limit(self, kind: Kind, payload_bytes: int) -> None:
        """Set the longest payload of incoming frames of `kind`."""
        self._limits.set(kind, payload_bytes)

    def trust(self, peers: Collection[str], control_only: Collection[str] = (), patience: float = 0.0) -> None:
        """Set who is a member; see `Transport.trust`."""
        self._reception.trust(peers, control_only, patience)

    def source_of(self, peer: str) -> str:
        """See `Transport.source_of`."""
        return self._reception.source_of(peer)

    async def dials(self, peer: str, addresses: Sequence[str]) -> bool:
        """See `Transport.dials`."""
        return await dials(peer, addresses)

    async def receive(self) -> TransportEvent:
        """The next event, from any peer."""
        return await self._inbox.get()

    async def _accept(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._reception.accept(info.peer_id.to_base58(), host_of(str(info.addr)), reader, writer)

    def _seen(self, peer: str) -> None:
        if (link := self._links.get(peer)) is not None:
            link.hurry()

    async def _disconnect(self, peer: str) -> None:
        if self._p2p is not None:
            with suppress(*NO_ANSWER):
                await within(ANSWER_SECONDS, self._p2p._client.disconnect(parsed_id(peer)))

    async def store(self, key: str, value: bytes, seconds: float) -> bool:
        """Put a record into the DHT. False if the guard refuses it, or a node holds one that expires later: that one is
        newer.

        Raises:
            ValueError: the record is too large or is to live too long.
        """
        if len(value) > MAX_RECORD_BYTES or seconds > MAX_RECORD_SECONDS:
            raise ValueError(
                f"expected a record of at most {MAX_RECORD_BYTES} bytes for at most {MAX_RECORD_SECONDS:.0f} s, "
                f"got {len(value)} bytes for {seconds} s"
            )
        assert self._node is not None
        expires = get_dht_time() + float(seconds)
        if self._guard is not None and not self._guard(key, value, expires):
            return False
        return bool(await self._unless_lost(self._node.store(key, [key, value], expires)))

    async def fetch(self, key: str) -> bytes | None:
        """The record under `key` that expires last, asked of the nodes that should hold it, not of a cache."""
        assert self._node is not None
        found = await self._unless_lost(self._node.get(key, latest=True))
        return None if found is None else found.value[1]

    def links(self) -> dict[str, LinkMeasure]:
        """What is known of each outgoing link, by peer."""
        return self._links.measures()

    def queued(self) -> int:
        """Frames that wait to be written, to all peers together."""
        return len(self._links)

    async def drain(self, seconds: float) -> None:
        """Wait until the queues are written out, at most `seconds`."""
        await self._links.drain(seconds)

    async def close(self) -> None:
        """End links, DHT node and p2pd, and remove the sockets. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        for task in self._beside:  # from now on p2pd may end
            task.cancel()
        if await self._links.close():  # p2pd drops what it has not yet sent when it ends
            await asyncio.sleep(_LAST_WORD_SECONDS)
        await self._reception.close()
        await asyncio.gather(*self._beside, return_exceptions=True)
        if self._node is not None and self._p2p is not None and self._p2p._child.returncode is None:
            with suppress(Exception):  # p2pd ends next, and with it whatever of the node did not
                await within(SHUTDOWN_SECONDS, self._node.shutdown())
        if self._p2p is not None:
            await end_p2pd(self._p2p)
