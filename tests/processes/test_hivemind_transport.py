"""The real transport: its links, its frames, and the end of what they run on."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from peers.fair_inbox import PEER_EVENTS
from peers.hivemind_transport import STREAMS
from peers.segments import PREFIX_BYTES, SEGMENT_BYTES
from peers.transport import FrameReceived, FrameRefused, LinkLost, LinkRestored, TransportLost
from protocol.errors import NetworkError
from protocol.frame import Kind

sys.path.insert(0, str(Path(__file__).parent))
helpers = importlib.import_module("hivemind_peers")
forward, frame_gets_through = helpers.forward, helpers.frame_gets_through
next_of, run = helpers.next_of, helpers.run
Make = helpers.Make


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
                segments = sum(max(1, -(-len(payload) // SEGMENT_BYTES)) for payload in payloads)
                assert counted.header_bytes == segments * PREFIX_BYTES
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


def test_a_reader_that_does_not_read_stops_the_sender(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        for _ in range(3):  # together more than b's inbox holds; the rest waits in the sockets between
            for step in range(1000):
                a.send(b.peer_id, forward(bytes(100), step))
            await a.drain(60)
        assert b.counters.received[Kind.FORWARD].frames <= PEER_EVENTS + STREAMS  # one in the hand of each reader
        for _ in range(3000):
            await next_of(b, FrameReceived)

    run(test, tmp_path)


def test_close_just_after_a_send_to_a_peer_that_went_away(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        await b.close()
        a.send(b.peer_id, forward(b"too late"))
        await next_of(a, LinkLost)
        a.send(b.peer_id, forward(b"far too late"))
        async with asyncio.timeout(20):
            await a.close()

    run(test, tmp_path)


def test_the_end_of_the_own_p2pd_is_reported_once(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        assert a.daemon_pid is not None
        os.kill(a.daemon_pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            lost = await next_of(a, TransportLost)
            assert "p2pd was killed by signal 9" in lost.reason
            assert not await a.store("key", b"value", 60) and await a.fetch("key") is None
            with pytest.raises(NetworkError):
                await a.connect(b.peer_id, await b.addresses())
            with pytest.raises(NetworkError, match="p2pd does not answer"):
                await a.addresses()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next_of(a, TransportLost), 0.5)
        async with asyncio.timeout(2):
            await a.close()

    run(test, tmp_path)


def test_the_end_of_the_own_p2pd_is_told_behind_a_full_inbox(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await b.connect(a.peer_id, await a.addresses())
        async with asyncio.timeout(60):
            for _ in range(2):  # together more than a's inbox holds
                for step in range(PEER_EVENTS // 2 + 10):
                    b.send(a.peer_id, forward(b"", step))
                await b.drain(60)
            while a.counters.received[Kind.FORWARD].frames <= PEER_EVENTS:
                await asyncio.sleep(0.05)
        assert a.daemon_pid is not None
        os.kill(a.daemon_pid, signal.SIGKILL)
        await next_of(b, LinkLost)
        async with asyncio.timeout(20):
            await next_of(a, TransportLost)

    run(test, tmp_path)


def test_close_is_no_loss_of_the_transport(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        await a.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next_of(a, TransportLost), 0.5)

    run(test, tmp_path)


def test_a_bad_peer_id_costs_one_link(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        for bad in ("", "0OIl", "Zürich", "1" * 200):
            with pytest.raises(NetworkError, match="expected a peer id"):
                await a.connect(bad, [])
            a.send(bad, forward(b"x"))
            lost = await next_of(a, LinkLost)
            assert lost.peer == bad and "no stream to the peer" in lost.reason

    run(test, tmp_path)


def test_bad_addresses_do_not_spoil_good_ones(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        bad = ["/ip4/999.1.1.1/tcp/5", "/dns4/xn--zz.example/tcp/5", "/ip4/127.0.0.1/tcp/5/nonsense", "no address"]
        await a.connect(b.peer_id, [*bad, *await b.addresses()])
        await frame_gets_through(a, b, b"there")

    run(test, tmp_path)


def test_a_forgotten_peer_still_gets_what_was_queued(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        await b.connect(a.peer_id, await a.addresses())
        for step in range(20):
            a.send(b.peer_id, forward(bytes(300_000), step))
        a.forget(b.peer_id)
        assert {(await next_of(b, FrameReceived)).frame.header.step for _ in range(20)} == set(range(20))
        await frame_gets_through(b, a, b"its streams stay")
        await frame_gets_through(a, b, b"a new link")

    run(test, tmp_path)


def test_a_forgotten_peer_that_went_away_is_not_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.links.PARTING_SECONDS", 0.5)

    async def test(make: Make) -> None:
        a, b = await make("a"), await make("b")
        await a.connect(b.peer_id, await b.addresses())
        await b.close()
        await next_of(a, LinkLost)
        a.send(b.peer_id, forward(b"never written"))
        a.forget(b.peer_id)
        assert f"link to {b.peer_id}" in tasks()
        await asyncio.sleep(1)
        assert not {f"link to {b.peer_id}", f"parting with {b.peer_id}"} & tasks()
        a.send(b.peer_id, forward(b"never written"))
        a.forget(b.peer_id)
        async with asyncio.timeout(20):
            await a.close()  # while the link is parting
        assert not {f"link to {b.peer_id}", f"parting with {b.peer_id}"} & tasks()

    run(test, tmp_path)


def tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()}
