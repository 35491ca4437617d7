"""What a run that goes on should change next: who enters, who drains, other shares, a move. Pure proposals.

One planned view at a time. Entries and drains are proposed as soon as they can be; shares and moves only when it has
been calm for a while, since they follow measurements that the last change has just disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from protocol.agreement import Agreement
from protocol.membership_events import short_peer
from protocol.placement import Move, Worker, better_place, neediest
from protocol.roster import Roster
from protocol.shares import better_shares, shares
from protocol.stage_cost import StageCost

CALM_STEPS = 20
CALM_SECONDS = 20.0
MOVE_STEPS = 50
MOST_FETCHING = 2  # learners of a stage that have no state yet: its replicas keep a copy for each


@dataclass(frozen=True, slots=True)
class Plan:
    """New weights, by peer, from `first_step` on; why, in words. `move`: who drains to go elsewhere."""

    first_step: int
    weights: Mapping[str, float]
    reason: str
    entering: tuple[str, ...] = ()
    move: Move | None = None


@dataclass(frozen=True, slots=True)
class Calm:
    """How long nothing was planned, and nobody moved: in steps, and whether it is long enough in seconds too."""

    since_plan: int
    since_move: int
    seconds: float

    @property
    def for_shares(self) -> bool:
        """Whether measurements can be trusted again."""
        return self.since_plan >= CALM_STEPS and self.seconds >= CALM_SECONDS

    @property
    def for_move(self) -> bool:
        """Whether a peer may be moved again."""
        return self.for_shares and self.since_move >= MOVE_STEPS


def next_plan(roster: Roster, costs: Sequence[StageCost], agreement: Agreement, margin: int, calm: Calm) -> Plan | None:
    """The next planned view, or None. The plan of the newest view must be past."""
    assert roster.view is not None
    first = roster.newest + 1 + margin
    if first > roster.view.last_step:
        return None
    move = better_place(costs, roster.resources(costs)) if calm.for_move else None
    weights: dict[str, float] = {}
    reasons: list[str] = [] if move is None else [move.reason]
    entering: list[str] = []
    for stage in range(len(costs)):
        entered = ready(roster, agreement, stage, margin)
        out = [p for p in _leaving(roster, stage) if set(roster.stayers(stage)) - {p}]
        if move is not None and move.peer in roster.stayers(stage):
            out.append(move.peer)
        weights |= _stage_weights(roster, stage, entered, out, calm, reasons)
        entering += entered
    if not weights:
        return None
    return Plan(first, weights, "; ".join(reasons), tuple(entering), move)


def ready(roster: Roster, agreement: Agreement, stage: int, margin: int) -> list[str]:
    """The learners of `stage` whose weights are the replicas', and who keep up."""
    return [
        r.peer
        for r, m in roster.learners(stage)
        if not m.away
        and m.leaving is None
        and m.target is None
        and m.applied is not None
        and m.applied >= roster.newest - margin - 1
        and agreement.agrees(stage, m.applied, m.weights)
    ]


def _leaving(roster: Roster, stage: int) -> list[str]:
    return [
        r.peer
        for r, m in roster.workers(stage)
        if r.weight > 0 and (m.leaving is not None or (m.target is not None and m.target != stage))
    ]


def _stage_weights(
    roster: Roster, stage: int, entered: Sequence[str], out: Sequence[str], calm: Calm, reasons: list[str]
) -> dict[str, float]:
    """What changes at one stage. Adds why to `reasons`."""
    assert roster.view is not None
    staying = {r.peer: r.weight for r, _ in roster.workers(stage) if r.weight > 0 and r.peer not in out}
    measured = {peer: roster.members[peer].microbatch_seconds for peer in [*staying, *entered]}
    reasons += [f"peer {short_peer(p)} has caught up and enters stage {stage}" for p in entered]
    reasons += [why for p in out if (why := _why_out(roster, p, stage))]
    drains = dict.fromkeys(out, 0.0)
    if entered:
        return shares(measured) | drains
    if not calm.for_shares:
        return drains
    better = better_shares(staying, measured)
    if better is not None:
        reasons.append(f"stage {stage} shares its work by measured speed: {_listed(better)}")
        return better | drains
    lost = [r for r in roster.view.stages[stage] if not r.alive and r.weight > 0]
    if lost and not out:
        reasons.append(f"stage {stage} shares the work of {len(lost)} that it lost anew")
        return staying
    return drains


def _why_out(roster: Roster, peer: str, stage: int) -> str:
    member = roster.members[peer]
    if member.target is not None:
        return f"peer {short_peer(peer)} goes from stage {stage} to {member.target}, which needs it more"
    if member.leaving is None:
        return ""  # a move, whose reason is said
    return f"peer {short_peer(peer)} leaves stage {stage}, as its owner asked"


def _listed(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{short_peer(peer)} {weight:g}" for peer, weight in weights.items())


def next_learner(
    roster: Roster, costs: Sequence[StageCost], start: int, apart: Callable[[str], Collection[str]] = lambda peer: ()
) -> tuple[str, int] | None:
    """A member without a place, and the stage that it should follow from the state after `start` on.

    Args:
        apart: those beside whom a peer is not to be: it has quarrelled with them, or can never meet them.
    """
    assert roster.view is not None
    if start >= roster.view.last_step:
        return None
    free = {
        peer: member
        for peer, member in roster.members.items()
        if member.stage is None and member.leaving is None and not member.away and not member.expected
    }
    workers = roster.resources(costs) if free else []
    for peer, member in free.items():
        stage = member.target
        if stage is None:
            stage = _neediest(roster, costs, workers, member.memory, apart(peer))
        if stage is None:
            continue
        fetching = [m for _, m in roster.learners(stage) if m.applied is None]
        if len(fetching) < MOST_FETCHING:
            return peer, stage
    return None


def _neediest(
    roster: Roster, costs: Sequence[StageCost], workers: Sequence[Worker], memory: int, apart: Collection[str]
) -> int | None:
    """The stage that needs a peer most, of those which are not beside a peer in `apart`."""
    closed = {
        s + d for peer in apart if (m := roster.members.get(peer)) and (s := m.stage) is not None for d in (-1, 0, 1)
    }
    if not closed:
        return neediest(costs, workers, memory)
    stages = [stage for stage in range(len(costs)) if stage not in closed]
    among = [replace(w, stage=stages.index(w.stage) if w.stage in stages else None) for w in workers]
    chosen = neediest([costs[stage] for stage in stages], among, memory) if stages else None
    return None if chosen is None else stages[chosen]
