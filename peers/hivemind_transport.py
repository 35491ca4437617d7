"""The real transport: libp2p streams and a Kademlia DHT, by hivemind. The only module that imports its networking.

Importing this module loads torch and hivemind (some 4 s), so others import it inside a function.

Each peer opens its own streams to a destination and only writes on them; on streams opened by others it only reads.
So a link is one direction, and its two ends never disagree on who reconnects.

A DHT record is stored as `[key, value]`: nodes see only the key's hash, so the key travels in the record and every
node checks it against the hash. A valid record thus cannot be replayed under another key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from peers.addresses import bare, check_announced, check_listen, peer_of, usable
from peers.limits import Limits, check_outgoing
from peers.link import CannotOpen, Link, Stream, read_frame
from peers.transport import FrameReceived, FrameRefused, TrafficCounters, TransportEvent
from protocol.errors import BadFrame, NetworkError, UserError
from protocol.frame import MAX_CONTROL_BYTES, Frame, Kind

logger = logging.getLogger(__name__)

PROTOCOL = "isthmus/1"
ANSWER_SECONDS = 10.0
INBOX_EVENTS = 1024
MAX_STREAMS_FROM_PEER = 32  # room for the streams of links that broke unnoticed
MAX_RECORD_BYTES = MAX_CONTROL_BYTES
MAX_RECORD_SECONDS = 24 * 3600.0

RecordGuard = Callable[[str, bytes], bool]

# Nothing here may reach outside unasked: no port mapping at the router, no AutoNAT, no relays.
_QUIET_NETWORK = {"nat_port_map": False, "auto_nat": False, "use_relay": False}
# How asking p2pd for something fails: its own errors, its end of the control socket closed, or nothing in time.
_NO_ANSWER = (P2PDaemonError, OSError, EOFError, asyncio.TimeoutError)
# Ctrl-C in a terminal reaches every process of its session. p2pd would end at once, before we could say goodbye.
_OWN_SESSION = (sys.executable, "-ISc", "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])")
_SHUTDOWN_SECONDS = 3.0
_LAST_WORD_SECONDS = 0.2
_TWIN_TRIES = 4
_TWIN_WAIT_SECONDS = 0.2

T = TypeVar("T")


class HivemindTransport:
    """A `peers.transport.Transport` over one p2pd child process. Make it with `create`."""

    def __init__(self, streams: int, record_guard: RecordGuard | None) -> None:
        self.peer_id = ""
        self.counters = TrafficCounters()
        self._streams = streams
        self._guard = record_guard
        self._p2p: P2P | None = None
        self._node: DHTNode | None = None
        self._limits = Limits()
        self._links: dict[str, Link] = {}
        self._addresses: dict[str, list[str]] = {}
        self._inbox: asyncio.Queue[TransportEvent] = asyncio.Queue(INBOX_EVENTS)
        self._readers: dict[asyncio.Task[Any], str] = {}
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
        streams: int = 2,
    ) -> HivemindTransport:
        """Start p2pd and a DHT node in this loop, and meet the initial peers.

        Args:
            identity: the private key's file; made if absent.
            announce: the addresses that others should use, if p2pd cannot know them (a forwarded port).
            no_listen: accept no connections; others call back over the ones this peer opens.
            record_guard: `guard(key, value)` says whether a DHT record is genuine. Others are neither stored nor
                returned by this node.
            streams: how many streams carry one link (several fill a long line better than one).

        Raises:
            UserError: a bad address, a taken port, an unusable identity file, or one in use by another peer.
            NetworkError: p2pd did not start, no initial peer answered, or its clock differs from ours.
        """
        _quieten()
        check_announced(announce)
        met = [(PeerID.from_base58(_checked_id(address)), address) for address in initial_peers]
        if not no_listen:
            check_listen(listen)
        known_identity = identity.exists()
        own = _prepare_identity(identity)
        self = cls(streams, record_guard)
        try:
            if known_identity and met:
                await _refuse_duplicate(own, met)
            self._p2p = await _start_p2pd(
                identity_path=str(identity),
                host_maddrs=list(listen),
                announce_maddrs=list(announce) if announce else None,
                no_listen=no_listen,
                dht_mode="client" if no_listen else "server",
            )
            await self._start(met, no_listen)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, met: list[tuple[PeerID, str]], no_listen: bool) -> None:
        assert self._p2p is not None
        self.peer_id = self._p2p.peer_id.to_base58()
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)
        answered = await _meet(self._p2p, met) if met else []
        self._node = await _start_node(self._p2p, answered, no_listen, self._guard)

    def sockets(self) -> list[str]:
        """The unix sockets that this transport made."""
        return [] if self._p2p is None else _sockets(self._p2p)

    @property
    def daemon_pid(self) -> int | None:
        """The process id of p2pd."""
        child = self._p2p._child if self._p2p is not None else None
        return child.pid if child is not None else None

    async def addresses(self) -> list[str]:
        """The addresses at which others can reach this peer; none with `no_listen`."""
        assert self._p2p is not None
        _, visible = await self._p2p._client.identify()
        return [f"{address}/p2p/{self.peer_id}" for address in usable([bare(str(a)) for a in visible])]

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Open the link to `peer`; see `Transport.connect`."""
        self._addresses[peer] = usable([bare(a) for a in addresses]) or self._addresses.get(peer, [])
        link = self._links.get(peer)
        if link is not None and link.up.is_set():
            return
        try:
            await _within(ANSWER_SECONDS, self._open_link(peer))
        except _NO_ANSWER as error:
            if link is None and peer in self._links:
                await self._links.pop(peer).close()
            raise _nobody(f"peer {peer} at {', '.join(addresses) or 'an open connection'}", error) from error

    async def _open_link(self, peer: str) -> None:
        await self._dial(peer)
        link = self._link(peer)
        link.hurry()
        await link.up.wait()

    async def _dial(self, peer: str) -> None:
        assert self._p2p is not None
        if known := self._addresses.get(peer):
            await self._p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(a) for a in known])

    def _link(self, peer: str) -> Link:
        if peer not in self._links:
            self._links[peer] = Link(peer, lambda: self._open_streams(peer), self._inbox.put, self.counters.sent)
        return self._links[peer]

    async def _open_streams(self, peer: str) -> list[Stream]:
        opened: list[Stream] = []
        try:
            with suppress(P2PDaemonError):  # p2pd may be connected, or know another address
                await _within(ANSWER_SECONDS, self._dial(peer))
            for _ in range(self._streams):
                opened.append(await _within(ANSWER_SECONDS, self._open_stream(peer)))
        except _NO_ANSWER as error:
            for _, writer in opened:
                writer.close()
            raise CannotOpen(f"no stream to the peer: {_one_line(error)}") from error
        return opened

    async def _open_stream(self, peer: str) -> Stream:
        assert self._p2p is not None
        _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer), PROTOCOL)
        return reader, writer

    def send(self, peer: str, frame: Frame) -> None:
        """Queue `frame`; see `Transport.send`. After `close`, does nothing."""
        check_outgoing(frame)
        if not self._closed:
            self._link(peer).put(frame)

    def limit(self, kind: Kind, payload_bytes: int) -> None:
        """Set the longest payload of incoming frames of `kind`."""
        self._limits.set(kind, payload_bytes)

    async def receive(self) -> TransportEvent:
        """The next event, from any peer."""
        return await self._inbox.get()

    async def _accept(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one incoming stream to its end. A full inbox stops the reading, and so the sender."""
        task = asyncio.current_task()
        assert task is not None
        peer = info.peer_id.to_base58()
        self._readers[task] = peer
        if peer in self._links:
            self._links[peer].hurry()
        try:
            if list(self._readers.values()).count(peer) > MAX_STREAMS_FROM_PEER:
                raise BadFrame(f"expected at most {MAX_STREAMS_FROM_PEER} streams from one peer, got one more")
            while (frame := await read_frame(reader, self._limits)) is not None:
                self.counters.received[frame.header.kind].add(frame)
                await self._inbox.put(FrameReceived(peer, frame))
        except BadFrame as error:
            await self._inbox.put(FrameRefused(peer, str(error)))
        except asyncio.CancelledError:
            pass  # only `close` cancels it, and nobody awaits the task that the stream server made
        finally:
            writer.close()
            self._readers.pop(task, None)

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
        if self._guard is not None and not self._guard(key, value):
            return False
        return bool(await self._node.store(key, [key, value], get_dht_time() + float(seconds)))

    async def fetch(self, key: str) -> bytes | None:
        """The record under `key` that expires last, asked of the nodes that should hold it, not of a cache."""
        assert self._node is not None
        found = await self._node.get(key, latest=True)
        return None if found is None else found.value[1]

    async def drain(self, seconds: float) -> None:
        """Wait until the queues are written out, at most `seconds`."""
        waits = [asyncio.create_task(link.drain()) for link in self._links.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late:
                task.cancel()

    async def close(self) -> None:
        """End links, DHT node and p2pd, and remove the sockets. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links.values()))
        if self._links:  # p2pd drops what it has not yet sent when it ends
            await asyncio.sleep(_LAST_WORD_SECONDS)
        readers = list(self._readers)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        if self._node is not None and self._p2p is not None and self._p2p._child.returncode is None:
            with suppress(Exception):  # p2pd ends next, and with it whatever of the node did not
                await _within(_SHUTDOWN_SECONDS, self._node.shutdown())
        if self._p2p is not None:
            await _end_p2pd(self._p2p)


