"""The real transport, with one p2pd for each peer, on loopback and in one loop."""

import asyncio
import glob
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peers.hivemind_transport import INBOX_EVENTS, HivemindTransport
from peers.leftovers import FolderLock
from peers.transport import FrameReceived, FrameRefused, LinkLost, LinkRestored, TransportEvent
from protocol.errors import NetworkError, UserError
from protocol.frame import HEADER_BYTES, Frame, Header, Kind

LIMIT = 8 << 20
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

Make = Callable[..., Coroutine[Any, Any, HivemindTransport]]


@asynccontextmanager
async def peers_in(folder: Path) -> AsyncIterator[Make]:
    """Gives a maker of peers; on leaving, closes them and checks that they left nothing."""
    made: list[tuple[HivemindTransport, list[str], int | None]] = []

    async def make(name: str, **options: Any) -> HivemindTransport:
        peer = await HivemindTransport.create(identity=folder / name, **options)
        made.append((peer, peer.sockets(), peer.daemon_pid))
        peer.limit(Kind.FORWARD, LIMIT)
        return peer

    try:
        yield make
    finally:
        await asyncio.gather(*(peer.close() for peer, _, _ in made))
        for peer, sockets, pid in made:
            await peer.close()
            assert len(sockets) == 2 and not any(os.path.exists(path) for path in sockets)
            assert not os.path.exists(f"/proc/{pid}")


def run(test: Callable[[Make], Coroutine[Any, Any, None]], folder: Path) -> None:
    async def main() -> None:
        async with peers_in(folder) as make:
            await test(make)

    before = set(glob.glob("/tmp/hivemind-*"))
    asyncio.run(asyncio.wait_for(main(), 300))
    ours = {path for path in set(glob.glob("/tmp/hivemind-*")) - before if os.stat(path).st_uid == os.getuid()}
    assert not {path for path in ours if not _held_by_others(path)}


def _held_by_others(path: str) -> bool:
    """Whether a p2pd that is not this process's child uses the socket: other tests may run beside this one."""
    for command in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            stem = os.path.basename(path).split("-", 2)[-1].encode()
            if stem in Path(command).read_bytes():
                return True
        except OSError:
            continue
    return False


def forward(payload: bytes | bytearray, step: int = 0) -> Frame:
    return Frame(Header(Kind.FORWARD, len(payload), step=step, stage=1), payload)


async def next_of(peer: HivemindTransport, kind: type[TransportEvent]) -> Any:
    while True:
        event = await peer.receive()
        if isinstance(event, kind):
            return event


async def frame_gets_through(sender: HivemindTransport, receiver: HivemindTransport, payload: bytes) -> None:
    """Send until it arrives, as the step protocol does: a frame on its way when a link broke is lost."""
    while True:
        sender.send(receiver.peer_id, forward(payload))
        try:
            event = await asyncio.wait_for(next_of(receiver, FrameReceived), 2)
        except TimeoutError:
            continue
        if event.frame.payload == payload:
            return


