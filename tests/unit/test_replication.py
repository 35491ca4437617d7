"""The reduction: groups of one, two and three, followers, the late one, views in every phase, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import SIZE, Crowd, one_view, part_of, rules, state_of, total_of

from protocol.blob import Blob, BlobKey, BlobKind
from protocol.effects import (
    Accuse,
    AskChunk,
    Compute,
    Differs,
    Effect,
    LostTrack,
    Refuse,
    Send,
    SendChunk,
    SendGone,
    SendOffer,
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
    Offered,
    Spoiled,
    Stalled,
    ViewChanged,
)
from protocol.exchange import MOST_WRONG
from protocol.frame import Kind
from protocol.replication import FETCHED_AHEAD, KEPT_FOR_FOLLOWERS, KEPT_TOTALS
from protocol.route import routes
from protocol.stage_machine import StageMachine
from protocol.view import View
from protocol.work import APPLY, Action

COUNT = 4
SOLE = one_view("a", last_step=3)
TWO = one_view("a b", last_step=3)
THREE = one_view("a b c", last_step=3)


def crowd(view: View, count: int = COUNT, window: int = 4) -> Crowd:
    """Everybody in the view, at its start."""
    made = Crowd(view, rules(count, window))
    for replica in view.peers():
        made.add(replica.peer)
    made.show(view)
    return made


def ends(crowd: Crowd, peers: str, last: int = 3, quiet: bool = True) -> None:
    """All of these have applied every step, once each; `quiet`: and nothing was refused."""
    for peer in peers:
        assert [e.step for e in crowd.of(peer, StepApplied)] == list(range(1, last + 1)), peer
        assert crowd.toys[peer].weights == f"w{last}" and crowd.machines[peer].finished
        assert not crowd.of(peer, LostTrack)
        assert not quiet or not crowd.of(peer, Refuse), crowd.of(peer, Refuse)


# Groups


def test_one_alone_applies_its_own_sum_and_makes_no_part() -> None:
    alone = crowd(SOLE)
    alone.run()
    ends(alone, "a")
    assert "PART" not in alone.actions("a") and not alone.of("a", SendOffer)
    assert alone.machines["a"].kept == {"tensors": 0, "blobs": 0, "early": 0}


@pytest.mark.parametrize("view", [TWO, THREE], ids=["two", "three"])
def test_a_group_adds_up_its_parts_in_the_same_order(view: View) -> None:
    group = crowd(view)
    group.run()
    names = "".join(view.group(0, 1))
    ends(group, names)
    applied = [[e.payload for e in group.of(peer, Compute) if e.action == APPLY] for peer in names]
    assert applied.count(applied[0]) == len(names), "the same bytes in the same order: the same bits"
    assert applied[0][0].givers == tuple(names) and applied[0][0].keep
    assert [part.offer.meta.covers for part in applied[0][0].parts] == [
        tuple(m for m, who in enumerate(routes(view, 0, 1, COUNT)) if who == peer) for peer in names
    ]


@pytest.mark.parametrize("lost", [SendOffer, AskChunk, SendChunk, Send])
def test_whatever_kind_of_message_is_lost_once_questions_bring_it(lost: type[Effect]) -> None:
    """The first of each kind that each peer says is lost; a stall asks for what is missing."""
    view = one_view("a b", "p q", last_step=2)
    group, losses = crowd(view), set()

    def lose(sender: str, effect: Effect) -> bool:
        if isinstance(effect, lost) and sender not in losses:
            losses.add(sender)
            return True
        return False

    group.lose = lose
    for _ in range(12):
        group.run()
        for peer in group.machines:
            group.tell(peer, Stalled())
    group.run()
    assert losses == set("abpq")
    ends(group, "abpq", last=2)


def test_a_follower_applies_the_totals_and_computes_nothing() -> None:
    view = one_view("a b", "p q f*0", last_step=3)
    group = crowd(view)
    group.run()
    ends(group, "abpqf")
    assert group.actions("f") == ["APPLY"] * 3
    assert not [e for peer in "ab" for e in group.of(peer, Send) if e.peer == "f"]


def test_one_alone_with_a_follower_makes_a_part_and_keeps_its_total() -> None:
    pair = crowd(one_view("a f*0", last_step=3))
    pair.run()
    ends(pair, "af")
    assert pair.actions("a").count("PART") == 3
    assert pair.machines["a"].kept["blobs"] == 3 + 1


# Kept, handed out, and gone


def test_one_that_is_late_gets_the_total() -> None:
    """b has not heard of a's part; a has b's, applies, and is asked."""
    group = crowd(TWO)
    group.lose = lambda sender, effect: isinstance(effect, SendOffer) and sender == "a" and effect.offer.key.step == 1
    group.run()
    assert group.of("a", StepApplied) and not group.of("b", StepApplied)
    group.lose = lambda sender, effect: False
    group.tell("b", Stalled())
    group.run()
    ends(group, "ab")
    first = next(e.payload for e in group.of("b", Compute) if e.action == APPLY)
    assert [part.key.kind for part in first.parts] == [BlobKind.TOTAL] and not first.givers


def test_one_that_is_slow_gets_the_rest_of_a_part_whose_maker_has_applied_the_step() -> None:
    group = crowd(TWO)
    group.lose = lambda sender, effect: isinstance(effect, SendChunk) and effect.peer == "b"
    group.run()
    assert group.of("a", StepApplied) and not group.of("b", StepApplied)
    group.lose = lambda sender, effect: False
    group.tell("b", Stalled())
    group.run()
    ends(group, "ab")
    first = next(e.payload for e in group.of("b", Compute) if e.action == APPLY)
    assert first.givers == ("a", "b")


def test_totals_are_kept_for_a_few_steps_and_for_longer_while_somebody_follows() -> None:
    for stage, kept in (("a b", KEPT_TOTALS), ("a b f*0", KEPT_FOR_FOLLOWERS)):
        view = one_view(stage, last_step=20)
        group = crowd(view, 2)
        group.run()
        assert group.machines["a"].applied == 20
        assert group.machines["a"].kept["blobs"] == kept + 1, "and the newest own part"
        for step, there in ((20 - kept, False), (21 - kept, True)):
            effects = group.machines["a"].handle(BlobWanted("b", 1, BlobKey(BlobKind.TOTAL, 0, step)))
            assert [type(e) for e in effects] == [SendOffer if there else SendGone]


def follower(group: str = "a b") -> StageMachine:
    """f, before step 1, knows its view."""
    machine = StageMachine("f", rules(COUNT))
    machine.handle(ViewChanged(one_view(f"{group} f*0")))
    return machine


TOTAL_KEY = BlobKey(BlobKind.TOTAL, 0, 1)


def test_a_follower_has_lost_track_only_when_all_of_the_group_say_gone() -> None:
    late = follower()
    wants = [e for e in late.handle(Stalled()) if isinstance(e, WantBlob)]
    assert {(e.peer, e.key) for e in wants} == {("a", TOTAL_KEY), ("b", TOTAL_KEY)}
    assert late.handle(BlobGone("a", 1, TOTAL_KEY)) == [] == late.handle(BlobGone("a", 1, TOTAL_KEY))
    assert late.handle(BlobGone("eve", 1, TOTAL_KEY)) == []
    assert late.handle(BlobGone("b", 1, replace(TOTAL_KEY, step=2))) == []
    assert [type(e) for e in late.handle(BlobGone("b", 1, TOTAL_KEY))] == [LostTrack]


def test_a_total_that_is_on_its_way_or_a_view_keeps_gone_from_counting() -> None:
    late, total = follower(), total_of(0, 1, COUNT)
    late.handle(Offered("a", 1, total.offer))
    late.handle(BlobGone("b", 1, TOTAL_KEY))
    assert [type(e) for e in late.handle(BlobGone("a", 1, TOTAL_KEY))] == [LostTrack], "a gave it up after all"
    late = follower()
    late.handle(BlobGone("a", 1, TOTAL_KEY))
    late.handle(ViewChanged(one_view("a b f*0", number=2)))
    assert late.handle(BlobGone("b", 1, TOTAL_KEY)) == []


def test_one_alone_in_its_group_never_loses_track() -> None:
    """What a follower does not have is of no account: the group's own sum is here."""
    machine = StageMachine("a", rules(COUNT))
    machine.handle(ViewChanged(one_view("a f*0")))
    assert machine.handle(BlobGone("f", 1, TOTAL_KEY)) == []


