"""States that change hands: to a newcomer, which begins from one; to holders, which keep it in their files. Pure.

    newcomer    want --> offers of the stage's replicas --> chunks --> LOAD --> follows the totals
    holder      offer at a checkpoint's step --> chunks --> KeepState
    after a loss of all replicas: the same, and the holders find the state in their files

A newcomer's view names the step, which nobody has applied yet, so all replicas keep the same bytes and each is a donor.
"""

from __future__ import annotations

from protocol.blob import Blob, BlobKey, BlobKind
from protocol.effects import (
    Accuse,
    Compute,
    Effect,
    FindState,
    KeepState,
    LostTrack,
    Ready,
    Refuse,
    SendGone,
    SendOffer,
    SendTaken,
    WantBlob,
)
from protocol.events import BlobGone, BlobWanted, Offered, StateFound
from protocol.exchange import Exchange
from protocol.place import Place
from protocol.work import LOAD, STATE


class StateTransfer:
    """The states that one peer gives, takes and keeps. `lacking`: it has no state of its own stage yet."""

    def __init__(self, place: Place, exchange: Exchange, lacking: bool) -> None:
        self._place, self._exchange = place, exchange
        self.lacking = lacking
        self._blob: Blob | None = None
        self._donors: tuple[str, ...] = ()
        self._wrong: set[str] = set()  # who handed out a state that it is not
        self._due: set[str] = set()
        self._kept: set[BlobKey] = set()
        self._gone: set[str] = set()
        self._looking: dict[BlobKey, set[str]] = {}

    @property
    def key(self) -> BlobKey:
        """This stage's state after the newest applied step."""
        return BlobKey(BlobKind.STATE, self._place.stage, self._place.applied)

    # Work

    def next_compute(self) -> Compute | None:
        """Load what has come, or hand out what is due."""
        if self.lacking:
            return None if self._blob is None else Compute(self._place.applied, LOAD, self._blob)
        return Compute(self._place.applied, STATE) if self._due else None

    def applied(self) -> None:
        """A step is applied: whoever is to have the state after it?"""
        place = self._place
        self._due = {*place.newcomers(place.applied), *place.holders(place.stage, place.applied)}

    def made(self, blob: Blob) -> list[Effect]:
        """The state is there to be handed out."""
        audience = self._due & {replica.peer for replica in self._place.newest.peers()}
        self._due = set()
        self._exchange.forget(lambda key: key.kind is BlobKind.STATE and self._is_unwanted(key))
        self._exchange.shelve(blob, audience)
        return self._offer(blob, audience)

    def loaded(self, weights: str) -> list[Effect]:
        """The state that was fetched is loaded; `weights` is the hash of what was loaded."""
        assert self._blob is not None
        claimed, self._blob = self._blob.offer.meta.weights, None
        right = self._right(self.key) or claimed
        if weights != right:
            reason = f"the state of step {self._place.applied} has weights {weights}, expected were {right}"
            return [*(effect for donor in self._donors for effect in self._is_wrong(donor, reason)), *self.wants()]
        self.lacking = False
        self._kept.add(self.key)
        return [Ready(self._place.applied, weights)]

    def _right(self, key: BlobKey) -> str:
        """The hash that its weights must have, as the coordinator knows it; "": it does not."""
        return self._place.newest.hash_of(key.stage, key.step)

    def _is_wrong(self, donor: str, reason: str) -> list[Effect]:
        """`donor` is not asked for this state again."""
        known = donor in self._wrong
        self._wrong.add(donor)
        return [] if known else [Accuse(donor, reason, state=True)]

    def spoiled(self) -> None:
        """What was fetched cannot be loaded; it is asked for again after a stall."""
        self._blob = None

    def view_changed(self) -> list[Effect]:
        """Who is there has changed."""
        self._gone.clear()
        if self.lacking:
            return self.wants()
        shelved = self._exchange.shelved(self.key)
        newcomers = set(self._place.newcomers(self._place.applied))
        if shelved is None:
            self._due |= newcomers
            return []
        self._exchange.shelve(shelved, newcomers)
        return self._offer(shelved, newcomers)

    # Events

    def offered(self, event: Offered) -> list[Effect]:
        """Somebody has a state."""
        place, offer = self._place, event.offer
        key = offer.key
        if key in self._kept:
            return [SendTaken(event.peer, offer.id)]
        own = self.lacking and key == self.key
        kept = place.stage != key.stage <= place.last_stage and place.peer in place.holders(key.stage, key.step)
        if not own and not kept:
            return [Refuse(event.peer, f"this peer neither lacks nor keeps the {key.kind} of {key.stage}, {key.step}")]
        # Anybody else could fill the disk with states of steps to come, for which the good copies would be dropped.
        serves = place.newest.stage_of(event.peer) == key.stage
        if not serves and not (own and event.peer in place.sources(key.step)):
            return [Refuse(event.peer, f"expected the state of {key.stage}, {key.step} from who serves that stage")]
        if offer.size != place.rules.blob_bytes(key):
            return [Refuse(event.peer, f"expected a state of {place.rules.blob_bytes(key)} bytes, got {offer.size}")]
        if own and place.misled and event.peer not in place.sources(key.step):
            return []  # from one at a time
        if own and event.peer in self._wrong:
            return [Refuse(event.peer, f"expected another state than it had handed out of {key.stage}, {key.step}")]
        right = self._right(key)
        if own and right and offer.meta.weights != right:
            reason = f"expected the state of {key.stage}, {key.step} with weights {right}, got {offer.meta.weights}"
            asks = self._exchange.refused(event.peer, key)
            return [*asks, Refuse(event.peer, reason), *self._is_wrong(event.peer, reason), *self.wants()]
        if own and self._blob is not None:
            return [SendTaken(event.peer, offer.id)]
        if kept:  # those who had an older one have given it up too
            self._exchange.abandon(lambda k: k.kind is BlobKind.STATE and k.stage == key.stage and k.step < key.step)
        return [*self._exchange.fetch(offer, event.peer)]

    def arrived(self, blob: Blob, donors: tuple[str, ...]) -> list[Effect]:
        """A state is here."""
        taken: list[Effect] = [SendTaken(donor, blob.offer.id) for donor in donors]
        self._exchange.abandon(lambda key: key == blob.key)
        if self.lacking and blob.key == self.key:
            self._blob, self._donors = blob, donors
            return taken
        self._kept.add(blob.key)
        return [KeepState(blob), *taken]

    def wanted(self, event: BlobWanted) -> list[Effect]:
        """Somebody asks for a state."""
        place, key = self._place, event.key
        if place.newest.stage_of(event.peer) != key.stage:  # what would it do with it?
            return [SendGone(event.peer, place.newest.number, key)]
        shelved = self._exchange.shelved(key)
        if shelved is not None:
            self._exchange.shelve(shelved, [event.peer])
            return self._offer(shelved, {event.peer})
        held = place.newest.holders
        if key.step == place.newest.restored and key.stage < len(held) and place.peer in held[key.stage]:
            # Read once, however many ask and however often: a state may be as large as the memory that is left.
            asked = key in self._looking
            self._looking.setdefault(key, set()).add(event.peer)
            return [] if asked else [FindState(event.peer, key)]
        if key.stage == place.stage and event.peer in place.newcomers(key.step):
            if key.step > place.applied:
                return []  # it will be offered when it is there
            if key == self.key and not self.lacking:
                self._due.add(event.peer)
                return []
        return [SendGone(event.peer, place.newest.number, key)]

    def found(self, event: StateFound) -> list[Effect]:
        """A file of it was looked for."""
        askers = self._looking.pop(event.key, {event.peer})
        if event.blob is None:
            return [SendGone(peer, self._place.newest.number, event.key) for peer in sorted(askers)]
        askers &= {replica.peer for replica in self._place.newest.peers()}
        if askers:
            self._exchange.shelve(event.blob, askers)
        return self._offer(event.blob, askers)

    def gone(self, event: BlobGone) -> list[Effect]:
        """Somebody who was asked has none."""
        if not self.lacking or event.key != self.key or event.peer not in self._place.sources(self._place.applied):
            return []
        asks: list[Effect] = [*self._exchange.refused(event.peer, event.key)]
        self._gone.add(event.peer)
        if self._blob is not None or self._exchange.has_donors(self.key):
            return asks
        if not set(self._place.sources(self._place.applied)) - self._wrong <= self._gone:
            return asks
        return [*asks, LostTrack(f"nobody has the state of stage {self._place.stage} after step {self._place.applied}")]

    def wants(self) -> list[Effect]:
        """Questions for the state that is lacking and was not offered; who had it may be lost, and took it along."""
        if not self.lacking or self._blob is not None or self._exchange.has_donors(self.key):
            return []
        number, place = self._place.newest.number, self._place
        there = [peer for peer in place.sources(place.applied) if place.newest.stage_of(peer) is not None]
        sources = [peer for peer in there if peer not in self._wrong]
        if not sources:
            return [LostTrack(f"nobody is left who has the state of stage {place.stage} after step {place.applied}")]
        return [WantBlob(peer, number, self.key) for peer in sources]

    def _offer(self, blob: Blob, peers: set[str]) -> list[Effect]:
        return [SendOffer(peer, self._place.newest.number, blob.offer) for peer in sorted(peers)]

    def _is_unwanted(self, key: BlobKey) -> bool:
        """Whether a newer state takes its place: nobody begins from it any more."""
        place = self._place
        beginners = {*place.newcomers(key.step)} & {*place.followers(place.applied + 1)}
        return key.stage == place.stage and key.step < place.applied and not beginners
