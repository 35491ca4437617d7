"""States that change hands: newcomers and their donors, holders of copies, a run that goes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from machines import Crowd, one_view, rules, state_of

import protocol.blob
from protocol.blob import Blob, BlobKey, BlobKind
from protocol.effects import (
    Accuse,
    AskChunk,
    Compute,
    Effect,
    FindState,
    KeepState,
    LostTrack,
    Ready,
    Refuse,
    SendChunk,
    SendGone,
    SendOffer,
    SendTaken,
    StepApplied,
    WantBlob,
)
from protocol.events import (
    BlobGone,
    BlobWanted,
    ChunkArrived,
    Computed,
    Offered,
    Spoiled,
    Stalled,
    StateFound,
    ViewChanged,
)
from protocol.stage_machine import StageMachine
from protocol.view import Replica, View
from protocol.work import LOAD, STATE

CHUNKS = 30
KEY = BlobKey(BlobKind.STATE, 0, 2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A blob of the toy has thirty chunks."""
    monkeypatch.setattr(protocol.blob, "CHUNK_BYTES", 20)
    yield


def begun(view: View, copies: bool = False) -> Crowd:
    """Everybody in the view, at its start."""
    made = Crowd(view, rules(4, copies=lambda step: 2 if copies and step % 2 == 0 else 0))
    for replica in view.peers():
        made.add(replica.peer)
    made.show(view)
    return made


def with_newcomer(start: int = 2, last_step: int = 6, copies: bool = False) -> Crowd:
    """a and b are in step 1; n is to begin from the state after `start`."""
    crowd = begun(one_view("a b", "p", last_step=last_step), copies)
    crowd.run(lambda: bool(crowd.of("a", Compute)))
    crowd.view = one_view(f"a b n*{start}", "p", number=2, last_step=last_step)
    crowd.add("n", start, lacking=True)
    crowd.show(crowd.view)
    return crowd


def steps(crowd: Crowd, peer: str) -> list[int]:
    return [e.step for e in crowd.of(peer, StepApplied)]


# Newcomers


def test_a_newcomer_begins_from_what_its_donors_keep_and_follows() -> None:
    crowd = with_newcomer()
    crowd.run()
    assert crowd.of("n", Ready) == [Ready(2, "w2")] and steps(crowd, "n") == [3, 4, 5, 6]
    assert crowd.actions("n") == ["LOAD"] + ["APPLY"] * 4 and crowd.toys["n"].weights == "w6"
    asked = crowd.of("n", AskChunk)
    states = [e for e in asked if e.blob == state_of(0, 2).offer.id]
    assert len(states) == CHUNKS, "each chunk once"
    for donor in "ab":
        assert crowd.actions(donor).count("STATE") == 1 and steps(crowd, donor) == [1, 2, 3, 4, 5, 6]
    kinds = {kept.blob.key.kind for m in crowd.machines.values() for kept in m._exchange._shelf.values()}
    assert BlobKind.STATE not in kinds, "it is taken"


def test_a_newcomer_that_comes_before_its_step_waits_for_it_and_tells_for_what() -> None:
    crowd = with_newcomer(start=3)
    crowd.run(lambda: bool(steps(crowd, "a")))
    assert crowd.machines["n"].waits_for() == "the state of stage 0 after step 3 (0 of ? chunks)"
    assert crowd.machines["n"].lacking and not crowd.machines["n"].finished
    crowd.run()
    assert steps(crowd, "n") == [4, 5, 6] and not crowd.of("n", LostTrack)


def test_a_donor_that_is_lost_in_the_middle_is_replaced_by_the_other() -> None:
    crowd = with_newcomer(last_step=9)
    came: set[int] = set()

    def lose(sender: str, effect: Effect) -> bool:
        if not isinstance(effect, SendChunk) or effect.blob != state_of(0, 2).offer.id:
            return False
        if sender == "a" and effect.index < 12:
            came.add(effect.index)
            return False
        return True

    crowd.lose = lose
    crowd.run()
    assert crowd.machines["n"].lacking and len(came) >= 3
    crowd.kill("a")
    crowd.lose = lambda sender, effect: False
    crowd.view = one_view("a!3 b n*2", "p", number=3, last_step=9)
    crowd.said["n"].clear()
    crowd.show(crowd.view)
    for _ in range(3):
        crowd.run()
        crowd.tell("n", Stalled())
    crowd.run()
    assert crowd.of("n", Ready) == [Ready(2, "w2")] and crowd.machines["n"].applied == 9
    again = {e.index for e in crowd.of("n", AskChunk) if e.blob == state_of(0, 2).offer.id and e.peer == "b"}
    assert again == set(range(CHUNKS)) - came, "what came from a is not asked for again"


