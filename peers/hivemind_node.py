"""What the real transport runs on: the identity, the p2pd child process and the DHT node.

Only the modules `peers.hivemind_*` import hivemind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from peers.addresses import bare, check_announced, check_listen, peer_of, usable
from peers.hivemind_records import MAX_REQUEST_BYTES, NodeGate, RecordCheck
from protocol.errors import NetworkError, UserError

ANSWER_SECONDS = 10.0
DIAL_SECONDS = 6.0
SHUTDOWN_SECONDS = 3.0
# How asking p2pd for something fails: its own errors, its end of the control socket closed, or nothing in time.
NO_ANSWER = (P2PDaemonError, OSError, EOFError, asyncio.TimeoutError)

# Nothing here may reach outside unasked: no port mapping at the router, no AutoNAT, no relays.
_QUIET_NETWORK = {"nat_port_map": False, "auto_nat": False, "use_relay": False}
# Ctrl-C in a terminal reaches every process of its session. p2pd would end at once, before we could say goodbye.
_OWN_SESSION = (sys.executable, "-ISc", "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])")
_MESSAGE_BYTES = MAX_REQUEST_BYTES + (1 << 12)  # between p2pd and here; p2pd refuses a longer one of others
_TWIN_TRIES = 4
_TWIN_WAIT_SECONDS = 0.2
_YIELD_TRIES = 6
_YIELD_SECONDS = 0.1

_LONGEST_PEER_ID = 128

T = TypeVar("T")
Met = Sequence[tuple[PeerID, str]]  # peers that are in the run already, each with its whole address


def quieten() -> None:
    """Send hivemind's errors, and only those, to the application's log instead of to stderr."""
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for everybody
    os.environ.setdefault("GOLOG_LOG_LEVEL", "error")  # read by p2pd


def checked_id(address: str) -> str:
    """The peer id at the end of an initial peer's address; UserError if there is none, or it is not one."""
    peer = peer_of(address)
    try:
        return str(parsed_id(peer).to_base58())
    except ValueError as error:
        raise UserError(f"expected a peer id after /p2p/, got {peer!r} in {address}") from error


def parsed_id(peer: str) -> PeerID:
    """The peer id that `peer` spells; ValueError if it spells none."""
    if not 0 < len(peer) <= _LONGEST_PEER_ID:
        raise ValueError(f"expected a peer id of 1 to {_LONGEST_PEER_ID} characters, got {len(peer)}")
    return PeerID.from_base58(peer)


def dialable(addresses: Sequence[str]) -> list[Multiaddr]:
    """Those of `addresses` that p2pd can try. A stranger named them: a malformed one does not spoil the others."""
    parsed = []
    for address in usable([bare(a) for a in addresses]):
        with suppress(ValueError):  # a name that is no name by the rules of IDNA
            parsed.append(Multiaddr(address))
    return parsed


def prepare_identity(path: Path) -> PeerID:
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
        raise UserError(f"expected an identity file at {path}, cannot use it: {one_line(error)}") from error


async def start_own_p2pd(
    identity: Path, met: Met, listen: Sequence[str], announce: Sequence[str] | None, no_listen: bool
) -> P2P:
    """The p2pd of this peer, after what its user may have got wrong was checked; see `HivemindTransport.create`."""
    check_announced(announce)
    if not no_listen:
        check_listen(listen)
    known_identity = identity.exists()
    own = prepare_identity(identity)
    if known_identity and met:
        await refuse_duplicate(own, met)
    return await start_p2pd(
        identity_path=str(identity),
        host_maddrs=list(listen),
        announce_maddrs=list(announce) if announce else None,
        no_listen=no_listen,
        dht_mode="client" if no_listen else "server",
    )


async def start_p2pd(**options: Any) -> P2P:
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
        return await Recorded.create(**_QUIET_NETWORK, persistent_conn_max_msg_size=_MESSAGE_BYTES, **options)
    except BaseException as error:
        for half_made in made:
            await end_p2pd(half_made)
        if isinstance(error, (*NO_ANSWER, ValueError)):
            raise NetworkError(f"the network daemon p2pd did not start: {one_line(error)}") from error
        raise


async def end_of(p2p: P2P) -> str:
    """Wait for p2pd to end. Returns how it did."""
    status = await p2p._child.wait()
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"the network daemon p2pd {how}"


async def end_p2pd(p2p: P2P) -> None:
    """Stop p2pd, by force if it takes too long, and remove its sockets."""
    try:
        await within(SHUTDOWN_SECONDS, p2p.shutdown())
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
    control = p2p._client.control if p2p._client is not None else None
    tasks = [p2p._listen_task, p2p._reader_task]
    tasks += [control._read_task, control._write_task] if control is not None else []
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
    for path in sockets_of(p2p):
        Path(path).unlink(missing_ok=True)


def sockets_of(p2p: P2P) -> list[str]:
    """The unix sockets between `p2p` and its daemon."""
    addresses = (getattr(p2p, name, None) for name in ("_daemon_listen_maddr", "_client_listen_maddr"))
    return [str(address).removeprefix("/unix") for address in addresses if address is not None]


