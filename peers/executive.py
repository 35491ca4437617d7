"""Carries out what the membership decides: stores and sends views, tells peers, keeps the run's numbers.

What must not be forgotten is in the folder before it is acted on, so that a coordinator can die at any line here and
one that returns goes on: a view is stored, then sent; a row is written, then acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from peers.coordinator_messages import Reported, end_message, seen_message, view_message
from peers.floor_meter import Premises
from peers.journal import Journal
from peers.last_net import LastNet
from peers.manifest_chain import ManifestChain
from peers.quota import Quota
from peers.reminder import RunWaits
from peers.run_budget import RunBudget
from peers.run_folder import Memory, RunFolder
from peers.run_record import RunRecord
from peers.run_status import describe_peers
from peers.step_reports import WireTotals
from peers.transport import Transport
from protocol.errors import UserError
from protocol.frame import control
from protocol.manifest import Manifest
from protocol.membership import Membership, Phase
from protocol.membership_events import (
    Admit,
    Effect,
    End,
    Event,
    Heard,
    Issue,
    Notice,
    Release,
    TurnAway,
    short_peer,
)
from protocol.records import VIEW
from protocol.signing import SigningKey
from protocol.view import View

logger = logging.getLogger(__name__)

REMEMBER_SECONDS = 10.0
MOST_RELEASED = 1000
ANSWERS = (10.0, 128, 8)  # seconds; in them to all who are no members, and to one of them
TURNED_AWAY = (60.0, 32)  # the same, of notes on who was turned away
SETTLE_SECONDS = 10.0  # without a new row, after which the end waits for no more reports


class Observer(Protocol):
    """Who shows the run to a person."""

    def waiting(self, present: int, needed: int) -> None:
        """Peers are awaited."""

    def began(self, first_step: int, last_step: int) -> None:
        """All stages have a peer."""

    def row(self, row: dict[str, Any]) -> None:
        """A step is done everywhere."""

    def note(self, text: str) -> None:
        """Something a person should know."""


class Executive:
    """The hands of `membership`, which begins the run with `needed` peers.

    `view` is the newest view that is stored and sent; `ended` is done when all is.
    """

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        key: SigningKey,
        folder: RunFolder,
        observer: Observer,
        membership: Membership,
        needed: int,
        clock: Callable[[], float],
        premises: Premises | None = None,
    ) -> None:
        self.membership, self.notice = membership, ""
        self.view: View | None = None
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.sessions: dict[str, str] = {}
        self.record = RunRecord(folder, manifest, premises)
        self.journal = Journal(folder, observer.note)
        self.net = LastNet(self.journal, self.decide, self._catch_up)
        self.manifests = ManifestChain(folder, manifest, key, self.journal)
        self.budget = RunBudget()
        self._transport, self._key, self._folder, self._observer = transport, key, folder, observer
        self._needed, self._clock = needed, clock
        self._served: dict[str, set[int]] = {}
        self._released: set[str] = set()
        self._unstored: Issue | None = None
        self._storing = True
        self._answers, self._turned_away = Quota(*ANSWERS, clock=clock), Quota(*TURNED_AWAY, clock=clock)
        self._closing: End | None = None
        self._rowed = self._remembered = clock()
        self._waits = RunWaits(clock())

    def take_over(self, membership: Membership, view: View, there: set[str]) -> None:
        """Go on with the run that `view` left, of whose peers those in `there` answer."""
        self.membership, self.view = membership, view
        self._transport.trust((), control_only=membership.members.keys())
        self.record.take_over(view.epoch, view.restored)
        self.sessions = {peer: member.session for peer, member in membership.members.items()}
        self._serve(view)
        text = f"took over at view {view.number}, with the rows up to step {self.record.seen}"
        self.journal.note("takeover", f"{text}: {len(there)} of {len(view.peers())} peers answer")
        self._observer.began(self.record.seen + 1, view.last_step)

    # Decisions

    def decide(self, event: Event) -> None:
        """Let the membership decide what follows from `event`, and do it."""
        before = set(self.membership.members)
        effects = self.membership.handle(event, self._clock())
        for effect in effects:
            self._perform(effect)
        if self.membership.members.keys() != before:
            self._transport.trust((), control_only=self.membership.members.keys())
        told = {effect.peer for effect in effects if isinstance(effect, Release | TurnAway)}
        for peer in before - self.membership.members.keys() - told:
            self._transport.forget(peer)  # or a link to each peer that ever died would be tried for ever
        self.net.sound = True

    def _catch_up(self) -> None:
        """Do what was decided and then lost, since an error came before it was handed out."""
        view, end = self.membership.view, self.membership.end
        issued = self._unstored.view if self._unstored is not None else self.view
        if view is not None and (issued is None or view.number > issued.number):
            self._perform(Issue(view, "decided before an error"))
        if end is not None and self._closing is None:
            self._perform(end)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Admit(peer):
                self._admit(peer)
            case TurnAway(peer, _) if self._closing is not None:  # it came too late, which is no mistake of its owner
                self.tell_stranger(peer, end_message(self._closing))
            case TurnAway(peer, reason):
                self.record.disown(peer)
                if self._turned_away.may(peer):  # whoever is turned away may ask again at once
                    self.journal.note("turned_away", f"turned peer {short_peer(peer)} away: {reason}", peer=peer)
                self.tell_stranger(peer, {"type": "turned_away", "reason": reason})
            case Issue():
                self._unstored = effect
                self._issue()
            case Notice(text):
                self.notice = text
                # While peers are awaited, their number is on the screen already.
                self.journal.note("notice", text, self.view is not None or len(self.membership.members) >= self._needed)
                if self.membership.phase is Phase.WAITING:
                    self._tell_all({"type": "notice", "text": text})
            case Release(peer):
                self.journal.note("released", f"peer {short_peer(peer)} may go", peer=peer)
                self._released = {*self._released, peer} if len(self._released) < MOST_RELEASED else {peer}
                self.tell_stranger(peer, {"type": "released"})
            case End():
                self._closing, self._rowed = effect, self._clock()
                self._settle()

    def _admit(self, peer: str) -> None:
        session = self.membership.members[peer].session
        self._released.discard(peer)
        if self.sessions.get(peer) != session:
            self.sessions[peer] = session
            self.journal.note("join", f"peer {short_peer(peer)} joined", self.view is not None, peer=peer)
        self.tell(peer, {"type": "admitted"})
        if self.membership.phase is Phase.WAITING and self.notice:
            self.tell(peer, {"type": "notice", "text": self.notice})
        self._send_view(peer, 0)

    def _issue(self) -> None:
        """Store the newest view, then send it. A full disk delays it: no number may ever be used twice."""
        if self._unstored is None:
            return
        view, reason = self._unstored.view, self._unstored.reason
        try:
            self.manifests.follow(view)
            self._folder.remember(self._state())
        except (OSError, UserError) as error:
            if self._storing:  # said once
                self.journal.note("failed", f"view {view.number} waits, since it cannot be stored: {error}")
            self._storing = False
            return
        self._storing = True
        self._unstored = None
        self._begin_or_restore(view)
        self.view, self.notice = view, "" if self.membership.phase is Phase.RUNNING else self.notice
        self._serve(view)
        self.journal.note("view", f"view {view.number}: {reason}", number=view.number, epoch=view.epoch)
        for peer in self.membership.members:
            self._send_view(peer, 0)

    def _begin_or_restore(self, view: View) -> None:
        if not self.record.began:
            self.record.begin(view.restored + 1, view.epoch)
            self._observer.began(view.restored + 1, view.last_step)
        elif view.epoch > self.record.epoch:
            self.record.restore(view.restored, view.epoch)
        else:
            return
        self.remember()  # at once: a coordinator that returns must not forget the new rows as well

    def _serve(self, view: View) -> None:
        for stage, replicas in enumerate(view.stages):
            for replica in replicas:
                self._served.setdefault(replica.peer, set()).add(stage)

    # What peers report

    def reported(self, peer: str, reported: Reported) -> None:
        """A member gave its account. It is believed about stages that it was given, and about no others."""
        source = (peer, self.sessions[peer])
        self.record.note(source, reported.wire)
        self.record.tell(peer, reported.figures, self.membership.members[peer].addresses)
        self.budget.note(peer, reported.account.least_seconds)
        self.decide(Heard(peer, reported.account))
        served = self._served.get(peer, ())
        steps = [report for report in reported.counted(self.view) if report.stage in served]
        for row in self.record.add(source, steps, self.membership.applied_everywhere, self.membership.newest):
            self._observer.row(row)
            self._rowed = self._clock()
        self._settle()
        self._answer(peer, reported.account.view)

    def _answer(self, peer: str, view: int) -> None:
        """What was told before may have been lost, so every report is answered with what its sender does not know."""
        if peer not in self.membership.members:
            return  # by this very report
        epoch = self.view.epoch if self.view is not None else 0
        self.tell(peer, seen_message(self.record.seen, epoch, self.budget.of(self.view)))
        self._send_view(peer, view)
        if (end := self.last_word()) is not None:
            self.tell(peer, end)

    def tick(self) -> None:
        """Do what could not be done before."""
        self._issue()
        self.record.write()
        self._settle()
        if (text := self._waits.sign_of_life(self.membership, self._clock())) is not None:
            self._observer.note(text)
        if self._clock() - self._remembered > REMEMBER_SECONDS:
            self.remember()

    def _settle(self) -> None:
        """End when every row is there, or nothing more comes: peers may have steps to report of which we were away."""
        end = self._closing
        if end is None or self.ended.done():
            return
        complete = end.failed or not self.record.began or self.record.done >= end.step
        if complete or self._clock() - self._rowed > SETTLE_SECONDS:
            self.journal.note("end", f"ended after step {end.step}: {end.reason}", show=False, failed=end.failed)
            self.remember()  # a coordinator that returns must not wait for peers that were told to go
            self._tell_all(end_message(end))
            self.ended.set_result(end)

    def conclude(self) -> None:
        """Leave report and memory in the folder."""
        end = self.ended.result() if self.ended.done() else None
        self.record.report(end, self.peers(), self._own)
        if self._folder.exists():
            self.remember()

    # Memory

    def remember(self) -> None:
        """Note members and totals, which change without a view."""
        self._remembered = self._clock()
        try:
            self._folder.remember(self._state())
        except (OSError, UserError) as error:
            logger.error("the coordinator's memory cannot be written: %s; the run goes on", error)

    def _state(self) -> Memory:
        return {"membership": self.membership.to_json(), "wire": self.record.to_json(self._own)}

    @property
    def _own(self) -> WireTotals:
        return WireTotals.of(self._transport.counters)

    def peers(self) -> list[dict[str, Any]]:
        """Who does what, for people."""
        return describe_peers(self.membership.view, self.membership.members)

    # Telling

    def last_word(self) -> dict[str, Any] | None:
        """What there is to say once the run has ended."""
        return end_message(self.ended.result()) if self.ended.done() else None

    def tell(self, peer: str, message: dict[str, Any]) -> None:
        """Send `peer` a control message."""
        self._transport.send(peer, control(message))

    def answer_stranger(self, peer: str) -> None:
        """Something came from one that is no member: what it was told last may have been lost."""
        released = {"type": "released"} if peer in self._released else None
        self.tell_stranger(peer, self.last_word() or released or {"type": "unknown"})

    def tell_stranger(self, peer: str, message: dict[str, Any]) -> None:
        """Send it to one that is no member, and forget it. Not each time: whoever was not answered asks again."""
        if not self._answers.may(peer):
            return
        self.tell(peer, message)
        self._transport.forget(peer)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self.membership.members:
            self.tell(peer, message)

    def _send_view(self, peer: str, known: int) -> None:
        """Send `peer` the newest view that it may have and that is stored, if it is newer than number `known`."""
        view = self.membership.view_for(peer)
        if view is not None and self.view is not None and known < view.number <= self.view.number:
            self.tell(peer, view_message(self._key.sign(VIEW, view.to_json())))
