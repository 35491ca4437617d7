"""Whether others can reach a peer that asks to join: found out before it gets a place, and told to itself.

A peer names its own addresses, and it may be wrong about them: it listens on loopback, or its router lets nobody in.
With a neighbour that cannot be dialled a run stands still. So of a newcomer's addresses those count that can lead there
from elsewhere, and then only if a nameless dialler, which has no connection to it yet, gets through. Who is left with
none is treated as one that asked for no connections: the others are called by it, and it is not put beside its like.

A peer that came from this machine's own loopback is believed: a launch, a laboratory, a test.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from peers.addresses import is_loopback, reachable_from
from peers.refusal_log import RefusalLog
from peers.transport import Transport
from protocol.frame import control
from protocol.membership_events import JoinAsked

logger = logging.getLogger(__name__)

MOST_KNOWN = 1024  # peers of whom the result is kept
MOST_AT_ONCE = 2  # each takes a process of its own for some seconds


class Reachability:
    """Looks at join requests over `transport` and hands them on, with the addresses that count, to `decide`."""

    def __init__(
        self,
        transport: Transport,
        decide: Callable[[JoinAsked], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._transport, self._decide, self._spawn = transport, decide, spawn
        self._known: dict[str, tuple[str, tuple[str, ...], bool]] = {}  # session, addresses, whether they lead there
        self._dialling: set[str] = set()
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
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
        elif event.peer not in self._dialling and len(self._dialling) < MOST_KNOWN:
            self._dialling.add(event.peer)
            self._spawn(self._dial(event))

    async def _dial(self, event: JoinAsked) -> None:
        try:
            async with self._turns:
                reached = await self._transport.dials(event.peer, event.addresses)
        finally:
            self._dialling.discard(event.peer)
        self._known.pop(event.peer, None)
        self._known[event.peer] = event.session, event.addresses, reached
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._hand_on(event, reached)

    def _hand_on(self, event: JoinAsked, reached: bool) -> None:
        if not reached:
            self._tell(event)
            event = replace(event, addresses=())
        self._decide(event)

    def _tell(self, event: JoinAsked) -> None:
        claimed = " or ".join(event.claimed[:3])
        text = (
            f"nobody can reach this peer at {claimed}: forward the port to it and say so (--port, --announce), or join "
            "with --no-listen; until then it is treated as if --no-listen were given"
        )
        self._refusals.note(event.peer, f"this peer cannot be reached at {claimed}")
        self._transport.send(event.peer, control({"type": "notice", "text": text}))