async def refuse_duplicate(own: PeerID, met: Met) -> None:
    """Raise UserError if a peer with our identity can be reached. Two of them would steal each other's connections.

    Asked through a nameless p2pd: ours could not tell its namesake from itself.
    """
    twin = UserError(
        f"a peer with this identity ({own.to_base58()}) is already in the run: give each peer its own folder; "
        "if that was this peer and it has just been killed, try again in 10 s"
    )
    if any(peer == own for peer, _ in met):
        raise twin
    nameless = await start_p2pd(no_listen=True, dht_mode="client")
    try:
        await meet(nameless, met)
        for _ in range(_TWIN_TRIES):  # libp2p fills its routing table some time after it has connected
            with suppress(*NO_ANSWER):
                await within(ANSWER_SECONDS / 2, nameless._client.connect(own, []))
                raise twin
            await asyncio.sleep(_TWIN_WAIT_SECONDS)
    finally:
        await end_p2pd(nameless)


async def dials(peer: str, addresses: Sequence[str]) -> bool:
    """Whether a p2pd without a name, and without a connection to `peer`, gets one at `addresses`."""
    nameless = await start_p2pd(no_listen=True, dht_mode="client")
    try:
        await within(DIAL_SECONDS, nameless._client.connect(parsed_id(peer), dialable(addresses)))
    except (*NO_ANSWER, ValueError):
        return False
    finally:
        await end_p2pd(nameless)
    return True


async def meet(p2p: P2P, met: Met) -> list[tuple[PeerID, str]]:
    """Connect to the initial peers at once. Returns those that answered; NetworkError if none did."""

    async def ask(peer: PeerID, address: str) -> BaseException | None:
        try:
            await within(ANSWER_SECONDS, p2p._client.connect(peer, [Multiaddr(bare(address))]))
        except (*NO_ANSWER, ValueError) as error:
            return error
        return None

    errors = await asyncio.gather(*(ask(peer, address) for peer, address in met))
    answered = [one for one, error in zip(met, errors, strict=True) if error is None]
    if not answered:
        raise nobody(f"a peer at {' or '.join(address for _, address in met)}", errors[0])
    return answered


async def yield_to(p2p: P2P, peer: PeerID) -> None:
    """Wait a while for `peer` to connect to us. Of two peers that want each other one does so, before it dials.

    libp2p dials from the port on which it listens. Two calls that cross on a long line become one TCP connection with
    two callers: both begin the handshake, it fails, and libp2p's backoff holds up the next try by some seconds.
    """
    for _ in range(_YIELD_TRIES):
        if any(known.peer_id == peer for known in await p2p._client.list_peers()):
            return
        await asyncio.sleep(_YIELD_SECONDS)


async def start_node(p2p: P2P, met: Met, no_listen: bool, check: RecordCheck) -> DHTNode:
    """A DHT node that knows `met`. Its caches are off: a stale record is worse than a round trip."""
    try:
        node = await DHTNode.create(
            p2p=p2p,
            initial_peers=[address for _, address in met],
            client_mode=no_listen,
            record_validator=check,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            reuse_get_requests=False,
        )
        NodeGate(node, check).stand_before(p2p)
        return node
    except (RuntimeError, ValidationError) as error:
        await _explain_clocks(p2p, met)
        raise NetworkError(
            f"the peer at {met[0][1]} answered but does not take this peer into the DHT: "
            f"check that it runs isthmus ({one_line(error)})"
        ) from error


async def _explain_clocks(p2p: P2P, met: Met) -> None:
    """Raise NetworkError if a peer's clock is so far from ours that hivemind refuses to work with it."""
    request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
    for peer, address in met:
        asked = get_dht_time()
        try:
            call = p2p.call_protobuf_handler(peer, "DHTProtocol.rpc_ping", request, dht_pb2.PingResponse)
            answer = await within(ANSWER_SECONDS, call)
        except (*NO_ANSWER, P2PHandlerError):
            continue
        ahead = answer.dht_time - (asked + get_dht_time()) / 2
        if abs(ahead) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
            raise NetworkError(
                f"expected clocks within {MAX_DHT_TIME_DISCREPANCY_SECONDS:.0f} s of each other, the clock of the peer "
                f"at {address} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} ours: "
                "set both by NTP (timedatectl set-ntp true)"
            )


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What `work` gives; TimeoutError if it takes longer. Unlike Python 3.11's `wait_for`, never forgets that it was
    cancelled."""
    async with asyncio.timeout(seconds):
        return await work


def nobody(who: str, error: BaseException | None) -> NetworkError:
    """The error for `who` not answering, `error` being what p2pd said."""
    return NetworkError(
        f"expected {who}, nobody answered within {ANSWER_SECONDS:.0f} s: check that it runs, that the address is "
        f"right and that its port is open in the firewall ({one_line(error)})"
    )


def one_line(error: BaseException | None) -> str:
    """p2pd's errors span lines; ours do not."""
    return " ".join(str(error).split())[:300] or type(error).__name__
