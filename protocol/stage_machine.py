"""The step protocol at one peer: events in, effects out. No I/O, no clock, no tensors; payloads are opaque.

Rules
  1. One compute action runs at a time.
  2. Everything follows from the newest view by pure functions: routes, groups, holders (`protocol.place`).
  3. When every microbatch routed here is done, the step is reduced and applied (`protocol.replication`); then the next
     one starts. Nobody is asked.
  4. Messages are sent at least once and take effect once, by (step, microbatch, direction); blobs are named by what is
     in them. What was sent is kept until all replicas of the neighbour have applied its step (`protocol.step_flow`).
  5. Who misses something asks for it: after a stall, after a view, when a link is back. A forward that comes again for
     a finished microbatch means that its gradient was lost: the gradient is sent again.
  6. What carries an older view is refused with the reason, and its sender told the newest. What carries a newer one
     waits for that view, within bounds (`protocol.early`).
  7. A newcomer begins by fetching a state (`protocol.state_transfer`), then applies the totals of the others, until a
     view gives it a share.

    [ no view ] --view--> [ lacks its state ] --LOAD--> [ step t ] --APPLY done, t = last_step--> [ finished ]
          |                                              ^      |
          +------------- view, has its state ------------+      |
                                                         +------+ APPLY done, t < last_step
"""

from __future__ import annotations

from protocol.blob import BlobKind
from protocol.early import AHEAD_STEPS, EarlyEvents
from protocol.effects import Accuse, Compute, Effect, Refuse, SendChunk, StepApplied
from protocol.events import (
    Arrived,
    BlobGone,
    BlobWanted,
    ChunkArrived,
    ChunkAsked,
    Computed,
    CreditsChanged,
    Event,
    Offered,
    Spoiled,
    Stalled,
    StateFound,
    Taken,
    Used,
    ViewChanged,
    Wanted,
)
from protocol.exchange import Exchange
from protocol.place import Place, Rules
from protocol.replication import Replication
from protocol.state_transfer import StateTransfer
from protocol.step_flow import StepFlow
from protocol.view import View
from protocol.work import Verb

MISLED = "what it handed out led to other weights than the replicas'"


