"""The coordinator's decisions: who is in, when a peer is lost, where a run stops, what it starts and goes on from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from coordinator_story import Peer, Story

from protocol.admission import MOST_FROM_SOURCE, MOST_MEMBERS
from protocol.conduct import FREE_RESTARTS, MOST_UNPROVOKED, RESTART_SECONDS, Conduct
from protocol.detector import BROKEN_FLOOR_SECONDS, CEILING_SECONDS, FLOOR_SECONDS, UNKNOWN_SECONDS
from protocol.membership import (
    Accused,
    Admit,
    Differs,
    Effect,
    End,
    Expelled,
    Failed,
    Heard,
    Irreplaceable,
    Issue,
    JoinAsked,
    LeaveAsked,
    Left,
    LinkBroken,
    LostTrack,
    Membership,
    Notice,
    Phase,
    Release,
    StageCost,
    StopAsked,
    Tick,
    TurnAway,
    short_peer,
)
from protocol.pace import MARGIN_SECONDS
from protocol.peer_report import PeerReport
from protocol.run_state import FREE_SEATINGS
from protocol.view import Replica, View
from protocol.waiting import SETTLE_SECONDS


def story(*peers: str, stages: int = 2, **terms: object) -> Story:
    """A run that goes on, with `peers` (one a stage at first) that all work."""
    told = Story(stages, **terms)  # type: ignore[arg-type]
    told.join(*peers)
    if len(peers) > stages:
        told.steps(8)
        told.steps(8)
    return told


def notices(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Notice)]


def reasons(effects: list[Effect]) -> str:
    return " | ".join(effect.reason for effect in effects if isinstance(effect, Issue))


# Before the first step


def test_the_run_opens_with_its_first_view_when_every_stage_has_a_peer() -> None:
    told = Story(2, 100)
    assert told.join("ann") == [Admit("ann"), Notice("stage 1 needs a peer; 1 more peers are awaited")]
    assert told.membership.phase is Phase.WAITING and told.membership.view is None
    assert told.membership.waiting[0] == (1,)
    view = View(1, 1, 100, ((Replica("ann", ("/ann",)),), (Replica("ben", ("/ben",)),)), holders=((), ()))
    assert told.join("ben") == [Admit("ben"), Issue(view, "every stage has a peer")]
    assert told.membership.phase is Phase.RUNNING and told.membership.view == view


def test_a_run_can_wait_for_more_peers_than_stages() -> None:
    told = Story(2, 100, wait_for=4)
    told.join("ann", "ben", "cat")
    assert told.membership.view is None and told.membership.waiting == ((0, 1), "all stages wait for 1 more peers")
    told.join("dan")
    assert told.seats() == {0: ["ann", "cat"], 1: ["ben", "dan"]}
    assert all(replica.weight == 1 for replica in told.issued()[0].peers()), "at the start all work at once"


def test_a_join_that_comes_twice_takes_one_place_only() -> None:
    told = Story(2, 100)
    told.join("ann")
    assert told.join("ann") == [Admit("ann")], "nothing is said twice"
    assert list(told.membership.members) == ["ann"]


def test_what_to_send_to_whom_admits_without_a_place() -> None:
    told = story("ann", "ben")
    assert told.membership.view_for("ann") == told.membership.view
    assert told.membership.view_for("stranger") is None


def test_a_peer_that_is_not_heard_while_the_run_waits_frees_its_place() -> None:
    told = Story(2, 100)
    told.join("ann")
    told.kill("ann")
    told.beat(UNKNOWN_SECONDS + 1)
    assert not told.membership.members
    told.join("ben", "cat")
    assert told.seats() == {0: ["ben"], 1: ["cat"]}


@pytest.mark.parametrize("event", [Left("ann", "its owner stopped it"), LeaveAsked("ann")], ids=str)
def test_a_peer_that_goes_while_the_run_waits_frees_its_place(event: Left | LeaveAsked) -> None:
    told = Story(2, 100)
    told.join("ann")
    assert (Release("ann") in told.feed(event)) is isinstance(event, LeaveAsked)
    assert not told.membership.members


def test_a_stop_while_the_run_waits_ends_it_at_once() -> None:
    told = Story(2, 100)
    told.join("ann")
    assert told.feed(StopAsked("enough")) == [End(0, False, "enough")]
    assert told.join("ben") == [TurnAway("ben", "the run has ended")]


def test_who_has_too_little_memory_for_any_stage_is_turned_away_with_the_figures() -> None:
    told = Story(costs=(StageCost(1, 3_000_000_000), StageCost(1, 2_000_000_000)))
    (turned,) = [e for e in told.join("ann", memory=1_000_000_000) if isinstance(e, TurnAway)]
    assert "it has 1.00 GB" in turned.reason and "about 2.00 GB" in turned.reason
    told.join("ben", memory=2_500_000_000)
    told.join("cat", memory=0)
    assert told.seats() == {0: ["cat"], 1: ["ben"]}, "unknown memory is no hindrance; what fits decides"


def test_a_run_has_room_for_so_many_peers() -> None:
    told = Story(1, 10**6)
    told.join(*(f"p{n}" for n in range(MOST_MEMBERS)))
    assert [e for e in told.join("late") if isinstance(e, TurnAway)] == [
        TurnAway("late", f"the run is full: it has {MOST_MEMBERS} peers")
    ]


def test_a_member_that_restarts_while_the_run_waits_comes_with_its_new_self() -> None:
    told = Story(2, 100)
    told.join("ann")
    told.feed(JoinAsked("ann", ("/new",), session="other"))
    told.join("ben")
    assert [replica.addresses for replica in told.issued()[0].peers()] == [("/new",), ("/ben",)]


# Newcomers


def test_a_newcomer_follows_catches_up_and_enters() -> None:
    told = story("ann", "ben")
    told.steps(6)
    told.join("cat")
    view = told.membership.view
    assert view is not None
    cat = view.replica("cat")
    assert (cat.weight, cat.before) == (0, 0) and cat.start > 6 and view.first_step == 1
    told.steps(3)
    assert told.shares(0)["cat"] == 0, "it has no state yet"
    effects = told.steps(8)
    assert "peer cat has caught up and enters stage 0" in reasons(effects)
    (entry,) = told.issued(effects)
    assert entry.replica("cat").weight == 1 and entry.replica("cat").before == 0
    assert entry.first_step > view.replica("cat").start


def test_a_newcomer_that_ends_with_other_weights_does_not_enter_and_is_turned_away_in_the_end() -> None:
    told = story("ann", "ben")
    told.steps(4)
    told.peers["cat"] = Peer(twisted="?")
    told.join("cat")
    effects = told.steps(60)
    assert "led to other weights" in reasons(effects)
    assert told.shares(0) == {"ann": 1}
    (turned,) = [e for e in effects if isinstance(e, TurnAway)]
    assert turned.peer == "cat" and "is its hardware unlike theirs?" in turned.reason
    assert told.join("cat") == [TurnAway("cat", turned.reason)]
    assert Admit("cat") in told.restart("cat"), "another session begins anew"


def test_a_learner_that_cannot_keep_up_starts_anew_and_is_turned_away_in_the_end() -> None:
    told = story("ann", "ben")
    told.steps(4)
    told.join("cat")
    (again,) = told.issued(told.feed(LostTrack("cat", "step 9 is not kept any more")))
    assert again.replica("cat").weight == 0
    assert told.feed(LostTrack("cat", "step 9 is not kept any more", view=again.number - 1)) == [], "said before"
    told.feed(LostTrack("cat", "step 19 is not kept any more"))
    effects = told.feed(LostTrack("cat", "step 29 is not kept any more"))
    assert [e.peer for e in effects if isinstance(e, TurnAway)] == ["cat"]
    assert told.seats() == {0: ["ann"], 1: ["ben"]}


def test_newcomers_go_where_they_are_needed_most() -> None:
    told = Story(costs=(StageCost(1), StageCost(3), StageCost(1)))
    told.join("p0", "p1", "p2", "p3", "p4")
    assert sorted(map(len, told.seats().values())) == [1, 1, 3]
    assert len(told.seats()[1]) == 3


def test_no_more_newcomers_fetch_the_state_at_once_than_can_be_kept_copies_for() -> None:
    told = Story(1, 1000)
    told.join("ann", "ben", "cat", "dan")
    assert told.seats() == {0: ["ann", "ben", "cat"]}
    told.steps(16)
    assert told.seats() == {0: ["ann", "ben", "cat", "dan"]}


def test_near_the_end_a_newcomer_has_nothing_to_do() -> None:
    told = story("ann", "ben", last_step=20)
    told.steps(18, seconds=0.1)
    assert told.issued(told.join("cat")) == []
    told.steps(2)
    assert told.end == End(20, False, "all steps are done")


# Losses


def test_a_lost_replica_costs_its_microbatches_only_and_at_once() -> None:
    told = story("ann", "ben", "cat")
    before = told.membership.view
    assert before is not None and told.shares(0) == {"ann": 1, "cat": 1}
    effects = told.feed(Left("ann", "killed"))
    (view,) = told.issued(effects)
    assert "peer ann of stage 0 is out: killed" in reasons(effects)
    lost = [r for r in view.stages[0] if not r.alive]
    assert [(r.peer, r.lost, r.weight) for r in lost] == [("ann", view.number, 1)]
    assert (view.first_step, view.epoch) == (before.first_step, before.epoch)
    assert told.membership.phase is Phase.RUNNING


def test_what_a_lost_replica_had_is_shared_anew_after_a_while() -> None:
    told = story("ann", "ben", "cat")
    told.feed(Left("ann", "killed"))
    told.steps(60)
    view = told.membership.view
    assert view is not None
    assert [r.peer for r in view.stages[0] if r.weight > 0] == ["cat"]
    assert told.membership.phase is Phase.RUNNING


def test_a_lost_learner_just_loses_its_entry() -> None:
    told = story("ann", "ben")
    told.join("cat")
    (view,) = told.issued(told.feed(Left("cat", "killed")))
    assert [r.peer for replicas in view.stages for r in replicas] == ["ann", "ben"]


def test_silence_is_suspected_first_and_then_costs_the_place() -> None:
    told = story("ann", "ben", "cat")
    told.beat(20)
    deadline = told.membership.deadline("ann")
    assert FLOOR_SECONDS <= deadline < CEILING_SECONDS
    told.kill("ann")
    effects = told.beat(round(deadline / 2) + 2)
    assert any("peer ann is suspected" in text for text in notices(effects)) and not told.issued(effects)
    effects = told.beat(round(deadline / 2) + 2)
    assert "peer ann of stage 0 is out: nothing was heard" in reasons(effects)


def test_a_suspect_that_is_heard_again_keeps_its_place_and_that_is_said() -> None:
    told = story("ann", "ben", "cat")
    told.beat(20)
    told.kill("ann")
    told.beat(7)
    told.peers["ann"].alive = True
    effects = told.beat(4)
    assert notices(effects) == ["peer ann is heard again"] and not told.issued(effects)


def test_a_broken_link_shortens_the_deadline() -> None:
    told = story("ann", "ben", "cat")
    told.beat(20)
    told.kill("ann")
    told.feed(LinkBroken("ann"))
    assert told.membership.deadline("ann") == BROKEN_FLOOR_SECONDS
    effects = told.beat(BROKEN_FLOOR_SECONDS + 2)
    assert "its link is broken" in reasons(effects)


def test_a_replica_that_restarts_has_lost_its_state_and_becomes_a_learner() -> None:
    told = story("ann", "ben", "cat")
    views = told.issued(told.restart("ann"))
    assert [r.lost for r in views[-1].stages[0] if r.peer == "ann"] == [views[0].number, 0]
    assert views[-1].replica("ann").weight == 0
    told.steps(16)
    assert told.shares(0) == {"ann": 1, "cat": 1}


def test_who_was_excluded_and_comes_back_is_a_newcomer() -> None:
    told = story("ann", "ben", "cat")
    told.kill("ann")
    told.beat(70)
    assert "ann" not in told.membership.members
    assert told.report("ann") == [], "what it says is nothing yet"
    told.peers["ann"].alive = True
    told.join("ann")
    told.steps(20)
    assert told.shares(0) == {"ann": 1, "cat": 1}


def test_what_strangers_do_changes_nothing() -> None:
    told = story("ann", "ben")
    assert told.feed(Heard("x"), LinkBroken("x"), Left("x", "gone"), LeaveAsked("x"), LostTrack("x", "?")) == []
    assert told.feed(Accused("x", "ann", "?"), Accused("ann", "x", "?"), Differs("x", 1, {}), Failed("x", "?")) == []


def test_a_fatal_failure_ends_the_run_with_its_reason() -> None:
    told = story("ann", "ben", "cat")
    told.feed(Failed("ben", "the loss is not finite", fatal=True))
    view = told.membership.view
    assert told.end is None and view is not None and view.epoch == 1, "somebody else takes its place, and tries"
    assert view.stage_of("ben") is None and told.membership.phase is Phase.RUNNING
    told = story("ann", "ben")
    told.feed(Failed("ben", "the loss is not finite", fatal=True))
    assert told.end is not None and told.end.failed
    assert told.end.reason == "stage 1 cannot go on: peer ben: the loss is not finite"


def test_a_peer_that_computes_without_a_result_is_stuck() -> None:
    told = story("ann", "ben", "cat")
    for index in range(40):
        told.peers["ann"].done += index < 10
        for name in told.members():
            told.report(name, idle=name != "ann")
        told.feed(Tick(), seconds=1)
    assert "has finished nothing" in reasons(told.effects)
    assert told.seats()[0] == ["cat"]


def test_of_two_who_cannot_reach_each_other_the_dispensable_one_goes() -> None:
    told = story("ann", "ben", "cat")
    for _ in range(35):
        for name in told.members():
            told.report(name, broken={"ann": ("ben",), "ben": ("ann",)}.get(name, ()))
        told.beat(1)
        told.feed(Tick(), seconds=1)
    assert "the run stood still" in reasons(told.effects) and "peer ben cannot reach it" in reasons(told.effects)
    assert told.seats() == {0: ["cat"], 1: ["ben"]}


def test_two_who_cannot_reach_each_other_and_are_both_needed_are_named() -> None:
    told = story("ann", "ben")
    for _ in range(35):
        for name in told.members():
            told.report(name, broken={"ann": ("ben",), "ben": ("ann",)}[name])
        told.beat(1)
        told.feed(Tick(), seconds=1)
    (text,) = [text for text in notices(told.effects) if "stands still" in text]
    assert "ann cannot reach ben" in text and "no stage concerned has a peer to spare" in text


def test_a_run_that_stands_still_for_no_known_reason_says_so_once() -> None:
    told = story("ann", "ben")
    told.steps(5)
    told.report("ann", applied=6)
    effects = told.beat(200)
    assert notices(effects) == ["the run has stood still for 60 s, though all peers are heard: stage 1 is at step 5"]


def test_a_peer_that_knows_a_newer_view_tells_of_another_coordinator() -> None:
    told = story("ann", "ben")
    assert told.report("ann", view=9) == [
        Notice(
            "peer ann names view 9, and the newest here is 1: is another coordinator running with this key, or is "
            "this folder an old copy?"
        )
    ]
    assert told.report("ann", view=9) == [], "once"


# A stage without peers


def test_a_stage_that_loses_its_last_peer_pauses_the_run_and_is_named() -> None:
    told = story("ann", "ben")
    told.steps(5)
    effects = told.feed(Left("ben", "killed"))
    assert told.membership.phase is Phase.WAITING and told.membership.waiting[0] == (1,)
    assert notices(effects) == ["the run waits: stage 1 needs a peer; stage 1 lost its peer ben"]
    assert told.beat(30) == [], "and said once"


def test_the_run_goes_on_by_itself_when_somebody_takes_the_place() -> None:
    told = story("ann", "ben", checkpoint_every=4)
    told.steps(10)
    told.kill("ben")
    told.feed(Left("ben", "killed"))
    (view,) = told.issued(told.join("cat"))
    assert (view.epoch, view.restored, view.first_step) == (1, 8, 9)
    assert view.holders == (("ann",), ("ann",)), "both states are here: its own, and a copy"
    assert all(replica.start == 8 for replica in view.peers())
    told.steps(3)
    assert told.membership.applied_everywhere == 11


def test_a_surplus_replica_takes_the_place_at_once() -> None:
    told = story("ann", "ben", "cat", checkpoint_every=4)
    told.kill("ben")
    effects = told.feed(Left("ben", "killed"))
    (view,) = told.issued(effects)
    assert view.epoch == 1 and view.restored == 16 and told.membership.phase is Phase.RUNNING
    assert sorted(len(peers) for peers in told.seats().values()) == [1, 1]
    assert "stage 1 lost its peer ben: killed; the run goes on from step 16" in reasons(effects)


def test_without_a_state_that_all_stages_have_the_run_waits_rather_than_begin_again() -> None:
    told = story("ann", "ben", checkpoint_every=4)
    told.copies = False
    told.steps(10)
    told.kill("ben")
    told.feed(Left("ben", "killed"))
    effects = told.join("cat")
    assert told.membership.phase is Phase.WAITING and not told.issued(effects)
    assert "no step has checkpoints of all 2 stages" in told.membership.waiting[1]
    assert "stage 1: none" in told.membership.waiting[1]
    told.peers["ben"].alive = True
    (view,) = told.issued(told.restart("ben"))
    assert view.restored == 8 and view.stage_of("ben") == 1


def test_before_the_first_checkpoint_the_run_begins_again() -> None:
    told = story("ann", "ben")
    told.steps(10)
    told.feed(Left("ben", "killed"))
    (view,) = told.issued(told.join("cat"))
    assert (view.restored, view.epoch, view.holders) == (0, 1, ((), ()))


def test_whose_file_is_damaged_is_not_sent_back_to_it_again() -> None:
    """Its word of that may come before the report that names the file no more."""
    told = story("ann", "ben", checkpoint_every=4)
    told.copies = False
    told.steps(10)
    (view,) = told.issued(told.restart("ben"))
    assert view.restored == 8
    effects = told.feed(LostTrack("ben", "nobody is left who has the state", view.number))
    assert not told.issued(effects), "somebody may yet bring it"
    ben = told.peers["ben"]
    ben.held = {stage: [step for step in steps if step < 8] for stage, steps in ben.held.items()}
    (view,) = told.issued(told.beat(12))
    assert view.restored == 4


def test_who_took_a_stage_and_cannot_get_its_state_sends_the_run_back_to_one_that_is_there() -> None:
    """Its only holder died before it had given it, though at its own stage others are left."""
    told = story("ann", "ben", "eve", checkpoint_every=4)
    told.steps(10)
    for peer in told.peers.values():
        peer.held = {s: [t for t in steps if t <= 4] for s, steps in peer.held.items()}
    told.steps(1)
    (alone,) = (peers[0] for peers in told.seats().values() if len(peers) == 1)
    effects = told.feed(LostTrack(alone, "nobody is left who has the state"))
    (view,) = told.issued(effects)
    assert view.epoch == 1 and view.restored == 4 and "has lost its state" in reasons(effects)
    assert told.feed(LostTrack(alone, "the same, said before", view=view.number - 1)) == []


def test_a_peer_that_sends_the_run_back_again_and_again_is_turned_away() -> None:
    told = story("ann", "ben", checkpoint_every=4)
    told.steps(10)
    effects: list[Effect] = []
    for _ in range(MOST_UNPROVOKED):  # nobody was lost
        view = told.membership.view
        assert view is not None and not effects
        told.feed(Irreplaceable("ben", view.epoch, view.restored + 1, "gone"))
        effects = [e for e in told.effects if isinstance(e, TurnAway)]
    assert [e.peer for e in effects if isinstance(e, TurnAway)] == ["ben"]


def test_the_last_peer_of_a_stage_may_be_silent_and_come_back() -> None:
    told = story("ann", "ben")
    told.steps(5)
    told.kill("ben")
    effects = told.beat(90)
    assert told.membership.phase is Phase.WAITING and not told.issued(effects)
    assert any("which may yet be heard again" in text for text in notices(effects))
    told.peers["ben"].alive = True
    effects = told.beat(4)
    assert told.membership.phase is Phase.RUNNING and not told.issued(effects)
    assert "the run goes on: those who were silent are heard again" in notices(effects)
    told.steps(2)
    assert told.membership.applied_everywhere == 7


def test_a_silent_last_peer_gives_way_to_somebody_who_is_here() -> None:
    told = story("ann", "ben")
    told.kill("ben")
    told.beat(70)
    (view,) = told.issued(told.join("cat"))
    assert view.epoch == 1 and "ben" not in told.membership.members and told.seats() == {0: ["ann"], 1: ["cat"]}


def test_of_two_silent_replicas_the_one_that_is_heard_goes_on_alone() -> None:
    told = story("ann", "ben", "cat")
    told.kill("ann", "cat")
    told.beat(70)
    assert told.membership.phase is Phase.WAITING and set(told.membership.members) == {"ann", "ben", "cat"}
    told.peers["cat"].alive = True
    told.beat(4)
    assert told.membership.phase is Phase.RUNNING and told.seats()[0] == ["cat"]


def test_who_restarted_as_the_last_of_its_stage_is_not_sent_the_view_that_still_names_it() -> None:
    told = story("ann", "ben", checkpoint_every=4)
    told.copies = False
    told.steps(6)
    told.peers["ben"].held.clear()
    told.restart("ben")
    assert told.membership.phase is Phase.WAITING
    assert told.membership.view_for("ben") is None and told.membership.view_for("ann") is not None


def test_a_report_of_another_session_is_of_a_peer_that_restarted() -> None:
    """It was let in by a coordinator that died before it had written that down."""
    told = story("ann", "ben", "cat")
    told.steps(20)
    (stage,) = [s for s, peers in told.seats().items() if len(peers) == 2]
    second = told.seats()[stage][1]
    effects = told.feed(Heard(second, PeerReport(session="another")))
    assert "it restarted" in reasons(effects) and second not in told.membership.members


def test_files_of_steps_that_nobody_lived_to_report_count_where_there_are_no_others() -> None:
    """The coordinator was away, its only peer went on, and died before it could tell."""
    told = story("ann", stages=1, checkpoint_every=2)
    told.steps(6)
    reached = told.membership.reached
    told.peers["ann"].held = {0: (reached + 2, reached + 4)}
    told.restart("ann")
    told.beat(SETTLE_SECONDS + 1)
    assert told.membership.phase is Phase.RUNNING
    assert told.membership.view is not None and told.membership.view.restored == reached + 4


@pytest.mark.parametrize("silent", [False, True])
def test_where_nobody_new_will_come_a_lost_stage_ends_the_run(silent: bool) -> None:
    told = story("ann", "ben", end_when_starved=True)
    told.steps(5)
    told.kill("ben")
    if silent:
        told.beat(CEILING_SECONDS + 5)
    else:
        told.feed(Left("ben", "out of memory"))
    assert told.end is not None and told.end.failed and told.end.step == 5
    assert told.end.reason.startswith("stage 1 lost its peer ben: " + ("" if silent else "out of memory"))


def test_where_nobody_new_will_come_a_resumed_run_without_a_stages_state_ends() -> None:
    """All are there who will ever be, and one stage's checkpoints are gone: it says so instead of waiting for ever."""
    told = story(resume=True, end_when_starved=True, wait_for=2, checkpoint_every=10)
    told.membership = Membership(told.terms, next_view=3, epoch=1, reached=60, done=60)
    told.join("ann", held={0: (50, 60)})
    told.join("ben")
    told.beat(SETTLE_SECONDS - 2)
    assert told.end is None, "somebody may bring it yet"
    told.beat(4)
    assert told.end is not None and told.end.failed and told.end.step == 60
    assert "no step has checkpoints of all 2 stages" in told.end.reason and "stage 1: none" in told.end.reason