def test_a_follower_far_behind_learns_that_what_it_was_fetching_is_gone() -> None:
    """Its donors have forgotten the total meanwhile: chunks that are not there are answered by nothing."""
    late = follower("a")
    asks = late.handle(Offered("a", 1, total_of(0, 1, COUNT).offer))
    assert [type(e) for e in asks] == [AskChunk]
    assert not [e for e in late.handle(Stalled()) if isinstance(e, WantBlob)]
    assert WantBlob("a", 1, TOTAL_KEY) in late.handle(Stalled())
    assert [type(e) for e in late.handle(BlobGone("a", 1, TOTAL_KEY))] == [LostTrack]


def test_totals_are_fetched_ahead_within_a_bound() -> None:
    late = follower("a")
    for step in range(2, FETCHED_AHEAD + 4):
        asks = late.handle(Offered("a", 1, total_of(0, step, COUNT).offer))
        assert bool(asks) == (step <= FETCHED_AHEAD), step
        for ask in asks:
            assert isinstance(ask, AskChunk)
            late.handle(ChunkArrived("a", ask.blob, 0, total_of(0, step, COUNT).chunk(0)))
    assert late.handle(Offered("a", 1, total_of(0, 3, COUNT).offer)) == [], "it is here"


# Views in every phase of a reduction


