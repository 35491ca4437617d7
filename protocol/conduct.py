"""What is held against a peer in this session of its: who does not keep up, or differs again and again, is turned away.

A restart by its owner (another session, perhaps another machine or line) begins with a clean sheet; but its quarrels
(`protocol.quarrels`) and its alarms (how often it sent the run back, or said that nobody could go on) are remembered,
since the session is its own choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.quarrels import Quarrels
from protocol.token_bucket import TokenBucket

MOST_RESYNCS, RESYNC_STEPS = 3, 100
MOST_LOST_TRACKS = 3
MOST_TORN, TORN_STEPS = 8, 100
MOST_UNPROVOKED = 2  # without a loss or a plan that could have torn the step
MOST_ALARMS = 3
FREE_RESTARTS, RESTART_SECONDS = 8, 15.0  # at once, and one more after so long: each costs the run two views
SHEETS_KEPT = 4096


@dataclass(slots=True)
class Sheet:
    """One session's."""

    session: str
    resyncs: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    unprovoked: int = 0
    lost_tracks: int = 0
    alarms: int = 0
    barred: str = ""
    restarts: TokenBucket = field(default_factory=lambda: TokenBucket(1 / RESTART_SECONDS, FREE_RESTARTS))


class Conduct:
    """The sheets of all peers that were ever here; the oldest are forgotten."""

    def __init__(self) -> None:
        self._sheets: dict[str, Sheet] = {}
        self.quarrels = Quarrels()

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
            kept = {"alarms": sheet.alarms, "torn": sheet.torn, "unprovoked": sheet.unprovoked}
            sheet = self._sheets[peer] = Sheet(session, restarts=sheet.restarts, **kept)  # type: ignore[arg-type]
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

    def tore(self, peer: str, step: int, likely: bool) -> bool:
        """`peer` says that `step` cannot be ended. Whether that is once too often: each time the run goes back."""
        sheet = self._sheet(peer)
        sheet.torn = [s for s in sheet.torn if abs(step - s) < TORN_STEPS] + [step]
        sheet.unprovoked += not likely
        return len(sheet.torn) >= MOST_TORN or sheet.unprovoked >= MOST_UNPROVOKED

    def lost_track(self, peer: str) -> bool:
        """`peer` could not follow. Whether that is once too often."""
        self._sheet(peer).lost_tracks += 1
        return self._sheet(peer).lost_tracks >= MOST_LOST_TRACKS

    def caught_up(self, peer: str) -> None:
        """`peer` followed to the end: earlier failures are forgiven."""
        self._sheet(peer).lost_tracks = 0

    def alarmed(self, peer: str) -> bool:
        """`peer` says of what others can do that nobody can. Whether that is once too often."""
        self._sheet(peer).alarms += 1
        return self._sheet(peer).alarms >= MOST_ALARMS

    def _sheet(self, peer: str) -> Sheet:
        return self._sheets.setdefault(peer, Sheet(""))

    def to_json(self) -> dict[str, list[str]]:
        """Who is barred, by session, and why."""
        return {peer: [sheet.session, sheet.barred] for peer, sheet in self._sheets.items() if sheet.barred}

    @classmethod
    def from_json(cls, stored: dict[str, list[str]], quarrels: Mapping[str, Any]) -> Conduct:
        """The conduct in `stored`, and the quarrels."""
        conduct = cls()
        conduct.quarrels = Quarrels.from_json(quarrels)
        for peer, (session, reason) in stored.items():
            conduct._sheets[peer] = Sheet(session, barred=reason)
        return conduct