@pytest.mark.parametrize("lost", [WantBlob, SendOffer, AskChunk, SendChunk, SendTaken])
def test_whatever_kind_of_message_is_lost_once_the_newcomer_begins(lost: type[Effect]) -> None:
    crowd, losses = with_newcomer(last_step=9), set()

    def lose(sender: str, effect: Effect) -> bool:
        if isinstance(effect, lost) and sender not in losses:
            losses.add(sender)
            return True
        return False

    crowd.lose = lose
    for _ in range(8):
        crowd.run()
        for peer in crowd.machines:
            crowd.tell(peer, Stalled())
    crowd.run()
    assert crowd.of("n", Ready) == [Ready(2, "w2")] and crowd.machines["n"].applied == 9 and losses


def newcomer(number: int = 2) -> StageMachine:
    machine = StageMachine("n", rules(4), 2, lacking=True)
    asked = machine.handle(ViewChanged(one_view("a b n*2", "p", number=number)))
    assert asked == [WantBlob("a", number, KEY), WantBlob("b", number, KEY)]
    return machine


def give(machine: StageMachine, donor: str, blob: Blob, view: int = 2) -> list[Effect]:
    """`donor` offers a blob and answers all questions."""
    asks = machine.handle(Offered(donor, view, blob.offer))
    effects: list[Effect] = []
    while asks:
        ask = asks.pop(0)
        if isinstance(ask, AskChunk):
            effects = machine.handle(ChunkArrived(donor, ask.blob, ask.index, blob.chunk(ask.index)))
            asks += effects
    return effects


def test_two_donors_share_the_work() -> None:
    machine, state = newcomer(), state_of(0, 2)
    asks = machine.handle(Offered("a", 2, state.offer)) + machine.handle(Offered("b", 2, state.offer))
    seen: list[tuple[str, int]] = []
    while asks:
        ask = asks.pop(0)
        if isinstance(ask, AskChunk):
            seen.append((ask.peer, ask.index))
            asks += machine.handle(ChunkArrived(ask.peer, ask.blob, ask.index, state.chunk(ask.index)))
    assert sorted(index for _, index in seen) == list(range(CHUNKS))
    assert min(sum(peer == donor for peer, _ in seen) for donor in "ab") > CHUNKS // 3


def test_a_state_that_is_whole_is_loaded_and_its_donors_told() -> None:
    machine = newcomer()
    state = state_of(0, 2)
    machine.handle(Offered("a", 2, state.offer))
    effects = give(machine, "b", state)
    machine.handle(Stalled())
    assert machine.lacking
    for index in range(CHUNKS):
        effects += machine.handle(ChunkArrived("a", state.offer.id, index, state.chunk(index)))
    assert {e.peer for e in effects if isinstance(e, SendTaken)} == {"a", "b"}
    (work,) = [e for e in effects if isinstance(e, Compute)]
    assert work.action == LOAD and work.step == 2 and work.payload.offer == state.offer
    assert machine.handle(Offered("a", 2, state.offer)) == [SendTaken("a", state.offer.id)], "it is here"
    effects = machine.handle(Computed(LOAD, "w2"))
    assert effects[0] == Ready(2, "w2") and not machine.lacking
    assert machine.handle(Offered("b", 2, state.offer)) == [SendTaken("b", state.offer.id)], "and was"


def test_a_state_with_another_hash_than_was_offered_is_not_begun_from() -> None:
    machine = newcomer()
    give(machine, "a", state_of(0, 2, weights="claimed"))
    accused, *asked = machine.handle(Computed(LOAD, "w2"))
    assert accused == Accuse("a", "the state of step 2 has weights w2, expected were claimed", state=True)
    assert machine.lacking and asked == [WantBlob("b", 2, KEY)], "another one is asked at once"
    (refused,) = machine.handle(Offered("a", 2, state_of(0, 2).offer))
    assert isinstance(refused, Refuse), "and the first one no more"
    give(machine, "b", state_of(0, 2, weights="claimed too", salt="b"))
    effects = machine.handle(Computed(LOAD, "w2"))
    assert [type(e) for e in effects] == [Accuse, LostTrack] and effects[0].peer == "b", "nobody is left"