def test_a_part_is_given_away_only_when_its_gradients_have_been_used() -> None:
    """Else the others apply the step with it, its maker dies, and nobody can make the gradients again."""
    view = one_view("u", "a b c", "d", last_step=3)
    group = crowd(view, 6, 6)
    group.lose = lambda sender, effect: sender == "c" and isinstance(effect, Send) and effect.peer == "u"
    group.run()
    assert "PART" not in group.actions("c") and not group.of("a", StepApplied)
    assert group.machines["c"].waits_for().startswith("word that u has used the gradient of step 1")
    group.kill("c")
    group.show(one_view("u", "a b c!2", "d", number=2, last_step=3))
    for _ in range(3):
        group.run()
        for peer in group.machines:
            group.tell(peer, Stalled())
    group.run()
    ends(group, "uabd", quiet=False)


LOSE_B = one_view("a b!2 c", number=2, last_step=3)


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_a_loss_at_any_moment_leaves_the_others_with_the_same_weights(moment: int) -> None:
    """b says whatever it says until the given number of things have happened, then it is gone and a view says so."""
    group = crowd(THREE)
    left = moment

    def enough() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    group.run(enough)
    group.kill("b")
    group.show(LOSE_B)
    for _ in range(4):
        group.run()
        for peer in "ac":
            group.tell(peer, Stalled())
    group.run()
    ends(group, "ac", quiet=False)


@pytest.mark.parametrize("first", ["a", "c"])
def test_one_had_all_parts_and_applied_the_other_had_not_when_the_third_died(first: str) -> None:
    other = "c" if first == "a" else "a"
    group = crowd(THREE)
    group.lose = lambda sender, effect: isinstance(effect, SendChunk) and effect.peer == other
    group.run(lambda: bool(group.of(first, StepApplied)))
    group.kill("b")
    group.lose = lambda sender, effect: False
    group.show(LOSE_B, only=[other])
    group.run()
    group.show(LOSE_B)
    for _ in range(3):
        group.run()
        for peer in "ac":
            group.tell(peer, Stalled())
    group.run()
    ends(group, "ac", quiet=False)


def test_who_is_applying_by_an_older_view_gives_its_part_to_no_other_sum() -> None:
    """The other does the lost one's microbatches itself: with this part it would have another sum, in the last bits."""
    (lost_one,) = (m for m, peer in enumerate(routes(THREE, 0, 1, 3)) if peer == "b")
    heir = routes(LOSE_B, 0, 1, 3)[lost_one]
    first = "a" if heir == "c" else "c"
    group = crowd(THREE, count=3)
    group.lose = lambda sender, effect: isinstance(effect, SendChunk) and effect.peer == heir
    group.run(lambda: first in group.waiting and group.waiting[first].action == APPLY)
    group.paused = {first}
    group.kill("b")
    group.lose = lambda sender, effect: False
    group.show(LOSE_B)
    group.run()
    for _ in range(3):  # the other asks
        group.tell(heir, Stalled())
        group.run()
    assert not group.of(heir, StepApplied), "it has no more than its own part"
    group.paused = set()
    group.run()
    for peer in "ac":
        group.tell(peer, Stalled())
    group.run()
    ends(group, "ac", quiet=False)
    reduced = next(work.payload for work in group.of(heir, Compute) if work.action == APPLY)
    assert [part.key.kind for part in reduced.parts] == [BlobKind.TOTAL]


