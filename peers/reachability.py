"""Whether others can reach a peer that asks to join: found out before it gets a place, and told to itself.

A peer names its own addresses, and it may be wrong about them: it listens on loopback, or its router lets nobody in.
With a neighbour that cannot be dialled a run stands still. So of a newcomer's addresses those count that can lead there
from elsewhere, and then only if a nameless dialler, which has no connection to it yet, gets through. Who is left with
none is treated as one that asked for no connections: the others are called by it, and it is not put beside its like.

The try is a service to newcomers and not a gate: a peer is believed where it tells nothing. So of one that came from
this machine's own loopback (a launch, a laboratory, a test); of addresses of a family that this machine does not have;
and where a try cannot begin soon, since others ask for as many: identities are free, and nobody waits behind a crowd of
them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from peers.addresses import has_way_to, is_loopback, reachable_from
from peers.refusal_log import RefusalLog
from peers.transport import Transport
from protocol.errors import NetworkError
from protocol.frame import control
from protocol.membership_events import JoinAsked
from protocol.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MOST_KNOWN = 1024  # peers of whom the result is kept
MOST_AT_ONCE = 4  # each takes a process of its own for some seconds
TRIES_A_SECOND, TRIES_IN_A_ROW = 2.0, 32.0
PATIENCE_SECONDS = 10.0  # until a try begins; a peer waits for three times as long to be admitted


class Reachability:
    """Looks at join requests over `transport` and hands them on, with the addresses that count, to `decide`.

    Args:
        has_way: whether this machine has a way to an address at all.
    """

    def __init__(
        self,
        transport: Transport,
        decide: Callable[[JoinAsked], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        clock: Callable[[], float] = time.monotonic,
        has_way: Callable[[str], bool] = has_way_to,
    ) -> None:
        self._transport, self._decide, self._spawn = transport, decide, spawn
        self._known: dict[str, tuple[str, tuple[str, ...], bool]] = {}  # session, addresses, whether they lead there
        self._dialling: set[str] = set()
        self._told: dict[str, str] = {}  # the session in which a peer was told that nobody reaches it
        self._turns, self._clock = asyncio.Semaphore(MOST_AT_ONCE), clock
        self._has_way_to = has_way
        self._tries = TokenBucket(TRIES_A_SECOND, TRIES_IN_A_ROW)
        self._refusals = RefusalLog(logger)

    def asked(self, event: JoinAsked) -> None:
        """`event` came. It is handed on at once, or when its addresses have been tried."""
        source = self._transport.source_of(event.peer)
        kept = tuple(reachable_from(event.addresses, source))
        event = replace(event, addresses=kept, source=source, claimed=event.addresses)

        known = self._known.get(event.peer)
        if not kept or not source or is_loopback(source):
            self._hand_on(event, bool(kept) or not event.claimed)
        elif known is not None and known[:2] == (event.session, kept):
            self._hand_on(event, known[2])
        elif event.peer in self._dialling:
            pass  # it asks again and again, and is answered when the try has ended
        elif len(self._dialling) < MOST_KNOWN and self._tries.take(self._clock()) == 0:
            self._dialling.add(event.peer)
            self._spawn(self._dial(event))
        else:
            self._hand_on(event, True)

    async def _dial(self, event: JoinAsked) -> None:
        try:
            reached = await self._try(event)
        finally:
            self._dialling.discard(event.peer)
        if reached is None:
            self._hand_on(event, True)
            return
        self._known.pop(event.peer, None)
        self._known[event.peer] = event.session, event.addresses, reached
        _forget_oldest(self._known)
        self._hand_on(event, reached)

    async def _try(self, event: JoinAsked) -> bool | None:
        """Whether the peer of `event` was reached; None: that cannot be told."""
        dialled = tuple(address for address in event.addresses if self._has_way_to(address))
        if not dialled:
            return None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            return None
        try:
            reached = await self._transport.dials(event.peer, dialled)
            return True if reached else None if len(dialled) < len(event.addresses) else False
        except NetworkError as error:  # of this machine: it has no room for one more process
            self._refusals.note(event.peer, f"its addresses were not tried: {error}")
            return None
        finally:
            self._turns.release()

    def _hand_on(self, event: JoinAsked, reached: bool) -> None:
        if not reached:
            self._tell(event)
            event = replace(event, addresses=())
        self._decide(event)

    def _tell(self, event: JoinAsked) -> None:
        """Say it to the peer itself, once: it asks until it is let in, and is told the same each time."""
        if self._told.pop(event.peer, None) == event.session:
            self._told[event.peer] = event.session
            return
        self._told[event.peer] = event.session
        _forget_oldest(self._told)
        claimed = " or ".join(event.claimed[:3])
        text = (
            f"nobody can reach this peer at {claimed} (its connection comes from {event.source}): forward the port to "
            "it and say so (--port, --announce), or join with --no-listen; until then it is treated as if --no-listen "
            "were given"
        )
        self._refusals.note(event.peer, f"this peer cannot be reached at {claimed}")
        self._transport.send(event.peer, control({"type": "notice", "text": text}))


def _forget_oldest(known: dict[str, Any]) -> None:
    while len(known) > MOST_KNOWN:
        del known[next(iter(known))]