def test_a_state_that_cannot_be_loaded_costs_a_word_and_is_asked_for_again() -> None:
    machine = newcomer()
    give(machine, "a", state_of(0, 2))
    assert machine.handle(Spoiled(LOAD, "a", "nonsense")) == [Accuse("a", "nonsense")]
    assert machine.lacking
    assert WantBlob("b", 2, KEY) in machine.handle(Stalled())
    give(machine, "b", state_of(0, 2))
    assert machine.handle(Computed(LOAD, "w2"))[0] == Ready(2, "w2")


def test_of_two_unlike_states_the_first_that_is_whole_is_begun_from() -> None:
    machine = newcomer()
    odd = state_of(0, 2, salt="odd")
    machine.handle(Offered("b", 2, odd.offer))
    effects = give(machine, "a", state_of(0, 2))
    assert [e.action for e in effects if isinstance(e, Compute)] == [LOAD]
    for index in range(CHUNKS):
        assert machine.handle(ChunkArrived("b", odd.offer.id, index, odd.chunk(index))) == []
    assert machine.handle(Computed(LOAD, "w2"))[0] == Ready(2, "w2")


def test_a_newcomer_loses_track_only_when_all_its_donors_have_nothing() -> None:
    machine = newcomer()
    for peer, key in (("p", KEY), ("eve", KEY), ("n", KEY), ("b", replace(KEY, step=1)), ("a", KEY), ("a", KEY)):
        assert machine.handle(BlobGone(peer, 2, key)) == []
    (lost,) = machine.handle(BlobGone("b", 2, KEY))
    assert lost == LostTrack("nobody has the state of stage 0 after step 2")


def test_a_donor_that_gives_is_enough_and_a_view_begins_the_count_anew() -> None:
    machine = newcomer()
    machine.handle(BlobGone("a", 2, KEY))
    machine.handle(Offered("b", 2, state_of(0, 2).offer))
    assert machine.handle(BlobGone("a", 2, KEY)) == []
    machine = newcomer()
    machine.handle(BlobGone("a", 2, KEY))
    machine.handle(ViewChanged(one_view("a b n*2", "p", number=3)))
    assert machine.handle(BlobGone("b", 3, KEY)) == []


def test_totals_that_come_before_the_state_are_kept_for_after_it() -> None:
    crowd = with_newcomer(last_step=5)
    crowd.lose = lambda sender, effect: isinstance(effect, SendChunk) and effect.blob == state_of(0, 2).offer.id
    crowd.run()
    assert steps(crowd, "a")[-1] == 5 and crowd.machines["n"].lacking
    crowd.lose = lambda sender, effect: False
    crowd.tell("n", Stalled())
    crowd.run()
    assert steps(crowd, "n") == [3, 4, 5]


# Donors


def test_a_question_for_a_state_is_answered_when_it_is_there_or_with_gone() -> None:
    machine = StageMachine("a", rules(4), 2)
    machine.handle(ViewChanged(one_view("a b n*2 m*7", "p")))
    assert machine.handle(BlobWanted("m", 1, replace(KEY, step=7))) == [], "it will be offered when it is there"
    for peer, key in (("n", replace(KEY, step=1)), ("p", KEY), ("b", KEY), ("n", replace(KEY, stage=1))):
        assert machine.handle(BlobWanted(peer, 1, key)) == [SendGone(peer, 1, key)]
    assert [type(e) for e in machine.handle(BlobWanted("eve", 1, KEY))] == [Refuse]


