"""The coordinator's daemon: feeds the membership, stores what must not be forgotten, sends views. It may die."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol import membership_events as membership
from protocol.membership import Membership
from protocol.peer_report import PeerReport, parse_report
from protocol.run_state import Phase, Terms
from protocol.stage_cost import StageCost
from protocol.view import View
from simulated_swarm.peer import COORDINATOR

if TYPE_CHECKING:
    from simulated_swarm.swarm import Swarm

TICK_SECONDS = 1.0
ABSENT_SECONDS = 6.0


class Coordinator:
    """`end` is how the run ended; `notice` is what a person was told last."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm, self.name = swarm, COORDINATOR
        self.session, self.alive = 0, False
        self.end: membership.End | None = None
        self.notice = ""
        self.skipped: tuple[int, ...] = ()  # as the published manifest has them
        self._stored: dict[str, Any] | None = None
        self._reached = 0
        run = swarm.scenario.run
        self._terms = Terms(
            costs=(StageCost(),) * run.stages,
            last_step=swarm.scenario.steps,
            wait_for=sum(swarm.scenario.replicas),
            checkpoint_every=swarm.scenario.checkpoint_every,
            skip_nonfinite=len(run.skipped),
        )
        self._membership = Membership(self._terms)

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self._membership.view

    @property
    def phase(self) -> str:
        """Where the run is."""
        return self._membership.phase.name

    @property
    def waits(self) -> bool:
        """Whether it says that it waits for a peer."""
        return self._membership.phase is Phase.WAITING

    # The process

    def start(self) -> None:
        """Start it, for the first time or from what it stored."""
        if self.alive:
            return
        self.session, self.alive = self.session + 1, True
        if self.session > 1:
            self.swarm.counts["coordinator restarted"] += 1
            self._take_over()
        self._tick(self.session)

    def kill(self) -> None:
        """End it, at this very moment."""
        self.alive = False

    def link_lost(self, other: str) -> None:
        """The link to a peer is broken, as is known a moment later."""
        session, delay = self.session, self.swarm.rng.uniform(0.1, 3)

        def known() -> None:
            if self.alive and self.session == session and self.end is None:
                self._feed(membership.LinkBroken(other))

        self.swarm.clock.after(delay, known)

    def link_back(self, other: str) -> None:
        """Nothing to send again: reports are answered."""
        if self.end is None:
            self._feed(membership.Heard(other))

    def _take_over(self) -> None:
        """As `peers.takeover`: with those who are there, or, if none is, from checkpoints."""
        if self._stored is None:
            self._membership = Membership(self._terms)
            return
        stored = json.loads(json.dumps(self._stored))
        view = View.from_json(stored["view"]) if stored["view"] is not None else None
        nodes, cut = self.swarm.network.nodes, self.swarm.network.is_cut
        peers = [] if view is None else [r.peer for r in view.peers()]
        there = {peer for peer in peers if nodes[peer].alive and not cut(self.name, peer)}
        if not there:
            self.swarm.counts["coordinator found nobody"] += 1
            stored["view"] = None
        self._membership = Membership.from_json(self._terms, stored, self.swarm.clock.now, self._reached)
        for peer in peers:
            if there and peer not in there:
                self.swarm.clock.after(ABSENT_SECONDS, self._gone(peer))

    def _gone(self, peer: str) -> Callable[[], None]:
        session = self.session

        def happen() -> None:
            node = self.swarm.network.nodes[peer]
            there = node.alive and not self.swarm.network.is_cut(self.name, peer)
            if self.alive and self.session == session and self.end is None and not there:
                self._feed(membership.Left(peer, "it was gone when the coordinator returned"))

        return happen

    def _tick(self, session: int) -> None:
        if self.alive and self.session == session and self.end is None:
            self.swarm.clock.after(TICK_SECONDS, lambda: self._tick(session))
            self._feed(membership.Tick())

    # What comes

    def receive(self, sender: str, message: object) -> None:
        """A peer's control message."""
        if not isinstance(message, tuple):
            return
        if message[0] == "join":
            _, held, session, speed = message
            self._feed(membership.JoinAsked(sender, (sender,), held, session, speed))
            return
        if sender not in self._membership.members:
            self._send(sender, ("unknown",))
            return
        match message:
            case ("reports", PeerReport() as report):
                parsed = parse_report(json.loads(json.dumps(report.to_json())), self.swarm.scenario.run.stages)
                self._feed(membership.Heard(sender, parsed))
                self._answer(sender, report)
            case ("leave",):
                self._feed(membership.LeaveAsked(sender))
            case ("not finite", str(reason), int(epoch), int(step)):
                self._feed(membership.Failed(sender, reason, True, epoch, step))
            case ("differs", int(step), dict(hashes)):
                self._feed(membership.Differs(sender, step, hashes))
            case ("failed", str(reason), bool(fatal)):
                self._feed(membership.Failed(sender, reason, fatal))
            case ("accuse", str(accused), str(reason), bool(state)):
                self._feed(membership.Accused(sender, accused, reason, state))
            case ("irreplaceable", int(epoch), int(step), str(reason)):
                self._feed(membership.Irreplaceable(sender, epoch, step, reason))
            case ("lost track", str(reason)):
                self._feed(membership.LostTrack(sender, reason))

    def _answer(self, sender: str, report: PeerReport) -> None:
        view = self._membership.view_for(sender)
        if view is not None and report.view < view.number:
            self._send(sender, ("view", view))

    def _feed(self, event: membership.Event) -> None:
        swarm = self.swarm
        if not isinstance(event, membership.Tick):
            swarm.trace(COORDINATOR, event)
        try:
            effects = self._membership.handle(event, swarm.clock.now)
        except Exception as error:
            swarm.checks.fail(f"the coordinator raised {error!r} at {event}", error)
        for effect in effects:
            swarm.trace(COORDINATOR, effect)
            self._perform(effect)
        self._reached = max(self._reached, self._membership.applied_everywhere)  # as its rows would tell

    def _perform(self, effect: membership.Effect) -> None:
        match effect:
            case membership.Admit(peer):
                self._send(peer, ("admitted",))
                self._send_view(peer)
            case membership.TurnAway(peer, reason):
                self.swarm.checks.turned_away(peer, reason)
                self._send(peer, ("turned away", reason))
            case membership.Issue(view):
                self._issue(view)
            case membership.Notice(text):
                self.swarm.counts["notices"] += 1
                self.notice = text
            case membership.Release(peer):
                self._send(peer, ("released",))
            case membership.End() as end:
                self.end = end

    def _issue(self, view: View) -> None:
        counts = self.swarm.counts
        counts["views"] += 1
        old = None if self._stored is None or self._stored["view"] is None else View.from_json(self._stored["view"])
        if old is not None:
            counts["restores"] += view.epoch > old.epoch
            same = view.epoch == old.epoch
            counts["planned views"] += same and view.first_step > old.first_step
            lost = sum(not r.alive for rs in view.stages for r in rs) - sum(
                not r.alive for rs in old.stages for r in rs
            )
            counts["replicas lost by a view"] += max(0, lost) * same
        learners = sum(r.weight == 0 and r.before == 0 and r.alive for rs in view.stages for r in rs)
        counts["views with learners"] += learners > 0
        self._stored = self._membership.to_json()
        self.skipped = view.skipped
        for peer in list(self._membership.members):
            self._send_view(peer)

    def _send_view(self, peer: str) -> None:
        view = self._membership.view_for(peer)
        if view is not None:
            self._send(peer, ("view", view))

    def _send(self, peer: str, message: tuple[object, ...]) -> None:
        self.swarm.network.send(COORDINATOR, peer, message)
