"""Events wait in a queue for each peer: taken in turns, bounded each and together, strangers last."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from peers import fair_inbox
from peers.fair_inbox import PEER_EVENTS, STRANGER_EVENTS, STRANGERS_EVENTS, FairInbox
from peers.transport import FrameReceived, LinkLost, TransportEvent, TransportLost
from protocol.frame import Frame, Header, Kind


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def frame(peer: str, step: int = 0) -> FrameReceived:
    return FrameReceived(peer, Frame(Header(Kind.FORWARD, 0, step=step), b""))


async def rest(inbox: FairInbox) -> list[TransportEvent]:
    return [await inbox.get() for _ in range(len(inbox))]


def test_peers_take_turns_and_each_keeps_its_order() -> None:
    async def test() -> None:
        inbox = FairInbox()
        for step in range(500):
            await inbox.put("loud", frame("loud", step), 10)
        for step in range(2):
            await inbox.put("ann", frame("ann", step), 10)
            await inbox.put("bob", frame("bob", step), 10)
        got = [event for event in await rest(inbox) if isinstance(event, FrameReceived)]
        assert [e.peer for e in got[:6]] == ["loud", "ann", "bob", "loud", "ann", "bob"]
        for peer in ("loud", "ann", "bob"):
            steps = [e.frame.header.step for e in got if e.peer == peer]
            assert steps == list(range(len(steps)))

    run(test())


def test_a_full_queue_stops_its_peer_and_no_other_and_nothing_is_lost() -> None:
    async def test() -> None:
        inbox = FairInbox()

        async def flood() -> None:
            for step in range(2 * PEER_EVENTS):
                await inbox.put("loud", frame("loud", step), 1)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.05)
        assert len(inbox) == PEER_EVENTS and not flooding.done()
        async with asyncio.timeout(5):
            await inbox.put("ann", frame("ann"), 1)
        got = [await inbox.get() for _ in range(2 * PEER_EVENTS + 1)]
        assert sum(isinstance(e, FrameReceived) and e.peer == "loud" for e in got) == 2 * PEER_EVENTS
        await flooding

    run(test())


def test_bytes_are_bounded_of_one_and_of_all_and_one_frame_may_always_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_inbox, "PEER_BYTES", 100)
    monkeypatch.setattr(fair_inbox, "ALL_BYTES", 250)

    async def waits(inbox: FairInbox, peer: str, size: int) -> bool:
        task = asyncio.create_task(inbox.put(peer, frame(peer), size))
        await asyncio.sleep(0.01)
        done = task.done()
        task.cancel()
        return not done

    async def test() -> None:
        inbox = FairInbox()
        assert not await waits(inbox, "a", 5000), "one frame may always come"
        assert await waits(inbox, "a", 1)
        await inbox.get()
        for peer in "abc":
            assert not await waits(inbox, peer, 80)
        assert await waits(inbox, "a", 15), "all together"
        assert not await waits(inbox, "d", 80), "but for one of whom nothing waits"
        assert await waits(inbox, "d", 80)

    run(test())


def test_strangers_are_bounded_and_members_overtake_them() -> None:
    async def test() -> None:
        inbox = FairInbox()
        taken = [inbox.put_stranger("bob", frame("bob"), 4096) for _ in range(10)]
        assert sum(taken) == STRANGER_EVENTS
        for number in range(1000):
            inbox.put_stranger(f"s{number}", frame(f"s{number}"), 4096)
        assert len(inbox) == STRANGERS_EVENTS
        for step in range(40):
            await inbox.put("ann", frame("ann", step), 1)
        await inbox.tell(LinkLost("x", "gone"))
        await inbox.tell(TransportLost("gone"))
        got = await rest(inbox)
        assert [type(event) for event in got[:2]] == [LinkLost, TransportLost]
        peers = [event.peer for event in got[2:42] if isinstance(event, FrameReceived)]
        assert peers.count("ann") == 39, "a stranger now and then, so that a newcomer is heard in any din"

    run(test())


def test_who_waits_for_an_event_gets_the_next_and_one_that_gives_up_loses_none() -> None:
    async def test() -> None:
        inbox = FairInbox()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.get(), 0.01)
        getting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        await inbox.put("ann", frame("ann", 7), 1)
        assert await getting == frame("ann", 7)

    run(test())
