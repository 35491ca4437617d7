"""The outgoing links of one transport, and what comes in over the links of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress

from peers.limits import Limits
from peers.link import Emit, Link, Stream
from peers.segments import ACKNOWLEDGEMENT, PREFIX_BYTES, PROBE, Begun, Joiner, Prefix
from peers.standing import Standing
from peers.trace import NO_TRACE, Tracer
from peers.transport import Traffic, TrafficCounters
from protocol.errors import BadFrame
from protocol.frame import Frame, Kind
from protocol.link_measure import LinkMeasure

PARTING_SECONDS = 5.0
SILENT_SECONDS = 10.0  # after which a stranger's stream ends; a living link is never silent for so long
MOST_PARTING = 32
MOST_LINKS_FROM_PEER = 4  # room for those that broke unnoticed
MOST_UNREAD_BYTES = 1 << 16  # of acknowledgements that the peer does not read


class Links:
    """At most one link to each peer beside those that it is parting with."""

    def __init__(
        self,
        open_streams: Callable[[str], Awaitable[Sequence[Stream]]],
        emit: Emit,
        sent: dict[Kind, Traffic],
        tracer: Tracer = NO_TRACE,
    ) -> None:
        self._open_streams = open_streams
        self._tracer = tracer
        self._emit = emit
        self._sent = sent
        self._links: dict[str, Link] = {}
        self._parting: dict[asyncio.Task[None], Link] = {}

    def get(self, peer: str) -> Link | None:
        """The link to `peer`, if there is one."""
        return self._links.get(peer)

    def to(self, peer: str) -> Link:
        """The link to `peer`, made if there is none."""
        if peer not in self._links:
            self._links[peer] = Link(peer, lambda: self._open_streams(peer), self._emit, self._sent, self._tracer)
        return self._links[peer]

    def measures(self) -> dict[str, LinkMeasure]:
        """What is known of each link."""
        return {peer: link.measure() for peer, link in self._links.items()}

    async def end(self, peer: str) -> None:
        """Close the link to `peer` now, if there is one."""
        if peer in self._links:
            await self._links.pop(peer).close()

    def forget(self, peer: str, parted: Callable[[], None]) -> None:
        """Close the link to `peer` when its queue is written, at the latest after `PARTING_SECONDS`; call `parted`."""
        link = self._links.pop(peer, None)
        if link is None:
            parted()
            return
        lasting = [task for task in self._parting if not task.cancelling()]
        if len(lasting) >= MOST_PARTING:  # one who is answered again and again has the older answers
            lasting[0].cancel()
        task = asyncio.create_task(self._part(link, parted), name=f"parting with {peer}")
        self._parting[task] = link
        task.add_done_callback(self._parting.pop)

    async def _part(self, link: Link, parted: Callable[[], None]) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(PARTING_SECONDS):
                    await link.drain()
        finally:
            await link.close()
            parted()

    def __len__(self) -> int:
        """Frames in all queues."""
        return sum(len(link) for link in self._all())

    async def drain(self, seconds: float) -> None:
        """Wait until every queue is written out, at most `seconds`."""
        waits = [asyncio.create_task(link.drain()) for link in self._all()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late:
                task.cancel()

    async def close(self) -> bool:
        """Close all links. Returns whether there were any."""
        links, parting = self._all(), list(self._parting)
        for task in parting:
            task.cancel()
        await asyncio.gather(*parting, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in links))
        return bool(links)

    def _all(self) -> list[Link]:
        return [*self._links.values(), *self._parting.values()]


class Incoming:
    """The frames that come in over the links of others, as far as `standing` lets them.

    `counters`: of what comes, and of the acknowledgements.
    """

    def __init__(self, limits: Limits, counters: TrafficCounters, standing: Standing) -> None:
        self._limits, self._counters, self._standing = limits, counters, standing
        self._begun = Begun()
        self._joiners: dict[tuple[str, int], tuple[Joiner, list[asyncio.StreamWriter]]] = {}

    async def frames(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AsyncGenerator[Frame, None]:
        """Each frame of `peer` that a segment on this stream completes, until the stream ends.

        What is not asked for is not read and not acknowledged, so a slow consumer slows the sender down.

        Raises:
            BadFrame: the peer sent what the limits or the layout forbid, or what only members may.
        """
        opened: dict[int, Joiner] = {}
        try:
            while (segment := await self._segment(peer, reader)) is not None:
                prefix, data = segment
                self._counters.received[prefix.header.kind].count(int(prefix.offset == 0), PREFIX_BYTES, len(data))
                if prefix.number != PROBE:
                    if prefix.link not in opened:
                        opened[prefix.link] = self._enter(peer, prefix.link, writer)
                    frame = opened[prefix.link].add(prefix, data, time.monotonic())
                    if frame is not None:
                        yield frame
                self._acknowledge(writer)
        finally:
            for link in opened:
                self._leave(peer, link, writer)

    def end_stale(self) -> None:
        """End the links over which a frame has begun to come and does not go on. To be called now and then."""
        now = time.monotonic()
        for joiner, writers in list(self._joiners.values()):
            if joiner.stale(now):
                joiner.clear()
                for writer in writers:
                    writer.transport.abort()

    async def _segment(self, peer: str, reader: asyncio.StreamReader) -> tuple[Prefix, bytes] | None:
        raw = await self._read(peer, reader, PREFIX_BYTES)
        if raw is None:
            return None
        prefix = Prefix.unpack(raw)
        if reason := await self._standing.settled(peer, prefix.header) or self._limits.refusal(prefix.header):
            raise BadFrame(reason)
        if delay := self._standing.delay(peer, prefix.header.kind, prefix.data_bytes):
            await asyncio.sleep(delay)
        data = await self._read(peer, reader, prefix.data_bytes)
        return None if data is None else (prefix, data)

    async def _read(self, peer: str, reader: asyncio.StreamReader, size: int) -> bytes | None:
        """The next `size` bytes; None: the stream has ended, or a stranger is silent."""
        while True:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    return await reader.readexactly(size)
            except TimeoutError:  # nothing is taken of what came so far
                if not self._standing.is_member(peer):
                    return None
            except (asyncio.IncompleteReadError, OSError):
                return None

    def _acknowledge(self, writer: asyncio.StreamWriter) -> None:
        if writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            raise BadFrame("expected a peer that reads the acknowledgements of what it sends")
        writer.write(ACKNOWLEDGEMENT)
        self._counters.sent[Kind.CONTROL].count(0, len(ACKNOWLEDGEMENT), 0)

    def _enter(self, peer: str, link: int, writer: asyncio.StreamWriter) -> Joiner:
        key = (peer, link)
        if key not in self._joiners:
            if sum(other == peer for other, _ in self._joiners) >= MOST_LINKS_FROM_PEER:
                raise BadFrame(f"expected at most {MOST_LINKS_FROM_PEER} links from one peer, got one more")
            self._joiners[key] = Joiner(self._begun), []
        joiner, writers = self._joiners[key]
        writers.append(writer)
        return joiner

    def _leave(self, peer: str, link: int, writer: asyncio.StreamWriter) -> None:
        joiner, writers = self._joiners[peer, link]
        writers.remove(writer)
        if not writers:
            joiner.clear()
            del self._joiners[peer, link]
