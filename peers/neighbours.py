"""The peers that this one speaks to, by the newest view: it opens links to them, and drops those that are gone.

Links to the stages beside it and to its own are opened with the view; those to others, for copies of a state, when
there is something to say.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from peers.background import Background
from peers.transport import Transport
from protocol.errors import NetworkError
from protocol.frame import Frame
from protocol.membership_events import short_peer
from protocol.view import View

logger = logging.getLogger(__name__)

NEWER_VIEW_SECONDS = 10.0  # how long a peer may be in a view that has not come here yet


class Neighbours:
    """`broken`: whose link is down. The link to `keep`, the coordinator, stays whatever a view says."""

    def __init__(self, transport: Transport, background: Background, keep: str) -> None:
        self._transport, self._background, self._keep = transport, background, keep
        self._known: dict[str, tuple[str, ...]] = {}
        self._opened: set[str] = set()
        self.broken: set[str] = set()
        transport.trust((), control_only=(keep,), patience=NEWER_VIEW_SECONDS)

    def changed(self, view: View, stage: int | None) -> None:
        """Look after the links that `view` asks for of a peer at `stage`; nobody waits for them."""
        present = {r.peer: r.addresses for r in view.peers()} if stage is not None else {}
        present.pop(self._transport.peer_id, None)
        self._transport.trust(view.everybody(), control_only=(self._keep,), patience=NEWER_VIEW_SECONDS)
        for peer in [peer for peer in self._known if peer not in present and peer != self._keep]:
            del self._known[peer]
            self._opened.discard(peer)
            self.broken.discard(peer)
            self._transport.forget(peer)
        for peer, addresses in present.items():
            if self._known.get(peer) != addresses:
                self._known[peer] = addresses
                self._opened.discard(peer)
                if stage is not None and _is_near(view, peer, stage):
                    self._open(peer)

    def send(self, peer: str, frame: Frame) -> None:
        """Send `frame`; a link to a peer that is not in the view is made for this frame only."""
        if peer in self._known:
            self._open(peer)
        self._transport.send(peer, frame)
        if peer not in self._known and peer != self._keep:
            self._transport.forget(peer)

    def link_changed(self, peer: str, *, broken: bool) -> None:
        """The link to `peer` broke, or is back. What the coordinator is told of those is bounded by the view."""
        if broken and peer in self._known:
            self.broken.add(peer)
        else:
            self.broken.discard(peer)

    def _open(self, peer: str) -> None:
        if peer not in self._opened:
            self._opened.add(peer)
            self._background.spawn(self._connect(peer, self._known[peer]))

    async def _connect(self, peer: str, addresses: Sequence[str]) -> None:
        try:
            await self._transport.connect(peer, addresses)
        except NetworkError as error:
            # It may be gone already. What is sent to it opens the link as soon as it answers.
            logger.warning("no link to %s yet: %s", short_peer(peer), error)


def _is_near(view: View, peer: str, stage: int) -> bool:
    other = view.stage_of(peer)
    return other is not None and abs(other - stage) <= 1