class _RecordCheck(RecordValidatorBase):  # type: ignore[misc]
    """What this node stores and returns: our own layout, under its own key, not for too long, and genuine."""

    def __init__(self, guard: RecordGuard | None) -> None:
        self._guard = guard

    def validate(self, record: DHTRecord) -> bool:
        """Called for every record that another node sends, and for our own before we store them here."""
        try:
            key, value = DHTProtocol.serializer.loads(record.value)
            return (
                record.subkey == DHTProtocol.IS_REGULAR_VALUE
                and isinstance(key, str)
                and isinstance(value, bytes)
                and len(value) <= MAX_RECORD_BYTES
                and record.key == DHTID.generate(key).to_bytes()
                and record.expiration_time <= get_dht_time() + MAX_RECORD_SECONDS + MAX_DHT_TIME_DISCREPANCY_SECONDS
                and (self._guard is None or self._guard(key, value))
            )
        except Exception:  # a stranger's bytes: whatever they break, the record is bad
            logger.debug("refused a malformed record", exc_info=True)
            return False


def _quieten() -> None:
    """Send hivemind's errors, and only those, to the application's log instead of to stderr."""
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for everybody
    os.environ.setdefault("GOLOG_LOG_LEVEL", "error")  # read by p2pd


def _checked_id(address: str) -> str:
    peer = peer_of(address)
    try:
        return PeerID.from_base58(peer).to_base58()
    except ValueError as error:
        raise UserError(f"expected a peer id after /p2p/, got {peer!r} in {address}") from error