def test_where_somebody_may_come_it_waits() -> None:
    told = story(resume=True, wait_for=2, checkpoint_every=10)
    told.membership = Membership(told.terms, next_view=3, epoch=1, reached=60, done=60)
    told.join("ann", held={0: (50, 60)})
    told.join("ben")
    told.beat(10 * SETTLE_SECONDS)
    assert told.end is None and "stage 1: none" in told.membership.waiting[1]


def test_a_run_whose_steps_are_all_done_waits_for_nobody() -> None:
    told = story("ann", "ben", last_step=5)
    told.steps(5)
    assert told.end is not None
    told.reload()
    told.feed(Tick())
    assert told.end is not None and not told.end.failed and told.end.step == 5
    assert told.end.reason == "all 5 steps were done before"


def test_a_run_that_never_got_under_way_again_stands_where_it_stood() -> None:
    told = story(resume=True, wait_for=2)
    told.membership = Membership(told.terms, next_view=3, epoch=1, reached=62, done=60)
    told.feed(Tick(), StopAsked())
    assert told.end is not None and told.end.step == 60, "not `ended after step 0`"


def test_where_nobody_new_will_come_a_surplus_replica_still_can() -> None:
    told = story("ann", "ben", "cat", end_when_starved=True)
    told.kill("ben")
    told.feed(Left("ben", "killed"))
    assert told.membership.phase is Phase.RUNNING and told.end is None


