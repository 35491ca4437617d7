"""The in-memory network: what it delivers, loses, delays and refuses, all from one seed."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from peers.lab.access import Access
from peers.lab.link_model import LinkModel
from peers.memory_transport import MemoryNetwork, MemoryTransport
from peers.transport import FrameReceived, FrameRefused, LinkLost, LinkRestored, TransportEvent, TransportLost
from protocol.errors import NetworkError
from protocol.frame import HEADER_BYTES, MAX_CONTROL_BYTES, Frame, Header, Kind, control


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def forward(number: int, size: int = 8) -> Frame:
    return Frame(Header(Kind.FORWARD, size, step=number), number.to_bytes(8, "little") + bytes(size - 8))


def joined(network: MemoryNetwork, *names: str) -> list[MemoryTransport]:
    return [member(network.join(name)) for name in names]


def member(transport: MemoryTransport) -> MemoryTransport:
    """It takes tensors from all."""
    transport.limit(Kind.FORWARD, 1 << 20)
    transport.trust("abc")
    return transport


async def events(transport: MemoryTransport, seconds: float = 0.2) -> list[TransportEvent]:
    """Everything that arrives until `seconds` pass without an event."""
    seen = []
    while True:
        try:
            seen.append(await asyncio.wait_for(transport.receive(), seconds))
        except TimeoutError:
            return seen


def steps(seen: list[TransportEvent]) -> list[int]:
    return [event.frame.header.step for event in seen if isinstance(event, FrameReceived)]


def test_frames_arrive_in_order_and_are_counted() -> None:
    async def test() -> None:
        a, b = joined(MemoryNetwork(1, delay=(0.0, 0.01)), "a", "b")
        await a.connect("b", await b.addresses())
        for number in range(50):
            a.send("b", forward(number))
        seen = await events(b)
        assert steps(seen) == list(range(50))
        assert all(isinstance(event, FrameReceived) and event.peer == "a" for event in seen)
        for traffic in (a.counters.sent[Kind.FORWARD], b.counters.received[Kind.FORWARD]):
            assert (traffic.frames, traffic.header_bytes, traffic.payload_bytes) == (50, 50 * HEADER_BYTES, 50 * 8)

    run(test())


def test_equal_seeds_give_equal_fates() -> None:
    async def fates(seed: int) -> list[int]:
        network = MemoryNetwork(seed, loss=0.2, reorder=0.2, duplicate=0.2)
        a, b = joined(network, "a", "b")
        for number in range(100):
            a.send("b", forward(number))
        return sorted(steps(await events(b)))

    first, again, other = (asyncio.run(fates(seed)) for seed in (7, 7, 8))
    assert first == again != other
    assert len(set(first)) < 100 < len(first) + 40
    assert len(first) > len(set(first))


def test_reordered_frames_overtake_each_other() -> None:
    async def test() -> None:
        a, b = joined(MemoryNetwork(3, reorder=0.5), "a", "b")
        for number in range(50):
            a.send("b", forward(number))
        seen = steps(await events(b))
        assert seen != sorted(seen) and sorted(seen) == list(range(50))

    run(test())


def test_bandwidth_keeps_the_link_busy() -> None:
    async def test() -> None:
        a, b = joined(MemoryNetwork(1, bandwidth_bytes_per_second=1_000_000), "a", "b")
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in range(4):
            a.send("b", forward(number, 50_000))
        await a.drain(60)
        assert loop.time() - start >= 0.2
        await b.receive()

    run(test())


def test_a_buffer_reused_too_early_shows() -> None:
    async def test() -> None:
        a, b = joined(MemoryNetwork(1, delay=(0.05, 0.05)), "a", "b")
        buffer = bytearray(b"right")
        a.send("b", Frame(Header(Kind.FORWARD, 5), buffer))
        buffer[:] = b"wrong"
        event = await b.receive()
        assert isinstance(event, FrameReceived) and event.frame.payload == b"wrong"
        buffer[:] = b"later"
        assert event.frame.payload == b"wrong"

    run(test())


def test_too_long_frames_are_refused_with_the_reason() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        a, b = network.join("a"), network.join("b")
        b.trust("a")
        a.send("b", forward(1))
        refused = await b.receive()
        assert isinstance(refused, FrameRefused) and refused.peer == "a" and "at most 0 bytes, got 8" in refused.reason
        assert [type(event) for event in await events(a)] == [LinkLost, LinkRestored]
        a.send("b", control({"type": "hello"}))
        assert isinstance(await b.receive(), FrameReceived)
        a.send("b", Frame(Header(Kind.CONTROL, MAX_CONTROL_BYTES + 1), bytes(MAX_CONTROL_BYTES + 1)))
        assert isinstance(await b.receive(), FrameRefused)

    run(test())


def test_a_header_that_misstates_its_payload_is_our_own_bug() -> None:
    a, _ = joined(MemoryNetwork(1), "a", "b")
    with pytest.raises(ValueError, match="expected a payload of 9 bytes"):
        a.send("b", Frame(Header(Kind.FORWARD, 9), b"12345678"))


def test_crash_and_restore() -> None:
    async def test() -> None:
        network = MemoryNetwork(1, delay=(0.05, 0.05))
        a, b, c = joined(network, "a", "b", "c")
        await a.connect("b", [])
        a.send("b", forward(1))  # on its way when b crashes
        network.crash("b")
        a.send("b", forward(2))
        b.send("a", forward(3))
        assert await events(a) == [LinkLost("b", "the peer crashed")]
        with pytest.raises(NetworkError):
            await c.connect("b", ["/memory/b"])
        network.restore("b")
        a.send("b", forward(4))
        assert await events(a) == [LinkRestored("b")]
        assert steps(await events(b)) == [4]
        assert await events(c) == []  # c has no link to b

    run(test())


def test_close_and_join_again() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        a, b = joined(network, "a", "b")
        await a.connect("b", [])
        await b.close()
        await b.close()
        assert isinstance(await a.receive(), LinkLost)
        (b,) = joined(network, "b")
        assert isinstance(await a.receive(), LinkRestored)
        a.send("b", forward(5))
        assert steps(await events(b)) == [5]

    run(test())


def test_send_to_nobody_reports_a_lost_link_once() -> None:
    async def test() -> None:
        (a,) = joined(MemoryNetwork(1), "a")
        a.send("ghost", forward(1))
        a.send("ghost", forward(2))
        assert await events(a) == [LinkLost("ghost", "no stream to the peer")]

    run(test())


def test_records_expire_and_the_latest_to_expire_wins() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        a, b = joined(network, "a", "b")
        c = network.join("c", record_guard=lambda key, value, expires: value != b"bad" and expires < time.time() + 100)
        assert await a.fetch("key") is None
        assert await a.store("key", b"long", 60)
        assert not await a.store("key", b"short", 30)
        assert await b.fetch("key") == b"long"
        assert await a.store("key", b"bad", 90)
        assert await b.fetch("key") == b"bad" and await c.fetch("key") is None
        assert not await c.store("other", b"bad", 60)
        assert not await c.store("other", b"good, but for too long", 200)
        assert await a.store("other", b"good, but for too long", 200) and await c.fetch("other") is None
        assert await a.store("gone", b"x", -1.0)
        assert await a.fetch("gone") is None

    run(test())


def test_forget_ends_the_reports_on_a_peer_and_nothing_else() -> None:
    async def test() -> None:
        network = MemoryNetwork(1, delay=(0.02, 0.02))
        a, b = joined(network, "a", "b")
        await a.connect("b", [])
        await b.connect("a", [])
        a.send("b", forward(1))
        a.forget("b")
        a.forget("nobody")
        b.send("a", forward(2))
        assert steps(await events(b)) == [1] and steps(await events(a)) == [2]
        network.crash("b")
        network.restore("b")
        assert await events(a) == []
        a.send("b", forward(3))
        assert steps(await events(b)) == [3]

    run(test())


def test_a_lost_transport_is_told_so_once_and_is_silent() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        a, b = joined(network, "a", "b")
        await a.connect("b", [])
        network.lose("b")
        network.lose("b")
        b.send("a", forward(1))
        assert await events(b) == [TransportLost("the network daemon ended")]
        assert await events(a) == [LinkLost("b", "the peer crashed")]
        await b.close()
        joined(network, "b")
        assert await events(a) == [LinkRestored("b")]

    run(test())


def behind(up: float, down: float, delay: float) -> Access:
    """A line with so many bytes a second each way, and the delay to the hub."""
    return Access(LinkModel(up, delay), LinkModel(down, delay))


def test_links_of_one_peer_share_its_line() -> None:
    """Two frames of 50 kB to two peers, over 1 MB/s up: the second leaves when the first has."""

    async def test() -> None:
        network = MemoryNetwork(1)
        a, b, c = (member(network.join(name, access=behind(1e6, 1e7, 0.05))) for name in "abc")
        loop = asyncio.get_running_loop()
        start = loop.time()
        a.send("b", forward(1, 50_000))
        a.send("c", forward(2, 50_000))
        await asyncio.gather(b.receive(), c.receive())
        assert loop.time() - start >= 0.1 + 2 * 0.05
        measure = a.links()["b"]
        assert measure.rtt_seconds == 0.2 and measure.bytes_per_second == 1e6

    run(test())


def test_lines_carry_in_order_and_drain_waits_for_the_line_up() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        access = behind(1e6, 1e6, 0.01)
        a, b = network.join("a", access=access), member(network.join("b"))
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in range(10):
            a.send("b", forward(number, 10_000))
        await a.drain(60)
        assert loop.time() - start >= 0.1
        assert steps(await events(b)) == list(range(10))
        access.change({"up_mbit": 0.8})
        start = loop.time()
        a.send("b", forward(10, 10_000))
        await b.receive()
        assert loop.time() - start >= 0.1
        access.change({"up_mbit": 0, "delay_ms": 0})
        for number in range(50):
            a.send("b", forward(number))
        assert steps(await events(b)) == list(range(50))

    run(test())


def test_a_peer_that_left_gets_nothing_that_was_still_at_the_hub() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        a, b = (network.join(name, access=behind(1e6, 1e6, 0.02)) for name in "ab")
        a.send("b", control({"type": "hello"}))
        await b.close()
        (b,) = joined(network, "b")
        assert await events(b) == []

    run(test())


def test_a_strangers_tensor_waits_for_it_to_become_a_member_and_is_refused_then() -> None:
    async def test() -> None:
        network = MemoryNetwork(1)
        a, b = joined(network, "a", "b")
        b.trust("c", patience=0.2)
        a.send("b", forward(1))
        a.send("b", control({"type": "join"}))
        seen = await events(b, 0.05)
        assert [e.frame.header.kind for e in seen if isinstance(e, FrameReceived)] == [Kind.CONTROL] and len(seen) == 1
        b.trust("ac", patience=0.2)
        assert steps(await events(b, 0.05)) == [1]
        b.trust("c", patience=0.0)
        a.send("b", forward(2))
        (refused,) = await events(b, 0.05)
        assert isinstance(refused, FrameRefused) and "no member" in refused.reason

    run(test())
