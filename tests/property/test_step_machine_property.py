"""The stage machine among peers, honest and not, and a coordinator that changes its mind: all events in any order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machines import Toy, part_of, rules, state_of, total_of

from protocol.blob import Blob, BlobKey, BlobKind, Meta
from protocol.effects import (
    Accuse,
    AskChunk,
    Compute,
    Differs,
    Effect,
    FindState,
    Irreplaceable,
    KeepState,
    LostTrack,
    Ready,
    Refuse,
    Send,
    SendChunk,
    SendGone,
    SendOffer,
    SendTaken,
    SendUsed,
    SendWant,
    StepApplied,
    WantBlob,
)
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
from protocol.frame import Kind
from protocol.route import holders, routes
from protocol.stage_machine import StageMachine
from protocol.view import Replica, View
from protocol.work import APPLY, LOAD, Schedule, Verb

PICK = st.integers(0, 99)
NEAR = st.sampled_from([0, 1, 1, 1, 1, 2])
NUMBER = st.sampled_from([0, 0, 0, 0, 1, -1])  # beside the newest view's
TENSOR_KINDS = st.sampled_from([Kind.FORWARD, Kind.BACKWARD])
ME = "me"


class AnyEvents(RuleBasedStateMachine):
    """Every third step has a microbatch more; every second leaves copies with others.

    Whatever the others offer holds what it says it holds (parts, totals and states are checked by their digests, not
    by their meaning); all else may be anything.
    """

    @initialize(
        stages=st.integers(1, 3),
        replicas=st.sampled_from([1, 2, 2, 3]),
        microbatches=st.integers(1, 4),
        window=st.integers(1, 3),
        schedule=st.sampled_from(Schedule),
        applied=st.sampled_from([0, 5]),
        lacking=st.sampled_from([False, False, False, True]),
        follows=st.sampled_from([False, False, True]),
        data=st.data(),
    )
    def start(
        self,
        stages: int,
        replicas: int,
        microbatches: int,
        window: int,
        schedule: Schedule,
        applied: int,
        lacking: bool,
        follows: bool,
        data: st.DataObject,
    ) -> None:
        self.stage = data.draw(st.integers(0, stages - 1))
        self.base, self.window, self.schedule, self.credits = microbatches, window, schedule, window
        self.rules = rules(self.count, window, lambda step: 2 if step % 2 == 0 else 0, schedule)
        self.applied, self.lacking, self.finished = applied, lacking, False
        share = 0.0 if follows and replicas > 1 else 1.0
        layout = [[Replica(f"s{s}r{r}", start=applied) for r in range(replicas)] for s in range(stages)]
        layout[self.stage][0] = Replica(ME, (), share, share, applied)
        self.view = View(
            0, applied + 1, 0, tuple(map(tuple, layout)), restored=data.draw(st.sampled_from([0, applied]))
        )
        self.view = replace(self.view, holders=tuple((rs[-1].peer, "s9r9") for rs in layout))
        self.machine = StageMachine(ME, self.rules, applied, lacking)
        self.toy = Toy(self.stage, stages - 1, self.count, None if lacking else applied)
        self.running: Compute | None = None
        self.asked: list[AskChunk] = []
        self.finds: list[FindState] = []
        self.blobs: dict[bytes, Blob] = {}
        self.mine: list[bytes] = []
        self.born = 0
        self.differed = 0
        if data.draw(st.integers(0, 3)):
            self.show(replace(self.view, last_step=applied + 4))

    # Tensors

    @rule(
        peer=PICK,
        kind=TENSOR_KINDS,
        view=st.integers(0, 9) | st.just(2**32 - 1),
        ahead=st.integers(-3, 4) | st.just(2**31),
        microbatch=st.integers(-1, 5) | st.just(65535),
    )
    def anything_arrives(self, peer: int, kind: Kind, view: int, ahead: int, microbatch: int) -> None:
        sender, step = self.someone(peer), max(0, self.applied + ahead)
        welcome = sender == self.sender(kind, step, microbatch) and self.served_here(step, microbatch)
        effects = self.feed(Arrived(sender, kind, view, step, microbatch, "?"))
        if self.view.number == 0 or view > self.view.number:
            assert all(isinstance(effect, Refuse) for effect in effects), "held or refused"
        elif view < self.view.number:
            assert [type(effect) for effect in effects] == [Refuse] and effects[0].stale  # type: ignore[union-attr]
        elif not welcome and step <= self.applied:
            assert [type(effect) for effect in effects] == [Refuse]

    @rule(kind=TENSOR_KINDS, ahead=NEAR, later=NUMBER, pick=PICK)
    def a_neighbour_sends(self, kind: Kind, ahead: int, later: int, pick: int) -> None:
        """An honest frame: from the right peer, of about this step, under about this view."""
        step = self.applied + ahead
        microbatch = pick % self.count(step)
        sender = self.sender(kind, step, microbatch)
        if sender is not None and step >= 1:
            self.feed(Arrived(sender, kind, max(0, self.view.number + later), step, microbatch, "x"))

    @precondition(lambda self: self.view.number > 0)
    @rule(kind=TENSOR_KINDS)
    def all_of_the_step_come(self, kind: Kind) -> None:
        for microbatch in range(self.count(self.applied + 1)):
            sender = self.sender(kind, self.applied + 1, microbatch)
            if sender is not None:
                self.feed(Arrived(sender, kind, self.view.number, self.applied + 1, microbatch, "x"))

    @rule(
        peer=PICK,
        later=NUMBER,
        ahead=st.integers(-2, 3),
        forward=st.booleans(),
        microbatches=st.lists(st.integers(-1, 6)),
    )
    def somebody_asks_for_tensors(
        self, peer: int, later: int, ahead: int, forward: bool, microbatches: list[int]
    ) -> None:
        step, asked = max(0, self.applied + ahead), tuple(microbatches)
        number = max(0, self.view.number + later)
        wanted = Wanted(self.someone(peer), number, step, asked if forward else (), () if forward else asked)
        for effect in self.feed(wanted):
            assert not isinstance(effect, Send) or effect.peer == wanted.peer

    @rule(peer=PICK, later=NUMBER, ahead=st.integers(-1, 1), microbatch=st.integers(0, 5) | st.just(2**32 - 1))
    def somebody_says_used(self, peer: int, later: int, ahead: int, microbatch: int) -> None:
        step = max(0, self.applied + ahead)
        self.feed(Used(self.someone(peer), max(0, self.view.number + later), step, microbatch))

    @precondition(lambda self: self.view.number > 0)
    @rule()
    def all_gradients_have_been_used(self) -> None:
        for microbatch in list(self.toy.sum):
            sender = self.sender(Kind.FORWARD, self.applied + 1, microbatch)
            if sender is not None:
                self.feed(Used(sender, self.view.number, self.applied + 1, microbatch))

    # Work

    @rule(credits=st.integers(0, 5))
    def credits_are_measured(self, credits: int) -> None:
        self.credits = max(1, min(credits, self.window))
        self.feed(CreditsChanged(credits))

    @precondition(lambda self: self.running is not None)
    @rule()
    def the_computation_ends(self) -> None:
        work, self.running = self.running, None
        assert work is not None
        self.feed(Computed(work.action, self.toy.run(work)))

    @precondition(lambda self: self.view.number > 0 and not self.machine.finished)
    @rule(rounds=st.integers(1, 4), most=st.integers(1, 12), reduces=st.booleans())
    def the_step_goes_on(self, rounds: int, most: int, reduces: bool) -> None:
        """Without some such rule, few examples would come to the end of a step."""
        for _ in range(rounds):
            self.all_of_the_step_come(kind=Kind.FORWARD)
            self.all_of_the_step_come(kind=Kind.BACKWARD)
            for _ in range(most):
                if self.running is not None:
                    self.the_computation_ends()
            self.all_gradients_have_been_used()
            if self.lacking:
                for peer in self.machine._place.sources(self.applied):
                    if self.present(peer):
                        self.offer(peer, 0, state_of(self.stage, self.applied))
            if reduces:
                self.all_parts_come()

    @rule(first=st.booleans())
    def a_total_of_the_step_comes(self, first: bool) -> None:
        """As to one that is late, or follows."""
        others = [r.peer for r in self.view.stages[self.stage] if r.alive and r.peer != ME]
        assume(others and self.view.number)
        self.offer(others[0 if first else -1], 0, total_of(self.stage, self.applied + 1, self.count(self.applied + 1)))
        self.all_chunks_come()

    @precondition(lambda self: self.running is not None and self.culprits(self.running))
    @rule(pick=PICK)
    def the_computation_is_spoiled(self, pick: int) -> None:
        work, self.running = self.running, None
        assert work is not None
        culprits = self.culprits(work)
        effects = self.feed(Spoiled(work.action, culprits[pick % len(culprits)], "a NaN"))
        assert all(effect.reason for effect in effects if isinstance(effect, Accuse))

    # Blobs

    @precondition(lambda self: self.view.number > 0)
    @rule(peer=PICK, later=NUMBER, ahead=NEAR, salt=st.integers(0, 2), odd=st.sampled_from([False] * 5 + [True]))
    def a_part_is_offered(self, peer: int, later: int, ahead: int, salt: int, odd: bool) -> None:
        maker, step = self.someone(peer), self.applied + ahead
        covers = [m for m in range(self.count(step)) if self.server(self.stage, step, m) == maker]
        weights = "odd" if odd else f"w{step - 1}"
        self.offer(maker, later, part_of(self.stage, step, covers, weights, str(salt) if covers else ""))

    @precondition(lambda self: self.view.number > 0)
    @rule()
    def all_parts_come(self) -> None:
        step = self.applied + 1
        for maker in self.view.group(self.stage, step):
            if maker != ME:
                covers = [m for m in range(self.count(step)) if self.server(self.stage, step, m) == maker]
                self.offer(maker, 0, part_of(self.stage, step, covers, f"w{step - 1}"))
        self.all_chunks_come()

    @rule(peer=PICK, later=NUMBER, ahead=st.integers(-2, 10))
    def a_total_is_offered(self, peer: int, later: int, ahead: int) -> None:
        step = max(1, self.applied + ahead)
        self.offer(self.someone(peer), later, total_of(self.stage, step, self.count(step)))

    @rule(peer=PICK, later=NUMBER, stage=st.integers(0, 3) | st.just(255), ahead=st.sampled_from([0, 0, 1, 2, -1]))
    def a_state_is_offered(self, peer: int, later: int, stage: int, ahead: int) -> None:
        self.offer(self.someone(peer), later, state_of(stage, max(0, self.applied + ahead)))

    @rule(peer=PICK, later=NUMBER, kind=st.sampled_from(BlobKind), step=st.integers(0, 9), size=st.integers(1, 700))
    def nonsense_is_offered(self, peer: int, later: int, kind: BlobKind, step: int, size: int) -> None:
        """Bytes of any length, which cover what is not routed to anybody."""
        self.offer(self.someone(peer), later, Blob.of(BlobKey(kind, self.stage, step), b"x" * size, Meta((77,))), True)

    @precondition(lambda self: self.asked)
    @rule(pick=PICK, wrong=st.sampled_from([False] * 4 + [True]), twice=st.booleans())
    def a_chunk_comes(self, pick: int, wrong: bool, twice: bool) -> None:
        ask = self.asked[pick % len(self.asked)]
        self.answer(ask, wrong)
        if twice:
            self.answer(ask, False)

    @rule()
    def all_chunks_come(self) -> None:
        for ask in list(self.asked):
            self.answer(ask, False)

    @rule(peer=PICK, pick=PICK, index=st.integers(0, 2) | st.just(2**32 - 1))
    def a_chunk_comes_that_nobody_asked_for(self, peer: int, pick: int, index: int) -> None:
        names = [*self.blobs, b"?" * 16]
        self.feed(ChunkArrived(self.someone(peer), names[pick % len(names)], index, b"?"))

    @rule(peer=PICK, pick=PICK, index=st.sampled_from([0, 0, 1, 2**32 - 1]))
    def a_chunk_is_asked_for(self, peer: int, pick: int, index: int) -> None:
        names = [*self.mine, b"?" * 16]
        effects = self.feed(ChunkAsked(self.someone(peer), names[pick % len(names)], index))
        assert len(effects) == 1 and isinstance(effects[0], SendChunk | Refuse)

    @rule(peer=PICK, pick=PICK)
    def somebody_has_taken_a_blob(self, peer: int, pick: int) -> None:
        names = [*self.mine, b"?" * 16]
        assert self.feed(Taken(self.someone(peer), names[pick % len(names)])) == []

    @rule(
        peer=PICK,
        later=NUMBER,
        kind=st.sampled_from(BlobKind),
        stage=st.integers(0, 3),
        ahead=st.integers(-2, 2),
        gone=st.booleans(),
    )
    def a_blob_is_asked_for_or_gone(
        self, peer: int, later: int, kind: BlobKind, stage: int, ahead: int, gone: bool
    ) -> None:
        key = BlobKey(kind, self.stage if stage == 3 else stage, max(0, self.applied + ahead))
        event = (BlobGone if gone else BlobWanted)(self.someone(peer), max(0, self.view.number + later), key)
        self.feed(event)

    @precondition(lambda self: self.finds)
    @rule(there=st.booleans())
    def a_file_was_looked_for(self, there: bool) -> None:
        find = self.finds.pop()
        self.feed(StateFound(find.peer, find.key, state_of(find.key.stage, find.key.step) if there else None))

    # Views

    @rule(ahead=st.sampled_from([4, 4, 3, 2, 1, 0, -1]))
    def the_first_or_the_same_view_comes(self, ahead: int) -> None:
        self.show(replace(self.view, last_step=max(1, self.applied + ahead)))

    @precondition(lambda self: self.view.number > 0)
    @rule(pick=PICK, here=st.sampled_from([True, True, False]), then=st.booleans())
    def somebody_is_lost(self, pick: int, here: bool, then: bool) -> None:
        stages = self.view.stages[self.stage : self.stage + 1] if here else self.view.stages
        living = [r.peer for rs in stages for r in rs if r.alive and r.peer != ME]
        assume(living)
        gone, number = living[pick % len(living)], self.view.number + 1
        stages = tuple(
            tuple(replace(r, lost=number) if r.peer == gone and r.alive else r for r in rs) for rs in self.view.stages
        )
        assume(all(any(r.alive for r in rs) for rs in stages))
        self.show(replace(self.view, stages=stages))
        if then:
            self.all_of_the_step_come(kind=Kind.FORWARD)

    @precondition(lambda self: self.running is not None and self.running.action == APPLY)
    @rule(pick=PICK)
    def somebody_is_lost_while_the_sum_is_made(self, pick: int) -> None:
        self.somebody_is_lost(pick=pick, here=True, then=True)

    @precondition(lambda self: self.view.number > 0)
    @rule(stage=PICK, ahead=st.integers(-1, 3), back=st.booleans())
    def somebody_joins(self, stage: int, ahead: int, back: bool) -> None:
        """As a learner: a new peer, or one that was lost."""
        at = stage % len(self.view.stages)
        lost = [r.peer for r in self.view.stages[at] if not r.alive and self.view.stage_of(r.peer) is None]
        self.born += 1
        name = lost[0] if back and lost else f"new{self.born}"
        entry = Replica(name, (), 0.0, 0.0, max(0, self.applied + ahead))
        stages = tuple((*rs, entry) if s == at else rs for s, rs in enumerate(self.view.stages))
        assume(len(stages[at]) <= 6)
        self.show(replace(self.view, stages=stages))

    @precondition(lambda self: self.view.number > 0)
    @rule(
        ahead=st.sampled_from([1, 1, 1, 3, 2, 0, -1]),
        shares=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0]), min_size=18, max_size=18),
        changes=st.integers(0, 3),
        me=st.sampled_from([1.0, 1.0, 0.0]),
    )
    def shares_are_planned(self, ahead: int, shares: list[float], changes: int, me: float) -> None:
        """From some step on, others have other shares; at times it comes late: for a step that is done or begun."""
        stages, drawn = [], iter(shares)
        for at, replicas in enumerate(self.view.stages):
            planned = []
            for replica in replicas:
                weight = next(drawn) if at == self.stage or changes == 0 else replica.weight
                weight = me if replica.peer == ME else weight if replica.alive else 0.0
                planned.append(replace(replica, before=replica.weight, weight=weight))
            if not any(r.alive and r.weight for r in planned):
                planned = list(replicas)
            stages.append(tuple(planned))
        first_step = max(1, self.applied + ahead)
        self.show(replace(self.view, stages=tuple(stages), first_step=first_step))

    @rule(back=st.integers(0, 2), last_step=st.integers(0, 9))
    def an_old_view_comes(self, back: int, last_step: int) -> None:
        assume(self.view.number > back)
        before = self.machine.view
        assert self.feed(ViewChanged(replace(self.view, number=self.view.number - back, last_step=last_step))) == []
        assert self.machine.view is before

    @rule(elsewhere=st.booleans())
    def a_view_without_this_peer_comes(self, elsewhere: bool) -> None:
        before = self.machine.view
        others = [(Replica(f"new{s}"),) for s in range(len(self.view.stages) + 1)]
        if elsewhere and self.view.number:
            others[(self.stage + 1) % len(others)] = (Replica(ME),)
        effects = self.feed(ViewChanged(View(self.view.number + 1, 1, 99, tuple(others))))
        if self.view.number or not elsewhere:
            assert [type(effect) for effect in effects] == [Refuse] and self.machine.view is before

    @rule(peer=st.none() | PICK)
    def a_stall_or_a_restored_link(self, peer: int | None) -> None:
        self.feed(Stalled(None if peer is None else self.someone(peer)))

    # What must hold of every effect

    def feed(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event)
        for effect in effects:
            self.check(effect, event)
        assert self.machine.waits_for()
        return effects

    def check(self, effect: Effect, event: Event) -> None:
        match effect:
            case Compute():
                self.check_compute(effect)
            case Send():
                self.check_send(effect)
            case SendOffer(peer, view, offer):
                assert self.present(peer) and view == self.view.number
                self.mine.append(offer.id)
            case AskChunk(peer):
                assert self.present(peer)
                self.asked.append(effect)
            case SendWant(peer, view, step, forward, backward):
                assert view == self.view.number and step == self.applied + 1 and forward + backward
                assert all(self.server(self.stage - 1, step, m) == peer for m in forward)
                assert all(self.server(self.stage + 1, step, m) == peer for m in backward)
            case WantBlob(peer, view, key):
                assert view == self.view.number and key.stage == self.stage and peer != ME
            case SendUsed(peer, view, step, microbatch):
                assert view == self.view.number and peer == self.server(self.stage + 1, step, microbatch)
                assert step <= self.applied or microbatch in self.toy.sum
            case Irreplaceable(_, step, reason):
                assert reason and isinstance(event, Wanted) and self.applied - 1 <= step <= self.applied
            case SendGone(_, view, _):
                assert view == self.view.number
            case SendTaken(_, blob):
                assert blob in self.blobs
            case Refuse(peer, reason, stale):
                assert reason and (not stale or self.view.number > 0)
            case StepApplied(step, last):
                assert isinstance(event, Computed) and event.action == APPLY
                assert step == self.applied + 1 == self.machine.applied and last == (step >= self.view.last_step)
                self.applied = step
            case Ready(step, weights):
                assert self.lacking and step == self.applied and weights == f"w{step}"
                self.lacking = False
            case Differs(step, hashes):
                assert step == self.applied + 1 and len({weights for _, weights in hashes}) > 1
                assert self.differed < self.view.number, "once in a view"
                self.differed = self.view.number
            case LostTrack(reason) | Accuse(_, reason):
                assert reason
            case KeepState(blob):
                key = blob.key
                assert key.stage != self.stage and ME in holders(self.view, key.stage, key.step, 2)
            case FindState():
                self.finds.append(effect)

    def check_compute(self, work: Compute) -> None:
        said = f"{work.action} of {work.step}"
        assert self.running is None, f"{said} while {self.running} runs"
        assert self.view.number > 0
        verb, microbatch = work.action.verb, work.action.microbatch
        if verb in (Verb.STATE, Verb.LOAD):
            assert work.step == self.applied and self.lacking == (verb is Verb.LOAD)
        else:
            assert not self.lacking and work.step == self.applied + 1 <= self.view.last_step, said
        if verb is Verb.FORWARD:
            assert self.served_here(work.step, microbatch) and (work.payload is None) == (self.stage == 0)
            assert (work.sender == "") == (self.stage == 0)
        if verb is Verb.BACKWARD:
            older = [m for m in range(microbatch) if self.served_here(work.step, m)]
            assert self.served_here(work.step, microbatch) and microbatch in self.toy.open
            assert set(older) <= set(self.toy.sum), f"{said} before an older one"
            assert (work.payload is None) == (self.stage == len(self.view.stages) - 1)
        if verb is Verb.APPLY:
            self.check_apply(work)
        if verb is Verb.PART and len(self.view.group(self.stage, work.step)) > 1:
            assert not self.machine._flow.unused(), "it could outlive its gradients"
        self.running = work

    def check_apply(self, work: Compute) -> None:
        """That the sum is whole the toy sees when it is made."""
        reduce, group = work.payload, self.view.group(self.stage, work.step)
        assert self.differed < self.view.number or reduce.parts[0].key.kind is BlobKind.TOTAL
        if not reduce.parts:
            assert group == (ME,) and not self.view.followers(self.stage, work.step)
        elif reduce.givers:
            assert reduce.givers == group and len({part.offer.meta.weights for part in reduce.parts}) == 1
            for peer, part in zip(group, reduce.parts, strict=True):
                routed = [m for m in range(self.count(work.step)) if self.server(self.stage, work.step, m) == peer]
                assert list(part.offer.meta.covers) == routed

    def check_send(self, send: Send) -> None:
        forward = send.kind is Kind.FORWARD
        assert send.payload == f"{'x' if forward else 'g'}{send.step}.{send.microbatch}"
        assert send.stage == self.stage + (1 if forward else -1) and send.view == self.view.number
        assert send.peer == self.server(send.stage, send.step, send.microbatch)
        assert self.applied - 1 <= send.step <= self.applied + 1, "two steps are kept"

    # The world

    def show(self, view: View) -> None:
        self.view = replace(view, number=self.view.number + 1)
        self.asked = [ask for ask in self.asked if self.present(ask.peer)]
        self.feed(ViewChanged(self.view))

    def offer(self, peer: str, later: int, blob: Blob, nonsense: bool = False) -> None:
        self.blobs[blob.offer.id] = blob
        effects = self.feed(Offered(peer, max(0, self.view.number + later), blob.offer))
        if nonsense and later <= 0 < self.view.number and blob.offer.size != 600:
            assert not [e for e in effects if isinstance(e, AskChunk) and e.blob == blob.offer.id]

    def answer(self, ask: AskChunk, wrong: bool) -> None:
        if ask in self.asked:
            self.asked.remove(ask)
        data = b"?" if wrong else self.blobs[ask.blob].chunk(ask.index)
        self.feed(ChunkArrived(ask.peer, ask.blob, ask.index, data))

    def someone(self, pick: int) -> str:
        names = [r.peer for rs in self.view.stages for r in rs if r.peer != ME] + ["stranger"]
        return names[pick % len(names)]

    def culprits(self, work: Compute) -> list[str]:
        """Who may have sent what cannot be used."""
        if work.action == APPLY:
            return [peer for peer in work.payload.givers if peer != ME]
        return ["stranger"] if work.action == LOAD else [work.sender] if work.sender else []

    def present(self, peer: str) -> bool:
        return self.view.stage_of(peer) is not None

    def server(self, stage: int, step: int, microbatch: int) -> str | None:
        """Who serves it, if anybody."""
        if not 0 <= stage < len(self.view.stages) or not 0 <= microbatch < self.count(step):
            return None
        try:
            return routes(self.view, stage, step, self.count(step))[microbatch]
        except LookupError:
            return None

    def sender(self, kind: Kind, step: int, microbatch: int) -> str | None:
        """Who should send it, if anybody."""
        return self.server(self.stage - 1 if kind is Kind.FORWARD else self.stage + 1, step, microbatch)

    def served_here(self, step: int, microbatch: int) -> bool:
        return self.server(self.stage, step, microbatch) == ME

    def count(self, step: int) -> int:
        return self.base + (step % 3 == 0)

    # What must hold at all times

    @invariant()
    def memory_is_bounded(self) -> None:
        most, kept = self.base + 1, self.machine.kept
        peers = sum(len(rs) for rs in self.view.stages) + 1
        assert kept["tensors"] <= 8 * most
        assert kept["early"] <= (peers + 4) * (2 * most + 16)
        states = len(self.view.stages) + 2
        assert kept["blobs"] <= 2 + 9 + 8 + 2 * states + peers * (states + 1)
        assert len(self.machine._replication._parts) <= peers
        assert len(self.machine._replication._totals) <= 9
        state = self.machine._flow.state
        bound = most if self.schedule is Schedule.GPIPE else self.window + 1
        assert self.machine.most_in_flight <= bound and (state is None or state.in_flight() <= bound)

    @invariant()
    def the_machine_knows_where_it_is(self) -> None:
        assert (self.machine.applied, self.machine.lacking) == (self.applied, self.lacking)
        if self.view.number:
            assert self.machine.view == self.view
            assert self.machine.finished == (not self.lacking and self.applied >= self.view.last_step)

    @invariant()
    def no_work_lies_idle(self) -> None:
        machine = self.machine
        if self.running is not None or not self.view.number or self.lacking or machine.finished:
            return
        state = machine._flow.state
        assert state is not None and state.step == self.applied + 1
        assert state.next_action(self.credits, self.schedule) is None
        assert set(state) == {m for m in range(self.count(state.step)) if self.served_here(state.step, m)}
        group, followers = (f(self.stage, state.step) for f in (self.view.group, self.view.followers))
        assert not (state.complete and group == (ME,) and not followers), "it could be applied"


AnyEvents.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyEvents = AnyEvents.TestCase
