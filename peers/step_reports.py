"""What each peer tells the coordinator about each step, and how those reports become the run's numbers. Pure.

Byte counts in a report are running totals of the transport's own counters, so a lost report loses no byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peers.transport import TrafficCounters
from protocol.config import RunConfig
from protocol.errors import BadFrame
from protocol.frame import Kind

MOST_PENDING = 5_000  # steps ahead of the first incomplete one; what is further ahead is nonsense


@dataclass(frozen=True, slots=True)
class WireTotals:
    """Bytes a peer has handed to its transport since it started: tensor payloads by direction, and what frames them."""

    forward_payload: int = 0
    forward_header: int = 0
    backward_payload: int = 0
    backward_header: int = 0
    control: int = 0

    @classmethod
    def of(cls, counters: TrafficCounters) -> WireTotals:
        """The totals in `counters`."""
        forward, backward, control = (counters.sent[kind] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.CONTROL))
        return cls(
            forward.payload_bytes,
            forward.header_bytes,
            backward.payload_bytes,
            backward.header_bytes,
            control.payload_bytes + control.header_bytes,
        )

    @classmethod
    def from_json(cls, value: Any) -> WireTotals:
        """The totals in `value`, as `as_tuple` gives them.

        Raises:
            BadFrame: not five byte counts.
        """
        if not isinstance(value, list | tuple) or len(value) != len(cls.__slots__) or not all(map(_is_count, value)):
            raise BadFrame(f"expected {len(cls.__slots__)} byte counts, got {str(value)[:80]!r}")
        return cls(*value)

    def __add__(self, other: WireTotals) -> WireTotals:
        return WireTotals(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def __sub__(self, other: WireTotals) -> WireTotals:
        return WireTotals(*(a - b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, ...]:
        """The five totals, in the order of the fields."""
        return tuple(getattr(self, name) for name in self.__slots__)

    def per_token(self, tokens: int, boundaries: int) -> tuple[float, float]:
        """Forward and backward bytes per token and boundary, headers included."""
        crossings = max(1, tokens * boundaries)
        forward = self.forward_payload + self.forward_header
        backward = self.backward_payload + self.backward_header
        return forward / crossings, backward / crossings

    @property
    def overhead_fraction(self) -> float:
        """Headers and control frames over tensor payload."""
        payload = self.forward_payload + self.backward_payload
        return (self.forward_header + self.backward_header + self.control) / payload if payload else 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step at one stage. `loss` (nats per token) comes from the last stage only."""

    step: int
    stage: int
    loss: float | None
    gradient_norm: float
    learning_rate: float
    seconds: float
    compute_seconds: float
    wire: WireTotals

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {**asdict(self), "wire": self.wire.as_tuple()}

    @classmethod
    def from_json(cls, value: Any) -> StepReport:
        """The report in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        try:
            step, stage, loss = value["step"], value["stage"], value["loss"]
            numbers = {name: value[name] for name in ("gradient_norm", "learning_rate", "seconds", "compute_seconds")}
            wire = WireTotals.from_json(value["wire"])
        except (LookupError, TypeError) as error:
            raise BadFrame(f"expected a step report, got {str(value)[:80]!r}") from error
        if not (_is_count(step) and _is_count(stage)):
            raise BadFrame(f"expected a step and a stage, got {str(step)[:20]} and {str(stage)[:20]}")
        if not all(map(_is_finite, (*numbers.values(), 0.0 if loss is None else loss))):
            raise BadFrame(f"expected finite numbers in the report of step {step}")
        return cls(step=step, stage=stage, loss=loss, wire=wire, **numbers)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_finite(value: Any) -> bool:
    # A NaN compares false, and an integer of hundreds of digits compares without overflowing.
    return type(value) in (int, float) and abs(value) < 1e300


@dataclass(slots=True)
class StepTable:
    """Gathers the stages' reports into rows, one a step, in step order. `wire`: all stages' totals at the last row."""

    config: RunConfig
    next_step: int = 1
    wire: WireTotals = WireTotals()
    _pending: dict[int, dict[int, StepReport]] = field(default_factory=dict)

    def add(self, report: StepReport) -> list[dict[str, Any]]:
        """The rows that `report` completes. A repeated report completes none."""
        stages = self.config.pipeline.stages
        timely = self.next_step <= report.step < self.next_step + MOST_PENDING
        if not timely or not 0 <= report.stage < stages:
            return []
        self._pending.setdefault(report.step, {})[report.stage] = report
        rows = []
        while len(self._pending.get(self.next_step, {})) == stages:
            rows.append(self._row(self._pending.pop(self.next_step)))
            self.next_step += 1
        return rows

    def _row(self, reports: Mapping[int, StepReport]) -> dict[str, Any]:
        stages = [reports[stage] for stage in sorted(reports)]
        total = sum((report.wire for report in stages), WireTotals())
        tokens, boundaries = self.config.tokens_per_step, len(stages) - 1
        forward, backward = (total - self.wire).per_token(tokens, boundaries)
        self.wire = total
        seconds = stages[0].seconds
        return {
            "step": stages[0].step,
            "loss": stages[-1].loss,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "learning_rate": stages[0].learning_rate,
            "forward_bytes_per_token": forward,
            "backward_bytes_per_token": backward,
            "gradient_norms": [report.gradient_norm for report in stages],
            "compute_seconds": [report.compute_seconds for report in stages],
        }


def summarise(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], wire: WireTotals, wire_tokens: int
) -> dict[str, Any]:
    """The report's numbers.

    Args:
        rows: all steps, those of earlier starts too.
        wire: what all daemons have sent for `wire_tokens` trained tokens.
    """
    forward, backward = wire.per_token(wire_tokens, config.pipeline.stages - 1)
    dense = 2.0 * config.model.dim
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "tokens": sum(row["tokens"] for row in rows),
        "loss_first": rows[0]["loss"] if rows else None,
        "loss_last": rows[-1]["loss"] if rows else None,
        "step_seconds_median": statistics.median(row["seconds"] for row in rows) if rows else None,
        "wire": {
            "forward_bytes_per_token": forward,
            "backward_bytes_per_token": backward,
            "dense_bf16_bytes_per_token": dense,
            "ratio_to_dense_bf16": 2 * dense / (forward + backward) if forward + backward else None,
            "forward_payload_bytes": wire.forward_payload,
            "backward_payload_bytes": wire.backward_payload,
            "header_bytes": wire.forward_header + wire.backward_header,
            "control_bytes": wire.control,
            "overhead_fraction": wire.overhead_fraction,
            "tokens": wire_tokens,
            "totals": wire.as_tuple(),
        },
    }