def test_a_sleep_of_the_coordinator_itself_is_nobodys_silence() -> None:
    told = story("ann", "ben", "cat")
    assert told.feed(Tick(), seconds=3600) == []
    assert told.beat(4) == []


# Unlike weights, accusations


def test_of_unlike_weights_the_majority_stays() -> None:
    told = story("ann", "ben", "cat", "dan", stages=1)
    told.steps(20)
    assert told.shares(0) == dict.fromkeys(["ann", "ben", "cat", "dan"], 1)
    effects = told.feed(Differs("ann", 30, {"ann": "x", "ben": "y", "cat": "y", "dan": "y"}))
    (view,) = told.issued(effects)
    assert "its weights differ" in reasons(effects)
    assert [r.weight for r in view.stages[0] if r.peer == "ann"] == [1, 0] and view.replica("ann").weight == 0
    assert told.feed(Differs("cat", 30, {"ann": "x", "ben": "y", "cat": "y", "dan": "y"})) == [], "once is enough"
    told.steps(20)
    assert told.shares(0)["ann"] == 1, "it came back"


def test_of_two_unlike_ones_the_first_in_the_view_stays() -> None:
    told = story("ann", "ben", "cat")
    hashes = {"cat": "y", "ann": "x"}
    (view,) = told.issued(told.feed(Differs("cat", 30, hashes), Differs("ann", 30, hashes)))
    assert view.replica("cat").weight == 0 and view.replica("ann").weight == 1


