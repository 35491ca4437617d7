"""What is held against a peer in this session of its: who does not keep up, or differs again and again, is turned away.

A restart by its owner (another session, perhaps another machine or line) begins with a clean sheet; but whom it accused
is remembered, since the session is its own choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from protocol.token_bucket import TokenBucket

MOST_RESYNCS, RESYNC_STEPS = 3, 100
MOST_LOST_TRACKS = 3
MOST_TORN, TORN_STEPS = 8, 100
MOST_ACCUSED = 3
FREE_RESTARTS, RESTART_SECONDS = 8, 15.0  # at once, and one more after so long: each costs the run two views
SHEETS_KEPT = 4096


@dataclass(slots=True)
class Sheet:
    """One session's."""

    session: str
    resyncs: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    lost_tracks: int = 0
    accused: set[str] = field(default_factory=set)
    barred: str = ""
    restarts: TokenBucket = field(default_factory=lambda: TokenBucket(1 / RESTART_SECONDS, FREE_RESTARTS))


class Conduct:
    """The sheets of all peers that were ever here; the oldest are forgotten."""

    def __init__(self) -> None:
        self._sheets: dict[str, Sheet] = {}

    def begin(self, peer: str, session: str, now: float) -> str:
        """`peer` asks to join: why it may not, or ""."""
        sheet = self._sheets.get(peer)
        if sheet is None:
            sheet = self._sheets[peer] = Sheet(session)
        elif sheet.session != session:
            wait = sheet.restarts.take(now)
            if wait > 0:
                return f"it was started again and again in a short time: try again in {math.ceil(wait)} s"
            del self._sheets[peer]  # to its new place, behind all others
            sheet = self._sheets[peer] = Sheet(session, accused=sheet.accused, restarts=sheet.restarts)
        while len(self._sheets) > SHEETS_KEPT:
            del self._sheets[next(iter(self._sheets))]
        return sheet.barred

    def bar(self, peer: str, reason: str) -> None:
        """`peer` may not come back in this session."""
        self._sheet(peer).barred = reason

    def resynced(self, peer: str, step: int) -> bool:
        """`peer` differed in `step`. Whether that is once too often."""
        sheet = self._sheet(peer)
        sheet.resyncs = [s for s in sheet.resyncs if abs(step - s) < RESYNC_STEPS] + [step]
        return len(sheet.resyncs) >= MOST_RESYNCS

    def tore(self, peer: str, step: int) -> bool:
        """`peer` says that `step` cannot be ended. Whether that is once too often: each time the run goes back."""
        sheet = self._sheet(peer)
        sheet.torn = [s for s in sheet.torn if abs(step - s) < TORN_STEPS] + [step]
        return len(sheet.torn) >= MOST_TORN

    def lost_track(self, peer: str) -> bool:
        """`peer` could not follow. Whether that is once too often."""
        self._sheet(peer).lost_tracks += 1
        return self._sheet(peer).lost_tracks >= MOST_LOST_TRACKS

    def caught_up(self, peer: str) -> None:
        """`peer` followed to the end: earlier failures are forgiven."""
        self._sheet(peer).lost_tracks = 0

    def accuses(self, peer: str, accused: str) -> bool:
        """`peer` accuses another. Whether it is rather `peer` who is wrong."""
        self._sheet(peer).accused.add(accused)
        return len(self._sheet(peer).accused) >= MOST_ACCUSED

    def _sheet(self, peer: str) -> Sheet:
        return self._sheets.setdefault(peer, Sheet(""))

    def to_json(self) -> dict[str, list[str]]:
        """Who is barred, by session, and why."""
        return {peer: [sheet.session, sheet.barred] for peer, sheet in self._sheets.items() if sheet.barred}

    @classmethod
    def from_json(cls, stored: dict[str, list[str]]) -> Conduct:
        """The conduct in `stored`."""
        conduct = cls()
        for peer, (session, reason) in stored.items():
            conduct._sheets[peer] = Sheet(session, barred=reason)
        return conduct
