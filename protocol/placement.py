"""Where a peer is of most use: the stage of a newcomer, and whether to move a peer. Pure.

A stage takes cost / (summed speed of its replicas) for a microbatch, and a run is as fast as its slowest stage. A
newcomer goes to the slowest. A peer is moved only if the slowest stage's time falls by a fifth or more: what a move
costs (a state to fetch, a share that is missing meanwhile) must come back, and peers must not swing to and fro.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.membership_events import short_peer
from protocol.stage_cost import StageCost

GAIN = 0.2


@dataclass(frozen=True, slots=True)
class Worker:
    """A peer as a resource.

    Attributes:
        stage: where it is, or goes; None: nowhere yet.
        speed: GFLOP/s.
        memory: bytes; 0: unknown.
        movable: whether it may be moved: it shares a stage's work, and is not on its way elsewhere.
    """

    peer: str
    stage: int | None
    speed: float
    memory: int = 0
    movable: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """Move `peer` to `stage`; why, in words."""

    peer: str
    stage: int
    reason: str


def fits(cost: StageCost, memory: int) -> bool:
    """Whether a peer with `memory` bytes (0: unknown) can serve a stage."""
    return memory == 0 or cost.memory <= memory


def times(costs: Sequence[StageCost], workers: Sequence[Worker]) -> list[float]:
    """Seconds of a microbatch at each stage; infinite where nobody is."""
    speeds = [math.fsum(w.speed for w in workers if w.stage == stage) for stage in range(len(costs))]
    return [cost.gflop / speed if speed > 0 else math.inf for cost, speed in zip(costs, speeds, strict=True)]


def neediest(costs: Sequence[StageCost], workers: Sequence[Worker], memory: int) -> int | None:
    """The slowest stage that fits into `memory`; of equal ones the first. None: none fits."""
    slow = times(costs, workers)
    fitting = [stage for stage, cost in enumerate(costs) if fits(cost, memory)]
    return max(fitting, key=lambda stage: (slow[stage], -stage), default=None)


def better_place(costs: Sequence[StageCost], workers: Sequence[Worker]) -> Move | None:
    """The one move that helps most, if it lowers the slowest stage's time by `GAIN` or more."""
    before = times(costs, workers)
    slowest = max(range(len(costs)), key=lambda stage: before[stage])
    found = _best(costs, workers, slowest)
    if found is None:
        return None
    worker, after = found
    if not after <= (1 - GAIN) * before[slowest]:
        return None
    reason = (
        f"stage {slowest} holds the run up at {before[slowest]:.2g} s a microbatch; peer {short_peer(worker.peer)} of "
        f"stage {worker.stage} brings the slowest to {after:.2g} s"
    )
    return Move(worker.peer, slowest, reason)


def substitute(costs: Sequence[StageCost], workers: Sequence[Worker], stage: int) -> Worker | None:
    """Who should take over `stage`, which loses its last replica: the one whose move leaves the run fastest."""
    found = _best(costs, workers, stage)
    return None if found is None else found[0]


def _best(costs: Sequence[StageCost], workers: Sequence[Worker], stage: int) -> tuple[Worker, float] | None:
    """The peer to move to `stage` that leaves the run fastest, and the slowest stage's time then."""
    found: tuple[float, str, Worker] | None = None
    for worker in workers:
        given = [w for w in workers if w.stage == worker.stage and w.movable]
        if not worker.movable or worker.stage in (None, stage) or len(given) < 2:
            continue
        if not fits(costs[stage], worker.memory):
            continue
        moved = Worker(worker.peer, stage, worker.speed, worker.memory)
        after = max(times(costs, [moved if w is worker else w for w in workers]))
        if found is None or (after, worker.peer) < found[:2]:
            found = after, worker.peer, worker
    return None if found is None else (found[2], found[0])


def speeds(
    declared: Mapping[str, float], seconds: Mapping[str, float | None], gflop: Mapping[str, float]
) -> dict[str, float]:
    """GFLOP/s of each peer: what it does at its stage where that is known, else what it declared, scaled to those.

    A peer measures its speed by one product of large matrices, and never does as much at its stage; so a declaration
    counts by the median of done / declared among those of whom both are known. Who declares nothing counts as usual.

    Args:
        seconds: measured, of a microbatch.
        gflop: of a microbatch at the peer's stage.
    """
    done = {peer: gflop[peer] / value for peer, value in seconds.items() if value is not None and peer in gflop}
    ratios = [done[peer] / declared[peer] for peer in done if declared.get(peer, 0.0) > 0]
    scale = statistics.median(ratios) if ratios else 1.0
    guessed = {peer: value * scale for peer, value in declared.items() if value > 0}
    found = guessed | done
    usual = statistics.median(found.values()) if found else 1.0
    return {peer: found.get(peer, usual) for peer in declared}
