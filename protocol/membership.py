"""Who is in the run and what follows: the coordinator's decisions, pure. The daemon feeds it events and carries out
its effects.

    WAITING --a peer for each stage, and a state that all stages have--> RUNNING --last step everywhere--> ENDED
       ^                                                                   |
       '-- a stage has nobody left who can be counted on ------------------'

WAITING says which stage needs a peer, and becomes RUNNING by itself: by the same view when those who were silent are
heard again, by a view of the next epoch when others take their places (`protocol.waiting`). All else goes by views as
`protocol.view_change` makes them:

    a newcomer    follows the neediest stage; enters by a planned view when its weights are the replicas'
    a loss        acts at once where the stage has others (`protocol.losses`)
    a drain       ends a share by a planned view; the peer may go, or goes elsewhere, when that plan is past
    a stop        is an earlier last step, so that all stages write a checkpoint of one step (`protocol.departure`)

After every event, what follows from the state is decided anew (`_follow`): no decision depends on an event that may
never come. Nothing is decided after ENDED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protocol import admission, blame, departure, losses, meeting, running, waiting
from protocol.conduct import Conduct
from protocol.membership_events import (
    Accused,
    Admit,
    Differs,
    Effect,
    End,
    Event,
    Expelled,
    Failed,
    Heard,
    Irreplaceable,
    Issue,
    JoinAsked,
    LeaveAsked,
    Left,
    LinkBroken,
    LostTrack,
    Notice,
    Release,
    StopAsked,
    Tick,
    TurnAway,
    short_peer,
)
from protocol.peer_report import PeerReport
from protocol.roster import Member
from protocol.run_state import Phase, RunState, Terms
from protocol.stage_cost import StageCost
from protocol.view import View

__all__ = [
    "Accused", "Admit", "Differs", "Effect", "End", "Event", "Expelled", "Failed", "Heard", "Irreplaceable", "Issue",
    "JoinAsked", "LeaveAsked", "Left", "LinkBroken", "LostTrack", "Member", "Membership", "Notice", "PeerReport",
    "Phase", "Release", "StageCost", "StopAsked", "Terms", "Tick", "TurnAway", "short_peer",
]  # fmt: skip

MANY, MANY_SECONDS = 32, 0.25  # what follows takes time in proportion to the members, and they report as often
RESTARTED = "it restarted, and what it had computed since its last checkpoint is gone"


class Membership:
    """The run's members and its newest view.

    Args:
        terms: what holds for the whole run.
        next_view: the first view number that was never used.
        epoch: the same for epochs.
        reached: the newest step that is known to have been applied in earlier lives of the run.
        done: the newest of them that every stage applied.
    """

    def __init__(self, terms: Terms, next_view: int = 1, epoch: int = 0, reached: int = 0, done: int = 0) -> None:
        self._run = RunState(terms, next_view, epoch, reached, done)

    @property
    def phase(self) -> Phase:
        """Where the run is."""
        return self._run.phase

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self._run.view

    @property
    def members(self) -> Mapping[str, Member]:
        """Who was admitted, by peer."""
        return self._run.members

    @property
    def waiting(self) -> tuple[tuple[int, ...], str]:
        """While WAITING: the stages that need a peer or a state, and what is waited for, in words."""
        return self._run.waiting

    @property
    def end(self) -> End | None:
        """How the run ended."""
        return self._run.end

    @property
    def reached(self) -> int:
        """The newest step that was ever applied, as far as known; after going back, the step gone back to."""
        return self._run.reached

    @property
    def newest(self) -> int:
        """The newest step that is believed to be applied somewhere: no one report decides it."""
        return self._run.roster.newest

    @property
    def applied_everywhere(self) -> int:
        """The newest step that every peer that works has applied."""
        return self._run.roster.applied_everywhere

    @property
    def step_seconds(self) -> float:
        """How long a step takes, from when the steps were reported."""
        return self._run.pace.step_seconds

    def deadline(self, peer: str) -> float:
        """Seconds of silence after which the member `peer` is excluded."""
        return self._run.detector.deadline(peer)

    def view_for(self, peer: str) -> View | None:
        """The view to send to `peer`; None if it must not have it: it names a place that `peer` has lost."""
        member, view = self._run.members.get(peer), self._run.view
        if member is None or view is None or (member.stage is None and view.stage_of(peer) is not None):
            return None
        return view

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of `event` at `now` (seconds on any steady clock), in the order to carry them out."""
        run = self._run
        if run.phase is Phase.ENDED:
            return [TurnAway(event.peer, "the run has ended")] if isinstance(event, JoinAsked) else []
        run.progressed += run.detector.passed(now)
        effects = self._take(event, now)
        if isinstance(event, Heard) and not effects and len(run.members) > MANY and now < run.followed + MANY_SECONDS:
            return effects  # soon enough at the next event
        run.followed, run.ticked = now, isinstance(event, Tick)
        return effects + self._follow(now)

    # Events

    def _take(self, event: Event, now: float) -> list[Effect]:
        run = self._run
        if isinstance(event, JoinAsked):
            return self._join(event, now)
        if isinstance(event, StopAsked):
            return departure.stop(run, event)
        if isinstance(event, Tick) or event.peer not in run.members:
            return []
        match event:
            case Heard(peer, report):
                run.detector.heard(peer, now)
                run.members[peer].expected = False
                if report is not None and report.session not in ("", run.members[peer].session):
                    # It was let in again in a life of the coordinator that died before it wrote that down.
                    return losses.gone(run, [peer], RESTARTED)
                return [] if report is None else self._report(peer, report, now)
            case LinkBroken(peer):
                run.detector.link_broken(peer)
                return []
            case Left(peer, reason):
                return losses.gone(run, [peer], reason)
            case Failed():
                return losses.failed(run, event)
            case Expelled(peer, reason):
                return losses.turned_away(run, peer, reason)
            case LeaveAsked(peer):
                run.detector.heard(peer, now)
                return departure.leave(run, peer, now)
            case Differs():
                return blame.differs(run, event, now)
            case Accused():
                return blame.accused(run, event)
            case Irreplaceable():
                return losses.irreplaceable(run, event)
            case LostTrack():
                return losses.lost_track(run, event)

    def _join(self, event: JoinAsked, now: float) -> list[Effect]:
        run, peer = self._run, event.peer
        member = run.members.get(peer)
        barred = run.conduct.begin(peer, event.session, now)
        if barred:  # of one identity only the newest process lives
            return [*(losses.gone(run, [peer], RESTARTED) if member is not None else []), TurnAway(peer, barred)]
        if member is not None and member.session == event.session:
            run.detector.heard(peer, now)
            member.held, member.addresses, member.expected = event.checkpoints, event.addresses, False
            return [Admit(peer)]
        effects: list[Effect] = []
        if member is not None:
            effects = losses.gone(run, [peer], RESTARTED)
        refusal = admission.refusal(run, event)
        if refusal:
            return [*effects, TurnAway(peer, refusal)]
        held, memory = event.checkpoints, event.memory
        run.members[peer] = Member(event.addresses, event.session, held, event.speed, memory, source=event.source)
        run.detector.expect(peer, now)
        run.unsettled = now
        return [*effects, Admit(peer)]

    def _report(self, peer: str, report: PeerReport, now: float) -> list[Effect]:
        run, member = self._run, self._run.members[peer]
        run.detector.worked(peer, now, report.done, report.idle)
        run.detector.complained(peer, report.broken)
        ahead = self._ahead(peer, report.view)
        if report.applied is not None and report.applied > (most := run.roster.most_applied(peer, run.terms.last_step)):
            report = replace(report, applied=most, weights="")
        if not member.take(report, run.view):
            return ahead
        stage, step = member.stage, member.step
        assert stage is not None
        if run.roster.is_replica(peer, step):
            run.agreement.note(stage, step, member.weights, peer)
        elif run.agreement.agrees(stage, step, member.weights) is False:
            return ahead + losses.mistaken(run, peer, step)
        if not run.roster.blind:
            if run.roster.newest > run.reached:
                run.progressed = now
            run.reached = max(run.reached, run.roster.newest)
            run.pace.note(run.roster.newest, now)
        return ahead

    def _ahead(self, peer: str, view: int) -> list[Effect]:
        if view < self._run.next_view:
            return []
        named = f"peer {short_peer(peer)} names view {view}, and the newest here is {self._run.next_view - 1}"
        return self._run.say(
            "ahead", f"{named}: is another coordinator running with this key, or is this folder an old copy?"
        )

    # What follows

    def _follow(self, now: float) -> list[Effect]:
        run = self._run
        if run.phase is Phase.ENDED:
            return []
        effects = [*losses.judge(run, now), *blame.settle(run, now)]
        if not run.stands:
            if run.phase is Phase.WAITING:
                effects += self._wake(now)
            effects += running.steer(run, now)
        if run.end is None and run.stands:
            effects += [*waiting.let_go(run, now), *waiting.wait(run, now)]
        if run.end is None and (run.ticked or any(isinstance(effect, Issue) for effect in effects)):
            effects += meeting.notice(run)
        return effects

    def _wake(self, now: float) -> list[Effect]:
        run = self._run
        run.phase, run.waiting, run.progressed = Phase.RUNNING, ((), ""), now
        return run.say("waiting", "the run goes on: those who were silent are heard again")

    # What is stored

    def to_json(self) -> dict[str, Any]:
        """What a coordinator that is started again must know. To be stored before a view that is in it is sent."""
        run = self._run
        return {
            "next_view": run.next_view,
            "next_epoch": run.next_epoch,
            "reached": run.reached,
            "view": None if run.view is None else run.view.to_json(),
            "members": {peer: member.to_json() for peer, member in run.members.items()},
            "barred": run.conduct.to_json(),
            "quarrels": run.conduct.quarrels.to_json(),
            "stop": None if run.stop is None else [run.stop.reason, run.stop.failed],
            "winding": run.winding,
            "skipped": list(run.skipped),
            "dead": {str(stage): how for stage, how in run.dead.items()},
            "end": None if run.end is None else [run.end.step, run.end.failed, run.end.reason],
        }

    @classmethod
    def from_json(cls, terms: Terms, stored: Mapping[str, Any], now: float, reached: int = 0) -> Membership:
        """The membership of a run that was begun before, from what was stored. Its peers may still be at work.

        A run that had ended, or had no view yet, is resumed from checkpoints.

        Args:
            reached: the newest step of which the coordinator's own record tells; every stage had applied it.
        """
        ended = 0 if stored["end"] is None else int(stored["end"][0])
        newest, done = max(reached, int(stored["reached"])), max(reached, ended)
        found = cls(replace(terms, resume=True), int(stored["next_view"]), int(stored["next_epoch"]), newest, done)
        run = found._run
        run.conduct = Conduct.from_json(stored["barred"], stored.get("quarrels", {}))
        run.skipped = tuple(map(int, stored.get("skipped", ())))
        if stored["view"] is None or stored["end"] is not None:
            return found
        run.roster.view, run.phase = View.from_json(stored["view"]), Phase.RUNNING
        run.stop = None if stored["stop"] is None else StopAsked(*stored["stop"])
        run.stop_issued = run.stop is not None and run.roster.view.last_step < terms.last_step
        run.winding, run.unsettled, run.progressed = str(stored["winding"]), now, now
        run.dead = {int(stage): str(how) for stage, how in stored["dead"].items()}
        run.planned_at = (run.roster.view.first_step, now)
        run.moved_at = run.roster.view.first_step
        for peer, member in stored["members"].items():
            run.roster.members[peer] = Member.from_json(member)
            run.roster.members[peer].expected = True
            run.detector.expect(peer, now, patient=True)
        return found
