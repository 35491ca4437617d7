"""From reports to rows: one a step, in step order, each when every stage has reported the step. Pure.

The replicas of a stage report the same loss, norm and weights. Where they do not, one of them is wrong: the report that
most of them make counts, of as many the first; and a report of a peer that is turned away before its row is made counts
no more. A row's bytes are what the run has sent since the row before it, as far as reports of this step and earlier
ones tell; what is told later counts in a later row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from peers.floor_meter import FloorMeter, Premises
from peers.floor_report import floor_fields
from peers.step_reports import HASH_DIGITS, LATE_STEPS, MOST_PENDING, StepReport, WireTotals
from peers.wire_ledger import Source, WireLedger
from protocol.config import RunConfig


class StepTable:
    """Gathers reports into rows. `next_step` is the step of the next row; `meter` knows what steps cost."""

    def __init__(self, config: RunConfig, next_step: int = 1, premises: Premises | None = None) -> None:
        self.config, self.next_step = config, next_step
        self.meter = FloorMeter(config, premises or Premises())
        self._pending: dict[int, dict[int, dict[str, StepReport]]] = {}  # by step, stage and peer
        self._told: dict[int, dict[Source, WireTotals]] = {}
        self._ledger, self._wire, self._wire_step = WireLedger(), WireTotals(), next_step - 1

    def go_on(self, next_step: int, ledger: WireLedger, wire_step: int) -> None:
        """The next row is `next_step`'s; `ledger` is what had been sent after `wire_step`, an earlier one.

        The bytes of the rows between the two are not known one by one: the first row gets their mean.
        """
        self.next_step, self._ledger = next_step, ledger.copy()
        self._wire, self._wire_step = ledger.total, min(wire_step, next_step - 1)

    def restore(self, step: int) -> None:
        """The run goes back to `step`: what was reported of later steps is of an abandoned future."""
        self.next_step = min(self.next_step, step + 1)
        self._pending = {s: reports for s, reports in self._pending.items() if s <= step}
        self._told = {s: told for s, told in self._told.items() if s <= step}
        self.meter.forget_after(step)
        self._wire_step = min(self._wire_step, self.next_step - 1)

    def add(self, report: StepReport, source: Source = ("", ""), settled: int | None = None) -> list[dict[str, Any]]:
        """The rows that `report` completes. A repeated report completes none, nor does one of nowhere.

        Args:
            settled: rows of later steps wait for the other replicas' reports; None: the first of each stage is enough.
        """
        known = 0 <= report.stage < self.config.pipeline.stages
        if not known or not 0 < report.step < self.next_step + MOST_PENDING:
            return []
        told = self._told.setdefault(max(report.step, self.next_step), {})
        told[source] = told.get(source, report.wire).larger(report.wire)
        self.meter.note(source[0], report.stage, report.step, report.costs)
        if report.step >= self.next_step:
            self._pending.setdefault(report.step, {}).setdefault(report.stage, {}).setdefault(source[0], report)
        return self._complete(settled)

    def disown(self, peer: str) -> None:
        """`peer` was turned away: what it reported counts in no row that is still to come."""
        self.meter.disown(peer)
        for stages in self._pending.values():
            for stage in [stage for stage, reports in stages.items() if reports.pop(peer, None) and not reports]:
                del stages[stage]

    def give_up(self, applied: int) -> list[dict[str, Any]]:
        """The rows up to which no report can be missing any more, when all have applied `applied`: partial ones.

        Peers send their oldest reports first. So when a later step has all its reports, those of this one are gone.
        """
        rows = self._complete(applied)
        while applied >= self.next_step + LATE_STEPS and any(map(self._is_full, self._pending)):
            rows += self._skip() + self._complete(applied)
        return rows

    def finish(self, step: int) -> list[dict[str, Any]]:
        """The rows up to `step`, after which nothing more comes."""
        rows = self._complete()
        while self.next_step <= step:
            rows += self._skip() + self._complete()
        return rows

    def _is_full(self, step: int) -> bool:
        return len(self._pending.get(step, ())) == self.config.pipeline.stages

    def _complete(self, settled: int | None = None) -> list[dict[str, Any]]:
        rows = []
        while self._is_full(self.next_step) and (settled is None or self.next_step <= settled):
            rows.append(self._row(self._pending.pop(self.next_step)))
            self.next_step += 1
        return rows

    def _skip(self) -> list[dict[str, Any]]:
        """Go past a step: its partial row, or none where nothing is known of it."""
        reports = self._pending.pop(self.next_step, {})
        rows = [{**self._row(reports), "partial": True}] if reports else []
        self.next_step += 1
        return rows

    def _row(self, made: Mapping[int, Mapping[str, StepReport]]) -> dict[str, Any]:
        reports = {stage: _believed(list(of_peers.values())) for stage, of_peers in made.items()}
        stages = [reports.get(stage) for stage in range(self.config.pipeline.stages)]
        first, last = reports[min(reports)], stages[-1]
        if any(report.skipped for report in reports.values()):
            return self._skipped_row(first)
        tokens = self.config.tokens_per_step
        forward, backward = self._bytes_per_token(first.step, tokens)
        return {
            "step": first.step,
            "loss": last.loss if last else None,
            "tokens": tokens,
            "seconds": first.seconds,
            "tokens_per_second": tokens / max(first.seconds, 1e-9),
            "learning_rate": first.learning_rate,
            "forward_bytes_per_token": forward,
            "backward_bytes_per_token": backward,
            "gradient_norms": [report.gradient_norm if report else None for report in stages],
            "compute_seconds": [report.compute_seconds if report else None for report in stages],
            "cpu_seconds": [report.costs.cpu_seconds if report else None for report in stages],
            "weights": [report.weights[:HASH_DIGITS] if report else "" for report in stages],
            **floor_fields(self.meter.floor(first.step), first.seconds),
        }

    def _skipped_row(self, report: StepReport) -> dict[str, Any]:
        """Of a step that all passed over: it trained on nothing, and what was sent meanwhile counts in the next row."""
        self._wire_step = report.step
        return {
            "step": report.step,
            "skipped": True,
            "loss": None,
            "tokens": 0,
            "seconds": report.seconds,
            "tokens_per_second": 0.0,
            "learning_rate": report.learning_rate,
            "forward_bytes_per_token": 0.0,
            "backward_bytes_per_token": 0.0,
            **floor_fields(None, report.seconds),
        }

    def _bytes_per_token(self, step: int, tokens: int) -> tuple[float, float]:
        for told in sorted(s for s in self._told if s <= step):
            for source, totals in self._told.pop(told).items():
                self._ledger.note(source, totals)
        total = self._ledger.total
        sent, steps = total - self._wire, step - self._wire_step
        self._wire, self._wire_step = total, step
        return sent.per_token(tokens * steps, self.config.pipeline.stages - 1)


def _believed(reports: Sequence[StepReport]) -> StepReport:
    """Of the reports of one step by the replicas of a stage, the first that says what most of them say."""
    said = Counter((report.weights, report.loss) for report in reports)
    return max(reports, key=lambda report: said[report.weights, report.loss])  # of equal ones `max` takes the first
