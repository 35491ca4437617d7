"""Where the streams that others open arrive: read, within what their senders' standing allows, into the inbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing

from peers.fair_inbox import FairInbox
from peers.limits import Limits
from peers.links import Incoming
from peers.standing import Standing
from peers.transport import FrameReceived, FrameRefused, TrafficCounters
from protocol.errors import BadFrame

SWEEP_SECONDS = 10.0
DISCONNECT_REFUSALS = 3
MOST_SOURCES = 4096
UNWELCOME_SECONDS, MOST_KEPT_WAITING = 2.0, 64


class Reception:
    """The incoming streams of one transport.

    Args:
        seen: is called with each peer whose stream may stay.
        disconnect: ends all connections of a peer.
    """

    def __init__(
        self,
        limits: Limits,
        counters: TrafficCounters,
        inbox: FairInbox,
        seen: Callable[[str], None],
        disconnect: Callable[[str], Awaitable[None]],
    ) -> None:
        self._standing, self._inbox = Standing(), inbox
        self._incoming = Incoming(limits, counters, self._standing)
        self._seen, self._disconnect = seen, disconnect
        self._control_only: frozenset[str] = frozenset()
        self._sources: dict[str, str] = {}
        self._readers: set[asyncio.Task[object]] = set()
        self._kept_waiting = 0

    def trust(self, peers: Collection[str], control_only: Collection[str], patience: float) -> None:
        """Set who is a member; see `Transport.trust`."""
        self._control_only = frozenset(control_only)
        self._standing.trust(self._control_only.union(peers), patience)

    def takes_tensors(self, peer: str) -> bool:
        """Whether `peer` is one with whom tensors are exchanged."""
        return self._standing.is_member(peer) and peer not in self._control_only

    def source_of(self, peer: str) -> str:
        """The IP address from which the newest stream of `peer` came; "": not known."""
        return self._sources.get(peer, "")

    async def accept(self, peer: str, source: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one incoming stream to its end. A full inbox stops the reading, and so the sender."""
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            if reason := self._standing.admit(peer, task, task.cancel):
                if self._standing.is_member(peer):
                    raise BadFrame(reason)
                await self._keep_waiting()
                return
            self._note_source(peer, source)
            self._seen(peer)
            async with aclosing(self._incoming.frames(peer, reader, writer)) as frames:
                async for frame in frames:
                    await self._deliver(peer, FrameReceived(peer, frame), frame.header.length)
        except BadFrame as error:
            writer.transport.abort()
            await self._refuse(peer, str(error))
        except asyncio.CancelledError:
            pass  # by `close`, or for another stream; nobody awaits the task that the stream server made
        finally:
            self._standing.ended(task)
            writer.transport.abort()  # `close` would wait for a peer that does not read
            self._readers.discard(task)

    def _note_source(self, peer: str, source: str) -> None:
        self._sources.pop(peer, None)
        self._sources[peer] = source
        while len(self._sources) > MOST_SOURCES:
            del self._sources[next(iter(self._sources))]

    async def _keep_waiting(self) -> None:
        """Let an unwelcome stream be for a while: whoever opens the next when one ends does so no faster than this."""
        if self._kept_waiting < MOST_KEPT_WAITING:
            self._kept_waiting += 1
            try:
                await asyncio.sleep(UNWELCOME_SECONDS)
            finally:
                self._kept_waiting -= 1

    async def _deliver(self, peer: str, event: FrameReceived | FrameRefused, size: int) -> None:
        if self._standing.is_member(peer):
            await self._inbox.put(peer, event, size)
        else:
            self._inbox.put_stranger(peer, event, size)

    async def _refuse(self, peer: str, reason: str) -> None:
        """Tell the daemon. A stranger that goes on so loses its connection."""
        refusals = self._standing.offended(peer)
        await self._deliver(peer, FrameRefused(peer, reason), 0)
        if refusals >= DISCONNECT_REFUSALS:
            await self._disconnect(peer)

    async def sweep(self) -> None:
        """End now and then what does not go on. Never returns."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._incoming.end_stale()

    async def close(self) -> None:
        """End all streams."""
        readers = list(self._readers)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