def test_a_part_is_offered_again_under_the_new_number_with_more_in_it_if_more_was_routed() -> None:
    group = crowd(THREE)
    group.lose = lambda sender, effect: isinstance(effect, SendChunk)
    group.run()
    offers = {offer.offer.meta.covers for offer in group.of("a", SendOffer)}
    assert offers == {tuple(m for m, who in enumerate(routes(THREE, 0, 1, COUNT)) if who == "a")}
    same = one_view("a b c f*9", number=2, last_step=3)
    group.said["a"].clear()
    group.show(same, only=["a"])
    group.run()
    assert [(o.peer, o.view, o.offer.meta.covers) for o in group.of("a", SendOffer)] == [
        (peer, 2, next(iter(offers))) for peer in "bc"
    ]
    lost = replace(LOSE_B, number=3)
    group.said["a"].clear()
    group.show(lost, only=["a"])
    group.run()
    mine = tuple(m for m, who in enumerate(routes(lost, 0, 1, COUNT)) if who == "a")
    assert {(o.peer, o.view, o.offer.meta.covers) for o in group.of("a", SendOffer)} == {("c", 3, mine)}


# One machine among scripted neighbours: `a` of a pair, whose own part is made


def mine(view: View, peer: str, step: int = 1) -> tuple[int, ...]:
    return tuple(m for m, who in enumerate(routes(view, 0, step, COUNT)) if who == peer)


def complete(view: View = TWO, peer: str = "a", weights: str = "w0") -> StageMachine:
    """All that is routed to it is done, and its part is offered."""
    machine = StageMachine(peer, rules(COUNT))
    effects = machine.handle(ViewChanged(view))
    while True:
        work = next((e for e in effects if isinstance(e, Compute)), None)
        if work is None:
            return machine
        made = part_of(0, 1, work.payload, weights) if str(work.action) == "PART" else None
        effects = machine.handle(Computed(work.action, made))


def give(machine: StageMachine, donor: str, blob: Blob, view: int = 1) -> list[Effect]:
    """`donor` offers a blob and answers all questions."""
    effects = machine.handle(Offered(donor, view, blob.offer))
    for ask in [e for e in effects if isinstance(e, AskChunk)]:
        effects = machine.handle(ChunkArrived(donor, ask.blob, ask.index, blob.chunk(ask.index)))
    return effects


THEIRS = part_of(0, 1, mine(TWO, "b"), "w0")


def applies(effects: list[Effect]) -> list[Any]:
    return [e.payload for e in effects if isinstance(e, Compute) and e.action == APPLY]


def test_the_other_part_is_all_that_was_missing() -> None:
    machine = complete()
    assert machine.waits_for() == "the part of step 1 from b (0 of ? chunks)"
    (reduce,) = applies(give(machine, "b", THEIRS))
    assert reduce.givers == ("a", "b") and reduce.parts[1].offer == THEIRS.offer


def test_a_part_that_comes_before_the_own_is_kept_for_it() -> None:
    machine = StageMachine("a", rules(COUNT))
    machine.handle(ViewChanged(TWO))
    assert applies(give(machine, "b", THEIRS)) == []
    effects: list[Effect] = [Compute(1, Action.parse(f"F{mine(TWO, 'a')[0]}"))]
    while not applies(effects):
        (work,) = [e for e in effects if isinstance(e, Compute)]
        made = part_of(0, 1, work.payload, "w0") if str(work.action) == "PART" else None
        effects = machine.handle(Computed(work.action, made))


