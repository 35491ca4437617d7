"""The budget of adaptive rates, as the coordinator knows it: the most that any peer's step takes at the least.

Why that is what a link may take: `protocol.rate_controller`.
"""

from __future__ import annotations

from collections import Counter

from protocol.view import View

MOST_NOTES = 1000  # of changed rates, kept of one peer


class RunBudget:
    """What the peers reported, by peer."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._notes: Counter[str] = Counter()

    def note(self, peer: str, seconds: float | None) -> None:
        """`peer` said what a step takes with it at the least."""
        if seconds is not None:
            self._seconds[peer] = seconds

    def of(self, view: View | None) -> float | None:
        """The largest of those that work by `view`; None: not all of them are known.

        A coordinator that has just returned would otherwise tell the lesser budget of the few that it has heard, and
        links would go down for it. Peers go by the last one that they were told meanwhile.
        """
        if view is None:
            return None
        working = {replica.peer for replica in view.peers() if replica.alive and replica.weight}
        self._seconds = {peer: seconds for peer, seconds in self._seconds.items() if peer in working}
        return max(self._seconds.values()) if working and len(self._seconds) == len(working) else None

    def may_note(self, peer: str) -> bool:
        """Whether one more changed rate of `peer` is to be written down: nobody fills the coordinator's disk."""
        self._notes[peer] += 1
        return self._notes[peer] <= MOST_NOTES