class StageMachine:
    """The protocol state of `peer`, which has applied `applied` steps, or is to fetch the state after them."""

    def __init__(self, peer: str, rules: Rules, applied: int = 0, lacking: bool = False, misled: int = 0) -> None:
        self._place = Place(peer, rules, applied, misled=misled)
        self._exchange = Exchange()
        self._flow = StepFlow(self._place)
        self._replication = Replication(self._place, self._exchange)
        self._states = StateTransfer(self._place, self._exchange, lacking)
        self._early = EarlyEvents()
        self._running: Compute | None = None
        self._void = False
        self._accused: set[str] = set()

    @property
    def peer(self) -> str:
        """Whose machine it is."""
        return self._place.peer

    @property
    def applied(self) -> int:
        """The newest step that is applied here."""
        return self._place.applied

    @property
    def stage(self) -> int:
        """The stage; -1 before the first view."""
        return self._place.stage

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self._place.view

    @property
    def lacking(self) -> bool:
        """Whether it has no state yet."""
        return self._states.lacking

    def misled_until(self, epoch: int, stage: int) -> tuple[int, str]:
        """How often it was misled (`protocol.place`), now that a view of `epoch` gives it another place at `stage`.

        And who alone had handed out what it followed; "": several, or it was not misled this time.
        """
        return (0, "") if self.view is None or self.lacking else self._place.misled_until(epoch, stage)

    @property
    def finished(self) -> bool:
        """Whether the newest view asks for no further step."""
        return self.view is not None and not self.lacking and self.applied >= self.view.last_step

    @property
    def most_in_flight(self) -> int:
        """Of the step under way: the most microbatches whose activations were kept at a time."""
        return self._flow.most_in_flight

    @property
    def kept(self) -> dict[str, int]:
        """How much is kept, for those who watch that it stays bounded."""
        return {"tensors": len(self._flow), "blobs": len(self._exchange), "early": len(self._early)}

    def handle(self, event: Event) -> list[Effect]:
        """The effects of `event`, in order."""
        effects = self._handle(event)
        effects += self._start_work()
        return effects

    def waits_for(self) -> str:
        """What the machine is waiting for, for people; a change of the text is progress. `nothing`: it is at work."""
        if self.view is None:
            return "a view"
        if self._running is not None or self.finished:
            return "nothing"
        if self.lacking:
            here, total = self._exchange.progress(self._states.key)
            return f"the state of stage {self.stage} after step {self.applied} ({here} of {total or '?'} chunks)"
        return self._flow.waits_for() or self._replication.waits_for() or "nothing"

    # Events

    def _handle(self, event: Event) -> list[Effect]:
        match event:
            case Arrived() | Offered() | Wanted() | Used() | BlobWanted():
                return self._of_view(event)
            case BlobGone():
                return self._replication.gone(event) + self._states.gone(event) if self.view else []
            case ChunkAsked(peer, blob, index):
                return self._give_chunk(peer, blob, index)
            case ChunkArrived():
                return self._chunk_arrived(event)
            case Taken(peer, blob):
                self._exchange.taken(blob, peer)
                return []
            case StateFound():
                return self._states.found(event)
            case Computed():
                return self._computed(event)
            case Spoiled():
                return self._spoiled(event)
            case ViewChanged(view):
                return self._view_changed(view)
            case CreditsChanged(credits):
                self._flow.credits_changed(credits)
                return []
            case Stalled(peer):
                return self._stalled(peer)

    def _view_changed(self, view: View) -> list[Effect]:
        if self.view is not None and view.number <= self.view.number:
            return []
        stage = view.stage_of(self.peer)
        if stage is None or self.stage not in (-1, stage):
            return [Refuse("coordinator", f"view {view.number} has {stage} as this peer's stage, not {self.stage}")]
        begins = self.view is None and view.epoch == 0  # nobody can have sent anything yet
        self._place.view, self._place.stage = view, stage
        self._accused.clear()
        if self._flow.state is None:
            self._begin_step()
        elif self._running is None or self._running.action.verb is not Verb.APPLY:
            self._void |= self._flow.reroute(None if self._running is None else self._running.action)
        effects: list[Effect] = [*self._exchange.keep_peers(replica.peer for replica in view.peers())]
        if not self.lacking:
            effects += self._replication.view_changed()
            effects += [] if begins else [*self._flow.wants(), *self._flow.again_unused()]
        return effects + self._states.view_changed() + self._replay_early()

    def _of_view(self, event: Arrived | Offered | Wanted | Used | BlobWanted) -> list[Effect]:
        if self.view is None or event.view > self.view.number:
            return self._hold(event)
        if event.view < self.view.number:
            return [Refuse(event.peer, f"view {event.view} is over, the newest is {self.view.number}", stale=True)]
        if self.view.stage_of(event.peer) is None:
            return [Refuse(event.peer, f"it is not in view {event.view}")]
        match event:
            case Arrived():
                return self._hold(event) if self._is_early(event.step) else self._flow.arrived(event)
            case Wanted():
                return self._flow.answer(event)
            case Used():
                return self._flow.used(event)
            case Offered() if event.offer.key.kind is BlobKind.STATE:
                return self._states.offered(event)
            case Offered():
                part = event.offer.key.kind is BlobKind.PART
                early = part and self._is_early(event.offer.key.step)
                return self._hold(event) if early else self._replication.offered(event)
            case BlobWanted():
                state = event.key.kind is BlobKind.STATE
                return self._states.wanted(event) if state else self._replication.wanted(event)

    def _is_early(self, step: int) -> bool:
        return (self._flow.state is None and step > self.applied) or step > self.applied + 1

    def _chunk_arrived(self, event: ChunkArrived) -> list[Effect]:
        arrival = self._exchange.arrived(event.peer, event.blob, event.index, event.data)
        effects: list[Effect] = [*arrival.asks]
        if arrival.hopeless and arrival.of is not None:
            effects.append(Accuse(event.peer, arrival.wrong, state=arrival.of.kind is BlobKind.STATE))
        elif arrival.wrong:
            effects.append(Refuse(event.peer, arrival.wrong))
        if arrival.blob is not None and arrival.blob.key.kind is BlobKind.STATE:
            effects += self._states.arrived(arrival.blob, arrival.donors)
        elif arrival.blob is not None:
            self._replication.arrived(arrival.blob, arrival.donors[0])
        return effects

    def _give_chunk(self, peer: str, blob: bytes, index: int) -> list[Effect]:
        if self.view is None or self.view.stage_of(peer) is None:
            return [Refuse(peer, "it is not in the newest view")]
        data = self._exchange.chunk(blob, index)
        if data is None:
            return [Refuse(peer, f"chunk {index} of blob {blob.hex()[:8]} is not here")]
        return [SendChunk(peer, blob, index, data)]

    def _computed(self, event: Computed) -> list[Effect]:
        void, self._void, self._running = self._void, False, None
        match event.action.verb:
            case Verb.FORWARD | Verb.BACKWARD if void:
                self._flow.void(event.action)
                return []
            case Verb.FORWARD | Verb.BACKWARD:
                return self._flow.computed(event.action, event.payload)
            case Verb.PART:
                return [] if void else self._replication.part_made(event.payload)
            case Verb.STATE:
                return self._states.made(event.payload)
            case Verb.LOAD:
                return self._loaded(event.payload)
            case Verb.APPLY:
                return self._step_applied(event)
            case _:
                return []

    def _loaded(self, weights: str) -> list[Effect]:
        effects = self._states.loaded(weights)
        if not self.lacking:
            self._begin_step()
            effects += self._replay_early() + self._replication.wants()
        return effects

    def _step_applied(self, event: Computed) -> list[Effect]:
        self._place.applied += 1
        most_in_flight = self._flow.most_in_flight
        self._flow.end()
        effects = self._replication.applied(event.payload)
        self._states.applied()
        self._begin_step()
        return [StepApplied(self.applied, self.finished, most_in_flight), *effects, *self._replay_early()]

    def _spoiled(self, event: Spoiled) -> list[Effect]:
        void, self._void, self._running = self._void, False, None
        effects: list[Effect] = []
        match event.action.verb:
            case Verb.APPLY:
                effects += self._replication.spoiled()
                self._flow.reroute(None)  # by a view that came while it ran
                effects += self._flow.wants()
            case Verb.LOAD:
                self._states.spoiled()
            case Verb.FORWARD | Verb.BACKWARD if not void:
                self._flow.spoiled(event.action)
        if event.peer in self._accused:
            return effects
        self._accused.add(event.peer)
        return [Accuse(event.peer, event.reason), *effects]

    def _stalled(self, peer: str | None) -> list[Effect]:
        if self.view is None:
            return []
        asks = self._exchange.again() if peer is None else self._exchange.link_back(peer)
        if peer is None and self._place.misled and self.peer not in self._place.group(self.applied + 1):
            self._place.misled += 1  # who gives nothing is no guide
        effects: list[Effect] = [*asks, *self._states.wants()]
        if self.lacking:
            return effects
        effects += self._flow.wants(peer)
        effects += self._flow.again_unused() if peer is None else self._flow.again(peer)
        return effects + self._replication.wants()

    # Parts

    def _begin_step(self) -> None:
        if not self.lacking and not self.finished:
            self._flow.begin()

    def _start_work(self) -> list[Effect]:
        if self._running is not None or self.view is None:
            return []
        remarks: list[Effect] = []
        compute = self._states.next_compute() or self._next_of_step(remarks)
        self._running = compute
        return remarks if compute is None else [*remarks, compute]

    def _next_of_step(self, remarks: list[Effect]) -> Compute | None:
        if self.finished or self._flow.state is None:
            return None
        compute = self._flow.next_compute()
        if compute is None and self._flow.state.complete:
            compute = self._replication.next_compute(remarks, not self._flow.unused())
        return compute

    def _hold(self, event: Arrived | Offered | Wanted | Used | BlobWanted) -> list[Effect]:
        step = event.step if isinstance(event, Arrived) else self.applied
        if self._place.ahead(step) > AHEAD_STEPS:
            return [Refuse(event.peer, f"step {step} is too early here: {self.applied} steps are applied")]
        per_sender = sum(map(self._place.rules.microbatches, (self.applied + 1, self.applied + 2)))
        known = None if self.view is None else frozenset(replica.peer for replica in self.view.peers())
        refusal = self._early.hold(event, per_sender, known)
        return [] if refusal is None else [Refuse(event.peer, refusal)]

    def _replay_early(self) -> list[Effect]:
        return [effect for event in self._early.release() for effect in self._of_view(event)]