def test_unlike_weights_are_told_once_and_nothing_is_applied_until_a_view_says_who_is_out() -> None:
    machine = complete()
    odd = part_of(0, 1, mine(TWO, "b"), "other")
    effects = give(machine, "b", odd)
    assert [e for e in effects if isinstance(e, Differs)] == [Differs(1, (("a", "w0"), ("b", "other")))]
    assert not applies(effects)
    for event in (Stalled(), Offered("b", 1, odd.offer), Stalled("b")):
        effects = machine.handle(event)
        assert not [e for e in effects if isinstance(e, Differs | Compute)]
    out = one_view("a b!2", number=2)
    effects = machine.handle(ViewChanged(out))
    assert [str(e.action) for e in effects if isinstance(e, Compute)] == [f"F{mine(TWO, 'b')[0]}"]


def test_unlike_weights_are_told_again_if_the_view_keeps_both() -> None:
    machine = complete()
    odd = part_of(0, 1, mine(TWO, "b"), "other")
    give(machine, "b", odd)
    machine.handle(ViewChanged(replace(TWO, number=2)))
    effects = give(machine, "b", odd, view=2)
    assert len([e for e in effects if isinstance(e, Differs)]) == 1 and not applies(effects)


@pytest.mark.parametrize(
    ("sender", "blob", "reason"),
    [
        ("b", part_of(0, 1, range(COUNT), "w0"), "expected a part of microbatches"),
        ("b", part_of(0, 1, (), "w0"), "expected a part of microbatches"),
        ("b", part_of(1, 1, mine(TWO, "b"), "w0"), "expected an offer of stage 0 from its replicas"),
        ("p", part_of(0, 1, mine(TWO, "b"), "w0"), "expected an offer of stage 0 from its replicas"),
        ("a", part_of(0, 1, mine(TWO, "a"), "w0"), "expected an offer of stage 0 from its replicas"),
        ("f", part_of(0, 1, (), "w0"), "it has no share in step 1 by view 1"),
        ("eve", THEIRS, "it is not in view 1"),
        ("b", Blob.of(THEIRS.key, b"short", THEIRS.offer.meta), "of 600 bytes, got 5"),
        ("b", Blob.of(TOTAL_KEY, b"short"), "of 600 bytes, got 5"),
        ("b", state_of(0, 0), "neither lacks nor keeps"),
        ("b", state_of(200, 0), "neither lacks nor keeps"),
    ],
)
def test_an_offer_that_cannot_be_right_is_refused_with_the_reason(sender: str, blob: Blob, reason: str) -> None:
    machine = complete(one_view("a b f*0", "p"))
    effects = machine.handle(Offered(sender, 1, blob.offer))
    assert [type(e) for e in effects] == [Refuse] and effects[0].peer == sender  # type: ignore[union-attr]
    assert reason in effects[0].reason and not effects[0].stale  # type: ignore[union-attr]


def test_an_offer_of_an_older_view_is_stale_and_of_a_newer_one_waits() -> None:
    machine = complete(replace(TWO, number=3))
    assert machine.handle(Offered("b", 2, THEIRS.offer)) == [Refuse("b", "view 2 is over, the newest is 3", True)]
    assert machine.handle(Offered("b", 4, THEIRS.offer)) == []
    effects = machine.handle(ViewChanged(replace(TWO, number=4)))
    assert [e.peer for e in effects if isinstance(e, AskChunk)] == ["b"]


def test_a_part_of_the_next_step_waits_for_it_and_one_of_a_step_before_gets_its_total() -> None:
    machine = complete()
    later = part_of(0, 2, mine(TWO, "b", 2), "w1")
    assert machine.handle(Offered("b", 1, later.offer)) == []
    give(machine, "b", THEIRS)
    total = total_of(0, 1, COUNT)
    effects = machine.handle(Computed(APPLY, total))
    assert [e.blob for e in effects if isinstance(e, AskChunk)] == [later.offer.id]
    assert machine.handle(Offered("b", 1, THEIRS.offer)) == [SendOffer("b", 1, total.offer)]
    assert machine.handle(BlobWanted("b", 1, THEIRS.key)) == [SendOffer("b", 1, total.offer)]
    assert machine.handle(BlobWanted("b", 1, replace(TOTAL_KEY, step=0))) == [
        SendGone("b", 1, replace(TOTAL_KEY, step=0))
    ]
    assert "from its replicas" in machine.handle(BlobWanted("b", 1, replace(TOTAL_KEY, stage=4)))[0].reason  # type: ignore[union-attr]