def test_a_newcomer_whose_step_is_the_one_just_applied_is_given_it_at_once() -> None:
    machine = StageMachine("a", rules(4), 2)
    (work,) = machine.handle(ViewChanged(one_view("a b n*2", "p")))
    assert isinstance(work, Compute) and work.action == STATE and work.step == 2
    state = state_of(0, 2)
    effects = machine.handle(Computed(STATE, state))
    assert effects[0] == SendOffer("n", 1, state.offer) and isinstance(effects[1], Compute)
    assert machine.handle(BlobWanted("n", 1, KEY)) == [SendOffer("n", 1, state.offer)]
    effects = machine.handle(ViewChanged(one_view("a b n*2", "p", number=2)))
    assert SendOffer("n", 2, state.offer) in effects, "a view may have come between"
    machine.handle(ViewChanged(one_view("a b n*2!3", "p", number=3)))
    assert machine.kept["blobs"] == 0, "nobody is to have it any more"


def test_a_state_is_made_for_nobody_who_is_gone_when_it_is_there() -> None:
    machine = StageMachine("a", rules(4), 2)
    machine.handle(ViewChanged(one_view("a b n*2", "p")))
    machine.handle(ViewChanged(one_view("a b n*2!2", "p", number=2)))
    effects = machine.handle(Computed(STATE, state_of(0, 2)))
    assert not [e for e in effects if isinstance(e, SendOffer)]


# Holders


def test_each_stage_keeps_copies_of_the_others_at_checkpoints() -> None:
    crowd = begun(one_view("a b", "p", "x", last_step=6), copies=True)
    crowd.run()
    for peer in crowd.machines:
        assert steps(crowd, peer) == [1, 2, 3, 4, 5, 6]
    held = {(e.blob.key.stage, e.blob.key.step) for peer in "abpx" for e in crowd.of(peer, KeepState)}
    assert held == {(stage, step) for stage in range(3) for step in (2, 4, 6)}
    for peer, machine in crowd.machines.items():
        kept = [e.blob for e in crowd.of(peer, KeepState)]
        assert all(blob.key.stage != machine.stage for blob in kept), "not its own"
        assert len({blob.key for blob in kept}) == len(kept), "once, though two replicas offer it"
        states = [k for k in machine._exchange._shelf.values() if k.blob.key.kind is BlobKind.STATE]
        assert not states and not machine._exchange._fetches


def holder() -> StageMachine:
    """p of the second stage: with so few others it keeps all copies."""
    machine = StageMachine("p", rules(4, copies=lambda step: 9 if step % 2 == 0 else 0), 5)
    machine.handle(ViewChanged(one_view("a b", "p q")))
    return machine


def test_a_holder_keeps_what_is_offered_and_says_so() -> None:
    machine, state = holder(), state_of(0, 4)
    effects = give(machine, "a", state, view=1)
    assert next(e for e in effects if isinstance(e, KeepState)).blob.offer == state.offer
    assert SendTaken("a", state.offer.id) in effects
    assert machine.handle(Offered("b", 1, state.offer)) == [SendTaken("b", state.offer.id)], "it has it"


def test_a_copy_that_never_becomes_whole_makes_way_for_the_next() -> None:
    machine = holder()
    for step in range(0, 60, 2):
        machine.handle(Offered("a", 1, state_of(0, step).offer))
        assert machine.kept["blobs"] == 1


@pytest.mark.parametrize(
    ("sender", "blob", "reason"),
    [
        ("a", state_of(0, 5), "neither lacks nor keeps"),
        ("a", state_of(1, 4), "neither lacks nor keeps"),
        ("a", state_of(2, 4), "neither lacks nor keeps"),
        ("a", state_of(255, 4), "neither lacks nor keeps"),
        ("a", Blob.of(BlobKey(BlobKind.STATE, 0, 4), b"short"), "expected a state of 600 bytes, got 5"),
        ("eve", state_of(0, 4), "it is not in view 1"),
        ("q", state_of(0, 4), "from who serves that stage"),
    ],
)
def test_an_offer_of_a_state_that_is_not_for_here_is_refused(sender: str, blob: Blob, reason: str) -> None:
    effects = holder().handle(Offered(sender, 1, blob.offer))
    assert [type(e) for e in effects] == [Refuse] and reason in effects[0].reason  # type: ignore[union-attr]


