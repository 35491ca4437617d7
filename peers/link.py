"""The outgoing links, and the reading of frames from a stream. Knows asyncio's streams, not who makes them.

A link has one queue and several streams; each stream has a writer task that takes the next frame. When any stream
breaks, all are closed, `LinkLost` is reported once, and the link opens new ones until it works again:

            open ok: LinkRestored if lost before
    DOWN ----------------------------------------> UP
     ^ |  open failed: LinkLost once, wait          |
     |_|                                            |
     ^---- a stream ended: LinkLost, wait ----------'

Frames wait in the queue meanwhile. The frame that was being written is dropped: the step protocol sends it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from peers.limits import Limits
from peers.transport import LinkLost, LinkRestored, Traffic, TransportEvent
from protocol.frame import HEADER_BYTES, Frame, Header, Kind
from protocol.link_measure import LinkMeasure

logger = logging.getLogger(__name__)

QUEUE_FRAMES = 1024
CHUNK_BYTES = 1 << 17
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
PARTING_SECONDS = 5.0

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Emit = Callable[[TransportEvent], Awaitable[None]]


class CannotOpen(Exception):
    """The streams of a link could not be opened; the message says why."""


async def read_frame(reader: asyncio.StreamReader, limits: Limits) -> Frame | None:
    """The next frame of a stream, or None at its end. The payload is allocated only after the header is accepted.

    Raises:
        BadFrame: the header is malformed or states a payload longer than `limits`.
    """
    try:
        header = Header.unpack(await reader.readexactly(HEADER_BYTES))
        limits.check(header)
        return Frame(header, await reader.readexactly(header.length))
    except (asyncio.IncompleteReadError, OSError):
        return None


class Link:
    """Sends frames to one peer for as long as it is not closed."""

    def __init__(
        self,
        peer: str,
        open_streams: Callable[[], Awaitable[Sequence[Stream]]],
        emit: Emit,
        sent: dict[Kind, Traffic],
    ) -> None:
        self.peer = peer
        self.up = asyncio.Event()
        self.dropped = 0
        self._open_streams = open_streams
        self._emit = emit
        self._sent = sent
        self._reported_lost = False
        self._closing = False
        self._wake = asyncio.Event()
        self._queue: asyncio.Queue[Frame] = asyncio.Queue(QUEUE_FRAMES)
        self._task = asyncio.create_task(self._run(), name=f"link to {peer}")

    def __len__(self) -> int:
        """Frames in the queue."""
        return self._queue.qsize()

    def put(self, frame: Frame) -> None:
        """Queue a frame. When the queue is full, the oldest frame goes: it is the one most likely out of date."""
        if self._queue.full():
            self._queue.get_nowait()
            self._queue.task_done()
            self.dropped += 1
            if self.dropped % QUEUE_FRAMES == 1:
                logger.warning("queue to %s is full (%d frames): dropped %d", self.peer, QUEUE_FRAMES, self.dropped)
        self._queue.put_nowait(frame)

    def hurry(self) -> None:
        """Try to open now rather than after the wait: the peer has just shown that it is there."""
        self._wake.set()

    async def drain(self) -> None:
        """Wait until every queued frame has been written."""
        await self._queue.join()

    async def close(self) -> None:
        """Stop for good. Can be called twice."""
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        wait = FIRST_WAIT_SECONDS
        while not self._closing:
            opened = time.monotonic()
            reason = await self._live_once()
            self.up.clear()
            await self._report_lost(reason)
            # Only a link that held for a while earns a quick retry, so that a peer that refuses us is not hammered.
            if time.monotonic() - opened > 2 * LONGEST_WAIT_SECONDS:
                wait = FIRST_WAIT_SECONDS
            # Not `wait_for`: cancelled when `_wake` has just been set, Python 3.11's forgets the cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _live_once(self) -> str:
        """Open the streams and serve them until one breaks. Returns why it ended."""
        self._wake.clear()
        try:
            streams = await self._open_streams()
        except CannotOpen as error:
            return str(error)
        try:
            self.up.set()
            await self._report_restored()
            return await self._serve(streams)
        finally:
            for _, writer in streams:
                writer.close()

    async def _serve(self, streams: Sequence[Stream]) -> str:
        tasks = [asyncio.create_task(_watch(reader)) for reader, _ in streams]
        tasks += [asyncio.create_task(self._write(writer)) for _, writer in streams]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, writer: asyncio.StreamWriter) -> str:
        # With a high-water mark of 0, `drain` returns when the bytes have left this process: nothing holds on to a
        # payload after its frame counts as written.
        writer.transport.set_write_buffer_limits(high=0)
        while True:
            frame = await self._queue.get()
            try:
                await self._write_frame(writer, frame)
            except OSError as error:
                return f"writing to the stream failed: {error or type(error).__name__}"
            finally:
                self._queue.task_done()

    async def _write_frame(self, writer: asyncio.StreamWriter, frame: Frame) -> None:
        self._sent[frame.header.kind].add(frame)
        writer.write(frame.header.pack())
        payload = memoryview(frame.payload)
        for start in range(0, len(payload), CHUNK_BYTES):
            writer.write(payload[start : start + CHUNK_BYTES])
            await writer.drain()
        await writer.drain()

    async def _report_lost(self, reason: str) -> None:
        if not self._reported_lost:
            self._reported_lost = True
            await self._emit(LinkLost(self.peer, reason))

    async def _report_restored(self) -> None:
        if self._reported_lost:
            self._reported_lost = False
            await self._emit(LinkRestored(self.peer))


class Links:
    """The outgoing links of one transport, at most one to each peer beside those that it is parting with."""

    def __init__(
        self,
        open_streams: Callable[[str], Awaitable[Sequence[Stream]]],
        emit: Emit,
        sent: dict[Kind, Traffic],
    ) -> None:
        self._open_streams = open_streams
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
            self._links[peer] = Link(peer, lambda: self._open_streams(peer), self._emit, self._sent)
        return self._links[peer]

    def measures(self) -> dict[str, LinkMeasure]:
        """What is known of each link."""
        return {peer: LinkMeasure() for peer in self._links}

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


async def _watch(reader: asyncio.StreamReader) -> str:
    """Wait for the end of a stream on which the peer never writes: it tells of a dead peer even when we are idle."""
    try:
        extra = await reader.read(1)
    except OSError as error:
        return f"the stream broke: {error or type(error).__name__}"
    return "the peer wrote on a stream that only we may write on" if extra else "the peer closed the stream"