def test_a_question_for_a_part_is_answered_when_it_is_there() -> None:
    early = StageMachine("a", rules(COUNT))
    early.handle(ViewChanged(TWO))
    assert early.handle(BlobWanted("b", 1, THEIRS.key)) == []
    offers = [e for e in complete().handle(BlobWanted("b", 1, THEIRS.key)) if isinstance(e, SendOffer)]
    assert [(o.peer, o.offer.meta.covers) for o in offers] == [("b", mine(TWO, "a"))]


def test_chunks_are_given_to_members_only() -> None:
    machine = complete()
    (offer,) = [e.offer for e in machine.handle(BlobWanted("b", 1, THEIRS.key)) if isinstance(e, SendOffer)]
    assert [type(e) for e in machine.handle(ChunkAsked("b", offer.id, 0))] == [SendChunk]
    assert [type(e) for e in machine.handle(ChunkAsked("eve", offer.id, 0))] == [Refuse]
    assert [type(e) for e in machine.handle(ChunkAsked("b", offer.id, 1))] == [Refuse]


def test_a_part_with_a_wrong_chunk_is_refused_and_asked_for_again_at_once() -> None:
    machine = complete()
    machine.handle(Offered("b", 1, THEIRS.offer))
    again, refusal = machine.handle(ChunkArrived("b", THEIRS.offer.id, 0, b"?" * 600))
    assert again == AskChunk("b", THEIRS.offer.id, 0)
    assert isinstance(refusal, Refuse) and "offered digest" in refusal.reason
    assert len(applies(machine.handle(ChunkArrived("b", THEIRS.offer.id, 0, THEIRS.chunk(0))))) == 1


def test_who_gives_nothing_but_wrong_chunks_of_its_part_is_accused_and_asked_again_after_a_stall() -> None:
    machine = complete()
    machine.handle(Offered("b", 1, THEIRS.offer))
    effects = [e for _ in range(MOST_WRONG) for e in machine.handle(ChunkArrived("b", THEIRS.offer.id, 0, b"?" * 600))]
    (accusation,) = [e for e in effects if isinstance(e, Accuse)]
    assert (accusation.peer, accusation.state) == ("b", False) and "offered digest" in accusation.reason
    assert WantBlob("b", 1, THEIRS.key) in machine.handle(Stalled())
    assert len(applies(give(machine, "b", THEIRS))) == 1


def test_a_part_that_does_not_add_up_halts_the_step_until_a_view_comes() -> None:
    machine = complete()
    give(machine, "b", THEIRS)
    effects = machine.handle(Spoiled(APPLY, "b", "a NaN"))
    assert effects == [Accuse("b", "a NaN")]
    assert not [e for e in machine.handle(Stalled()) if isinstance(e, Compute)]
    effects = machine.handle(ViewChanged(one_view("a b!2", number=2)))
    assert [str(e.action) for e in effects if isinstance(e, Compute)] == [f"F{mine(TWO, 'b')[0]}"]


def test_a_total_that_is_no_use_costs_its_donor_a_word_and_is_asked_for_elsewhere() -> None:
    """Whoever follows would end with it, though nothing is wrong with him."""
    late = follower()
    bad = Blob.of(TOTAL_KEY, b"!" * SIZE)
    (reduce,) = applies(give(late, "a", bad))
    assert reduce.donor == "a"
    assert late.handle(Spoiled(APPLY, "a", "a NaN")) == [Accuse("a", "a NaN")]
    assert {e.peer for e in late.handle(Stalled()) if isinstance(e, WantBlob)} == {"a", "b"}
    (reduce,) = applies(give(late, "b", total_of(0, 1, COUNT)))
    assert reduce.donor == "b"


def test_a_part_that_does_not_add_up_after_a_view_that_lost_its_maker_does_not_halt() -> None:
    """The view came while the sum was made, so the step goes on by it: nobody sends another view."""
    machine = complete()
    assert len(applies(give(machine, "b", THEIRS))) == 1
    machine.handle(ViewChanged(one_view("a b!2", number=2)))
    effects = machine.handle(Spoiled(APPLY, "b", "a NaN"))
    assert [str(e.action) for e in effects if isinstance(e, Compute)] == [f"F{mine(TWO, 'b')[0]}"]