def test_frames_both_ways(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        assert a.daemon_pid is not None and os.getsid(a.daemon_pid) == a.daemon_pid  # out of reach of Ctrl-C
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o400
        for address in await a.addresses():
            assert address.endswith(f"/p2p/{a.peer_id}") and "/tcp/0/" not in address
        await a.connect(b.peer_id, await b.addresses())
        await b.connect(a.peer_id, await a.addresses())
        await b.connect(a.peer_id, await a.addresses())
        payloads = [os.urandom(size) for size in (0, 1, 4096, 5_000_000, 300_000)]
        for sender, receiver in ((a, b), (b, a)):
            for step, payload in enumerate(payloads):
                sender.send(receiver.peer_id, forward(bytearray(payload), step))
        for sender, receiver in ((a, b), (b, a)):
            for _ in payloads:
                event = await next_of(receiver, FrameReceived)
                assert event.peer == sender.peer_id
                assert event.frame.payload == payloads[event.frame.header.step]
        await asyncio.gather(a.drain(60), b.drain(60))
        for traffic in (p.counters for p in (a, b)):
            for counted in (traffic.sent[Kind.FORWARD], traffic.received[Kind.FORWARD]):
                assert counted.frames == len(payloads)
                assert counted.header_bytes == len(payloads) * HEADER_BYTES
                assert counted.payload_bytes == sum(map(len, payloads))

    run(test, tmp_path)


def test_too_long_frame_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        b.limit(Kind.FORWARD, 100)
        await a.connect(b.peer_id, await b.addresses())
        a.send(b.peer_id, forward(bytes(101)))
        refused = await next_of(b, FrameRefused)
        assert refused.peer == a.peer_id and "at most 100 bytes, got 101" in refused.reason
        assert (await next_of(a, LinkLost)).peer == b.peer_id
        assert (await next_of(a, LinkRestored)).peer == b.peer_id
        await frame_gets_through(a, b, bytes(100))

    run(test, tmp_path)


def test_a_peer_that_ends_and_comes_back(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        (address,) = await b.addresses()
        await a.connect(b.peer_id, [address])
        await b.close()
        assert (await next_of(a, LinkLost)).peer == b.peer_id
        a.send(b.peer_id, forward(b"queued"))
        back = await make("b", listen=[address.rpartition("/p2p/")[0]], initial_peers=await a.addresses())
        assert back.peer_id == b.peer_id
        assert (await next_of(a, LinkRestored)).peer == b.peer_id
        assert (await next_of(back, FrameReceived)).frame.payload == b"queued"
        await frame_gets_through(a, back, b"new")

    run(test, tmp_path)


def test_send_back_to_a_peer_that_does_not_listen(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        b = await make("b", no_listen=True, initial_peers=await a.addresses())
        assert await b.addresses() == []
        await b.connect(a.peer_id, await a.addresses())
        b.send(a.peer_id, forward(b"there"))
        event = await next_of(a, FrameReceived)
        a.send(event.peer, forward(b"and back"))
        assert (await next_of(b, FrameReceived)).frame.payload == b"and back"

    run(test, tmp_path)


def test_a_killed_p2pd(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        assert b.daemon_pid is not None
        os.kill(b.daemon_pid, signal.SIGKILL)
        assert (await next_of(a, LinkLost)).peer == b.peer_id

    run(test, tmp_path)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from peers.hivemind_transport import HivemindTransport
from peers.leftovers import FolderLock

async def main(folder):
    with FolderLock(folder) as lock:
        transport = await HivemindTransport.create(identity=folder / "identity")
        lock.record(transport.daemon_pid, transport.sockets())
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_leftovers_of_a_killed_daemon(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = json.loads((tmp_path / "daemon.json").read_text())
    assert any(os.path.exists(path) for path in left["sockets"])
    with FolderLock(tmp_path):
        assert not any(os.path.exists(path) for path in left["sockets"])
        assert not _runs(left["p2pd"])


def _runs(pid: int) -> bool:
    """Whether `pid` is a process that has not ended (one that nobody has waited for yet has no command line)."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_reader_that_does_not_read_stops_the_sender(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        for _ in range(3):  # together more than b's inbox holds; the rest waits in the sockets between
            for step in range(1000):
                a.send(b.peer_id, forward(bytes(100), step))
            await a.drain(60)
        assert b.counters.received[Kind.FORWARD].frames <= INBOX_EVENTS + 2  # one in the hand of each reader
        for _ in range(3000):
            await next_of(b, FrameReceived)

    run(test, tmp_path)


def test_nobody_there(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        with pytest.raises(NetworkError, match="nobody answered within 10 s") as caught:
            await make("a", initial_peers=[NOBODY])
        assert NOBODY in str(caught.value) and "\n" not in str(caught.value)
        a = await make("a")
        with pytest.raises(NetworkError, match="nobody answered"):
            await a.connect(NOBODY.rpartition("/")[2], [NOBODY])

    run(test, tmp_path)


def test_users_mistakes(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        (address,) = await a.addresses()
        port = address.split("/")[4]
        with pytest.raises(UserError, match=f"port {port}"):
            await make("b", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(UserError, match="does not exist"):
            await make("no/such/folder/b")
        with pytest.raises(UserError, match="expected a peer's address"):
            await make("b", initial_peers=["127.0.0.1:4000"])
        with pytest.raises(UserError, match="to announce"):
            await make("b", announce=["/ip4/127.0.0.1/tcp/0"])
        (tmp_path / "broken").write_bytes(b"not a key")
        with pytest.raises(UserError, match="expected an identity file"):
            await make("broken")

    run(test, tmp_path)


def test_an_identity_in_use_is_refused(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        await make("b", initial_peers=await a.addresses())
        for name in ("a", "b"):
            (tmp_path / f"copy of {name}").write_bytes((tmp_path / name).read_bytes())
            with pytest.raises(UserError, match="already in the run"):
                await make(f"copy of {name}", initial_peers=await a.addresses())
        assert stat.S_IMODE((tmp_path / "copy of b").stat().st_mode) == 0o400

    run(test, tmp_path)


def test_records(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        b, c = [await make(name, initial_peers=await a.addresses()) for name in ("b", "c")]
        assert await b.fetch("view") is None
        assert await b.store("view", b"one", 60)
        assert await c.fetch("view") == b"one"
        assert await c.store("view", b"two", 120)
        assert await a.fetch("view") == b"two" and await b.fetch("view") == b"two"
        assert not await b.store("view", b"late, but expires sooner", 60)
        assert await b.fetch("view") == b"two"
        with pytest.raises(ValueError, match="expected a record of at most"):
            await b.store("view", bytes(2 << 20), 60)

    run(test, tmp_path)


def test_guard_refuses_bad_records(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        asked: list[tuple[str, bytes]] = []

        def guard(key: str, value: bytes) -> bool:
            asked.append((key, value))
            return value.startswith(b"signed")

        careful = await make("careful", record_guard=guard)
        careless = await make("careless", initial_peers=await careful.addresses())
        await careless.store("view", b"forged", 60)
        assert ("view", b"forged") in asked
        assert await careful.fetch("view") is None
        assert not await careful.store("mine", b"forged", 60)
        assert await careless.store("view", b"signed", 90)
        assert await careful.fetch("view") == b"signed"

    run(test, tmp_path)
