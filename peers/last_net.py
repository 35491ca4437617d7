"""The last net under the coordinator's decisions: an error in one of them costs at most a member, never the run.

What members send is bounded where it is parsed. A word that finds a mistake of ours all the same must not end the run,
and must not be able to do it twice: its speaker loses its place, and what it said goes with it. But if decisions failed
before it spoke too, it is not the cause, and nobody pays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from peers.journal import Journal
from protocol.membership_events import Event, Expelled, short_peer

logger = logging.getLogger(__name__)

MOST_TOLD = 100  # different errors, each once


class LastNet:
    """Deals with errors of decisions. `sound`: the last one raised none.

    Args:
        decide: decides what follows from an event.
        catch_up: does what was decided and then lost, since an error came before it was handed out.
    """

    def __init__(self, journal: Journal, decide: Callable[[Event], None], catch_up: Callable[[], None]) -> None:
        self._journal, self._decide, self._catch_up = journal, decide, catch_up
        self._told: set[str] = set()
        self.sound = True

    def caught(self, error: Exception, peer: str | None = None) -> None:
        """`error` came of what the member `peer` said, or of nobody's word."""
        guilty, self.sound = self.sound and peer is not None, False
        if peer is None or not guilty:
            self._tell("what follows could not be decided, and the run goes on as it is", error)
        else:
            self._tell(f"what peer {short_peer(peer)} said could not be dealt with", error)
            reason = f"what it said could not be dealt with: {type(error).__name__}"
            try:
                self._decide(Expelled(peer, reason))
            except Exception as again:
                self._tell("what follows could not be decided, and the run goes on as it is", again)
        self._catch_up()

    def _tell(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            logger.error("%s", text, exc_info=error)
            self._journal.note("mistake", text)
