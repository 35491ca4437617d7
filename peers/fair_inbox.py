"""The events that wait for a daemon: fair among peers, bounded in number and bytes, strangers last.

    own        the transport's own news of its links and its end           first, and never refused
    members    a queue for each, taken from in turns                       a full one stops its peer, and no other
    strangers  the same, for all who are no members together               when no member waits, or now and then

Whoever puts an event waits for room: what is not taken is not read from the peer, and so slows it down.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from peers.transport import TransportEvent

PEER_EVENTS = 1024
PEER_BYTES = 1 << 25
ALL_EVENTS = 1 << 14
ALL_BYTES = 1 << 28  # a peer of which nothing waits may always put one
STRANGER_EVENTS = 4  # of one
STRANGERS_EVENTS = 64  # of all together
STRANGER_TURN = 32  # events of members after which a stranger is heard although more of theirs wait


class _Queues:
    """A queue for each peer, taken from in turns."""

    def __init__(self, peer_events: int, all_events: int) -> None:
        self._peer_events, self._all_events = peer_events, all_events
        self._queues: OrderedDict[str, deque[tuple[TransportEvent, int]]] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._count = self._sum = 0

    def __len__(self) -> int:
        return self._count

    def has_room(self, peer: str, size: int) -> bool:
        """Whether `peer` may put `size` bytes."""
        queue = self._queues.get(peer)
        if queue is None:
            return True
        own = len(queue) < self._peer_events and self._bytes[peer] + size <= PEER_BYTES
        return own and self._count < self._all_events and self._sum + size <= ALL_BYTES

    def put(self, peer: str, event: TransportEvent, size: int) -> None:
        """Put it behind what waits of `peer`."""
        self._queues.setdefault(peer, deque()).append((event, size))
        self._bytes[peer] = self._bytes.get(peer, 0) + size
        self._count, self._sum = self._count + 1, self._sum + size

    def take(self) -> TransportEvent:
        """The oldest of the peer whose turn it is."""
        peer, queue = next(iter(self._queues.items()))
        event, size = queue.popleft()
        self._count, self._sum = self._count - 1, self._sum - size
        if queue:
            self._bytes[peer] -= size
            self._queues.move_to_end(peer)
        else:
            del self._queues[peer], self._bytes[peer]
        return event


class FairInbox:
    """Events in, by peer; events out, in turns."""

    def __init__(self) -> None:
        self._own: deque[TransportEvent] = deque()
        self._members = _Queues(PEER_EVENTS, ALL_EVENTS)
        self._strangers = _Queues(STRANGER_EVENTS, STRANGERS_EVENTS)
        self._passed_over = 0
        self._ready = asyncio.Event()
        self._room: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        """Events that wait."""
        return len(self._own) + len(self._members) + len(self._strangers)

    async def tell(self, event: TransportEvent) -> None:
        """Put news of the transport itself."""
        self._own.append(event)
        self._ready.set()

    async def put(self, peer: str, event: TransportEvent, size: int) -> None:
        """Put an event of the member `peer`, of `size` bytes, as soon as there is room."""
        while not self._members.has_room(peer, size):
            await self._wait()
        self._members.put(peer, event, size)
        self._ready.set()

    def put_stranger(self, peer: str, event: TransportEvent, size: int) -> bool:
        """Put an event of one who is no member. False: there is no room, and it is dropped: they ask again."""
        # Unlike a member, a stranger is not promised room for one: there may be any number of them.
        if len(self._strangers) >= STRANGERS_EVENTS or not self._strangers.has_room(peer, size):
            return False
        self._strangers.put(peer, event, size)
        self._ready.set()
        return True

    async def get(self) -> TransportEvent:
        """The next event."""
        while not len(self):
            self._ready.clear()
            await self._ready.wait()
        event = self._take()
        self._wake()
        return event

    def _take(self) -> TransportEvent:
        if self._own:
            return self._own.popleft()
        if len(self._strangers) and (not len(self._members) or self._passed_over >= STRANGER_TURN):
            self._passed_over = 0
            return self._strangers.take()
        self._passed_over += 1
        return self._members.take()

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room.add(waiter)
        try:
            await waiter
        finally:
            self._room.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._room:
            if not waiter.done():
                waiter.set_result(None)
