"""A peer's line to its coordinator: what it is told, and the reports that are kept until their rows are written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peers.step_costs import PeerFigures
from peers.step_reports import StepReport, WireTotals
from peers.transport import Transport
from protocol.frame import control
from protocol.join_request import join_message
from protocol.peer_report import PeerReport
from protocol.view import View

MOST_REPORTS = 10_000  # kept for a coordinator that is away
MOST_REPORTS_SENT = 100  # in one message
QUIET_SECONDS = 10.0  # without a word from it, each step's reports would only fill the link's queue


class CoordinatorLine:
    """Speaks to the coordinator `peer` over `transport`. `figures` says what this daemon has cost so far."""

    def __init__(self, transport: Transport, peer: str, figures: Callable[[], PeerFigures] = PeerFigures) -> None:
        self._transport, self.peer, self._figures = transport, peer, figures
        self._session = secrets.token_hex(8)
        self._reports: list[StepReport] = []
        self._heard = time.monotonic()
        self.broken = False  # the link to it

    def heard(self) -> None:
        """Something came from it."""
        self._heard = time.monotonic()

    def away(self) -> float:
        """Seconds since something came from it."""
        return time.monotonic() - self._heard

    def tell(self, message: dict[str, Any]) -> None:
        """Say something; it may be lost."""
        self._transport.send(self.peer, control(message))

    def ask_to_join(
        self, addresses: Sequence[str], held: Mapping[int, Sequence[int]], speed: float, memory: int, config: str = ""
    ) -> None:
        """Ask to be let in, or in again. The session tells a repeated question from a restart.

        Args:
            config: the hash of the configuration by which this peer goes.
        """
        self.tell(join_message(addresses, held, self._session, speed, memory, config))

    def add(self, report: StepReport) -> None:
        """A step's report, kept until `seen`."""
        self._reports = [*self._reports, report][-MOST_REPORTS:]

    @property
    def kept(self) -> int:
        """How many reports are kept."""
        return len(self._reports)

    def seen(self, step: int) -> bool:
        """All rows up to `step` are written. Whether to go on at once with the many that are kept."""
        before = len(self._reports)
        self._reports = [report for report in self._reports if report.step > step]
        return bool(self._reports) and before - len(self._reports) >= MOST_REPORTS_SENT // 2

    @property
    def quiet(self) -> bool:
        """Whether it is of no use to tell it of a step now."""
        return self.broken or self.away() > QUIET_SECONDS

    def forget_after(self, step: int) -> None:
        """The run went back to `step`: what came later is done again."""
        self._reports = [report for report in self._reports if report.step <= step]

    def report(self, view: View | None, state: Mapping[str, Any], held: Mapping[int, Sequence[int]]) -> None:
        """Send the reports that are kept, and where this peer is: `state` as `StageWorker.state` gives it."""
        if self.broken:  # nothing would arrive, all would be queued
            return
        account = PeerReport(view=0 if view is None else view.number, held=held, session=self._session, **state)
        reports = [report.to_json() for report in self._reports[:MOST_REPORTS_SENT]]
        self.tell({"type": "reports", "reports": reports, **self._totals(), **account.to_json()})

    def goodbye(self) -> None:
        """The last word."""
        self.tell({"type": "goodbye", **self._totals()})

    def _totals(self) -> dict[str, Any]:
        """What this peer has sent and cost so far."""
        wire = WireTotals.of(self._transport.counters)
        return {"wire": wire.as_tuple(), "figures": self._figures().to_json()}
