"""Shares of the replicas of one stage, from measured speeds: a step lasts as long as its busiest replica.

With weights w and s seconds a microbatch, replica i is busy for w_i / sum(w) * s_i of each of the step's microbatches;
w_i = 1 / s_i makes all alike. Speeds jitter, and every change of weights is a view, so they change only when the stage
gets faster by more than a seventh. A weight is bounded below: a share of nearly nothing costs more than it gives.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

SMALLEST = 1 / 8
GAIN = 1.15
SMOOTHING = 0.2


def smoothed(old: float | None, new: float) -> float:
    """A moving average of measured seconds."""
    return new if old is None else old + SMOOTHING * (new - old)


def shares(seconds: Mapping[str, float | None]) -> dict[str, float]:
    """The weight of each replica, the fastest's 1, for its seconds a microbatch. Unknown ones count as the median."""
    known = [value for value in seconds.values() if value is not None and value > 0]
    usual = statistics.median(known) if known else 1.0
    speeds = {peer: 1 / (value if value is not None and value > 0 else usual) for peer, value in seconds.items()}
    fastest = max(speeds.values(), default=1.0)
    return {peer: round(max(SMALLEST, speed / fastest), 3) for peer, speed in speeds.items()}


def stage_seconds(weights: Mapping[str, float], seconds: Mapping[str, float]) -> float:
    """Seconds of the busiest replica for each of the stage's microbatches."""
    total = sum(weights.values())
    return max(weights[peer] / total * seconds[peer] for peer in weights)


def better_shares(weights: Mapping[str, float], seconds: Mapping[str, float | None]) -> dict[str, float] | None:
    """Other weights for the replicas in `weights` if they make the stage faster by more than the threshold; or None."""
    known = {peer: value for peer in weights if (value := seconds.get(peer)) is not None and value > 0}
    if len(known) < len(weights) or len(weights) < 2:
        return None
    better = shares(known)
    return better if stage_seconds(weights, known) > GAIN * stage_seconds(better, known) else None
