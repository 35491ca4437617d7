"""Who loses its place, and what becomes of it: silence, restarts, failures. `protocol.blame` has who is to blame."""

from __future__ import annotations

from collections.abc import Collection

from protocol import skipping
from protocol.detector import Standing
from protocol.membership_events import Effect, Failed, Irreplaceable, LostTrack, TurnAway, short_peer
from protocol.run_state import RunState
from protocol.view_change import bereft, with_learner, without


def vacate(run: RunState, peers: Collection[str], reason: str, follow: bool = False) -> list[Effect]:
    """The places of `peers` are lost: at once where others can go on, or else the stage is dead.

    Args:
        follow: they become learners at the same stage, with the state to be fetched anew.
    """
    view, roster = run.view, run.roster
    seats = {peer: stage for peer in peers if peer in run.members and (stage := run.members[peer].stage) is not None}
    if view is None or not seats:
        return []
    past = roster.past_without(seats)
    dying = set(bereft(view, past, seats)) & set(seats.values())
    for peer, stage in seats.items():
        if stage in dying:
            run.dead.setdefault(stage, f"stage {stage} lost its peer {short_peer(peer)}: {reason}")
    for peer, stage in seats.items():
        run.members[peer].unseat()
        run.note_place(peer, stage)
    run.lost_at = max(run.lost_at, roster.newest)
    kept = {peer: stage for peer, stage in seats.items() if stage not in dying}
    if not kept:
        return []
    changed = without(view, list(kept), past)
    start = run.margin_step
    for peer, stage in kept.items() if follow and start < view.last_step and not roster.blind else ():
        changed = with_learner(changed, stage, peer, run.members[peer].addresses, start)
        run.members[peer].seat(stage, run.next_view, start)
    who = ", ".join(f"peer {short_peer(peer)} of stage {stage}" for peer, stage in kept.items())
    return run.issue(changed, f"{who} {'starts anew' if follow else 'is out'}: {reason}")


def gone(run: RunState, peers: Collection[str], reason: str) -> list[Effect]:
    """`peers` are members no more."""
    effects = vacate(run, peers, reason)
    for peer in peers:
        run.members.pop(peer, None)
        run.detector.forget(peer)
        run.say(peer, "")
    return effects


def turned_away(run: RunState, peer: str, reason: str) -> list[Effect]:
    """`peer` is a member no more, and may not come back in this session."""
    run.conduct.bar(peer, reason)
    return [*gone(run, [peer], reason), TurnAway(peer, reason)]


def judge(run: RunState, now: float) -> list[Effect]:
    """Suspect, exclude and clear members by what the detector thinks of them."""
    effects: list[Effect] = []
    overdue: dict[str, str] = {}
    for peer, member in run.members.items():
        standing, why = run.detector.standing(peer, now)
        if standing is Standing.OVERDUE:
            overdue[peer] = why
        if standing is Standing.WELL:
            if member.suspected:
                effects += run.say(peer, f"peer {short_peer(peer)} is heard again")
            member.suspected, member.away = False, ""
        elif not member.suspected:
            member.suspected = True
            effects += run.say(peer, f"peer {short_peer(peer)} is suspected: {why}")
    lost = _to_exclude(run, overdue)
    for peer in set(overdue) - set(lost):
        run.members[peer].away = overdue[peer]
    for peer in lost:
        effects += gone(run, [peer], overdue[peer])
    return effects


def _to_exclude(run: RunState, overdue: dict[str, str]) -> list[str]:
    """Those whose stage can go on without them. The last of a stage may yet be heard again."""
    needed: set[str] = set()
    for stage in range(len(run.costs)):
        there = [r.peer for r, _ in run.roster.workers(stage)]
        if all(peer in overdue for peer in there):
            needed |= set(there)
    return [peer for peer in overdue if peer not in needed]


def failed(run: RunState, event: Failed) -> list[Effect]:
    """A peer cannot go on: that costs its place. `fatal` may end the run, if it was not one peer alone that says so.

    A number that is not finite where the arithmetic is everybody's will be so for the next one, too: the others do the
    step again, and say the same. Until then it may be that peer's machine, or no truth.
    """
    if skipping.is_settled(run, event):
        return []
    if skipping.may_pass_over(run, event):
        return _cannot_do(run, event)
    peer, member = event.peer, run.members[event.peer]
    stage = member.stage
    working = [r.peer for r, m in run.roster.workers(stage) if m.applied is not None] if stage is not None else []
    if not event.fatal or stage is None or peer not in working:
        return gone(run, [peer], event.reason)
    before = run.diverged_before(stage, member.step + 1, peer)
    if working == [peer] and (before or not _somebody_else(run, peer)):
        return cannot_go_on(run, stage, peer, event.reason)
    if run.conduct.alarmed(peer):
        return turned_away(
            run, peer, f"it says again and again that nobody could go on, and others can: {event.reason}"
        )
    return gone(run, [peer], event.reason)


