"""What the replicas of a stage owe each other: parts, totals and states. Pure; bytes move through `protocol.exchange`.

A step ends in one of three ways:

    alone in its group, nobody follows         APPLY the own sum
    every part of the group is here            APPLY their sum, in view order: the same bits everywhere; keep the total
    somebody has applied the step already      APPLY the total that he hands out

A part holds what its maker was routed by *this* view, and says so; so the parts of a group hold every microbatch
once. A new view makes all parts new: each is offered again, under the new number, with more in it if more was routed.
Weights are compared before they are changed: a part names the hash of those it was computed on, and where the hashes of
a group differ nobody applies, until a view says who is out.

Whoever comes with a part for a step that is applied here gets the total. So a group that lost a member in the middle of
a reduction ends it alike, if only one of them had all parts; and if none had, they do the lost one's microbatches
themselves. A part is kept until the next step is applied, a total for two steps, longer while somebody follows.
"""

from __future__ import annotations

from collections.abc import Collection

from protocol.blob import Blob, BlobKey, BlobKind, Offer
from protocol.effects import Compute, Differs, Effect, LostTrack, Reduce, Refuse, SendGone, SendOffer, WantBlob
from protocol.events import BlobGone, BlobWanted, Offered
from protocol.exchange import Exchange
from protocol.place import Place
from protocol.work import APPLY, PART

KEPT_TOTALS = 2
KEPT_FOR_FOLLOWERS = 8
FETCHED_AHEAD = 8  # totals that a follower fetches before it can use them


