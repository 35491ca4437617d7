"""A scripted swarm around the coordinator's decisions: peers that join, step, report and fall silent, by a clock that
the test turns. Every view that is issued is checked for what must hold of views.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.membership import (
    Effect,
    End,
    Event,
    Heard,
    Issue,
    JoinAsked,
    Membership,
    PeerReport,
    Phase,
    Release,
    StageCost,
    Terms,
    Tick,
    TurnAway,
)
from protocol.route import routes
from protocol.view import Replica, View


@dataclass
class Peer:
    """One peer as it really is."""

    session: str = "1"
    alive: bool = True
    applied: int | None = None
    epoch: int = -1
    since: tuple[int, int] | None = None  # the entry it serves: stage, start
    done: int = 0
    held: dict[int, list[int]] = field(default_factory=dict)
    seconds: float | None = None
    twisted: str = ""  # appended to its hashes


class Story:
    """`feed` gives events to the membership and checks what comes out."""

    def __init__(
        self, stages: int = 2, last_step: int = 1000, costs: Sequence[StageCost] = (), **terms: object
    ) -> None:
        self.terms = Terms(tuple(costs) or (StageCost(),) * stages, last_step, **terms)  # type: ignore[arg-type]
        self.membership = Membership(self.terms)
        self.now = 0.0
        self.peers: dict[str, Peer] = {}
        self.effects: list[Effect] = []
        self.told: dict[str, tuple[int, int]] = {}  # the newest (epoch, step) that each peer reported
        self.copies = True

    # Events

    def feed(self, *events: Event, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        found: list[Effect] = []
        for event in events:
            ended, before = self.membership.phase is Phase.ENDED, self.membership.view
            if isinstance(event, Heard) and event.report is not None and event.report.applied is not None:
                self._note(event.peer, event.report)
            effects = self.membership.handle(event, self.now)
            if ended:
                assert all(isinstance(effect, TurnAway) for effect in effects)
            self._check(effects, before)
            found += effects
        self.effects += found
        return found

    def _note(self, peer: str, report: PeerReport) -> None:
        assert report.applied is not None
        self.told[peer] = max(self.told.get(peer, (0, 0)), (report.epoch, report.applied))

    def join(self, *names: str, held: Mapping[int, Sequence[int]] | None = None, **more: object) -> list[Effect]:
        found: list[Effect] = []
        for name in names:
            peer = self.peers.setdefault(name, Peer())
            peer.held |= {stage: list(steps) for stage, steps in (held or {}).items()}
            found += self.feed(JoinAsked(name, (f"/{name}",), dict(peer.held), peer.session, **more))  # type: ignore[arg-type]
        return found

    def restart(self, name: str, **more: object) -> list[Effect]:
        old = self.peers[name]
        self.peers[name] = Peer(session=old.session + "1", held=old.held)
        return self.join(name, **more)  # type: ignore[arg-type]

    def kill(self, *names: str) -> None:
        for name in names:
            self.peers[name].alive = False

    def report(self, name: str, **more: object) -> list[Effect]:
        return self.feed(Heard(name, self.account(name, **more)))

    def account(self, name: str, **more: object) -> PeerReport:
        peer, view = self.peers[name], self.membership.view_for(name)
        stage = None if view is None else view.stage_of(name)
        weights = "" if peer.applied is None else f"{stage}-{peer.applied}{peer.twisted}"
        fields: dict[str, object] = {
            "view": view.number if view else 0,
            "epoch": view.epoch if view else 0,
            "stage": stage,
            "applied": peer.applied,
            "weights": weights,
            "held": dict(peer.held),
            "done": peer.done,
            "microbatch_seconds": peer.seconds,
        }
        return PeerReport(**{**fields, **more})  # type: ignore[arg-type]

    # The swarm

    def beat(self, seconds: float) -> list[Effect]:
        """Time passes; everybody who is alive is heard every two seconds."""
        found: list[Effect] = []
        for index in range(round(seconds)):
            found += self.feed(Tick(), seconds=1.0)
            if index % 2:
                self._obey()
                for name in self.members():
                    if self.peers[name].alive:
                        found += self.report(name)
        return found

    def steps(self, count: int, seconds: float = 0.5) -> list[Effect]:
        """Steps are done, as far as the living can; each takes `seconds`."""
        found: list[Effect] = []
        for _ in range(count):
            self._obey()
            self._step()
            found += self.feed(Tick(), seconds=seconds)
            for name in self.members():
                if self.peers[name].alive:
                    found += self.report(name)
        return found

    def members(self) -> list[str]:
        return [name for name in self.membership.members if name in self.peers]

    def seats(self) -> dict[int, list[str]]:
        view = self.membership.view
        assert view is not None
        return {s: [r.peer for r in replicas if r.alive] for s, replicas in enumerate(view.stages)}

    def shares(self, stage: int) -> dict[str, float]:
        view = self.membership.view
        assert view is not None
        return {r.peer: r.weight for r in view.stages[stage] if r.alive}

    def _obey(self) -> None:
        for name, peer in self.peers.items():
            view = self.membership.view_for(name)
            stage = None if view is None else view.stage_of(name)
            if view is None or stage is None or not peer.alive:
                continue
            entry = (stage, view.replica(name).start)
            if peer.epoch != view.epoch:
                peer.epoch, peer.since = view.epoch, entry
                peer.applied = view.restored if entry[1] == view.restored else None
            elif peer.since != entry:
                peer.since, peer.applied = entry, None

    def _step(self) -> None:
        view = self.membership.view
        if view is None or self.membership.phase is not Phase.RUNNING:
            return
        workers = [r.peer for r in view.peers() if r.weight > 0 or r.before > 0]
        applied = [self.peers[name].applied or 0 for name in workers]
        step = min(applied) + 1
        group = [p for s in range(len(view.stages)) for p in view.group(s, step)]
        if step > view.last_step or not all(self.peers[p].alive for p in group):
            return
        for r in view.peers():
            peer, stage = self.peers[r.peer], view.stage_of(r.peer)
            if peer.alive and (peer.applied == step - 1 or (peer.applied is None and r.start <= step)):
                peer.applied, peer.done = step, peer.done + 1
                if step % self.terms.checkpoint_every == 0 or step == view.last_step:
                    self._checkpoint(stage, step, r.peer)

    def _checkpoint(self, stage: int | None, step: int, name: str) -> None:
        assert stage is not None
        for other, peer in self.peers.items():
            if other == name or (self.copies and peer.alive):
                peer.held[stage] = [*peer.held.get(stage, []), step]

    def reload(self) -> None:
        """The coordinator dies and comes back with what it stored."""
        stored = json.loads(json.dumps(self.membership.to_json()))
        self.membership = Membership.from_json(self.terms, stored, self.now)

    # What was said

    def issued(self, effects: Iterable[Effect] | None = None) -> list[View]:
        return [e.view for e in (self.effects if effects is None else effects) if isinstance(e, Issue)]

    @property
    def end(self) -> End | None:
        return self.membership.end

    # What must hold

    def _check(self, effects: Sequence[Effect], before: View | None) -> None:
        for effect in effects:
            if isinstance(effect, Issue):
                assert effect.reason
                self._check_view(effect.view, before)
                before = effect.view
            if isinstance(effect, Release | TurnAway) and self.end is None:
                assert effect.peer not in self.membership.members
        if self.membership.phase is Phase.WAITING:
            stages, text = self.membership.waiting
            assert stages and "stage" in text

    def _check_view(self, view: View, before: View | None) -> None:
        assert View.from_json(json.loads(json.dumps(view.to_json()))) == view
        living = [r.peer for r in view.peers()]
        assert len(living) == len(set(living)), "one living entry a peer"
        for stage, replicas in enumerate(view.stages):
            assert any(r.alive and r.weight > 0 for r in replicas), f"stage {stage} has nobody"
            assert set(routes(view, stage, view.first_step, 8)) <= set(living)
        if before is None:
            return
        assert view.number == before.number + 1
        assert view.epoch in (before.epoch, before.epoch + 1)
        if view.epoch == before.epoch:
            self._check_step_on(view, before)

    def _check_step_on(self, view: View, before: View) -> None:
        new = {r.peer: r for r in view.peers()}
        old = {r.peer: r for r in before.peers()}
        if view.first_step == before.first_step:
            anew = {r.peer for replicas in view.stages for r in replicas if r.lost == view.number}
            for peer in (new.keys() & old.keys()) - anew:
                assert _share(new[peer]) == _share(old[peer]), "only a plan changes the shares of the living"
            return
        assert view.first_step > before.first_step
        for peer, replica in old.items():
            works = (replica.weight > 0 or replica.before > 0) and peer in new
            if works:
                epoch, step = self.told.get(peer, (0, 0))
                assert max((epoch, step), (before.epoch, before.restored)) >= (before.epoch, before.first_step - 1), (
                    "the previous plan is not past"
                )
                assert new[peer].before == replica.weight


def _share(replica: Replica) -> tuple[float, float]:
    return replica.weight, replica.before