@pytest.mark.parametrize("odd", ["", "not a hash"])
def test_whatever_a_replica_says_of_its_weights_one_of_the_two_stays(odd: str) -> None:
    told = story("ann", "ben", "cat")
    first, second = next(peers for peers in told.seats().values() if len(peers) == 2)
    hashes = {first: odd, second: "y"}
    (view,) = told.issued(told.feed(Differs(second, 30, hashes), Differs(first, 30, hashes)))
    assert {view.replica(first).weight, view.replica(second).weight} == {0, 1}
    assert odd or view.replica(second).weight == 1


def test_who_differs_again_and_again_is_turned_away() -> None:
    told = story("ann", "ben", "cat")
    for _ in range(3):
        hashes = {"ann": "x", "cat": "y"}
        effects = told.feed(Differs("ann", 30, hashes), Differs("cat", 30, hashes))
        if told.seats()[0] != ["ann"]:
            told.steps(16)
    (turned,) = [e for e in effects if isinstance(e, TurnAway)]
    assert turned.peer == "cat" and "is its hardware unlike theirs?" in turned.reason


def test_who_sends_what_cannot_be_used_loses_its_place() -> None:
    told = story("ann", "ben", "cat")
    effects = told.feed(Accused("ben", "cat", "a number is not finite"))
    assert reasons(effects) == "peer cat of stage 0 is out: peer ben cannot use what it sent: a number is not finite"
    assert told.seats() == {0: ["ann"], 1: ["ben"]}
    (turned,) = [e for e in told.feed(Accused("ann", "cat", "a NaN")) if isinstance(e, TurnAway)]
    assert turned == TurnAway("cat", "peer ann cannot use what it sent: a NaN")


