"""What the coordinator writes down about a run: a line for each step, and the report at its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from peers.files import write_json
from peers.run_folder import RunFolder
from peers.step_reports import StepReport, StepTable, WireTotals, summarise
from protocol.errors import BadFrame
from protocol.manifest import Manifest
from protocol.membership import End, Membership

logger = logging.getLogger(__name__)


class RunRecord:
    """The numbers of one run, in its folder. Nothing is touched before `begin`."""

    def __init__(self, folder: RunFolder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._table = StepTable(manifest.config)
        self.last_row: dict[str, Any] | None = None
        self._first_step: int | None = None
        self._wire: dict[str, WireTotals] = {}
        self._earlier, self._earlier_tokens = WireTotals(), 0
        self._wrote_last = True

    def begin(self, first_step: int) -> None:
        """The run starts, or goes on, with `first_step`; rows of later steps are of an abandoned future."""
        self._first_step = self._table.next_step = first_step
        self._folder.forget_rows_after(first_step - 1)
        rows = list(self._folder.rows())
        self.last_row = rows[-1] if rows else None
        self._earlier, self._earlier_tokens = _earlier_wire(self._folder)

    @property
    def began(self) -> bool:
        """Whether the run has started or gone on."""
        return self._first_step is not None

    def add(self, peer: str, wire: WireTotals, reports: Sequence[StepReport]) -> list[dict[str, Any]]:
        """Note what `peer` reported; the rows of the steps that are complete with it."""
        self._wire[peer] = wire
        rows = [row for report in reports for row in self._table.add(report)]
        for row in rows:
            self._write(row)
        return rows

    def _write(self, row: dict[str, Any]) -> None:
        self.last_row = row
        try:
            with self._folder.metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._wrote_last = True
        except OSError as error:
            if self._wrote_last:  # said once, not at each step
                logger.error("%s cannot be written: %s; the run goes on", self._folder.metrics, error)
            self._wrote_last = False

    def report(self, end: End | None, membership: Membership, own: WireTotals) -> None:
        """Write the report. `own` is what the coordinator itself has sent."""
        if self._first_step is None:
            return
        rows = list(self._folder.rows())
        clean = end is not None and not end.failed and end.step == self._table.next_step - 1
        # After an abnormal end the newest totals hold bytes of steps that no row counts.
        sent = sum(self._wire.values(), WireTotals()) if clean else self._table.wire
        sent = sent + self._earlier + WireTotals(control=own.control)
        steps = self._table.next_step - self._first_step
        tokens = self._earlier_tokens + steps * self._manifest.config.tokens_per_step
        report = summarise(self._manifest.config, rows, sent, tokens)
        report |= {
            "unigram_loss": self._manifest.unigram_loss,
            "run_id": self._manifest.run_id,
            "ended": None if end is None else {"failed": end.failed, "reason": end.reason},
            "peers": self._peers(membership),
        }
        try:
            write_json(self._folder.report, report)
        except OSError as error:
            logger.error("%s cannot be written: %s", self._folder.report, error)

    def _peers(self, membership: Membership) -> list[dict[str, Any]]:
        view = membership.view
        return [
            {
                "peer": peer,
                "stage": view.stage_of(peer) if view else None,
                "steps": member.step,
                "sent_bytes": sum(self._wire.get(peer, WireTotals()).as_tuple()),
            }
            for peer, member in membership.members.items()
        ]


def _earlier_wire(folder: RunFolder) -> tuple[WireTotals, int]:
    """The byte totals of earlier starts and the tokens they belong to; none where no report tells."""
    try:
        wire = json.loads(folder.report.read_text())["wire"]
        return WireTotals.from_json(wire["totals"]), int(wire["tokens"])
    except (OSError, ValueError, KeyError, TypeError, BadFrame):
        return WireTotals(), 0
