"""A peer's daemon: it joins, reports, takes views, keeps its disk. Its process can be killed, frozen, started again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.effects import SendOffer
from protocol.events import Event, Stalled, ViewChanged
from protocol.peer_report import PeerReport
from protocol.stage_machine import MISLED
from protocol.view import View
from simulated_swarm.disk import Disk
from simulated_swarm.host import Host
from simulated_swarm.toy_model import ToyState

if TYPE_CHECKING:
    from simulated_swarm.swarm import Swarm

COORDINATOR = "coordinator"
HEARTBEAT_SECONDS = 2.0
DISK_SECONDS = 0.2
MOST_EARLY = 16


class Peer:
    """A machine of one owner. `session` counts its processes."""

    hostile = False

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.swarm, self.name = swarm, name
        self.rng = random.Random(f"peer {name} of {swarm.scenario.seed}")
        self.disk = Disk(swarm.scenario.keep)
        self.slowness = 10.0 if self.rng.random() < swarm.scenario.slow_peers else 1.0
        self.session, self.alive, self.frozen = 0, False, False
        self.view: View | None = None
        self.host: Host | None = None
        self.leaving = self.gone = self.bad = False
        self.ended = ""
        self._admitted = False
        self._queued: list[Callable[[], None]] = []
        self._early: list[Event] = []
        self._next_report = 0.0

    # The process

    def start(self) -> None:
        """Start its process."""
        if self.gone or self.alive:
            return
        self.session, self.alive, self.frozen = self.session + 1, True, False
        self.view = self.host = None
        self._admitted = False
        self._queued.clear()
        self._early.clear()
        self.disk.skipped = self.swarm.coordinator.skipped  # as in the manifest, which it fetches
        self._join()
        self._beat(self.session)

    def kill(self) -> None:
        """End it, at this very moment."""
        self.alive = False
        self._queued.clear()
        self.swarm.coordinator.link_lost(self.name)

    def freeze(self, seconds: float) -> None:
        """Stop it for a while; what comes meanwhile waits."""
        if not self.alive or self.frozen:
            return
        self.frozen = True
        session = self.session
        self.swarm.clock.after(seconds, lambda: self._thaw(session))

    def leave(self) -> None:
        """Its owner wants it back."""
        self.leaving = True
        self.tell(("leave",))

    def come_back(self) -> None:
        """Its owner, who took it away or was turned away with it, is asked for its files; it is mended meanwhile."""
        self.gone = self.leaving = self.bad = False
        self.ended = ""

    def unless_frozen(self, happen: Callable[[], None]) -> Callable[[], None]:
        """`happen`, later if the process is stopped when it is due; never if it has ended."""
        session = self.session

        def now() -> None:
            if not self.alive or self.session != session:
                return
            if self.frozen:
                self._queued.append(now)
            else:
                happen()

        return now

    def _thaw(self, session: int) -> None:
        if session != self.session or not self.alive:
            return
        self.frozen = False
        queued, self._queued = self._queued, []
        for happen in queued:
            happen()

    def _beat(self, session: int) -> None:
        if not self.alive or self.session != session:
            return
        self.swarm.clock.after(1.0, self.unless_frozen(lambda: self._beat(session)))
        if self.host is not None:
            self.host.beat()
        if self.here and self.swarm.clock.now >= self._next_report:
            if not self._admitted:
                self._join()
            elif self.leaving:
                self.tell(("leave",))
            self.report()

    @property
    def here(self) -> bool:
        """Whether its process runs."""
        return self.alive and not self.frozen

    # The coordinator

    def tell(self, message: tuple[object, ...]) -> None:
        """Send the coordinator a message."""
        self.swarm.network.send(self.name, COORDINATOR, message)

    def report(self) -> None:
        """Tell the coordinator how far it is."""
        self._next_report = self.swarm.clock.now + HEARTBEAT_SECONDS
        self.tell(("reports", self.account()))

    def account(self) -> PeerReport:
        """How far it is."""
        host, view = self.host, self.view
        return PeerReport(
            view=0 if view is None else view.number,
            epoch=0 if view is None else view.epoch,
            stage=None if host is None else host.stage,
            applied=None if host is None or host.machine.lacking else host.machine.applied,
            weights="" if host is None or host.machine.lacking else host.weights,
            held=self.disk.held(),
            idle=host is None or host.idle,
            done=0 if host is None else host.done,
            broken=self.swarm.network.broken(self.name) if self.swarm.rng.random() < 0.9 else (),
            microbatch_seconds=2 * statistics.fmean(host.seconds[-20:]) if host is not None and host.seconds else None,
            session=f"{self.name}#{self.session}",
        )  # fmt: skip

    def _join(self) -> None:
        self._next_report = self.swarm.clock.now + HEARTBEAT_SECONDS
        self.tell(("join", self.disk.held(), f"{self.name}#{self.session}", 1.0 / self.slowness))

    # What comes

    def receive(self, sender: str, message: object) -> None:
        """Something came."""
        self.unless_frozen(lambda: self._handle(sender, message))()

    def link_lost(self, other: str) -> None:
        """Nothing to do: reports tell of it."""

    def link_back(self, other: str) -> None:
        """The link to `other` was lost, and is back."""
        if self.host is not None:
            self.unless_frozen(lambda: self.host.feed(Stalled(other)) if self.host else None)()

    def send(self, receiver: str, message: object, size: int = 100) -> None:
        """Send another peer something."""
        if receiver == COORDINATOR:
            return
        self.swarm.network.send(self.name, receiver, message, size)

    def spoils(self) -> bool:
        """Whether it sends garbage this time."""
        if self.bad and self.rng.random() < 0.02:
            self.swarm.counts["garbage sent"] += 1
            return True
        return False

    def handed_out(self, state: ToyState) -> ToyState:
        """What others get for `state`."""
        return state

    def offers(self, offer: SendOffer) -> SendOffer:
        """What others are offered in place of `offer`."""
        return offer

    def _handle(self, sender: str, message: object) -> None:
        if isinstance(message, tuple):
            self._control(message)
        elif self.host is None:
            if len(self._early) < MOST_EARLY:
                self._early.append(message)  # type: ignore[arg-type]
        else:
            newer = getattr(message, "view", 0)
            if self.view is not None and newer > self.view.number:
                self.swarm.counts["of a newer view"] += 1
            self.host.feed(message)  # type: ignore[arg-type]
        del sender

    def _control(self, message: tuple[object, ...]) -> None:
        match message:
            case ("admitted",):
                self._admitted = True
            case ("unknown",):
                self._join()
            case ("view", View() as view):
                self._take(view)
            case ("turned away", str(reason)):
                self.swarm.counts["turned away"] += 1
                self.host = None
                self._admitted = False
                self.ended = self.ended or reason
                self.kill()
            case ("released",) if self.leaving:
                self.swarm.counts["released"] += 1
                self.gone = True
                self.kill()
            case ("end", str(reason)):
                self.ended = reason

    def _take(self, view: View) -> None:
        if not self._admitted or (self.view is not None and view.number <= self.view.number):
            return
        self.view, self.disk.skipped = view, view.skipped
        stage = view.stage_of(self.name)
        if stage is None:
            self.host = None
            return
        place = (view.epoch, stage, view.replica(self.name).start)
        if self.host is None or self.host.place != place:
            former = self.host
            if former is not None:
                self.swarm.counts["places changed"] += 1
            self.host = Host(self, view, place, self._misled(former, place))
        self.host.feed(ViewChanged(view))
        early, self._early = self._early, []
        for event in early:
            self._handle("", event)

    def _misled(self, former: Host | None, place: tuple[int, int, int]) -> int:
        """As `peers.tenure`."""
        misled, guide = (0, "") if former is None else former.machine.misled_until(place[0], place[1])
        self.swarm.counts["starts anew"] += misled > 0
        if guide:
            self.tell(("accuse", guide, MISLED, True))
        return misled

    # The disk

    def write(self, stage: int, step: int, state: ToyState) -> None:
        """Write a file; it is there a moment later, if the process lives so long."""
        seconds = self.rng.uniform(0, DISK_SECONDS)
        skipped = () if self.view is None else self.view.skipped
        self.swarm.clock.after(seconds, self.unless_frozen(lambda: self.disk.write(stage, step, state, skipped)))