def test_without_the_last_of_a_stage_that_sends_what_cannot_be_used_the_run_waits_for_another() -> None:
    """One word must not end what others have trained."""
    told = story("ann", "ben")
    told.feed(Accused("ann", "ben", "an id outside the vocabulary"))
    stages, text = told.membership.waiting
    assert told.end is None and stages == (1,) and "stage 1 lost its peer ben" in text
    assert "ben" not in told.membership.members


def test_where_nobody_else_will_come_it_ends_the_run() -> None:
    told = story("ann", "ben", end_when_starved=True)
    told.feed(Accused("ann", "ben", "an id outside the vocabulary"))
    assert told.end is not None and told.end.failed
    assert (
        told.end.reason == "stage 1 lost its peer ben: peer ann cannot use what it sent: an id outside the vocabulary"
    )


def test_a_new_session_does_not_forget_whom_it_accused() -> None:
    conduct = Conduct()
    for number, session in enumerate("ab", 1):
        assert conduct.begin("ann", session, 0.0) == ""
        conduct.quarrels.note("ann", f"peer-{number}")
        assert conduct.quarrels.wrong("ann", f"peer-{number}") == ("ann" if number == 2 else "")


def test_who_accuses_one_after_the_other_is_wrong_itself() -> None:
    told = story("a0", "b0", "a1", "b1", "a2", "a3", "a4")
    told.steps(40)
    accuser, *others = told.membership.members
    told.feed(Accused(accuser, others[-1], "noise"))
    assert others[-1] not in told.membership.members, "one's word against one's: who came later gives way"
    assert told.join(others[-1])[0] == Admit(others[-1]), "and may come back"
    effects = told.feed(Accused(accuser, others[0], "noise"))
    assert [e.peer for e in effects if isinstance(e, TurnAway)] == [accuser]
    assert set(others) <= told.membership.members.keys()