def _prepare_identity(path: Path) -> PeerID:
    """The peer id of the key in `path`, which only its owner may read; a new key if the file is absent."""
    if not path.parent.is_dir():
        raise UserError(f"expected the folder {path.parent} for the identity file, and it does not exist: create it")
    if not path.exists():
        before = os.umask(0o377)  # from its first byte on, the key is nobody else's to read
        try:
            P2P.generate_identity(str(path))
        finally:
            os.umask(before)
    try:
        path.chmod(0o400)
        return PeerID.from_identity(path.read_bytes())
    except Exception as error:
        raise UserError(f"expected an identity file at {path}, cannot use it: {_one_line(error)}") from error


async def _start_p2pd(**options: Any) -> P2P:
    """`P2P.create` that leaves nothing behind when it fails."""
    made: list[P2P] = []

    class Recorded(P2P):  # type: ignore[misc]
        """`create` makes its object itself, and when it raises nobody else holds it."""

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            return [*_OWN_SESSION, *P2P._make_process_args(*args, **kwargs)]

    try:
        return await Recorded.create(**_QUIET_NETWORK, **options)
    except BaseException as error:
        for half_made in made:
            await _end_p2pd(half_made)
        if isinstance(error, _NO_ANSWER):
            raise NetworkError(f"the network daemon p2pd did not start: {_one_line(error)}") from error
        raise


async def _end_p2pd(p2p: P2P) -> None:
    """Stop p2pd, by force if it takes too long, and remove its sockets."""
    try:
        await _within(_SHUTDOWN_SECONDS, p2p.shutdown())
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
    control = p2p._client.control if p2p._client is not None else None
    tasks = [p2p._listen_task, p2p._reader_task]
    tasks += [control._read_task, control._write_task] if control is not None else []
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
    for path in _sockets(p2p):
        Path(path).unlink(missing_ok=True)


