"""How peers go and how a run stops: drained where others stay, by a common last step where nobody would."""

from __future__ import annotations

from protocol.losses import gone
from protocol.membership_events import Effect, Release, StopAsked, short_peer
from protocol.placement import substitute
from protocol.run_state import Phase, RunState
from protocol.view_change import with_last_step
from protocol.waiting import COPY_SECONDS

SHORTEST_LEAVE_SECONDS, LONGEST_LEAVE_SECONDS = 30.0, 120.0
LEAVE_STEPS = 5


def leave(run: RunState, peer: str, now: float) -> list[Effect]:
    """The owner of `peer` wants it back: at once where it does no work, else when its share has ended."""
    member = run.members[peer]
    works = any(r.peer == peer for r, _ in run.roster.workers(member.stage)) if member.stage is not None else False
    if run.view is None or not works:
        return [*gone(run, [peer], "its owner stopped it"), Release(peer)]
    if member.leaving is None:
        steps = LEAVE_STEPS * run.pace.step_seconds
        member.leaving = now + min(max(SHORTEST_LEAVE_SECONDS, steps), LONGEST_LEAVE_SECONDS)
        return run.say(peer, f"peer {short_peer(peer)} of stage {member.stage} wants to leave")
    return []


def stop(run: RunState, asked: StopAsked) -> list[Effect]:
    """The run is to stop: at once if it waits, else it is wound down as soon as it is known how far it is."""
    if run.phase is Phase.WAITING:
        return run.finish(asked.failed, asked.reason)
    run.stop = run.stop or asked
    return []


def wind_down(run: RunState) -> list[Effect]:
    """All stages stop after the same step, a few steps from now."""
    if run.stop is None or run.stop_issued:
        return []
    run.stop_issued = True
    return _earlier_end(run, run.stop.reason)


def _earlier_end(run: RunState, reason: str) -> list[Effect]:
    # The view must reach every peer before any passes its last step, or stages would stop at different steps.
    assert run.view is not None
    last = run.margin_step
    return [] if last >= run.view.last_step else run.issue(with_last_step(run.view, last), reason)


def overrun(run: RunState) -> list[Effect]:
    """Somebody passed the last step before it knew of it: a later one for all."""
    assert run.view is not None
    if run.roster.newest <= run.view.last_step or run.view.last_step >= run.terms.last_step:
        return []
    last = min(run.margin_step, run.terms.last_step)
    passed = f"step {run.roster.newest} was begun before the view that stops at {run.view.last_step} had come"
    return run.issue(with_last_step(run.view, last), passed)


def arrived(run: RunState, now: float) -> list[Effect]:
    """Everybody has applied the view's last step."""
    assert run.view is not None
    if run.view.last_step >= run.terms.last_step:
        return run.finish(False, "all steps are done")
    if run.stop is not None:
        return run.finish(run.stop.failed, run.stop.reason)
    if not run.winding:
        return run.issue(with_last_step(run.view, run.terms.last_step), f"the run goes on to {run.terms.last_step}")
    if run.terms.end_when_starved:
        return run.finish(True, run.winding)
    run.paused_at = True
    for member in run.members.values():
        member.leaving = None if member.leaving is None else now + COPY_SECONDS
    return []


def part(run: RunState, now: float) -> list[Effect]:
    """What becomes of those who want to leave. Where others stay, the next plan drains them."""
    effects: list[Effect] = []
    for peer, member in list(run.members.items()):
        if member.leaving is None or member.stage is None:
            continue
        if set(run.roster.stayers(member.stage)) - {peer}:
            if now > member.leaving:
                effects += [*gone(run, [peer], "it wanted to leave, and had waited long enough"), Release(peer)]
        elif not run.winding and (now > member.leaving or not _somebody_comes(run, member.stage)):
            run.winding = f"peer {short_peer(peer)}, the last of stage {member.stage}, was stopped by its owner"
            effects += _earlier_end(run, run.winding)
    return effects


def _somebody_comes(run: RunState, stage: int) -> bool:
    """Whether a peer is on its way to `stage`; if none is, the most dispensable one is sent there."""
    follows = any(m.leaving is None and not m.away for _, m in run.roster.learners(stage))
    if follows or any(m.target == stage for m in run.members.values()):
        return True
    worker = substitute(run.costs, run.roster.resources(run.costs), stage)
    if worker is not None:
        run.members[worker.peer].target = stage
    return worker is not None
