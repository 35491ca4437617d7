"""What all daemons of a run have sent, over restarts of peers and of the coordinator. Pure.

A daemon tells its running totals, which begin at 0 when it starts. So what counts is the sum, over every (peer,
session) that ever reported, of the newest totals that it told. They may come late or twice; they only grow.
"""

from __future__ import annotations

from typing import Any

from peers.step_reports import WireTotals
from protocol.errors import BadFrame

MOST_SOURCES = 1000  # daemons that are told apart; of the oldest ones only the sum is kept

Source = tuple[str, str]  # peer, session


class WireLedger:
    """Totals by daemon."""

    def __init__(self) -> None:
        self._newest: dict[Source, WireTotals] = {}
        self._gone = WireTotals()

    def note(self, source: Source, totals: WireTotals) -> None:
        """`source` told these totals."""
        known = self._newest.get(source)
        self._newest[source] = totals if known is None else known.larger(totals)
        if len(self._newest) > MOST_SOURCES:
            oldest = next(iter(self._newest))
            self._gone += self._newest.pop(oldest)

    @property
    def total(self) -> WireTotals:
        """What all have sent."""
        return sum(self._newest.values(), self._gone)

    def of_peer(self, peer: str) -> WireTotals:
        """What `peer` has sent, in all its sessions."""
        return sum((totals for (who, _), totals in self._newest.items() if who == peer), WireTotals())

    def copy(self) -> WireLedger:
        """One that goes its own way from here."""
        other = WireLedger()
        other._newest, other._gone = dict(self._newest), self._gone
        return other

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {
            "gone": self._gone.as_tuple(),
            "sources": [[*source, totals.as_tuple()] for source, totals in self._newest.items()],
        }

    @classmethod
    def from_json(cls, value: Any) -> WireLedger:
        """The ledger in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        ledger = cls()
        try:
            ledger._gone = WireTotals.from_json(value["gone"])
            for peer, session, totals in value["sources"]:
                ledger._newest[str(peer), str(session)] = WireTotals.from_json(totals)
        except (LookupError, TypeError, ValueError) as error:
            raise BadFrame(f"expected the totals of daemons, got {str(value)[:80]!r}") from error
        return ledger
