"""From which step a run can start or go on, and who serves which stage then. Pure.

A step can be gone back to if for each stage somebody present has its state in files: its own checkpoint, or a copy that
it keeps for another stage. Step 0 needs no files, the seed gives it. Who has its stage's state begins at once; anyone
else can fetch it. So: the newest such step; then a peer for each stage, of those who have its state as many as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.placement import Worker, fits, neediest
from protocol.stage_cost import StageCost


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that is present: `stage` is where it was (None: nowhere), `held[stage]` the steps it has in files.

    `hidden`: it accepts no connections, so it cannot meet another one that does not.
    """

    peer: str
    held: Mapping[int, Sequence[int]] = field(default_factory=dict)
    stage: int | None = None
    speed: float = 1.0
    memory: int = 0
    hidden: bool = False

    def has(self, stage: int, step: int) -> bool:
        """Whether it needs to fetch nothing."""
        return step == 0 or step in self.held.get(stage, ())


@dataclass(frozen=True, slots=True)
class Assignment:
    """The run goes on after `step`: `stages[s]` serve stage s, `holders[s]` have its state in files."""

    step: int
    stages: tuple[tuple[str, ...], ...]
    holders: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Shortage:
    """It cannot: `stages` lack a peer or a state; why, in words."""

    stages: tuple[int, ...]
    reason: str


def assign(
    candidates: Sequence[Candidate], costs: Sequence[StageCost], from_start: bool, most: int | None = None
) -> Assignment | Shortage:
    """Where the run starts or goes on with those present, or what is missing.

    Args:
        from_start: whether step 0 will do. It will not where a checkpoint should exist: work would be lost in silence.
        most: the newest step that the run has reached; files of later ones are of a future that was given up.
    """
    missing = _without_peer(candidates, costs)
    if missing:
        return Shortage(missing, _peers_wanted(missing, len(candidates)))
    steps = {s for c in candidates for held in c.held.values() for s in held if most is None or s <= most}
    for step in [*sorted(steps - {0}, reverse=True), *([0] if from_start else [])]:
        holders = _holders(candidates, len(costs), step)
        if step == 0 or all(holders):
            return Assignment(step, _seated(candidates, costs, step), holders)
    return _no_common_step(candidates, len(costs))


def _holders(candidates: Sequence[Candidate], stages: int, step: int) -> tuple[tuple[str, ...], ...]:
    if step == 0:
        return ((),) * stages
    return tuple(tuple(c.peer for c in candidates if step in c.held.get(stage, ())) for stage in range(stages))


def _without_peer(candidates: Sequence[Candidate], costs: Sequence[StageCost]) -> tuple[int, ...]:
    """The stages that nobody is left for."""
    wishes = {
        stage: sorted((c for c in candidates if fits(cost, c.memory)), key=_preference(stage))
        for stage, cost in enumerate(costs)
    }
    # Who is at a stage keeps it, so that the stage that is named is the one that lost its peer.
    own = matched({stage: [c.peer for c in wished if c.stage == stage] for stage, wished in wishes.items()}, {})
    served = matched({stage: [c.peer for c in wished] for stage, wished in wishes.items()}, own)
    return tuple(stage for stage in range(len(costs)) if stage not in served)


def _peers_wanted(missing: Sequence[int], present: int) -> str:
    names = ", ".join(map(str, missing))
    return f"stage {names} needs a peer" if len(missing) == 1 else f"stages {names} need peers ({present} are here)"


def _no_common_step(candidates: Sequence[Candidate], stages: int) -> Shortage:
    have = {stage: sorted({s for c in candidates for s in c.held.get(stage, ())}) for stage in range(stages)}
    described = ", ".join(f"stage {stage}: {steps or 'none'}" for stage, steps in have.items())
    newest = max((steps[-1] for steps in have.values() if steps), default=0)
    lacking = tuple(stage for stage, steps in have.items() if not steps or steps[-1] < newest) or tuple(have)
    reason = (
        f"no step has checkpoints of all {stages} stages among the peers that are here ({described}): "
        "start the peers with the folders they had"
    )
    return Shortage(lacking, reason)


def _seated(candidates: Sequence[Candidate], costs: Sequence[StageCost], step: int) -> tuple[tuple[str, ...], ...]:
    """One for each stage, then all others who need to fetch nothing."""
    stages = range(len(costs))
    # Where it was first, then the fast; those with the state first of all, since what is matched once stays so.
    order = [sorted((c for c in candidates if fits(costs[s], c.memory)), key=_preference(s)) for s in stages]
    own = matched({s: [c.peer for c in order[s] if c.has(s, step)] for s in stages}, {})
    seats = {peer: s for s, peer in matched({s: [c.peer for c in order[s]] for s in stages}, own).items()}
    for candidate in candidates:
        if candidate.peer not in seats:
            stage = _further(candidate, candidates, costs, seats, step)
            if stage is not None:
                seats[candidate.peer] = stage
    return tuple(tuple(c.peer for c in candidates if seats.get(c.peer) == s) for s in stages)


def _preference(stage: int) -> Callable[[Candidate], tuple[bool, bool, float]]:
    """Where it was, then with every second stage for those that are hidden, then the fast."""
    even = stage % 2 == 0
    return lambda candidate: (candidate.stage != stage, candidate.hidden != even, -candidate.speed)


def _further(
    candidate: Candidate,
    candidates: Sequence[Candidate],
    costs: Sequence[StageCost],
    seats: Mapping[str, int],
    step: int,
) -> int | None:
    """The stage of one more peer: of those whose state it has, where it was, else the neediest."""
    closed = {seats[c.peer] + d for c in candidates if c.hidden and c.peer in seats for d in (-1, 0, 1)}
    open_to = [
        s
        for s, cost in enumerate(costs)
        if candidate.has(s, step) and fits(cost, candidate.memory) and not (candidate.hidden and s in closed)
    ]
    if candidate.stage in open_to:
        return candidate.stage
    if not open_to:
        return None
    workers = [Worker(c.peer, seats.get(c.peer), c.speed) for c in candidates]
    chosen = neediest([costs[s] for s in open_to], [_among(w, open_to) for w in workers], candidate.memory)
    return None if chosen is None else open_to[chosen]


def _among(worker: Worker, stages: Sequence[int]) -> Worker:
    index = stages.index(worker.stage) if worker.stage is not None and worker.stage in stages else None
    return Worker(worker.peer, index, worker.speed)


def matched(wishes: Mapping[int, Sequence[str]], served: Mapping[int, str]) -> dict[int, str]:
    """A different peer for as many stages as can be, of those in `wishes[stage]`; stages in `served` stay served.

    Augmenting paths (Kuhn 1955): a stage may push another one off its peer if that one finds a peer elsewhere.
    """
    taken = {peer: stage for stage, peer in served.items()}

    def place(stage: int, tried: set[str]) -> bool:
        free_first = sorted(wishes[stage], key=lambda peer: peer in taken)
        for peer in free_first:
            if peer in tried:
                continue
            tried.add(peer)
            if peer not in taken or place(taken[peer], tried):
                taken[peer] = stage
                return True
        return False

    for stage in wishes:
        if stage not in taken.values():
            place(stage, set())
    return {stage: peer for peer, stage in taken.items()}