def test_only_a_neighbour_can_be_accused() -> None:
    told = story("ann", "ben", "cat", stages=3)
    assert told.feed(Accused("ann", "cat", "?"), Accused("ann", "ann", "?")) == []


# Stopping


def test_one_absurd_report_does_not_stop_the_run_from_stopping() -> None:
    told = story("ann", "ben", "cat", stages=3, last_step=10_000)
    told.steps(5)
    told.report("ann", applied=9_000)
    (view,) = told.issued(told.feed(StopAsked()))
    assert view.last_step < 20


@pytest.mark.parametrize("step_seconds", [0.05, 0.3, 1.0, 5.0])
def test_a_stop_leaves_time_for_the_view_to_reach_everybody(step_seconds: float) -> None:
    told = story("ann", "ben", last_step=10**6)
    told.steps(41, step_seconds)
    first = told.membership.view
    assert first is not None and told.membership.step_seconds == pytest.approx(step_seconds)
    (view,) = told.issued(told.feed(StopAsked()))
    assert replace(view, number=first.number, last_step=first.last_step) == first, "only these two change"
    steps_between = view.last_step - 42  # somebody may be in step 42 already
    assert steps_between >= 1 and steps_between * step_seconds >= MARGIN_SECONDS - 1e-6
    assert (steps_between - 1) * step_seconds < MARGIN_SECONDS, "and no longer than that"


@pytest.mark.parametrize("failed", [False, True])
def test_a_stopped_run_ends_at_its_new_last_step_with_the_reason_that_was_given(failed: bool) -> None:
    told = story("ann", "ben")
    told.steps(5)
    (view,) = told.issued(told.feed(StopAsked("enough", failed), StopAsked("second")))
    told.steps(20)
    assert told.end == End(view.last_step, failed, "enough")


def test_a_stop_near_the_end_lets_the_run_end_as_it_would() -> None:
    told = story("ann", "ben", last_step=10)
    told.steps(7)
    assert told.feed(StopAsked("enough", failed=True)) == []
    told.steps(3)
    assert told.end == End(10, False, "all steps are done")


def test_a_last_step_that_somebody_passed_already_is_put_off() -> None:
    told = story("ann", "ben")
    told.steps(5)
    (view,) = told.issued(told.feed(StopAsked()))
    late = view.last_step + 1
    told.report("ann", applied=late)
    (later,) = told.issued(told.report("ben", applied=late))
    assert later.last_step > late


def test_a_stage_lost_while_the_run_stops_fails_it() -> None:
    told = story("ann", "ben")
    told.steps(5)
    told.feed(StopAsked())
    told.feed(Left("ben", "killed"))
    assert told.end is not None and told.end.failed and "stage 1 lost its peer ben: killed" in told.end.reason


# Leaving


def test_who_leaves_is_drained_and_released() -> None:
    told = story("ann", "ben", "cat")
    effects = told.feed(LeaveAsked("ann"))
    (view,) = told.issued(effects)
    assert view.replica("ann").weight == 0 and view.replica("ann").before == 1
    assert "peer ann leaves stage 0, as its owner asked" in reasons(effects)
    assert Release("ann") not in effects
    effects = told.steps(20)
    assert Release("ann") in effects and told.seats() == {0: ["cat"], 1: ["ben"]}
    assert told.membership.phase is Phase.RUNNING


def test_a_learner_goes_at_once() -> None:
    told = story("ann", "ben")
    told.join("cat")
    assert Release("cat") in told.feed(LeaveAsked("cat"))
    assert told.seats() == {0: ["ann"], 1: ["ben"]}


def test_the_last_of_a_stage_waits_for_a_substitute_that_is_sent_there() -> None:
    told = story("ann", "ben", "cat")
    effects = told.feed(LeaveAsked("ben"))
    effects += told.steps(60)
    assert "which needs it more" in reasons(effects)
    assert Release("ben") in effects and told.membership.phase is Phase.RUNNING
    assert [len(peers) for peers in told.seats().values()] == [1, 1]
    assert all(view.epoch == 0 for view in told.issued()), "no step was lost"


def test_where_nobody_can_take_its_place_the_run_is_wound_down_to_a_checkpoint_of_all() -> None:
    told = story("ann", "ben")
    told.steps(5)
    effects = told.feed(LeaveAsked("ben"))
    assert "peer ben, the last of stage 1, was stopped by its owner" in reasons(effects)
    last = told.issued(effects)[-1].last_step
    effects = told.steps(20)
    assert Release("ben") in effects and told.membership.phase is Phase.WAITING
    assert told.membership.waiting[0] == (1,) and told.end is None
    (view,) = told.issued(told.join("cat"))
    assert (view.restored, view.last_step, view.epoch) == (last, 1000, 1)


