"""One outgoing link and the book of links, over streams that a test scripts."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from peers import links as module
from peers.limits import Limits
from peers.link import CannotOpen, Link, Stream
from peers.links import MOST_LINKS_FROM_PEER, Incoming, Links
from peers.segments import ACKNOWLEDGEMENT
from peers.standing import Standing
from peers.transport import LinkLost, LinkRestored, TrafficCounters, TransportEvent
from protocol.errors import BadFrame
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
        await asyncio.sleep(0.5)  # now it waits for its third try, or for `hurry`
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


class Somebody:
    """A peer that takes frames over real streams of one machine, `streams` a link."""

    def __init__(self, folder: Path, streams: int = 4) -> None:
        self._path, self._streams = str(folder / "socket"), streams
        self.counters, self.mine = TrafficCounters(), TrafficCounters()
        self.got: asyncio.Queue[Frame] = asyncio.Queue()
        self.events: asyncio.Queue[TransportEvent] = asyncio.Queue()
        self._limits = Limits()
        self._limits.set(Kind.FORWARD, 1 << 24)
        self.standing = Standing()
        self.standing.trust({"a"})
        self.incoming = Incoming(self._limits, self.counters, self.standing)
        self.writers: list[asyncio.StreamWriter] = []
        self.mute = self.deaf = False
        self.own: list[Stream] = []
        self.undeaf = asyncio.Event()
        self.pause = 0.0

    async def __aenter__(self) -> "Somebody":
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        self.links = Links(self._open, self.events.put, self.mine.sent)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.close()
        self._server.close()
        await asyncio.sleep(0.05)  # for the readers to see the end of their streams

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        if self.deaf:
            await self.undeaf.wait()
            return writer.close()
        if self.mute:
            await reader.read()
            return writer.close()
        async with aclosing(self.incoming.frames("a", reader, writer)) as frames:
            async for frame in frames:
                await asyncio.sleep(self.pause)
                await self.got.put(frame)
        writer.close()

    async def _open(self, peer: str) -> Sequence[Stream]:
        self.own = [await asyncio.open_unix_connection(self._path) for _ in range(self._streams)]
        return self.own


def test_frames_arrive_over_all_streams_and_are_counted_at_both_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with Somebody(tmp_path) as somebody:
            link = somebody.links.to("b")
            payload = bytes(range(256)) * 4096
            for step in range(5):
                link.put(Frame(Header(Kind.FORWARD, len(payload), step=step), payload))
            frames = [await somebody.got.get() for _ in range(5)]
            assert sorted(frame.header.step for frame in frames) == list(range(5))
            assert all(bytes(frame.payload) == payload for frame in frames)
            await link.drain()
            while link.measure().busy_seconds < 1e-9 or link._meter.inflight:  # the last acknowledgements
                await asyncio.sleep(0.01)
            sent, received = somebody.mine.sent[Kind.FORWARD], somebody.counters.received[Kind.FORWARD]
            assert sent == received and (sent.frames, sent.payload_bytes) == (5, 5 * len(payload))
            assert link.measure().sent_bytes == sent.payload_bytes + sent.header_bytes
            assert somebody.counters.sent[Kind.CONTROL].header_bytes == 5 * 16 * len(ACKNOWLEDGEMENT)
            assert link.measure().rtt_seconds is not None and len(somebody.writers) == 4

    run(test())


def test_a_broken_stream_is_reported_and_the_link_opens_new_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with Somebody(tmp_path) as somebody:
            link = somebody.links.to("b")
            await link.up.wait()
            while len(somebody.writers) < 4:
                await asyncio.sleep(0.01)
            somebody.writers[2].close()
            assert await somebody.events.get() == LinkLost("b", "the peer closed the stream")
            link.put(FRAME)
            assert await somebody.events.get() == LinkRestored("b")
            assert (await somebody.got.get()).payload == b"1234"

    run(test())


def test_a_peer_that_acknowledges_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.link.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("peers.link.SILENCE_SECONDS", 0.3)

    async def test() -> None:
        async with Somebody(tmp_path) as somebody:
            somebody.mute = True
            somebody.links.to("b").put(FRAME)
            lost = await somebody.events.get()
            assert isinstance(lost, LinkLost) and "acknowledged nothing" in lost.reason

    run(test())


def test_an_acknowledgement_of_nothing_ends_the_link(tmp_path: Path) -> None:
    async def test() -> None:
        async with Somebody(tmp_path) as somebody:
            link = somebody.links.to("b")
            await link.up.wait()
            while not somebody.writers:
                await asyncio.sleep(0.01)
            somebody.writers[0].write(ACKNOWLEDGEMENT)
            lost = await somebody.events.get()
            assert lost == LinkLost("b", "the peer acknowledged what was not sent")

    run(test())


def test_more_links_from_a_peer_than_can_be_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with Somebody(tmp_path, streams=1) as somebody:
            incoming = somebody.incoming
            _, writer = await asyncio.open_unix_connection(somebody._path)
            for link in range(MOST_LINKS_FROM_PEER):
                incoming._enter("a", link, writer)
            incoming._enter("b", 0, writer)
            with pytest.raises(BadFrame, match="links from one peer"):
                incoming._enter("a", 99, writer)
            incoming._leave("a", 1, writer)
            incoming._enter("a", 99, writer)
            writer.close()

    run(test())


def test_nothing_is_kept_of_a_link_that_has_ended_however_often_it_is_opened_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with Somebody(tmp_path) as somebody:
            link = somebody.links.to("b")
            for _ in range(MOST_LINKS_FROM_PEER + 2):
                for _ in range(8):  # more than one on each stream
                    link.put(FRAME)
                for _ in range(8):
                    await somebody.got.get()
                somebody.writers[-1].close()
                assert isinstance(await somebody.events.get(), LinkLost)
                link.hurry()
                assert await somebody.events.get() == LinkRestored("b")
                async with asyncio.timeout(5):
                    while somebody.incoming._joiners:
                        await asyncio.sleep(0.01)

    run(test())


def test_streams_that_break_while_the_others_are_opened_do_not_end_the_link(tmp_path: Path) -> None:
    async def test() -> None:
        async with Somebody(tmp_path) as somebody:

            async def open_broken(peer: str) -> Sequence[Stream]:
                streams = await Somebody._open(somebody, peer)
                if len(somebody.writers) <= 4:
                    streams[1][1].transport.abort()
                    await asyncio.sleep(0.05)
                return streams

            links = Links(open_broken, somebody.events.put, somebody.mine.sent)
            links.to("b").put(FRAME)
            assert isinstance(await somebody.events.get(), LinkLost)
            assert (await somebody.got.get()).payload == b"1234"
            await links.close()

    run(test())


def test_a_link_that_is_given_up_holds_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.link.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("peers.link.WARM_PROBE_SECONDS", 0.05)
    monkeypatch.setattr("peers.link.SILENCE_SECONDS", 0.3)

    async def test() -> None:
        async with Somebody(tmp_path, streams=1) as somebody:
            somebody.deaf = True
            link = somebody.links.to("b")
            link.put(Frame(Header(Kind.FORWARD, 1 << 22), bytes(1 << 22)))
            await link.up.wait()
            sockets = [writer.get_extra_info("socket") for _, writer in somebody.own]
            while not somebody.own[0][1].transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
            assert isinstance(await somebody.events.get(), LinkLost)
            await asyncio.sleep(0.05)
            assert [socket.fileno() for socket in sockets] == [-1]
            somebody.undeaf.set()

    run(test())


def test_a_slow_peer_is_not_taken_for_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It acknowledges all the time, but each segment long after it was sent."""
    monkeypatch.setattr("peers.link.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("peers.link.WARM_PROBE_SECONDS", 0.05)
    monkeypatch.setattr("peers.link.SILENCE_SECONDS", 2.0)

    async def test() -> None:
        async with Somebody(tmp_path, streams=1) as somebody:
            somebody.pause = 0.2
            for _ in range(13):
                somebody.links.to("b").put(FRAME)
            for _ in range(13):
                await somebody.got.get()
            assert somebody.events.empty()

    run(test())


def test_a_peer_that_hurries_and_refuses_us_does_not_keep_us_busy() -> None:
    async def test() -> None:
        nobody = Nobody()

        async def hurried(peer: str) -> Sequence[Stream]:
            link.hurry()
            return await nobody.open_streams()

        link = Links(hurried, nobody.emit, TrafficCounters().sent).to("b")
        await asyncio.sleep(0.5)
        assert 1 <= nobody.asked <= 4
        await link.close()

    run(test())
