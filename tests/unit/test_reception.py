"""Streams that others open, over real sockets: what a stranger can make the process hold, and that a member feels none
of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from peers import links
from peers.fair_inbox import FairInbox
from peers.limits import Limits
from peers.reception import Reception
from peers.segments import ACKNOWLEDGEMENT, SEGMENT_BYTES, Prefix
from peers.standing import STRANGER_STREAMS, STRANGERS_STREAMS
from peers.transport import FrameReceived, FrameRefused, TrafficCounters
from protocol.frame import Frame, Header, Kind, control


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def whole(frame: Frame, number: int = 0) -> bytes:
    return Prefix(1, number, 0, frame.header).pack() + bytes(frame.payload)


class Door:
    """A reception behind a unix socket. The first line on a stream says who opened it, as p2pd would."""

    def __init__(self, folder: Path, *members: str) -> None:
        self._path = str(folder / "door")
        self.inbox, self.disconnected = FairInbox(), list[str]()
        limits, self.counters = Limits(), TrafficCounters()
        limits.set(Kind.FORWARD, 1 << 24)
        self.reception = Reception(limits, self.counters, self.inbox, lambda peer: None, self._disconnect)
        self.reception.trust(members, (), 0.0)
        self.open = 0

    async def __aenter__(self) -> Door:
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.reception.close()
        self._server.close()

    async def _disconnect(self, peer: str) -> None:
        self.disconnected.append(peer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        peer = (await reader.readline()).decode().strip()
        await self.reception.accept(peer, "", reader, writer)
        self.open -= 1

    async def stream(self, peer: str, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream of `peer` with `data` written to it."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        writer.write(peer.encode() + b"\n" + data)
        return reader, writer


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the stream ends soon."""
    try:
        async with asyncio.timeout(5):
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_stranger_may_ask_to_join_and_what_is_a_members_ends_its_stream(tmp_path: Path) -> None:
    async def test() -> None:
        async with Door(tmp_path, "ann") as door:
            reader, _ = await door.stream("bob", whole(control({"type": "join"})))
            event = await door.inbox.get()
            assert isinstance(event, FrameReceived) and event.peer == "bob"
            assert await reader.readexactly(len(ACKNOWLEDGEMENT)) == ACKNOWLEDGEMENT
            for number, kind in enumerate(Kind):
                bad, _ = await door.stream(f"bad{number}", Prefix(1, 0, 0, Header(kind, 1 << 20)).pack())
                assert await ended(bad)
                refused = await door.inbox.get()
                assert isinstance(refused, FrameRefused) and "no member" in refused.reason
            assert door.counters.received[Kind.FORWARD].payload_bytes == 0, "nothing of it was read"

    run(test())


def test_streams_of_many_identities_are_bounded_and_nonsense_disconnects(tmp_path: Path) -> None:
    async def test() -> None:
        async with Door(tmp_path, "ann") as door:
            for number in range(3 * STRANGERS_STREAMS):
                await door.stream(f"s{number}")
            await asyncio.sleep(0.2)
            assert door.open <= STRANGERS_STREAMS
            member, _ = await door.stream("ann", whole(control({"type": "reports"})))
            assert await member.readexactly(len(ACKNOWLEDGEMENT)) == ACKNOWLEDGEMENT
            event = await door.inbox.get()
            assert isinstance(event, FrameReceived) and event.peer == "ann"

    run(test())


def test_a_flood_of_one_identity_leaves_a_few_streams_and_few_events(tmp_path: Path) -> None:
    async def test() -> None:
        async with Door(tmp_path, "ann") as door:
            flood = b"".join(whole(control({"type": "x" * 30}), n) for n in range(100))
            for _ in range(50):
                await door.stream("bob", flood)
            await asyncio.sleep(0.3)
            assert len(door.inbox) <= 4 and door.counters.received[Kind.CONTROL].frames <= 40
            assert door.open <= STRANGER_STREAMS + 64, "those it holds, and those that are let be for a while"

    run(test())


def test_a_silent_stranger_ends_and_a_silent_member_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENT_SECONDS", 0.1)

    async def test() -> None:
        async with Door(tmp_path, "ann") as door:
            half = whole(control({"type": "join"}))[:-3]
            stranger, _ = await door.stream("bob", half)
            member, writer = await door.stream("ann", half)
            assert await ended(stranger)
            writer.write(whole(control({"type": "join"}))[-3:])
            assert await member.readexactly(len(ACKNOWLEDGEMENT)) == ACKNOWLEDGEMENT, "nothing of it was lost"

    run(test())


def test_half_frames_of_strangers_hold_nothing_and_those_of_members_what_came(tmp_path: Path) -> None:
    async def test() -> None:
        async with Door(tmp_path, "ann") as door:
            header = Header(Kind.FORWARD, 1 << 24)
            halves = b"".join(Prefix(1, n, 0, header).pack() + bytes(SEGMENT_BYTES) for n in range(8))
            for number in range(20):
                await door.stream(f"s{number}", halves)
            _, writer = await door.stream("ann", halves)
            await writer.drain()
            for _ in range(100):
                await asyncio.sleep(0.01)
                if door.reception._incoming._begun.bytes == 8 * SEGMENT_BYTES:
                    break
            assert door.reception._incoming._begun.bytes == 8 * SEGMENT_BYTES
            writer.close()
            await asyncio.sleep(0.1)
            assert door.reception._incoming._begun.bytes == 0

    run(test())
