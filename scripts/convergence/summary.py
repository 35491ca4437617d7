"""What the rows of a group say: each arm's losses, steps to the target and times. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from convergence.meter import Case, Link, steady_step
from convergence.plan import Cell, PlannedArm
from convergence.public_case import CASE, FIXED_MICROBATCHES, MICROBATCHES
from convergence.results import Results, Row, loss_of
from convergence.sweep import best_rate, sweep_cell, sweep_rates
from convergence.target import Reached, Steps, over_seeds, spread_of, steps_to
from convergence.wire import Wire, as_metered, at_case, dense_at_case, metered
from protocol.config import RunConfig


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """An arm with at least one row that did not diverge.

    Attributes:
        rows: all of its rows.
        rate: the best learning rate so far; `settled` if its sweep is finished.
        at_edge: it is the lowest or highest that was tried.
        steps: to the group's target; None if the group has none.
    """

    arm: PlannedArm
    rows: Mapping[Cell, Row]
    rate: float
    settled: bool
    at_edge: bool
    steps: Steps | None = None

    @property
    def config(self) -> RunConfig:
        """The best run of the first seed and horizon."""
        return self.arm.config(sweep_cell(self.arm, self.rate))

    @property
    def row(self) -> Row:
        """The row of `config`."""
        return self.rows[sweep_cell(self.arm, self.rate)]

    @property
    def wire(self) -> Wire:
        """Bytes per token as measured."""
        return Wire(**self.row["wire"])

    @property
    def metered_wire(self) -> Wire:
        """The same as if sent in the codec that it is metered with."""
        return metered(self.config, self.wire, as_metered(self.config))

    def wire_in(self, case: Case, microbatches: int) -> Wire:
        """Bytes per token with the arm's d/k, bits and scales in `case`."""
        return metered(self.config, self.wire, at_case(self.config, case, microbatches))

    @property
    def losses(self) -> dict[Cell, float]:
        """The final loss of each row, infinite where it diverged."""
        return {cell: loss_of(row) for cell, row in self.rows.items()}

    def finals(self, steps: int) -> dict[int, float]:
        """Final losses at the best rate after `steps`, by seed."""
        cells = (Cell(self.rate, seed, steps) for seed in self.arm.seeds)
        return {cell.seed: loss_of(self.rows[cell]) for cell in cells if cell in self.rows}

    @property
    def base_losses(self) -> list[float]:
        """Final losses at the best rate and the first horizon, one a seed."""
        return list(self.finals(self.arm.horizons[0]).values())

    @property
    def loss(self) -> float:
        """Their mean."""
        return statistics.mean(self.base_losses)

    @property
    def spread(self) -> float | None:
        """Their standard deviation, None for one seed."""
        return spread_of(self.base_losses)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A steady step in the public case: seconds, and the microbatches that it takes."""

    seconds: float
    microbatches: int


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group's arms, in the plan's order.

    Attributes:
        waiting: arms without a loss, and whether they have rows, which then all diverged.
        dense: the dense arm of the lowest mean loss at the first horizon, which is the target; None if there is none.
        spread: the seeds' standard deviation, pooled over all arms with several seeds; None if there are none.
    """

    name: str
    arms: Sequence[ArmSummary]
    waiting: Sequence[tuple[PlannedArm, bool]]
    dense: ArmSummary | None
    spread: float | None

    def gap(self, arm: ArmSummary) -> float | None:
        """Nats above the target."""
        return None if self.dense is None else arm.loss - self.dense.loss

    def gap_in_spreads(self, arm: ArmSummary) -> float | None:
        """The gap in seed spreads."""
        gap = self.gap(arm)
        return None if gap is None or not self.spread else gap / self.spread

    def time(self, arm: ArmSummary, link: Link, fixed: bool = False) -> float | None:
        """T = steps to the target x steady step, in seconds of the public case; None if the target is missed."""
        if arm.steps is None or arm.steps.mean is None:
            return None
        return arm.steps.mean * step_time(arm, link, fixed).seconds

    def time_above(self, arm: ArmSummary, link: Link, fixed: bool = False) -> float | None:
        """What T is above when the target is missed: that of the longest run."""
        if arm.steps is None or arm.steps.mean is not None:
            return None
        return arm.steps.longest * step_time(arm, link, fixed).seconds

    def dense_time(self, link: Link, fixed: bool = False) -> float | None:
        """T of the dense model in bfloat16: it meets its own mean loss at the first horizon."""
        return None if self.dense is None else self.dense.arm.horizons[0] * dense_step_time(link, fixed).seconds

    @property
    def reparam(self) -> ArmSummary | None:
        """The arm of role reparam, the second to compare times with."""
        return next((arm for arm in self.arms if arm.arm.role == "reparam"), None)


