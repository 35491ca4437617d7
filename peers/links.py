"""The outgoing links of one transport, and what comes in over the links of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress

from peers.limits import Limits
from peers.link import Emit, Link, Stream
from peers.segments import ACKNOWLEDGEMENT, PREFIX_BYTES, PROBE, Joiner, Prefix
from peers.trace import NO_TRACE, Tracer
from peers.transport import Traffic, TrafficCounters
from protocol.errors import BadFrame
from protocol.frame import Frame, Kind
from protocol.link_measure import LinkMeasure

PARTING_SECONDS = 5.0
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
        task = asyncio.create_task(self._part(link, parted), name=f"parting with {peer}")
        self._parting[task] = link
        task.add_done_callback(self._parting.pop)

    async def _part(self, link: Link, parted: Callable[[], None]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PARTING_SECONDS):
                await link.drain()
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
    """The frames that come in over the links of others. `counters`: of what comes, and of the acknowledgements."""

    def __init__(self, limits: Limits, counters: TrafficCounters) -> None:
        self._limits, self._counters = limits, counters
        self._joiners: dict[tuple[str, int], tuple[Joiner, list[int]]] = {}

    async def frames(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AsyncGenerator[Frame, None]:
        """Each frame of `peer` that a segment on this stream completes, until the stream ends.

        What is not asked for is not read and not acknowledged, so a slow consumer slows the sender down.

        Raises:
            BadFrame: the peer sent what the limits or the layout forbid.
        """
        opened: dict[int, Joiner] = {}
        try:
            while (segment := await self._segment(reader)) is not None:
                prefix, data = segment
                self._counters.received[prefix.header.kind].count(int(prefix.offset == 0), PREFIX_BYTES, len(data))
                if prefix.number != PROBE:
                    if prefix.link not in opened:
                        opened[prefix.link] = self._enter(peer, prefix.link)
                    frame = opened[prefix.link].add(prefix, data)
                    if frame is not None:
                        yield frame
                self._acknowledge(writer)
        finally:
            for link in opened:
                self._leave(peer, link)

    async def _segment(self, reader: asyncio.StreamReader) -> tuple[Prefix, bytes] | None:
        try:
            prefix = Prefix.unpack(await reader.readexactly(PREFIX_BYTES))
            self._limits.check(prefix.header)
            return prefix, await reader.readexactly(prefix.data_bytes)
        except (asyncio.IncompleteReadError, OSError):
            return None

    def _acknowledge(self, writer: asyncio.StreamWriter) -> None:
        if writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            raise BadFrame("expected a peer that reads the acknowledgements of what it sends")
        writer.write(ACKNOWLEDGEMENT)
        self._counters.sent[Kind.CONTROL].count(0, len(ACKNOWLEDGEMENT), 0)

    def _enter(self, peer: str, link: int) -> Joiner:
        key = (peer, link)
        if key not in self._joiners:
            if sum(other == peer for other, _ in self._joiners) >= MOST_LINKS_FROM_PEER:
                raise BadFrame(f"expected at most {MOST_LINKS_FROM_PEER} links from one peer, got one more")
            self._joiners[key] = Joiner(), [0]
        joiner, streams = self._joiners[key]
        streams[0] += 1
        return joiner

    def _leave(self, peer: str, link: int) -> None:
        streams = self._joiners[peer, link][1]
        streams[0] -= 1
        if not streams[0]:
            del self._joiners[peer, link]
