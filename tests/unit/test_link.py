"""One outgoing link and the book of links, over streams that a test scripts."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from peers import link as module
from peers.link import CannotOpen, Link, Links, Stream
from peers.transport import LinkLost, TrafficCounters, TransportEvent
from protocol.frame import Frame, Header, Kind

FRAME = Frame(Header(Kind.FORWARD, 4), b"1234")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


class Nobody:
    """Opens no stream, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.events: list[TransportEvent] = []

    async def open_streams(self, peer: str = "") -> Sequence[Stream]:
        self.asked += 1
        raise CannotOpen("nobody there")

    async def emit(self, event: TransportEvent) -> None:
        self.events.append(event)

    def links(self) -> Links:
        return Links(self.open_streams, self.emit, TrafficCounters().sent)


async def closes(link: Link) -> bool:
    """Whether `close` returns soon. Were its task to live on, waiting for it would never end, so nobody does."""
    closing = asyncio.create_task(link.close())
    _, late = await asyncio.wait([closing], timeout=2)
    return not late


@pytest.mark.parametrize("ticks", range(6))
def test_close_at_the_moment_of_a_hurry(ticks: int) -> None:
    """Python 3.11's `wait_for` forgets a cancellation that comes just when what it waits for has come."""

    async def test() -> None:
        nobody = Nobody()
        link = Link("b", nobody.open_streams, nobody.emit, TrafficCounters().sent)
        while not nobody.events:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # now it waits for its next try, or for `hurry`
        link.hurry()
        for _ in range(ticks):
            await asyncio.sleep(0)
        assert await closes(link)
        asked = nobody.asked
        await asyncio.sleep(0.5)
        assert nobody.asked == asked and nobody.events == [LinkLost("b", "nobody there")]

    run(test())


def test_a_forgotten_link_ends_when_its_queue_is_written_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        nobody, parted = Nobody(), list[str]()
        links = nobody.links()
        links.to("idle")
        links.to("stuck").put(FRAME)
        for peer in ("idle", "stuck", "unknown"):
            links.forget(peer, lambda peer=peer: parted.append(peer))
            assert links.get(peer) is None
        await asyncio.sleep(0.1)
        assert parted == ["unknown", "idle"]
        await asyncio.sleep(0.4)
        assert parted == ["unknown", "idle", "stuck"]
        assert len(asyncio.all_tasks()) == 2  # this one and `wait_for`'s

    monkeypatch.setattr(module, "PARTING_SECONDS", 0.3)
    run(test())


def test_close_does_not_wait_for_a_parting() -> None:
    async def test() -> None:
        links = Nobody().links()
        assert not await links.close()
        links.to("b").put(FRAME)
        links.forget("b", lambda: None)
        async with asyncio.timeout(1):
            assert await links.close()
        assert len(asyncio.all_tasks()) == 2

    run(test())
