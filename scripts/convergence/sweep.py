"""Which rows an arm still needs. Pure: a plan and the losses that are there give the next cells.

    SWEEP      all learning rates at the first seed and horizon; while the best is at an edge, one more beyond it
    SEEDS      the best rate at the other seeds
    HORIZONS   the best rate at the other horizons, all seeds

A run that diverged counts as an infinite loss. Nothing but the results is remembered, so that an interrupted sweep
goes on where it was, and a changed plan takes what fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import IntEnum

from convergence.plan import Cell, PlannedArm

Losses = Mapping[Cell, float]


class Phase(IntEnum):
    """How far an arm is."""

    SWEEP = 0
    SEEDS = 1
    HORIZONS = 2


def sweep_rates(arm: PlannedArm, losses: Losses) -> list[float]:
    """The learning rates of the sweep, ascending, so far as the losses say: the last extension may not be trained."""
    rates = list(arm.learning_rates)
    below = above = 0
    while all(sweep_cell(arm, rate) in losses for rate in rates):
        best = _best(arm, rates, losses)
        if best == rates[0] and below < arm.extensions:
            rates.insert(0, rates[0] / 2)
            below += 1
        elif best == rates[-1] and above < arm.extensions:
            rates.append(rates[-1] * 2)
            above += 1
        else:
            break
    return rates


def sweep_cell(arm: PlannedArm, rate: float) -> Cell:
    """The sweep's cell at `rate`."""
    return Cell(rate, arm.seeds[0], arm.horizons[0])


def best_rate(arm: PlannedArm, losses: Losses) -> float | None:
    """The learning rate of the lowest loss in the sweep, or None while the sweep is not finished."""
    rates = sweep_rates(arm, losses)
    return _best(arm, rates, losses) if all(sweep_cell(arm, rate) in losses for rate in rates) else None


def due_cells(arm: PlannedArm, losses: Losses) -> list[tuple[Phase, Cell]]:
    """The cells that can be trained now, in their order; none when the arm is finished."""
    best = best_rate(arm, losses)
    if best is None:
        return _missing(((Phase.SWEEP, sweep_cell(arm, rate)) for rate in sweep_rates(arm, losses)), losses)
    return _missing(_later_cells(arm, best), losses) if math.isfinite(losses[sweep_cell(arm, best)]) else []


def remaining_cells(arm: PlannedArm, losses: Losses) -> list[tuple[Phase, Cell]]:
    """All cells still to be trained if no sweep is extended further. Rates that are not known yet are the middle's."""
    due = due_cells(arm, losses)
    if not due or due[0][0] != Phase.SWEEP:
        return due
    middle = arm.learning_rates[len(arm.learning_rates) // 2]
    return due + list(_later_cells(arm, middle))


def _best(arm: PlannedArm, rates: list[float], losses: Losses) -> float:
    return min(rates, key=lambda rate: losses[sweep_cell(arm, rate)])


def _later_cells(arm: PlannedArm, rate: float) -> Iterable[tuple[Phase, Cell]]:
    first, *longer = arm.horizons
    yield from ((Phase.SEEDS, Cell(rate, seed, first)) for seed in arm.seeds[1:])
    yield from ((Phase.HORIZONS, Cell(rate, seed, steps)) for steps in longer for seed in arm.seeds)


def _missing(cells: Iterable[tuple[Phase, Cell]], losses: Losses) -> list[tuple[Phase, Cell]]:
    return [(phase, cell) for phase, cell in cells if cell not in losses]
