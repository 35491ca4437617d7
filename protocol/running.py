"""A run that goes on: newcomers follow and enter, shares change, who drained goes, the last step is reached."""

from __future__ import annotations

from protocol import departure, losses, meeting, standstill
from protocol.membership_events import Effect, Release, short_peer
from protocol.run_state import RunState
from protocol.steering import Calm, next_learner, next_plan
from protocol.view_change import drained, planned, with_learner, without


def steer(run: RunState, now: float) -> list[Effect]:
    """What a run that goes on needs now."""
    assert run.view is not None
    if run.roster.blind:
        return []
    stood = standstill.resolve(run, now)
    if stood:
        return stood
    late = departure.overrun(run)
    if not late and run.roster.applied_everywhere >= run.view.last_step:
        return departure.arrived(run, now)
    effects = [*departure.wind_down(run), *late, *_retire(run)]
    if run.stop is not None or run.winding:
        return effects
    effects += [*_seat(run, now), *departure.part(run, now)]
    return effects + (_plan(run, now) if run.roster.past and not run.stands else [])


def _retire(run: RunState) -> list[Effect]:
    """Those whose share has ended go, or become learners elsewhere."""
    assert run.view is not None
    out = [peer for peer in drained(run.view) if peer in run.members] if run.roster.past else []
    for peer, member in run.members.items():
        if member.target is not None and member.stage is not None and peer not in drained(run.view):
            alone = not run.roster.stayers(member.stage)
            member.target = None if alone else member.target
    if not out:
        return []
    reason = ", ".join(f"the share of peer {short_peer(peer)} has ended" for peer in out)
    effects = run.issue(without(run.view, out, past=True), reason)
    for peer in out:
        run.members[peer].unseat()
        if run.members[peer].leaving is not None:
            effects += [*losses.gone(run, [peer], "its owner stopped it"), Release(peer)]
    return effects


def _seat(run: RunState, now: float) -> list[Effect]:
    """Who has no place follows the stage that needs it most: all by one view, and few such views a second.

    Each view goes to all members and is acted on by all, so whoever joins again and again must not set its pace.
    """
    start = run.margin_step
    seated: list[str] = []

    def apart(peer: str) -> set[str]:
        return {*run.conduct.quarrels.apart(peer), *meeting.beside(run, peer)}

    while (found := next_learner(run.roster, run.costs, start, apart)) is not None:
        if not seated and run.seatings.take(now) > 0:
            return []
        assert run.view is not None
        peer, stage = found
        run.members[peer].seat(stage, run.next_view, start)
        run.roster.view = with_learner(run.view, stage, peer, run.members[peer].addresses, start)
        seated.append(f"peer {short_peer(peer)} follows stage {stage}, which needs it most")
    return run.issue(run.view, "; ".join(seated)) if seated and run.view is not None else []


def _plan(run: RunState, now: float) -> list[Effect]:
    assert run.view is not None
    newest = run.roster.newest
    calm = Calm(newest - run.planned_at[0], newest - run.moved_at, now - run.planned_at[1] if run.ticked else 0.0)
    plan = next_plan(run.roster, run.costs, run.agreement, run.pace.margin, calm)
    if plan is None:
        return []
    run.planned_at = (plan.first_step, now)
    if plan.move is not None:
        run.members[plan.move.peer].target = plan.move.stage
        run.moved_at = plan.first_step
    for peer in plan.entering:
        run.conduct.caught_up(peer)
    return run.issue(planned(run.view, plan.first_step, plan.weights), plan.reason)