def test_where_nobody_new_will_come_a_leaver_ends_the_run() -> None:
    told = story("ann", "ben", end_when_starved=True)
    told.steps(5)
    told.feed(LeaveAsked("ben"))
    told.steps(20)
    assert told.end is not None and told.end.failed and "peer ben" in told.end.reason


def test_a_leaver_is_not_kept_for_ever() -> None:
    told = story("ann", "ben", "cat")
    told.feed(LeaveAsked("ann"))
    effects = told.beat(130)  # nobody steps, so its share cannot end
    assert Release("ann") in effects and told.membership.phase is Phase.RUNNING


def test_a_leaver_whose_copies_nobody_takes_goes_in_the_end() -> None:
    told = story("ann", "ben")
    told.copies = False
    told.steps(5)
    told.feed(LeaveAsked("ben"))
    assert Release("ben") not in told.steps(20)
    assert Release("ben") in told.beat(70)


# Shares and moves


def test_shares_follow_measured_speed() -> None:
    told = story("ann", "ben", "cat")
    told.peers["ann"].seconds, told.peers["ben"].seconds, told.peers["cat"].seconds = 0.1, 0.05, 0.3
    told.steps(80)
    assert told.shares(0) == pytest.approx({"ann": 1, "cat": 0.333})
    assert "shares its work by measured speed" in reasons(told.effects)
    views = len(told.issued())
    told.peers["cat"].seconds = 0.28
    told.steps(80)
    assert len(told.issued()) == views, "a little jitter changes nothing"


def test_a_peer_moves_to_a_stage_that_holds_the_run_up_and_says_why() -> None:
    told = Story(2, 10_000)
    told.join("a0", "b0", "a1", "b1")
    told.steps(40)
    told.feed(Left("b0", "killed"))
    for _ in range(3):
        told.join("c0")
        told.steps(60)
    assert {len(peers) for peers in told.seats().values()} == {2}
    told.feed(Left(told.seats()[1][0], "killed"))
    told.join("d0")
    told.steps(60)
    told.peers.pop("none", None)
    seats = told.seats()
    gone = seats[1]
    told.join("e0", "f0")
    told.steps(80)
    for peer in [p for p in told.seats()[1] if p != gone[0]]:
        told.feed(Left(peer, "killed"))
    before = {stage: len(peers) for stage, peers in told.seats().items()}
    assert before[0] >= 3 and before[1] == 1
    effects = told.steps(150)
    assert "stage 1 holds the run up" in reasons(effects)
    assert {stage: len(peers) for stage, peers in told.seats().items()} == {0: before[0] - 1, 1: 2}
    assert told.membership.applied_everywhere > 300, "nobody waited"


# Resuming, and the coordinator's own death


def resumed(stages: int = 2, last_step: int = 100, reached: int = 100) -> Story:
    told = Story(stages, last_step, resume=True)
    told.membership = Membership(told.terms, next_view=4, epoch=2, reached=reached)
    return told


def test_a_resumed_run_starts_after_the_newest_step_that_all_stages_have() -> None:
    told = resumed(reached=60)
    told.join("ben", held={1: [50]})
    (view,) = told.issued(told.join("ann", held={0: [50]}))
    assert (view.number, view.first_step, view.restored, view.epoch) == (4, 51, 50, 2)
    assert told.seats() == {0: ["ann"], 1: ["ben"]}
    assert view.holders == (("ann",), ("ben",))


def test_a_copy_will_do_and_anyone_can_take_a_stage() -> None:
    told = resumed(reached=60)
    told.join("ann", held={0: [50], 1: [50]})
    (view,) = told.issued(told.join("new"))
    assert told.seats() == {0: ["ann"], 1: ["new"]} and view.holders[1] == ("ann",)


def test_who_may_yet_bring_a_newer_state_is_awaited_a_little() -> None:
    told = resumed(reached=120)
    told.join("ben", held={1: [50, 100]})
    assert not told.issued(told.join("ann", held={0: [50]}))
    assert told.membership.waiting == ((0,), "somebody may yet bring the state of stage 0 after step 100")
    (view,) = told.issued(told.beat(12))
    assert view.restored == 50


def test_a_fresh_run_takes_no_notice_of_old_checkpoints() -> None:
    told = Story(1, 100)
    (view,) = told.issued(told.join("ann", held={0: [50]}))
    assert (view.first_step, view.restored) == (1, 0)


def test_a_resumed_run_with_no_common_step_waits_and_says_what_there_is() -> None:
    told = resumed()
    told.join("ann", held={0: [40, 50]})
    told.join("ben", held={1: [60]})
    assert told.end is None and told.membership.phase is Phase.WAITING
    stages, text = told.membership.waiting
    assert stages == (0,) and "(stage 0: [40, 50], stage 1: [60])" in text
    assert "start the peers with the folders they had" in text
    (view,) = told.issued(told.join("cat", held={0: [60]}))
    assert view.restored == 60


def test_a_resumed_run_without_any_checkpoint_begins_at_the_start_only_if_there_was_none() -> None:
    told = resumed(reached=500)
    told.join("ann", "ben")
    assert told.membership.phase is Phase.WAITING
    told = resumed(reached=20)
    told.join("ann", "ben")
    assert told.issued()[0].restored == 0


def test_a_resumed_run_that_was_done_before_ends_without_a_step() -> None:
    told = resumed(stages=1)
    effects = told.join("ann", held={0: [100]})
    assert effects[-1] == End(100, False, "all 100 steps were done before")


def test_a_coordinator_that_comes_back_goes_on_with_the_same_view() -> None:
    told = story("ann", "ben", "cat")
    view = told.membership.view
    told.reload()
    assert told.membership.view == view and told.membership.phase is Phase.RUNNING
    assert told.steps(5) == [], "nobody noticed"
    assert told.membership.applied_everywhere == 21
    told.join("dan")
    told.steps(16)
    assert "dan" in told.seats()[1] and told.shares(1)["dan"] == 1