def test_a_frame_for_what_a_view_moved_here_while_the_sum_is_made_is_no_error() -> None:
    view = one_view("p", "a b")
    machine = StageMachine("a", rules(1))
    stepped = next(step for step in range(1, 9) if routes(view, 1, step, 1) == ("b",))
    machine = StageMachine("a", rules(1), applied=stepped - 1)
    effects = machine.handle(ViewChanged(view))
    assert [str(e.action) for e in effects if isinstance(e, Compute)] == ["PART"], "nothing is routed here"
    machine.handle(Computed(Action.parse("PART"), part_of(1, stepped, (), "w")))
    assert len(applies(give(machine, "b", part_of(1, stepped, (0,), "w")))) == 1
    machine.handle(ViewChanged(one_view("p", "a b!2", number=2)))
    assert machine.handle(Arrived("p", Kind.FORWARD, 2, stepped, 0, "x")) == []
    effects = machine.handle(Computed(APPLY, total_of(1, stepped, 1)))
    assert [type(e) for e in effects] == [StepApplied]


def test_what_was_added_up_by_an_older_view_is_offered_to_all() -> None:
    """Whoever got the newer view before it had all parts waits for it."""
    machine = complete(THREE)
    for peer in "bc":
        effects = give(machine, peer, part_of(0, 1, mine(THREE, peer), "w0"))
    assert len(applies(effects)) == 1
    machine.handle(ViewChanged(replace(THREE, number=2)))
    total = total_of(0, 1, COUNT)
    effects = machine.handle(Computed(APPLY, total))
    assert [(e.peer, e.view) for e in effects if isinstance(e, SendOffer)] == [("b", 2), ("c", 2)]
    effects = machine.handle(ViewChanged(replace(THREE, number=3)))
    offered = [(e.peer, e.view) for e in effects if isinstance(e, SendOffer) and e.offer == total.offer]
    assert offered == [("b", 3), ("c", 3)], "and again by the next view"


def test_parts_that_are_replaced_do_not_pile_up() -> None:
    machine = complete(THREE)
    for salt in range(40):
        give(machine, "b", part_of(0, 1, mine(THREE, "b"), "w0", str(salt)))
    assert len(machine._replication._parts) == 1 and machine.kept["blobs"] == 1
    (reduce,) = applies(give(machine, "c", part_of(0, 1, mine(THREE, "c"), "w0")))
    assert b'"39"' in bytes(reduce.parts[1].data), "the newest counts"


def test_parts_with_nothing_in_them_may_be_equal() -> None:
    """Two with less than a microbatch each have the same part: zeros."""
    view = next(
        view
        for step in range(1, 99)
        if len(set(routes(view := one_view("a b c", first_step=1), 0, step, 1))) == 1
        and routes(view, 0, step, 1) == ("a",)
        and (view := replace(view, last_step=step))
    )
    step = view.last_step
    machine = StageMachine("a", rules(1), applied=step - 1)
    effects = machine.handle(ViewChanged(view))
    for _ in range(2):
        (work,) = [e for e in effects if isinstance(e, Compute)]
        effects = machine.handle(Computed(work.action))
    machine.handle(Computed(Action.parse("PART"), part_of(0, step, (0,), "w")))
    zeros = part_of(0, step, (), "w")
    give(machine, "b", zeros)
    assert len(applies(give(machine, "c", zeros))) == 1


def test_a_part_made_for_what_a_view_has_changed_meanwhile_is_made_again() -> None:
    machine = StageMachine("a", rules(12, 12))
    effects = machine.handle(ViewChanged(THREE))
    while str((work := next(e for e in effects if isinstance(e, Compute))).action) != "PART":
        effects = machine.handle(Computed(work.action))
    machine.handle(ViewChanged(LOSE_B))
    old, new = (tuple(m for m, who in enumerate(routes(v, 0, 1, 12)) if who == "a") for v in (THREE, LOSE_B))
    assert work.payload == old and set(old) < set(new)
    effects = machine.handle(Computed(work.action, part_of(0, 1, old, "w0")))
    assert not [e for e in effects if isinstance(e, SendOffer)]
    while str((work := next(e for e in effects if isinstance(e, Compute))).action) != "PART":
        effects = machine.handle(Computed(work.action))
    assert work.payload == new