class Replication:
    """The reduction of the step after `place.applied`, and the totals of those before."""

    def __init__(self, place: Place, exchange: Exchange) -> None:
        self._place, self._exchange = place, exchange
        self._own: Blob | None = None
        self._offers: dict[str, Offer] = {}
        self._parts: dict[bytes, Blob] = {}
        self._totals: dict[int, tuple[Blob, str]] = {}  # and who offered it
        self._gone: set[str] = set()
        self._halted = False
        self._applying = 0  # the view by which the step is being applied, or was last looked at
        self._adding = False
        self._handed = self._handing = ""  # who gave the total of the newest step, and of the one being applied

    # Work

    def next_compute(self, effects: list[Effect], delivered: bool) -> Compute | None:
        """What can be done when all microbatches routed here are; remarks go to `effects`.

        Args:
            delivered: whether all gradients that were made here have been used. A part that is given away earlier may
                outlive them: the others apply the step, this peer dies, and nobody can make its gradients again.
        """
        self._applying = self._place.newest.number
        self._handing = ""
        compute = self._next(effects, delivered)
        self._adding = compute is not None and compute.action == APPLY
        return compute

    def _next(self, effects: list[Effect], delivered: bool) -> Compute | None:
        place, step = self._place, self._place.applied + 1
        group, followers = place.group(step), place.followers(step)
        keep = len(group) > 1 or bool(followers)
        if place.skips(step):
            return Compute(step, APPLY, Reduce(skip=True))
        whole = self._whole(group)
        if step in self._totals and not whole:
            total, donor = self._totals[step]
            self._handing = donor
            return Compute(step, APPLY, Reduce((total,), keep=keep, donor=donor))
        if place.peer not in group or self._halted:
            return None
        if not keep:
            return Compute(step, APPLY, Reduce())
        if self._own is None:
            if not delivered and len(group) > 1:
                return None
            return Compute(step, PART, tuple(place.routed(step)))
        if not whole:
            return None
        hashes = tuple((peer, part.offer.meta.weights) for peer, part in zip(group, whole, strict=True))
        if len({weights for _, weights in hashes}) > 1:
            self._halted = True
            effects += self._differ(step, hashes)
            return None
        return Compute(step, APPLY, Reduce(whole, group, keep=True))

    def _differ(self, step: int, hashes: tuple[tuple[str, str], ...]) -> list[Effect]:
        """Weights are unlike. Who was handed the total of the step before concedes: the others applied another one."""
        own = dict(hashes)[self._place.peer]
        if not self._handed or 2 * [weights for _, weights in hashes].count(own) > len(hashes):
            return [Differs(step, hashes)]
        conceded = tuple((peer, "" if peer == self._place.peer else weights) for peer, weights in hashes)
        return [Differs(step, conceded)]

    def _whole(self, group: tuple[str, ...]) -> tuple[Blob, ...]:
        """The parts of all in `group`, if they are all here.

        Then no total is needed: who had added up others by an older view would not have given its part to this one. Nor
        is anybody's total believed rather than the own sum.
        """
        parts = [self._own if peer == self._place.peer else self._part_of(peer) for peer in group]
        there = tuple(part for part in parts if part is not None)
        return there if self._place.peer in group and len(there) == len(group) else ()

    def part_made(self, blob: Blob) -> list[Effect]:
        """The own part is there; if a view has changed what it must cover meanwhile, it is made again."""
        place, step = self._place, self._place.applied + 1
        if blob.key.step != step or blob.offer.meta.covers != tuple(place.routed(step)):
            return []
        self._own = blob
        self._exchange.shelve(blob)
        return self._offer(blob, [peer for peer in place.group(step) if peer != place.peer])

    def applied(self, total: Blob | None) -> list[Effect]:
        """The step is applied; `place.applied` names it."""
        step = self._place.applied
        self._handed = self._handing
        followers = self._place.followers(step)
        self._forget_step()
        if total is not None:
            self._exchange.shelve(total)
        oldest = self._place.worked(KEPT_FOR_FOLLOWERS if followers else KEPT_TOTALS)
        newest = self._place.worked(1)
        self._exchange.abandon(lambda key: key.kind is not BlobKind.STATE and key.step <= step)
        self._exchange.forget(lambda key: _is_past(key, newest, oldest))
        self._totals = {s: kept for s, kept in self._totals.items() if s > step}
        # Whoever got a newer view before he had all parts waits for what was added up here by the older one.
        late = self._place.others() if self._applying != self._place.newest.number else followers
        return [] if total is None else self._offer(total, late)

    def spoiled(self) -> list[Effect]:
        """The parts could not be added up. Nor can they be again, unless a view has made them new meanwhile.

        A total that is no use is asked for again: somebody else may have the right one.
        """
        self._adding = False
        self._totals.pop(self._place.applied + 1, None)
        self._halted = self._applying == self._place.newest.number
        return [] if self._halted else self._offer_own_again()

    def view_changed(self) -> list[Effect]:
        """Parts are of one view; offer again what still holds."""
        place, step = self._place, self._place.applied + 1
        self._offers.clear()
        self._gone.clear()
        self._halted = False
        covers = {tuple(place.routed(step, peer)) for peer in place.group(step)}
        self._parts = {name: part for name, part in self._parts.items() if part.offer.meta.covers in covers}
        # What the older view's parts give is being applied: the others must not make another sum with this part.
        effects: list[Effect] = [] if self._adding else self._offer_own_again()
        total = self._exchange.shelved(BlobKey(BlobKind.TOTAL, place.stage, place.applied))
        if total is not None:
            effects += self._offer(total, place.others())
        return effects if place.peer in place.group(step) else effects + self.wants()

    def _offer_own_again(self) -> list[Effect]:
        place, step = self._place, self._place.applied + 1
        if self._own is None:
            return []
        if self._own.offer.meta.covers == tuple(place.routed(step)) and place.peer in place.group(step):
            return self._offer(self._own, [peer for peer in place.group(step) if peer != place.peer])
        key, self._own = self._own.key, None
        self._exchange.forget(lambda other: other == key)
        return []

    # Events

    def offered(self, event: Offered) -> list[Effect]:
        """A part or a total of this stage is offered, by the newest view."""
        place, offer = self._place, event.offer
        if offer.key.stage != place.stage or event.peer not in place.others():
            return [Refuse(event.peer, f"expected an offer of stage {place.stage} from its replicas, got {offer.key}")]
        if offer.key.step <= place.applied:
            late = offer.key.kind is BlobKind.PART
            return self._late(event.peer, offer.key.step) if late else []
        if offer.size != place.rules.blob_bytes(offer.key):
            wanted = place.rules.blob_bytes(offer.key)
            return [Refuse(event.peer, f"expected {offer.key} of {wanted} bytes, got {offer.size}")]
        return self._part_offered(event) if offer.key.kind is BlobKind.PART else self._total_offered(event)

    def _part_offered(self, event: Offered) -> list[Effect]:
        place, offer = self._place, event.offer
        if event.peer not in place.group(offer.key.step):
            return [Refuse(event.peer, f"it has no share in step {offer.key.step} by view {event.view}")]
        covers = tuple(place.routed(offer.key.step, event.peer))
        if offer.meta.covers != covers:
            return [Refuse(event.peer, f"expected a part of microbatches {covers}, got {offer.meta.covers}")]
        stray = _stray_losses(offer, covers if place.stage == place.last_stage else ())
        if stray:
            return [Refuse(event.peer, f"expected the losses of microbatches that are in the part, got {stray[:3]}")]
        before = self._offers.pop(event.peer, offer)
        self._offers[event.peer] = offer
        if before.id not in {other.id for other in self._offers.values()}:
            self._parts.pop(before.id, None)
        return [] if offer.id in self._parts else [*self._exchange.fetch(offer, event.peer)]

    def _total_offered(self, event: Offered) -> list[Effect]:
        step = event.offer.key.step
        if step in self._totals or step > self._place.applied + FETCHED_AHEAD:
            return []
        count = self._place.rules.microbatches(step) if self._place.stage == self._place.last_stage else 0
        stray = _stray_losses(event.offer, range(count))
        if stray:
            return [Refuse(event.peer, f"expected the losses of {count} microbatches, got {stray[:3]}")]
        guides = self._place.followed(self._place.applied + 1)
        if guides and event.peer not in guides:
            return []
        return [*self._exchange.fetch(event.offer, event.peer)]

    def arrived(self, blob: Blob, donor: str) -> None:
        """A part or a total is here, as `donor` had offered it."""
        if blob.key.step <= self._place.applied:
            return
        if blob.key.kind is BlobKind.PART:
            self._parts[blob.offer.id] = blob
        else:
            self._totals[blob.key.step] = blob, donor

    def wanted(self, event: BlobWanted) -> list[Effect]:
        """Somebody has heard no offer of a part or a total."""
        key, place = event.key, self._place
        if key.stage != place.stage or event.peer not in place.others():
            return [Refuse(event.peer, f"expected a question about stage {place.stage} from its replicas, got {key}")]
        if key.step <= place.applied:
            return self._late(event.peer, key.step)
        if self._own is None or key != self._own.key or self._is_adding_older():
            return []
        return self._offer(self._own, [event.peer])

    def gone(self, event: BlobGone) -> list[Effect]:
        """Somebody has applied the step and kept no total. If all have, this peer has lost track."""
        place, step = self._place, self._place.applied + 1
        if event.key != BlobKey(BlobKind.TOTAL, place.stage, step) or event.peer not in place.others():
            return []
        self._gone.add(event.peer)
        asks: list[Effect] = [*self._exchange.refused(event.peer, event.key)]
        others = {peer for peer in place.group(step) if peer != place.peer}
        if not others or step in self._totals or not others <= self._gone or self._exchange.has_donors(event.key):
            return asks
        return [*asks, LostTrack(f"nobody keeps the total of step {step} at stage {place.stage} any more")]

    # Waiting

    def awaited(self) -> list[tuple[str, BlobKey]]:
        """(peer, blob) for which this step waits, once all microbatches are done."""
        place, step = self._place, self._place.applied + 1
        group = place.group(step)
        if place.peer not in group:
            return [(peer, BlobKey(BlobKind.TOTAL, place.stage, step)) for peer in group]
        key = BlobKey(BlobKind.PART, place.stage, step)
        return [(peer, key) for peer in group if peer != place.peer and self._part_of(peer) is None]

    def waits_for(self) -> str:
        """What is awaited of other replicas, in words; "": nothing."""
        place, step = self._place, self._place.applied + 1
        for peer, key in self.awaited():
            # Who has applied the step meanwhile gives its total in place of his part.
            of_total = self._exchange.progress(BlobKey(BlobKind.TOTAL, place.stage, step))
            here, total = max(self._exchange.progress(key), of_total)
            return f"the {key.kind} of step {step} from {peer} ({here} of {total or '?'} chunks)"
        return ""

    def wants(self) -> list[Effect]:
        """Questions for what is awaited and not on its way."""
        place, step = self._place, self._place.applied + 1
        if step in self._totals or self._exchange.has_donors(BlobKey(BlobKind.TOTAL, place.stage, step)):
            return []
        return [WantBlob(peer, place.newest.number, key) for peer, key in self.awaited() if not self._comes_from(peer)]

    def _is_adding_older(self) -> bool:
        """Whether the step is being applied by an older view than the newest; its total will be offered to all."""
        return self._adding and self._applying != self._place.newest.number

    # Parts

    def _part_of(self, peer: str) -> Blob | None:
        offer = self._offers.get(peer)
        return None if offer is None else self._parts.get(offer.id)

    def _comes_from(self, peer: str) -> bool:
        """Whether the part of `peer` is being fetched. It is not if a chunk of it was wrong."""
        offer = self._offers.get(peer)
        return offer is not None and self._exchange.is_fetching(offer.id)

    def _late(self, peer: str, step: int) -> list[Effect]:
        key = BlobKey(BlobKind.TOTAL, self._place.stage, step)
        total = self._exchange.shelved(key)
        number = self._place.newest.number
        return [SendGone(peer, number, key)] if total is None else self._offer(total, [peer])

    def _offer(self, blob: Blob, peers: list[str] | tuple[str, ...]) -> list[Effect]:
        return [SendOffer(peer, self._place.newest.number, blob.offer) for peer in peers if peer != self._place.peer]

    def _forget_step(self) -> None:
        self._own, self._halted, self._adding = None, False, False
        self._offers.clear()
        self._parts.clear()
        self._gone.clear()


def _is_past(key: BlobKey, oldest_part: int, oldest_total: int) -> bool:
    if key.kind is BlobKind.STATE:
        return False
    # The others may still be fetching the part of the step just applied; to apply the next one they need not.
    return key.step < (oldest_part if key.kind is BlobKind.PART else oldest_total)


def _stray_losses(offer: Offer, expected: Collection[int]) -> list[int]:
    """The microbatches of which `offer` tells a loss that it cannot know, or tells it twice."""
    told = [microbatch for microbatch, _ in offer.meta.losses]
    return [microbatch for microbatch in told if microbatch not in expected or told.count(microbatch) > 1]
