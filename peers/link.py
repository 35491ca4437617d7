"""An outgoing link: the frames for one peer, sent over several streams. Knows asyncio's streams, not who makes them.

Frames are cut into segments (`peers.segments`). Each stream has a lane: a task that writes one segment at a time and
reads the acknowledgements, from which `peers.link_meter` measures the link. A segment is handed to an idle lane only
while less than the meter's window is under way, so that what waits does so here, where the urgent overtakes the rest.

            open ok: LinkRestored if lost before
    DOWN ----------------------------------------> UP
     ^ |  open failed: LinkLost once, wait          |
     |_|                                            |
     ^---- a stream ended, or nothing was acknowledged for long: LinkLost, wait
                                                    '

Frames wait meanwhile. Those that were begun are dropped: the step protocol sends them again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from peers.link_meter import LinkMeter, Stamp
from peers.segments import ACKNOWLEDGEMENT, PREFIX_BYTES, Cutter, Segment, probe
from peers.trace import NO_TRACE, Tracer, frame_name
from peers.transport import LinkLost, LinkRestored, Traffic, TransportEvent
from protocol.frame import Frame, Kind
from protocol.link_measure import LinkMeasure
from protocol.membership_events import short_peer

logger = logging.getLogger(__name__)

QUEUE_FRAMES = 1024
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
PROBE_SECONDS = 1.0
# TCP forgets what a line can bear after some 0.3 s without a packet (`docs/lab_tables.md` has what that costs).
WARM_PROBE_SECONDS = 0.1
WARM_SECONDS = 30.0  # since the last tensor
SILENCE_SECONDS = 30.0
# Between this process and p2pd. A whole segment fits; more would be a queue that nothing overtakes.
SOCKET_BYTES = 1 << 17

_TENSORS = (Kind.FORWARD, Kind.BACKWARD)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Emit = Callable[[TransportEvent], Awaitable[None]]


class CannotOpen(Exception):
    """The streams of a link could not be opened; the message says why."""


class _Lane:
    """One stream of a link."""

    def __init__(self, link: Link, stream: Stream) -> None:
        self._link, (self._reader, self._writer) = link, stream
        self._given: asyncio.Future[tuple[bytes, memoryview]] | None = None
        self._under_way: deque[Stamp] = deque()
        self._heard_at = float("-inf")
        # With a high-water mark of 0, `drain` returns when the bytes have left this process.
        self._writer.transport.set_write_buffer_limits(high=0)
        if (connection := self._writer.get_extra_info("socket")) is not None:
            with suppress(OSError):  # it is closed already: `read` will say so
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)

    def give(self, head: bytes, data: memoryview, stamp: Stamp) -> None:
        """Write this next. Only for an idle lane."""
        assert self._given is not None
        self._under_way.append(stamp)
        self._given.set_result((head, data))

    @property
    def silent_since(self) -> float | None:
        """Since when nothing was acknowledged that should have been."""
        return max(self._under_way[0].sent_at, self._heard_at) if self._under_way else None

    def end(self, at_once: bool) -> None:
        """Close the stream. `at_once`: without what p2pd has not taken, which might never be."""
        if at_once:
            self._writer.transport.abort()
        self._writer.close()

    async def write(self) -> str:
        """Write what is given, until the stream breaks. Returns why it did."""
        while True:
            self._given = asyncio.get_running_loop().create_future()
            self._link.idle(self)
            head, data = await self._given
            try:
                # In one piece: asyncio writes at once, and p2pd would pass the 32 bytes of the head on by themselves.
                self._writer.write(b"".join((head, data)))
                await self._writer.drain()
            except OSError as error:
                return f"writing to the stream failed: {error or type(error).__name__}"

    async def read(self) -> str:
        """Take the acknowledgements, until the stream ends: it tells of a dead peer even when we are idle."""
        while True:
            try:
                answer = await self._reader.readexactly(len(ACKNOWLEDGEMENT))
            except asyncio.IncompleteReadError:
                return "the peer closed the stream"
            except OSError as error:
                return f"the stream broke: {error or type(error).__name__}"
            if answer != ACKNOWLEDGEMENT or not self._under_way:
                return "the peer acknowledged what was not sent"
            self._heard_at = self._link.acknowledged(self._under_way.popleft())


class Link:
    """Sends frames to one peer for as long as it is not closed. `sent` counts what goes into the sockets."""

    def __init__(
        self,
        peer: str,
        open_streams: Callable[[], Awaitable[Sequence[Stream]]],
        emit: Emit,
        sent: dict[Kind, Traffic],
        tracer: Tracer = NO_TRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.up = asyncio.Event()
        self.dropped = 0
        self._open_streams, self._emit, self._sent, self._clock = open_streams, emit, sent, clock
        self._tracer, self._track = tracer, f"to {short_peer(peer)}"
        self._reported_lost = False
        self._closing = False
        self._wake = asyncio.Event()
        self._meter = LinkMeter()
        self._cutter = Cutter(_link_number())
        self._lanes: list[_Lane] = []
        self._idle: deque[_Lane] = deque()
        self._written = asyncio.Event()
        self._written.set()
        self._last_sent = clock()
        self._last_tensor = float("-inf")
        self._task = asyncio.create_task(self._run(), name=f"link to {peer}")
        self._task.add_done_callback(_say_failed)

    def __len__(self) -> int:
        """Frames that wait, or are not wholly sent."""
        return len(self._cutter)

    def put(self, frame: Frame) -> None:
        """Queue a frame. When the queue is full, the oldest of the least urgent goes: it is most likely out of date."""
        if len(self._cutter) >= QUEUE_FRAMES and self._cutter.drop_oldest():
            self.dropped += 1
            if self.dropped % QUEUE_FRAMES == 1:
                logger.warning("queue to %s is full (%d frames): dropped %d", self.peer, QUEUE_FRAMES, self.dropped)
        self._cutter.put(frame, self._clock())
        self._written.clear()
        self._pump()

    def measure(self) -> LinkMeasure:
        """What is known of it."""
        return self._meter.measure(self._clock())

    def hurry(self) -> None:
        """Try to open now rather than after the wait: the peer has just shown that it is there."""
        self._wake.set()

    async def drain(self) -> None:
        """Wait until every queued frame has been written."""
        await self._written.wait()

    async def close(self) -> None:
        """Stop for good. Can be called twice."""
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # For the lanes

    def idle(self, lane: _Lane) -> None:
        """`lane` can take a segment."""
        if lane in self._lanes:  # else its stream is being given up
            self._idle.append(lane)
            self._pump()

    def acknowledged(self, stamp: Stamp) -> float:
        """A segment has arrived. Returns when it is."""
        now = self._clock()
        self._meter.acknowledged(now, stamp)
        self._pump()
        return now

    def _pump(self) -> None:
        """Hand segments to idle lanes, those that have been idle longest first: each stream's own window stays open."""
        while self._idle and self._meter.inflight < self._meter.window:
            segment = self._cutter.next()
            if segment is None:
                break
            self._hand(segment)
        if not len(self._cutter) and len(self._idle) == len(self._lanes):
            self._written.set()

    def _hand(self, segment: Segment) -> None:
        now, limited, header = self._clock(), not len(self._cutter), segment.prefix.header
        self._last_sent = now
        if header.kind in _TENSORS:
            self._last_tensor = now
            if segment.last:
                self._tracer.span(self._track, frame_name(header), segment.put_at, now)
        self._sent[header.kind].count(int(segment.prefix.offset == 0), PREFIX_BYTES, len(segment.data))
        stamp = self._meter.sent(now, PREFIX_BYTES + len(segment.data), limited)
        self._idle.popleft().give(segment.prefix.pack(), segment.data, stamp)

    # Life

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
            # However it hurries us: a peer may refuse our streams as soon as it has opened its own.
            await asyncio.sleep(FIRST_WAIT_SECONDS)
            # Not `wait_for`: cancelled when `_wake` has just been set, Python 3.11's forgets the cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait - FIRST_WAIT_SECONDS):
                    await self._wake.wait()
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _live_once(self) -> str:
        """Open the streams and serve them until one breaks. Returns why it ended."""
        self._wake.clear()
        try:
            streams = await self._open_streams()
        except CannotOpen as error:
            return str(error)
        lanes = [_Lane(self, stream) for stream in streams]
        try:
            self.up.set()
            await self._report_restored()
            return await self._serve(lanes)
        finally:
            for lane in lanes:
                lane.end(at_once=not self._closing)

    async def _serve(self, lanes: list[_Lane]) -> str:
        self._lanes = lanes
        tasks = [asyncio.create_task(work()) for lane in lanes for work in (lane.read, lane.write)]
        tasks.append(asyncio.create_task(self._probe()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            self._lanes = []
            self._idle.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._meter.lost(self._clock())
            self._cutter.restart(_link_number())
            self._pump()

    async def _probe(self) -> str:
        """While nothing else is sent, keep the line warm and measured; notice a peer that does not answer any more."""
        while True:
            warm = self._clock() - self._last_tensor < WARM_SECONDS
            wait = WARM_PROBE_SECONDS if warm else PROBE_SECONDS
            await asyncio.sleep(wait)
            now = self._clock()
            unanswered = [lane.silent_since for lane in self._lanes if lane.silent_since is not None]
            if unanswered and now - min(unanswered) > SILENCE_SECONDS:
                return f"the peer acknowledged nothing for {SILENCE_SECONDS:.0f} s"
            if self._idle and not len(self._cutter) and now - self._last_sent >= 0.9 * wait:
                self._hand(probe(self._cutter.link))

    async def _report_lost(self, reason: str) -> None:
        if not self._reported_lost:
            self._reported_lost = True
            await self._emit(LinkLost(self.peer, reason))

    async def _report_restored(self) -> None:
        if self._reported_lost:
            self._reported_lost = False
            await self._emit(LinkRestored(self.peer))


def _say_failed(task: asyncio.Task[None]) -> None:
    """Nobody awaits a link's task before it is closed, so a bug in it would only show as silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the %s ended by a bug here", task.get_name(), exc_info=error)


def _link_number() -> int:
    return random.getrandbits(32)