def summarise(name: str, arms: Sequence[PlannedArm], results: Results) -> GroupSummary:
    """What is known of the group `name`."""
    found = [summary for arm in arms if (summary := _summary(arm, results)) is not None]
    known = {summary.arm.name for summary in found}
    dense = min((s for s in found if s.arm.role == "dense"), key=lambda s: s.loss, default=None)
    variances = [s.spread**2 for s in found if s.spread is not None and math.isfinite(s.spread)]
    return GroupSummary(
        name=name,
        arms=[_with_steps(summary, dense) for summary in found],
        waiting=[(arm, bool(results.of(arm))) for arm in arms if arm.name not in known],
        dense=dense,
        spread=math.sqrt(statistics.mean(variances)) if variances else None,
    )


def step_time(arm: ArmSummary, link: Link, fixed: bool = False) -> StepTime:
    """The arm's steady step, with FIXED_MICROBATCHES or the best of MICROBATCHES."""
    choices = (FIXED_MICROBATCHES,) if fixed else MICROBATCHES
    return min((_step(link, m, arm.wire_in(CASE, m)) for m in choices), key=_seconds)


def dense_step_time(link: Link, fixed: bool = False) -> StepTime:
    """The same of the dense model in bfloat16."""
    choices = (FIXED_MICROBATCHES,) if fixed else MICROBATCHES
    return min((_step(link, m, dense_at_case(CASE, m)) for m in choices), key=_seconds)


@lru_cache(maxsize=4096)
def _step(link: Link, microbatches: int, wire: Wire) -> StepTime:
    pipeline = CASE.pipeline(microbatches, wire.forward, wire.backward)
    return StepTime(steady_step(pipeline, link), microbatches)


def _seconds(time: StepTime) -> float:
    return time.seconds


def _summary(arm: PlannedArm, results: Results) -> ArmSummary | None:
    losses, rows = results.losses(arm), results.of(arm)
    tried = [rate for rate in sweep_rates(arm, losses) if sweep_cell(arm, rate) in losses]
    rate = min(tried, key=lambda rate: losses[sweep_cell(arm, rate)], default=None)
    if rate is None or math.isinf(losses[sweep_cell(arm, rate)]):
        return None
    settled = best_rate(arm, losses) is not None
    return ArmSummary(arm, rows, rate, settled, rate in (tried[0], tried[-1]))


def _with_steps(summary: ArmSummary, dense: ArmSummary | None) -> ArmSummary:
    if dense is None:
        return summary
    if summary is dense:  # it meets its own mean loss where that was taken, whatever its seeds do
        steps = over_seeds([Reached(dense.arm.horizons[0])])
        return replace(summary, steps=steps)
    by_length = {steps: summary.finals(steps) for steps in summary.arm.horizons}
    finals = [
        {steps: losses[seed] for steps, losses in by_length.items() if seed in losses}
        for seed in by_length[summary.arm.horizons[0]]
    ]
    steps = over_seeds(steps_to(dense.loss, of_seed) for of_seed in finals)
    return replace(summary, steps=steps)
