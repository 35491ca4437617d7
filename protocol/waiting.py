"""A run that waits: before its first step, or because a stage has nobody left. When and from which step it goes on."""

from __future__ import annotations

from dataclasses import replace

from protocol.assignment import Assignment, Candidate, Shortage, assign
from protocol.detector import CEILING_SECONDS
from protocol.losses import gone
from protocol.membership_events import Effect, Release, short_peer
from protocol.roster import Member
from protocol.run_state import Phase, RunState
from protocol.shares import shares
from protocol.view import Replica, View

SETTLE_SECONDS = 10.0
COPY_SECONDS = 60.0


def wait(run: RunState, now: float) -> list[Effect]:
    """Go on if those who are here can, or say what is missing."""
    if run.phase is Phase.RUNNING:
        run.phase, run.unsettled = Phase.WAITING, now
    # Nobody needs to come to a run that has nothing left to do.
    if run.view is None and run.done >= run.terms.last_step:
        return run.finish(False, f"all {run.terms.last_step} steps were done before")
    if run.stop is not None:
        return run.finish(True, f"{_losses(run)[0]}, while the run was to stop: {run.stop.reason}")
    candidates = _trusted(run, _candidates(run))
    newest = _newest_allowed(run, candidates)
    held = {s for c in candidates for steps in c.held.values() for s in steps if newest is None or s <= newest} - {0}
    found = assign(candidates, run.costs, run.begins, newest)
    if isinstance(found, Shortage):
        return _starve(run, found, now)
    missing = run.terms.wait_for - len(candidates) if run.view is None else 0
    if missing > 0:
        return _say(run, tuple(range(len(run.costs))), f"all stages wait for {missing} more peers")
    best = max(held, default=0)
    behind = tuple(s for s in range(len(run.costs)) if not any(c.has(s, best) for c in candidates))
    if found.step < best and now - run.unsettled < SETTLE_SECONDS:
        names = ", ".join(map(str, behind))
        return _say(run, behind, f"somebody may yet bring the state of stage {names} after step {best}")
    run.progressed = now
    return _go_on(run, found)


def _candidates(run: RunState) -> list[Candidate]:
    present = {p: m for p, m in run.members.items() if not m.away and not m.expected and m.leaving is None}
    rates = {worker.peer: worker.speed for worker in run.roster.resources(run.costs)}
    return [
        Candidate(peer, m.held, m.stage, rates[peer], m.memory, hidden=not m.addresses) for peer, m in present.items()
    ]


def _trusted(run: RunState, candidates: list[Candidate]) -> list[Candidate]:
    """Without the files of those whose files were wrong, unless the run cannot go on so far without them."""
    doubted = run.doubted
    trusted = [replace(c, held={}) if c.peer in doubted else c for c in candidates]
    return candidates if isinstance(assign(trusted, run.costs, run.begins), Shortage) else trusted


def _newest_allowed(run: RunState, candidates: list[Candidate]) -> int | None:
    """The newest step that may be gone back to. A new run takes no notice of files that lie about.

    Files of later steps than were reported are of a future that the run gave up when it went back; or of steps that
    nobody lived to report, while the coordinator was away. So they count where there is nothing else to go on from.
    """
    if run.view is None:
        return None if run.terms.resume else 0
    if not run.reached_known or isinstance(assign(candidates, run.costs, run.begins, run.reached), Shortage):
        return None
    return run.reached


def _starve(run: RunState, shortage: Shortage, now: float) -> list[Effect]:
    silent, lost = _silent(run), _losses(run)
    # Everybody is there who will ever be, so what they lack nobody brings.
    settled = len(run.members) >= max(run.terms.wait_for, 1) and now - run.unsettled >= SETTLE_SECONDS
    if run.view is None and run.terms.end_when_starved and settled:
        return run.finish(True, shortage.reason)
    hopeless = bool(run.dead) or any(run.detector.silence(p, now) > CEILING_SECONDS for p, _ in silent)
    if run.view is not None and run.terms.end_when_starved and lost and hopeless:
        return run.finish(True, lost[0])
    if run.view is None:
        missing = max(run.terms.wait_for, len(run.costs)) - len(run.members)
        more = f"; {missing} more peers are awaited" if missing > 0 else ""
        return _say(run, shortage.stages, shortage.reason + more)
    hopes = [f"or peer {short_peer(p)}, which may yet be heard again" for p, _ in silent]
    stages = tuple(sorted(set(run.roster.starved()) | set(run.dead))) or shortage.stages
    return _say(run, stages, "; ".join([f"the run waits: {shortage.reason}", *[t.split(":")[0] for t in lost], *hopes]))