def _somebody_else(run: RunState, peer: str) -> bool:
    """Whether those who would be left without `peer` could serve all stages."""
    present = [p for p, m in run.members.items() if p != peer and not m.away and m.leaving is None]
    return len(present) >= len(run.costs)


def cannot_go_on(run: RunState, stage: int, peer: str, reason: str) -> list[Effect]:
    """No replica of `stage` can do its next step, as `peer` was the last to say."""
    return run.finish(True, f"stage {stage} cannot go on: peer {short_peer(peer)}: {reason}")


def _cannot_do(run: RunState, event: Failed) -> list[Effect]:
    """A peer cannot do a step, and stands still. Where others of its stage can, they do; else it is passed over.

    One that was wrong, or lies, has lost no more than its place, or the run one of the steps that it may pass over.
    """
    stage = run.members[event.peer].stage
    working = [r.peer for r, _ in run.roster.workers(stage)] if stage is not None else []
    if stage is None or event.peer not in working:
        return []
    if working != [event.peer]:
        return vacate(run, [event.peer], event.reason)
    skipping.pass_over(run, stage, event)
    return []


def mistaken(run: RunState, peer: str, step: int) -> list[Effect]:
    """A learner followed its stage to weights that are no replica's."""
    reason = f"what it followed led to other weights than the replicas' after step {step}"
    if run.conduct.resynced(peer, step):
        return turned_away(run, peer, f"{reason}, again and again: is its hardware unlike theirs?")
    return vacate(run, [peer], reason, follow=True)


def irreplaceable(run: RunState, event: Irreplaceable) -> list[Effect]:
    """A step cannot be ended any more: the run goes back, as if the stage had lost its last peer."""
    stage = run.members[event.peer].stage
    if run.view is None or stage is None or stage in run.dead or event.epoch != run.view.epoch:
        return []
    if event.step <= run.view.restored:
        return []  # of that all have the state
    if run.conduct.tore(event.peer, event.step, _may_be_torn(run, event.step)):
        return turned_away(run, event.peer, "it sends the run back again and again, for what it says it cannot give")
    run.dead[stage] = f"step {event.step} cannot be ended: {event.reason}"
    return []


def _may_be_torn(run: RunState, step: int) -> bool:
    """Whether somebody was lost lately, or a plan may have come late: else no step can be torn."""
    assert run.view is not None
    lost = any(not r.alive for replicas in run.view.stages for r in replicas)
    planned = run.view.first_step > run.view.restored + 1 and run.view.first_step >= step - 1
    return lost or planned or run.lost_at >= step - 1


def lost_track(run: RunState, event: LostTrack) -> list[Effect]:
    """Who cannot follow its stage starts anew, a few times. Where nobody else has the state, the run goes back."""
    member = run.members[event.peer]
    stage = member.stage
    if run.view is None or stage is None or stage in run.dead or 0 < event.view < member.since:
        return []
    # Whatever it said of its files before: it would be sent back to the same step at once, again and again.
    member.held = {s: [t for t in steps if (s, t) != (stage, member.start)] for s, steps in member.held.items()}
    restores = member.start == run.view.restored and stage < len(run.view.holders)
    keepers = [keeper for keeper in run.view.holders[stage] if keeper != event.peer] if restores else []
    new = [keeper for keeper in keepers if run.doubt(keeper, event.peer)]
    if len(keepers) == 1 and keepers[0] in run.members:
        run.conduct.quarrels.note(event.peer, keepers[0])  # it had said that it has the state
    if not new and run.conduct.lost_track(event.peer):
        reason = f"it cannot keep up with stage {stage}: {event.reason}; its link is too slow for that"
        return turned_away(run, event.peer, reason)
    if run.roster.stayers(stage) == [event.peer]:
        run.dead[stage] = f"stage {stage} has lost its state: peer {short_peer(event.peer)}: {event.reason}"
        return []
    return vacate(run, [event.peer], f"it lost track: {event.reason}", follow=True)
