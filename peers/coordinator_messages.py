"""The control messages between a coordinator and its peers. What decisions follow from is in `protocol.peer_message`.

peer -> coordinator   join, reports, leave, failed, goodbye, differs, accuse, lost_track, irreplaceable
coordinator -> peer   admitted, view, seen, notice, released, turned_away, unknown, end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peers.step_reports import StepReport, WireTotals
from protocol.errors import BadFrame
from protocol.membership_events import End
from protocol.peer_report import PeerReport, parse_report
from protocol.view import View

MOST_REPORTS = 2_000


@dataclass(frozen=True, slots=True)
class Reported:
    """A `reports` message: the peer's own account, its steps, and what its daemon has sent so far."""

    account: PeerReport
    steps: tuple[StepReport, ...]
    wire: WireTotals

    def counted(self, view: View | None) -> list[StepReport]:
        """The steps that are of the run as it is in `view`: an older epoch's count up to where the run went back to."""
        if view is None or self.account.epoch > view.epoch:
            return []
        if self.account.epoch == view.epoch:
            return list(self.steps)
        newest = view.restored if self.account.epoch == view.epoch - 1 else 0
        return [report for report in self.steps if report.step <= newest]


def parse_reports(message: Mapping[str, Any], stages: int) -> Reported:
    """The content of a `reports` message.

    Raises:
        BadFrame: a field is missing, of another type, or beyond its bound.
    """
    steps = message.get("reports")
    if not isinstance(steps, list) or len(steps) > MOST_REPORTS:
        raise BadFrame(f"expected at most {MOST_REPORTS} step reports in one message")
    account = parse_report(message, stages)
    wire = WireTotals.from_json(message.get("wire"))
    return Reported(account, tuple(map(StepReport.from_json, steps)), wire)


def parse_wire(message: Mapping[str, Any]) -> WireTotals:
    """The totals in a `goodbye`.

    Raises:
        BadFrame: there are none.
    """
    return WireTotals.from_json(message.get("wire"))


def view_message(record: bytes) -> dict[str, Any]:
    """A signed view."""
    return {"type": "view", "record": record.decode()}


def seen_message(step: int, epoch: int) -> dict[str, Any]:
    """All rows up to `step` are in the file; reports of them need not come again."""
    return {"type": "seen", "step": step, "epoch": epoch}


def end_message(end: End) -> dict[str, Any]:
    """The run is over."""
    return {"type": "end", "step": end.step, "failed": end.failed, "reason": end.reason}