def _sockets(p2p: P2P) -> list[str]:
    addresses = (getattr(p2p, name, None) for name in ("_daemon_listen_maddr", "_client_listen_maddr"))
    return [str(address).removeprefix("/unix") for address in addresses if address is not None]


async def _refuse_duplicate(own: PeerID, met: Sequence[tuple[PeerID, str]]) -> None:
    """Raise UserError if a peer with our identity can be reached. Two of them would steal each other's connections.

    Asked through a nameless p2pd: ours could not tell its namesake from itself.
    """
    twin = UserError(
        f"a peer with this identity ({own.to_base58()}) is already in the run: give each peer its own folder; "
        "if that was this peer and it has just been killed, try again in 10 s"
    )
    if any(peer == own for peer, _ in met):
        raise twin
    nameless = await _start_p2pd(no_listen=True, dht_mode="client")
    try:
        await _meet(nameless, met)
        for _ in range(_TWIN_TRIES):  # libp2p fills its routing table some time after it has connected
            with suppress(*_NO_ANSWER):
                await _within(ANSWER_SECONDS / 2, nameless._client.connect(own, []))
                raise twin
            await asyncio.sleep(_TWIN_WAIT_SECONDS)
    finally:
        await _end_p2pd(nameless)


async def _meet(p2p: P2P, met: Sequence[tuple[PeerID, str]]) -> list[tuple[PeerID, str]]:
    """Connect to the initial peers at once. Returns those that answered; NetworkError if none did."""

    async def ask(peer: PeerID, address: str) -> BaseException | None:
        try:
            await _within(ANSWER_SECONDS, p2p._client.connect(peer, [Multiaddr(bare(address))]))
        except _NO_ANSWER as error:
            return error
        return None

    errors = await asyncio.gather(*(ask(peer, address) for peer, address in met))
    answered = [one for one, error in zip(met, errors, strict=True) if error is None]
    if not answered:
        raise _nobody(f"a peer at {' or '.join(address for _, address in met)}", errors[0])
    return answered


async def _start_node(
    p2p: P2P, met: Sequence[tuple[PeerID, str]], no_listen: bool, guard: RecordGuard | None
) -> DHTNode:
    """A DHT node that knows `met`. Its caches are off: a stale record is worse than a round trip."""
    try:
        return await DHTNode.create(
            p2p=p2p,
            initial_peers=[address for _, address in met],
            client_mode=no_listen,
            record_validator=_RecordCheck(guard),
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            reuse_get_requests=False,
        )
    except (RuntimeError, ValidationError) as error:
        await _explain_clocks(p2p, met)
        raise NetworkError(
            f"the peer at {met[0][1]} answered but does not take this peer into the DHT: "
            f"check that it runs isthmus ({_one_line(error)})"
        ) from error


async def _explain_clocks(p2p: P2P, met: Sequence[tuple[PeerID, str]]) -> None:
    """Raise NetworkError if a peer's clock is so far from ours that hivemind refuses to work with it."""
    request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
    for peer, address in met:
        asked = get_dht_time()
        try:
            call = p2p.call_protobuf_handler(peer, "DHTProtocol.rpc_ping", request, dht_pb2.PingResponse)
            answer = await _within(ANSWER_SECONDS, call)
        except (*_NO_ANSWER, P2PHandlerError):
            continue
        ahead = answer.dht_time - (asked + get_dht_time()) / 2
        if abs(ahead) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
            raise NetworkError(
                f"expected clocks within {MAX_DHT_TIME_DISCREPANCY_SECONDS:.0f} s of each other, the clock of the peer "
                f"at {address} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} ours: "
                "set both by NTP (timedatectl set-ntp true)"
            )


async def _within(seconds: float, work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, seconds)


def _nobody(who: str, error: BaseException | None) -> NetworkError:
    return NetworkError(
        f"expected {who}, nobody answered within {ANSWER_SECONDS:.0f} s: check that it runs, that the address is "
        f"right and that its port is open in the firewall ({_one_line(error)})"
    )


def _one_line(error: BaseException | None) -> str:
    """p2pd's errors span lines; ours do not."""
    return " ".join(str(error).split())[:300] or type(error).__name__
