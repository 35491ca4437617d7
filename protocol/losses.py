"""Who loses its place, and what becomes of it: silence, restarts, wrong weights, payloads that do not decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from protocol.detector import Standing
from protocol.membership_events import Accused, Differs, Effect, Irreplaceable, LostTrack, TurnAway, short_peer
from protocol.run_state import RunState
from protocol.view_change import bereft, with_learner, without


def vacate(run: RunState, peers: Collection[str], reason: str, follow: bool = False) -> list[Effect]:
    """The places of `peers` are lost: at once where others can go on, or else the stage is dead.

    Args:
        follow: they become learners at the same stage, with the state to be fetched anew.
    """
    view, roster = run.view, run.roster
    seats = {peer: stage for peer in peers if (stage := run.members[peer].stage) is not None}
    if view is None or not seats:
        return []
    past = roster.past_without(seats)
    dying = set(bereft(view, past, seats)) & set(seats.values())
    for peer, stage in seats.items():
        if stage in dying:
            run.dead.setdefault(stage, f"stage {stage} lost its peer {short_peer(peer)}: {reason}")
    for peer in seats:
        run.members[peer].unseat()
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
        del run.members[peer]
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


def differs(run: RunState, event: Differs) -> list[Effect]:
    """Replicas of a stage have unlike weights: the majority keeps its place; of as many, those first in the view.

    The reporter's word is believed: what the others have said of their weights in reports is of before, and what went
    wrong may have gone wrong since.
    """
    reporter = run.members[event.peer]
    if run.view is None or reporter.stage is None:
        return []
    stage = reporter.stage
    there = [r.peer for r, _ in run.roster.workers(stage)]
    hashes = {peer: event.hashes[peer] for peer in there if peer in event.hashes}
    named = [weights for weights in hashes.values() if weights]  # who names none is wrong, for nobody could compare
    if event.peer not in there or len(set(hashes.values())) < 2 or not named:
        return []
    right, _ = Counter(named).most_common(1)[0]  # counts in order of insertion: the view's
    odd = [peer for peer, weights in hashes.items() if weights != right]
    often = [peer for peer in odd if run.conduct.resynced(peer, event.step)]
    reason = f"its weights differ from the other replicas' before step {event.step}"
    effects = vacate(run, [peer for peer in odd if peer not in often], reason, follow=True)
    for peer in often:
        effects += turned_away(run, peer, f"{reason}, again and again: is its hardware unlike theirs?")
    return effects


def mistaken(run: RunState, peer: str, step: int) -> list[Effect]:
    """A learner followed its stage to weights that are no replica's."""
    reason = f"what it followed led to other weights than the replicas' after step {step}"
    if run.conduct.resynced(peer, step):
        return turned_away(run, peer, f"{reason}, again and again: is its hardware unlike theirs?")
    return vacate(run, [peer], reason, follow=True)


def accused(run: RunState, event: Accused) -> list[Effect]:
    """One of the two is wrong: the accused, unless the other accuses one after the other.

    If it was the last of its stage, the run waits for another, and goes on from its newest checkpoint.
    """
    here, there = run.members[event.peer].stage, run.members[event.accused].stage
    if here is None or there is None or abs(here - there) > 1 or event.peer == event.accused:
        return []
    wrong, reason = event.accused, f"peer {short_peer(event.peer)} cannot use what it sent: {event.reason}"
    if run.conduct.accuses(event.peer, event.accused):
        wrong, reason = event.peer, "it accuses one peer after the other of sending what it cannot use"
    return turned_away(run, wrong, reason)


def irreplaceable(run: RunState, event: Irreplaceable) -> list[Effect]:
    """A step cannot be ended any more: the run goes back, as if the stage had lost its last peer."""
    stage = run.members[event.peer].stage
    if run.view is None or stage is None or stage in run.dead or event.epoch != run.view.epoch:
        return []
    if run.conduct.tore(event.peer, event.step):
        return turned_away(run, event.peer, "it sends the run back again and again, for what it says it cannot give")
    run.dead[stage] = f"step {event.step} cannot be ended: {event.reason}"
    return []


def lost_track(run: RunState, event: LostTrack) -> list[Effect]:
    """Who cannot follow its stage starts anew, a few times. Where nobody else has the state, the run goes back."""
    member = run.members[event.peer]
    stage = member.stage
    if run.view is None or stage is None or stage in run.dead or 0 < event.view < member.since:
        return []
    # Whatever it said of its files before: it would be sent back to the same step at once, again and again.
    member.held = {s: [t for t in steps if (s, t) != (stage, member.start)] for s, steps in member.held.items()}
    if run.conduct.lost_track(event.peer):
        reason = f"it cannot keep up with stage {stage}: {event.reason}; its link is too slow for that"
        return turned_away(run, event.peer, reason)
    if run.roster.stayers(stage) == [event.peer]:
        run.dead[stage] = f"stage {stage} has lost its state: peer {short_peer(event.peer)}: {event.reason}"
        return []
    return vacate(run, [event.peer], f"it lost track: {event.reason}", follow=True)