def test_who_died_while_the_coordinator_was_away_is_found_out() -> None:
    told = story("ann", "ben", "cat")
    told.kill("ann")
    told.reload()
    told.beat(CEILING_SECONDS - 5)
    assert "ann" in told.membership.members
    told.beat(10)
    assert told.seats() == {0: ["cat"], 1: ["ben"]} and told.membership.phase is Phase.RUNNING


def test_a_coordinator_does_not_plan_before_it_knows_how_far_all_are() -> None:
    told = story("ann", "ben", "cat")
    told.steps(100)
    told.reload()
    assert told.feed(StopAsked()) == [], "it does not know yet where"
    told.report("ann")
    told.report("ben")
    (view,) = told.issued(told.report("cat"))
    assert view.last_step > 116


def test_when_all_are_gone_the_coordinator_resumes_from_their_folders() -> None:
    told = story("ann", "ben", checkpoint_every=4)
    told.steps(10)
    told.reload()
    told.restart("ann")
    (view,) = told.issued(told.restart("ben"))
    assert (view.restored, view.epoch) == (8, 1)


def test_what_is_stored_is_json_and_a_run_that_ended_is_resumed_from_checkpoints() -> None:
    told = story("ann", "ben", end_when_starved=True)
    told.steps(5)
    told.feed(Left("ben", "killed"))
    stored = json.loads(json.dumps(told.membership.to_json()))
    again = Membership.from_json(told.terms, stored, told.now, reached=70)
    assert again.phase is Phase.WAITING and again.view is None and again.reached == 70 and not again.members


def test_a_barred_peer_stays_barred_through_a_restart_of_the_coordinator() -> None:
    told = story("ann", "ben", "cat")
    told.feed(Accused("ben", "cat", "noise"), Accused("ann", "cat", "noise"))
    told.reload()
    assert [type(effect) for effect in told.join("cat")] == [TurnAway]


def test_a_peer_is_called_by_its_last_letters() -> None:
    assert short_peer("12D3KooWabcdefgh") == "abcdefgh"


# Those who join again and again, and many from one place


def test_who_restarts_again_and_again_is_told_to_wait_and_costs_the_run_few_views() -> None:
    """Four hundred joins of one identity made eight hundred views."""
    told = story("ann", "ben", "cat", "dan")
    before = len(told.issued())
    refused = [e for _ in range(400) for e in told.restart("dan") if isinstance(e, TurnAway)]
    assert len(refused) == 400 - FREE_RESTARTS
    assert "try again in 15 s" in refused[0].reason
    assert len(told.issued()) - before <= 2 * FREE_RESTARTS + 1, "two each, and the last one is out"
    told.now += RESTART_SECONDS
    assert Admit("dan") in told.restart("dan"), "it is not barred"


def test_newcomers_get_their_places_by_few_views_however_many_come() -> None:
    told = story("ann", "ben")
    before = len(told.issued())
    told.join(*(f"new-{number}" for number in range(100)))
    for _ in range(10):
        told.feed(Tick(), seconds=0.1)
    assert len(told.membership.members) == 102
    assert 0 < len(told.issued()) - before <= FREE_SEATINGS + 1


def test_one_network_address_does_not_fill_the_run() -> None:
    told = story("ann", "ben")
    crowd = [f"new-{number}" for number in range(MOST_FROM_SOURCE + 5)]
    effects = [e for name in crowd for e in told.join(name, source="203.0.113.7") if isinstance(e, TurnAway)]
    assert [e.peer for e in effects] == crowd[-5:] and "one network address" in effects[0].reason
    assert Admit("else") in told.join("else", source="203.0.113.8")


def test_one_line_does_not_fill_the_run_by_the_many_ipv6_addresses_that_it_has() -> None:
    told = story("ann", "ben")
    crowd = {f"new-{number}": f"2001:db8:0:7::{number + 1:x}" for number in range(MOST_FROM_SOURCE + 5)}
    effects = [e for name, at in crowd.items() for e in told.join(name, source=at) if isinstance(e, TurnAway)]
    assert [e.peer for e in effects] == list(crowd)[-5:]
    assert Admit("else") in told.join("else", source="2001:db8:0:8::1"), "the neighbour's line is another one"


def test_an_ipv4_address_is_the_same_one_in_ipv6() -> None:
    told = story("ann", "ben")
    crowd = {f"new-{number}": f"{'::ffff:' * (number % 2)}203.0.113.7" for number in range(MOST_FROM_SOURCE + 1)}
    effects = [e for name, at in crowd.items() for e in told.join(name, source=at) if isinstance(e, TurnAway)]
    assert [e.peer for e in effects] == [f"new-{MOST_FROM_SOURCE}"]


@pytest.mark.parametrize("source", ["", "127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_what_comes_from_this_machine_or_from_nobody_knows_where_is_not_counted(source: str) -> None:
    told = story("ann", "ben")
    crowd = [f"new-{number}" for number in range(MOST_FROM_SOURCE + 5)]
    assert not [e for name in crowd for e in told.join(name, source=source) if isinstance(e, TurnAway)]


def test_a_coordinator_that_returns_knows_where_its_members_came_from() -> None:
    told = story("ann", "ben")
    told.join("new", source="203.0.113.7")
    stored = json.loads(json.dumps(told.membership.to_json()))
    again = Membership.from_json(told.terms, stored, told.now)
    assert again.members["new"].source == "203.0.113.7"


def test_an_expelled_member_is_out_and_may_not_come_back() -> None:
    told = story("ann", "ben", "cat", "dan")
    reason = "what it said could not be dealt with"
    assert TurnAway("cat", reason) in told.feed(Expelled("cat", reason))
    assert "cat" not in told.membership.members and all("cat" not in peers for peers in told.seats().values())
    assert told.join("cat") == [TurnAway("cat", reason)]