@pytest.mark.parametrize("start", [2, 4, 99])
def test_states_that_nobody_said_he_has_taken_do_not_pile_up(start: int) -> None:
    """The word is lost. There is the newest, and the one that somebody who follows was to begin from."""
    crowd = with_newcomer(start, last_step=30, copies=True)
    crowd.lose = lambda sender, effect: isinstance(effect, SendTaken)
    crowd.run()
    assert steps(crowd, "a")[-1] == 30
    for machine in crowd.machines.values():
        states = [k for k in machine._exchange._shelf.values() if k.blob.key.kind is BlobKind.STATE]
        assert len(states) <= 2


# A run that goes back

RESTORED = replace(
    one_view("n", "p", number=5, first_step=5, last_step=7), epoch=1, restored=4, holders=(("p",), ("p",))
)


def gone_back() -> Crowd:
    """Stage 0 was lost; n takes it over from the file at p, which goes on from its own."""
    crowd = Crowd(RESTORED, rules(4))
    crowd.add("n", 4, lacking=True)
    crowd.add("p", 4)
    return crowd


def test_a_state_comes_out_of_a_holders_files_after_a_loss_of_all_replicas() -> None:
    crowd = gone_back()
    crowd.files["p"] = state_of(0, 4)
    crowd.show(RESTORED)
    crowd.run()
    assert crowd.of("p", FindState)[0] == FindState("n", BlobKey(BlobKind.STATE, 0, 4))
    assert crowd.of("n", Ready) == [Ready(4, "w4")]
    assert steps(crowd, "n") == steps(crowd, "p") == [5, 6, 7]
    assert not crowd.machines["p"]._exchange._shelf


def test_a_holder_without_the_file_says_so_and_the_newcomer_has_lost_track() -> None:
    crowd = gone_back()
    crowd.show(RESTORED)
    crowd.run()
    assert [e.key.step for e in crowd.of("p", SendGone)] == [4]
    assert crowd.of("n", LostTrack) == [LostTrack("nobody has the state of stage 0 after step 4")]


def test_a_holder_that_dies_before_it_has_given_the_state_costs_the_newcomer_its_track() -> None:
    """It would wait for ever for a peer that is no more."""
    machine = StageMachine("n", rules(4), 4, lacking=True)
    view = replace(RESTORED, stages=(*RESTORED.stages[:1], (Replica("p"), Replica("q"))))
    assert [type(e) for e in machine.handle(ViewChanged(view))] == [WantBlob]
    lost = replace(view, number=6, stages=(*RESTORED.stages[:1], (Replica("p", lost=6), Replica("q"))))
    assert [type(e) for e in machine.handle(ViewChanged(lost))] == [LostTrack]
    assert [type(e) for e in machine.handle(Stalled())] == [LostTrack], "the word may have been lost"


def test_a_file_is_read_once_however_often_its_state_is_asked_for() -> None:
    machine = StageMachine("p", rules(4), 4)
    machine.handle(ViewChanged(replace(RESTORED, stages=((Replica("n"), Replica("m")), RESTORED.stages[1]))))
    key = BlobKey(BlobKind.STATE, 0, 4)
    looks = [e for peer in "nnmnm" for e in machine.handle(BlobWanted(peer, 5, key))]
    assert looks == [FindState("n", key)]
    state = state_of(0, 4)
    assert [e.peer for e in machine.handle(StateFound("n", key, state)) if isinstance(e, SendOffer)] == ["m", "n"]


def test_only_the_holders_named_look_and_only_for_the_step_that_is_restored() -> None:
    machine = StageMachine("p", rules(4), 4)
    machine.handle(ViewChanged(replace(RESTORED, holders=((), ("p",)))))
    assert [type(e) for e in machine.handle(BlobWanted("n", 5, BlobKey(BlobKind.STATE, 0, 4)))] == [SendGone]
    machine = StageMachine("p", rules(4), 4)
    machine.handle(ViewChanged(RESTORED))
    assert [type(e) for e in machine.handle(BlobWanted("n", 5, BlobKey(BlobKind.STATE, 0, 3)))] == [SendGone]
    key = BlobKey(BlobKind.STATE, 0, 4)
    assert machine.handle(BlobWanted("n", 5, key)) == [FindState("n", key)]
    state = state_of(0, 4)
    assert machine.handle(StateFound("n", key, state)) == [SendOffer("n", 5, state.offer)]
    assert machine.handle(BlobWanted("n", 5, key)) == [SendOffer("n", 5, state.offer)], "the file is read once"
