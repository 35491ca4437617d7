"""What the coordinator writes down about a run: a line for each step, and the report at its end.

A row counts as seen when it is in the file, not before: peers keep their reports until then, so a coordinator that
dies loses none, and a full disk none either, as long as the peers have room.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from peers.files import write_json
from peers.floor_meter import Premises
from peers.run_folder import RunFolder, append_lines
from peers.step_costs import PeerFigures
from peers.step_reports import StepReport, WireTotals, summarise
from peers.step_table import StepTable
from peers.wire_ledger import Source, WireLedger
from protocol.errors import BadFrame
from protocol.manifest import Manifest
from protocol.membership import End

logger = logging.getLogger(__name__)

PATIENCE_STEPS = 16  # that a row waits for the reports of all replicas of its stages


class RunRecord:
    """The numbers of one run, in its folder. Nothing is touched before `begin` or `take_over`."""

    def __init__(self, folder: RunFolder, manifest: Manifest, premises: Premises | None = None) -> None:
        self._folder, self._manifest = folder, manifest
        self._table = StepTable(manifest.config, premises=premises)
        self._ledger, self._own_before, self._tokens, self._known_after, self.epoch = _remembered(folder)
        self._unwritten: list[dict[str, Any]] = []
        self._failing = False
        self.last_row: dict[str, Any] | None = None
        self.began = False

    @property
    def seen(self) -> int:
        """The last step of which the row, and every earlier one, is in the file or can never be."""
        return self._unwritten[0]["step"] - 1 if self._unwritten else self._table.next_step - 1

    @property
    def done(self) -> int:
        """The same, but for being written."""
        return self._table.next_step - 1

    def begin(self, first_step: int, epoch: int) -> None:
        """The run starts, or its peers all begin again, with `first_step`: later rows are of an abandoned future.

        What daemons that were killed sent after this folder's last note is not known; nor do the tokens of that time
        count, so that the bytes per token are right.
        """
        self.epoch = epoch
        self._forget_after(first_step - 1)
        self._go_on(first_step, first_step - 1)

    def take_over(self, epoch: int, restored: int) -> None:
        """The run went on without a coordinator: its peers have the reports from the last row on.

        Args:
            epoch: that of the newest view. If the rows are of an earlier one, they end after step `restored`.
        """
        known_after = self._known_after
        if known_after is not None:  # the peers will tell what they sent since then
            self._tokens += sum(row["tokens"] for row in self._folder.rows() if row["step"] > known_after)
        if self.epoch < epoch:
            self._forget_after(restored)
        self.epoch = epoch
        rows = self._folder.rows()
        next_step = rows[-1]["step"] + 1 if rows else 1
        self._go_on(next_step, next_step - 1 if known_after is None else known_after)

    def _go_on(self, next_step: int, known_after: int) -> None:
        self._table.go_on(next_step, self._ledger, known_after)
        rows = self._folder.rows()
        self.last_row = rows[-1] if rows else None
        self.began = True

    def restore(self, step: int, epoch: int) -> None:
        """The peers go back to `step`, in a new epoch; rows of later steps are written again."""
        self.epoch = epoch
        written = self._table.next_step > step + 1
        self._table.restore(step)
        if not written:
            return
        self._unwritten = [row for row in self._unwritten if row["step"] <= step]
        self._forget_after(step)
        rows = self._folder.rows()
        self.last_row = self._unwritten[-1] if self._unwritten else rows[-1] if rows else None

    def _forget_after(self, step: int) -> None:
        try:
            self._folder.forget_rows_after(step)
        except OSError as error:
            logger.error("the rows after step %d stay for now: %s; those that come replace them", step, error)

    def note(self, source: Source, wire: WireTotals) -> None:
        """Note what a daemon has sent so far."""
        self._ledger.note(source, wire)

    def tell(self, peer: str, figures: PeerFigures, addresses: Sequence[str]) -> None:
        """Note what the daemon of `peer`, at `addresses`, has cost so far, and how it finds its links."""
        self._table.meter.tell(peer, figures, addresses)

    def add(self, source: Source, reports: Sequence[StepReport], applied: int, newest: int) -> list[dict[str, Any]]:
        """Note what a daemon reported; the rows that are done with it.

        Args:
            applied: the newest step that every replica has applied.
            newest: the newest step that the run can have reached. Reports of later ones are of no use now: an honest
                peer keeps them and sends them again.
        """
        # One replica that never says how far it is must not hold up everybody's rows.
        settled = max(applied, newest - PATIENCE_STEPS)
        possible = [report for report in reports if report.step <= newest]
        rows = [row for report in possible for row in self._table.add(report, source, settled)]
        return self._keep(rows + self._table.give_up(settled))

    def disown(self, peer: str) -> None:
        """`peer` was turned away: no row that is still to be made comes from it."""
        self._table.disown(peer)

    def _keep(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._tokens += sum(row["tokens"] for row in rows)
        self._unwritten += rows
        self.last_row = rows[-1] if rows else self.last_row
        self.write()
        return rows

    def write(self) -> None:
        """Write what is not written yet."""
        if not self._unwritten:
            return
        try:
            append_lines(self._folder.metrics, self._unwritten)
            self._unwritten, self._failing = [], False
        except OSError as error:
            if not self._failing:  # said once, not at each step
                logger.error("%s cannot be written: %s; the run goes on", self._folder.metrics, error)
            self._failing = True

    def to_json(self, own: WireTotals) -> dict[str, Any]:
        """What must outlive this coordinator, beside the rows. `own` is what it has sent itself."""
        control = self._own_before + own.control
        step = self._table.next_step - 1 if self.began else self._known_after
        known = {"epoch": self.epoch, "step": step, "tokens": self._tokens}
        return {**known, "own": control, "ledger": self._ledger.to_json()}

    def report(self, end: End | None, peers: Sequence[dict[str, Any]], own: WireTotals) -> None:
        """Write the report. `own` is what the coordinator itself has sent, `peers` who is in it."""
        if not self.began:
            return
        if end is not None:
            self._keep(self._table.finish(end.step))
        rows, config = self._folder.rows(), self._manifest.config
        sent = self._ledger.total + WireTotals(control=self._own_before + own.control)
        meter = self._table.meter
        report = summarise(config, rows, sent, self._tokens, meter.payloads)
        report |= {
            "unigram_loss": self._manifest.unigram_loss,
            "run_id": self._manifest.run_id,
            "skipped_steps": [row["step"] for row in rows if row.get("skipped")],
            "ended": None if end is None else {"failed": end.failed, "reason": end.reason},
            "peers": [
                {**peer, **meter.figures(who).for_people(), "sent_bytes": sum(self._ledger.of_peer(who).as_tuple())}
                for peer in peers
                for who in [peer["peer"]]
            ],
        }
        try:
            write_json(self._folder.report, report)
        except OSError as error:
            logger.error("%s cannot be written: %s", self._folder.report, error)


def _remembered(folder: RunFolder) -> tuple[WireLedger, int, int, int | None, int]:
    """The totals of earlier starts, what their coordinators sent, the tokens that both belong to, after which step, and
    the epoch of the rows.
    """
    try:
        wire = folder.memory()["wire"]
        own, tokens, step, epoch = (int(wire[name]) for name in ("own", "tokens", "step", "epoch"))
        return WireLedger.from_json(wire["ledger"]), own, tokens, step, epoch
    except (KeyError, TypeError, ValueError, BadFrame):
        return WireLedger(), 0, 0, None, 0
