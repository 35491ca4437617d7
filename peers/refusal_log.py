"""Log lines that others cause: one for each identity, a bounded number in all, and a summary of the rest.

Identities are free and frames are cheap, so a line for each thing that was refused would be a way to fill a disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from peers.quota import Quota
from protocol.membership_events import short_peer
from protocol.plain_text import plain

PERIOD_SECONDS = 60.0
MOST_LINES = 16  # in a period, all identities together


class RefusalLog:
    """What others did that was refused or failed, and how often."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._quota = Quota(PERIOD_SECONDS, MOST_LINES, clock=clock)

    def note(self, peer: str, text: str, level: int = logging.WARNING) -> None:
        """`text` says what happened with `peer`, which it need not name. What is not shown does not count."""
        self.tick()
        if self._logger.isEnabledFor(level) and self._quota.may(peer):
            self._logger.log(level, "%s: %s", plain(short_peer(peer)), plain(text))

    def tick(self) -> None:
        """Sum up what was only counted, when the period is over. To be called now and then."""
        over = self._quota.renew()
        if over is not None and over[0]:
            self._logger.warning("%d more times others were refused or failed, in %.0f s", *over)
