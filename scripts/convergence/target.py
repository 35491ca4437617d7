"""Steps to a target loss, from full runs of several lengths. Pure.

Each run has its own decay, so a point of one run's curve is not the loss of a shorter run. Between the two lengths
whose final losses bracket the target, the loss is taken as linear in the logarithm of the steps. Nothing is said beyond
the lengths that were trained.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reached:
    """The target is met at `steps`; `at_most`: already by the shortest run, so perhaps by a shorter one."""

    steps: float
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Missed:
    """Not within `steps`, the longest run; its loss is `gap` nats above the target."""

    steps: int
    gap: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps to the target over seeds.

    Attributes:
        mean: over seeds, or None if some seed missed it.
        spread: standard deviation over seeds; None for one.
        at_most: some seed met it by its shortest run.
        missed: seeds that did not, of `seeds`; `longest` and `gap` (the mean) are theirs.
    """

    mean: float | None
    spread: float | None
    at_most: bool
    missed: int
    seeds: int
    longest: int
    gap: float

    def __str__(self) -> str:
        if self.mean is None:
            some = "" if self.missed == self.seeds else f" ({self.missed} of {self.seeds} seeds)"
            return f"not within {self.longest:,}{some}: {self.gap:+.3f} nats"
        spread = "" if self.spread is None else f" ± {self.spread:,.0f}"
        return f"{'≤ ' if self.at_most else ''}{self.mean:,.0f}{spread}"


def steps_to(target: float, finals: Mapping[int, float]) -> Reached | Missed:
    """Where the final losses `finals`, by length in steps (at least one), first come down to `target`."""
    lengths = sorted(finals)
    if finals[lengths[0]] <= target:
        return Reached(lengths[0], at_most=True)
    for short, long in itertools.pairwise(lengths):
        if finals[long] <= target:
            share = (finals[short] - target) / (finals[short] - finals[long]) if math.isfinite(finals[short]) else 1.0
            return Reached(math.exp(math.log(short) + share * math.log(long / short)))
    return Missed(lengths[-1], finals[lengths[-1]] - target)


def over_seeds(outcomes: Iterable[Reached | Missed]) -> Steps:
    """The outcomes of all seeds (at least one) as one."""
    outcomes = list(outcomes)
    reached = [outcome for outcome in outcomes if isinstance(outcome, Reached)]
    missed = [outcome for outcome in outcomes if isinstance(outcome, Missed)]
    complete = not missed
    return Steps(
        mean=statistics.mean(r.steps for r in reached) if complete else None,
        spread=spread_of([r.steps for r in reached]) if complete else None,
        at_most=any(r.at_most for r in reached),
        missed=len(missed),
        seeds=len(outcomes),
        longest=max((m.steps for m in missed), default=0),
        gap=statistics.mean(m.gap for m in missed) if missed else 0.0,
    )


def spread_of(values: list[float]) -> float | None:
    """The sample's standard deviation; None for fewer than two values, or if one is infinite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