def _silent(run: RunState) -> list[tuple[str, Member]]:
    return [(peer, m) for peer, m in run.members.items() if m.away and m.stage is not None]


def _losses(run: RunState) -> list[str]:
    """How the stages that stand lost their peers."""
    lost = [run.dead[stage] for stage in sorted(run.dead)]
    lost += [f"stage {m.stage} lost its peer {short_peer(p)}: {m.away}" for p, m in _silent(run)]
    return lost or [f"stage {stage} has nobody to work on its next steps" for stage in run.roster.starved()]


def _say(run: RunState, stages: tuple[int, ...], text: str) -> list[Effect]:
    run.waiting = (stages, text)
    return run.say("waiting", text)


def _go_on(run: RunState, found: Assignment) -> list[Effect]:
    """The first view, or one of the next epoch: all begin from the state after the same step."""
    view = _restored(run, found)
    reason = _why(run, found)
    out = [peer for peer, m in run.members.items() if m.away or m.leaving is not None]
    leavers: list[Effect] = [Release(peer) for peer in out if run.members[peer].leaving is not None]
    for peer in out:
        run.members[peer].unseat()
    gone(run, out, "")
    run.dead.clear()
    run.pace.restart()
    run.agreement.clear_after(found.step)
    run.phase, run.waiting, run.winding, run.paused_at = Phase.RUNNING, ((), ""), "", False
    run.planned_at, run.moved_at = (found.step, run.planned_at[1]), found.step
    run.reached, run.reached_known, run.lost_at = found.step, True, -1
    run.next_epoch = view.epoch + 1
    run.say("waiting", "")
    for member in run.members.values():
        member.unseat()
        member.target = None
    for stage, peers in enumerate(found.stages):
        for peer in peers:
            run.members[peer].seat(stage, run.next_view, found.step, found.step)
    effects = [*run.issue(view, reason), *leavers]
    if found.step >= run.terms.last_step:
        effects += run.finish(False, f"all {run.terms.last_step} steps were done before")
    return effects


def _restored(run: RunState, found: Assignment) -> View:
    stages = []
    for stage, peers in enumerate(found.stages):
        known = {p: m.microbatch_seconds if m.stage == stage else None for p in peers if (m := run.members[p])}
        weights = shares(known)
        stages.append(
            tuple(Replica(p, run.members[p].addresses, weights[p], weights[p], start=found.step) for p in peers)
        )
    first, last = found.step + 1, run.terms.last_step
    restored_hashes = tuple(run.agreement.most(stage, found.step) for stage in range(len(stages)))
    if not any(restored_hashes):
        restored_hashes = ()
    begun = View(run.next_view, first, last, tuple(stages), run.next_epoch, found.step, found.holders)
    return replace(begun, restored_hashes=restored_hashes, skipped=run.skipped)


def _why(run: RunState, found: Assignment) -> str:
    if run.view is None and not found.step:
        return "every stage has a peer"
    if run.view is None:
        return f"every stage has a peer and its state after step {found.step}"
    lost = "; ".join(run.dead[stage] for stage in sorted(run.dead))
    again = f"the run goes on from step {found.step}, the newest that all stages have"
    return f"{lost}; {again}" if lost else again


def let_go(run: RunState, now: float) -> list[Effect]:
    """Release who wants to leave a run that waits, once somebody else has its stage's state, or after a while."""
    effects: list[Effect] = []
    for peer, member in list(run.members.items()):
        if member.leaving is None:
            continue
        newest = max(member.held.get(member.stage, ()), default=0) if member.stage is not None else 0
        others = [m for p, m in run.members.items() if p != peer and not m.away]
        safe = newest == 0 or any(newest in m.held.get(member.stage or 0, ()) for m in others)
        if (safe and newest >= run.reached) or member.stage is None or now > member.leaving:
            effects += [*gone(run, [peer], "its owner stopped it"), Release(peer)]
    return effects
