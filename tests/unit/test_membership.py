"""The coordinator's decisions: who is in, when a peer is lost, where a run stops, what a resumed run starts from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.assignment import assign_stages
from protocol.membership import (
    LINK_GRACE_SECONDS,
    SILENCE_SECONDS,
    STOP_MARGIN_SECONDS,
    Admit,
    Effect,
    End,
    Event,
    Heard,
    Issue,
    JoinAsked,
    Left,
    LinkBroken,
    Membership,
    Phase,
    StopAsked,
    Tick,
    TurnAway,
    short_peer,
)
from protocol.view import Replica, View


def join(peer: str, **held: list[int]) -> JoinAsked:
    """`peer` asks to join; `s0=[5]` says that it holds stage 0 after step 5."""
    return JoinAsked(peer, (f"/{peer}",), {int(stage[1:]): steps for stage, steps in held.items()})


def feed(membership: Membership, *events: Event, now: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in membership.handle(event, now)]


def running(stages: int = 2, last_step: int = 100, next_view: int = 1) -> Membership:
    membership = Membership(stages, last_step, next_view)
    feed(membership, *(join(f"p{stage}") for stage in range(stages)))
    assert membership.phase is Phase.RUNNING
    return membership


# Gathering


def test_the_run_opens_with_its_first_view_when_every_stage_has_a_peer() -> None:
    membership = Membership(2, 100)
    assert feed(membership, join("ann")) == [Admit("ann")]
    assert membership.phase is Phase.GATHERING and membership.view is None
    view = View(1, 1, 100, ((Replica("ann", ("/ann",)),), (Replica("ben", ("/ben",)),)))
    assert feed(membership, join("ben")) == [Admit("ben"), Issue(view)]
    assert membership.phase is Phase.RUNNING and membership.view == view


def test_one_peer_more_than_stages_is_turned_away_with_the_reason() -> None:
    membership = running(2)
    assert feed(membership, join("late")) == [
        TurnAway("late", "the run is full: 2 stages have 2 peers, and this release serves each stage by one")
    ]
    assert "late" not in membership.members


def test_a_join_that_comes_twice_takes_one_place_only() -> None:
    membership = Membership(2, 100)
    assert feed(membership, join("ann"), join("ann")) == [Admit("ann"), Admit("ann")]
    assert membership.phase is Phase.GATHERING and list(membership.members) == ["ann"]


def test_asking_to_join_again_and_again_is_not_silence() -> None:
    membership = Membership(2, 100)
    for now in range(0, 300, 30):
        feed(membership, join("ann"), now=float(now))
        feed(membership, Tick(), now=float(now + 29))
    assert list(membership.members) == ["ann"]


def test_a_member_that_did_not_get_the_first_view_gets_it_with_its_second_join() -> None:
    membership = running(2)
    assert membership.view is not None
    assert feed(membership, join("p0")) == [Admit("p0"), Issue(membership.view)]
    assert membership.view.number == 1, "the same view, not a new one"


@pytest.mark.parametrize("event", [Left("ann", "its owner stopped it"), LinkBroken("ann"), Tick()], ids=str)
def test_a_peer_lost_while_gathering_frees_its_place(event: Event) -> None:
    membership = Membership(2, 100)
    feed(membership, join("ann"))
    assert feed(membership, event) == []
    assert feed(membership, Heard("x"), Tick(), now=SILENCE_SECONDS + 1) == []
    assert membership.members == {}
    effects = feed(membership, join("ben"), join("cat"), now=100.0)
    assert membership.phase is Phase.RUNNING and isinstance(effects[-1], Issue)
    assert [replicas[0].peer for replicas in effects[-1].view.stages] == ["ben", "cat"]


def test_a_stop_while_gathering_ends_the_run_at_once() -> None:
    membership = Membership(2, 100)
    assert feed(membership, join("ann"), StopAsked(reason="enough")) == [Admit("ann"), End(0, False, "enough")]
    assert feed(membership, join("ben")) == [TurnAway("ben", "the run has ended")]


# Running


@pytest.mark.parametrize("peer", ["p0", "p1"])
def test_a_peer_that_leaves_a_running_run_ends_it_and_is_named(peer: str) -> None:
    membership = running(2)
    feed(membership, Heard("p0", 7), Heard("p1", 6))
    stage = int(peer[1])
    assert feed(membership, Left(peer, "out of memory")) == [
        End(6, True, f"stage {stage} lost its peer {peer}: out of memory")
    ]
    assert membership.phase is Phase.ENDED


def test_what_strangers_do_changes_nothing() -> None:
    membership = running(2)
    assert feed(membership, Heard("x", 100), LinkBroken("x"), Left("x", "gone"), Heard("p0", 100)) == []
    assert membership.phase is Phase.RUNNING


def test_silence_ends_the_run_after_its_limit_and_not_before() -> None:
    membership = running(2)
    feed(membership, Heard("p0"), now=10.0)
    assert feed(membership, Tick(), now=SILENCE_SECONDS) == []
    (end,) = feed(membership, Tick(), now=SILENCE_SECONDS + 0.1)
    assert end == End(0, True, f"stage 1 lost its peer p1: nothing was heard from it for {SILENCE_SECONDS:.0f} s")


def test_every_word_breaks_the_silence() -> None:
    membership = running(2)
    for now in range(30, 300, 30):
        feed(membership, Heard("p0"), Heard("p1"), now=float(now))
        assert feed(membership, Tick(), now=now + SILENCE_SECONDS - 1) == []
    assert membership.phase is Phase.RUNNING


def test_a_broken_link_may_come_back_within_its_grace() -> None:
    membership = running(2)
    feed(membership, LinkBroken("p1"), now=1.0)
    feed(membership, LinkBroken("p1"), now=10.0)
    assert feed(membership, Tick(), now=1.0 + LINK_GRACE_SECONDS) == []
    feed(membership, Heard("p1"), now=1.0 + LINK_GRACE_SECONDS)
    assert feed(membership, Tick(), now=2.0 + LINK_GRACE_SECONDS) == []
    feed(membership, LinkBroken("p1"), now=20.0)
    assert feed(membership, Tick(), now=20.0 + LINK_GRACE_SECONDS) == []
    (end,) = feed(membership, Tick(), now=20.1 + LINK_GRACE_SECONDS)
    assert isinstance(end, End) and end.failed
    assert end.reason == f"stage 1 lost its peer p1: its connection broke and did not come back in {15} s"


def test_a_second_break_does_not_start_the_grace_anew() -> None:
    membership = running(2)
    feed(membership, LinkBroken("p1"), now=0.0)
    feed(membership, LinkBroken("p1"), now=14.0)
    assert [type(effect) for effect in feed(membership, Tick(), now=16.0)] == [End]


def test_the_run_ends_when_the_slowest_peer_has_applied_the_last_step() -> None:
    membership = running(3, last_step=9)
    assert feed(membership, Heard("p0", 9), Heard("p1", 9), Heard("p2", 8)) == []
    assert membership.applied_everywhere == 8
    assert feed(membership, Heard("p2", 9)) == [End(9, False, "all steps are done")]
    assert feed(membership, Heard("p2", 9), Left("p0", "bye"), Tick(), StopAsked()) == [], "after the end, nothing"


def test_reports_out_of_order_do_not_take_steps_back() -> None:
    membership = running(2)
    feed(membership, Heard("p0", 5), Heard("p1", 5), Heard("p0", 3), Heard("p1"))
    assert membership.applied_everywhere == 5


def test_a_member_that_restarted_has_lost_its_state_and_ends_a_running_run() -> None:
    membership = Membership(2, 100)
    feed(membership, *(JoinAsked(peer, (), session="1") for peer in ("ann", "ben")), Heard("ann", 4), Heard("ben", 4))
    assert isinstance(feed(membership, JoinAsked("ben", (), session="1"))[-1], Issue), "only a repeated request"
    (end,) = feed(membership, JoinAsked("ben", (), session="2"))
    assert isinstance(end, End) and end.failed and end.step == 4 and "it restarted" in end.reason


def test_a_member_that_restarts_while_gathering_comes_with_its_new_self() -> None:
    membership = Membership(2, 100)
    feed(membership, JoinAsked("ann", ("/old",), session="1"))
    assert feed(membership, JoinAsked("ann", ("/new",), session="2")) == [Admit("ann")]
    (*_, issue) = feed(membership, join("ben"))
    assert isinstance(issue, Issue)
    assert [replica.addresses for (replica,) in issue.view.stages] == [("/new",), ("/ben",)]


# Stopping


def test_one_absurd_report_does_not_stop_the_run_from_stopping() -> None:
    membership = running(3, last_step=10_000)
    feed(membership, Heard("p0", 10**9), Heard("p1", 5), Heard("p2", 5))
    (issue,) = feed(membership, StopAsked(1.0))
    assert isinstance(issue, Issue) and issue.view.last_step < 20


@pytest.mark.parametrize("step_seconds", [0.0, 0.001, 0.3, 1.0, 60.0])
def test_a_stop_leaves_time_for_the_view_to_reach_everybody(step_seconds: float) -> None:
    membership = running(2, last_step=10**6)
    feed(membership, Heard("p0", 41), Heard("p1", 41))
    first = membership.view
    (issue,) = feed(membership, StopAsked(step_seconds))
    assert isinstance(issue, Issue) and first is not None
    assert replace(issue.view, number=first.number, last_step=first.last_step) == first, "only these two change"
    assert issue.view.number == 2
    # A peer may be in step 42 already; from then to the start of the step after the last, the margin must pass.
    steps_between = issue.view.last_step - 42
    assert steps_between >= 1
    assert steps_between * max(step_seconds, 0.001) >= STOP_MARGIN_SECONDS
    assert (steps_between - 1) * max(step_seconds, 0.001) < STOP_MARGIN_SECONDS, "and no longer than that"


@pytest.mark.parametrize("failed", [False, True])
def test_a_stopped_run_ends_at_its_new_last_step_with_the_reason_that_was_given(failed: bool) -> None:
    membership = running(2)
    (issue,) = feed(membership, StopAsked(1.0, "peer p0 was stopped by its owner", failed))
    assert isinstance(issue, Issue)
    last = issue.view.last_step
    assert feed(membership, Heard("p0", last), Heard("p1", last - 1)) == []
    assert feed(membership, Heard("p1", last)) == [End(last, failed, "peer p0 was stopped by its owner")]


def test_a_stop_asked_twice_issues_one_view() -> None:
    membership = running(2)
    (issue,) = feed(membership, StopAsked(0.1, "first"), StopAsked(60.0, "second"))
    assert isinstance(issue, Issue)
    last = issue.view.last_step
    assert feed(membership, Heard("p0", last), Heard("p1", last)) == [End(last, False, "first")]


def test_a_stop_near_the_end_lets_the_run_end_as_it_would() -> None:
    membership = running(2, last_step=10)
    feed(membership, Heard("p0", 7), Heard("p1", 7))
    assert feed(membership, StopAsked(1.0, "stopped as asked", failed=True)) == []
    assert membership.view is not None and membership.view.last_step == 10
    assert feed(membership, Heard("p0", 10), Heard("p1", 10)) == [End(10, False, "all steps are done")]


def test_a_peer_lost_while_stopping_still_fails_the_run() -> None:
    membership = running(2)
    feed(membership, StopAsked())
    (end,) = feed(membership, Left("p0", "killed"))
    assert isinstance(end, End) and end.failed


def test_view_numbers_have_no_gaps_also_across_restarts() -> None:
    numbers = []
    for expected in (1, 3, 5):
        membership = running(2, next_view=expected)
        assert membership.view is not None
        numbers.append(membership.view.number)
        feed(membership, join("p0"), join("p1"), join("stranger"), Heard("p0", 3))
        feed(membership, StopAsked(), StopAsked())
        numbers.append(membership.view.number)
    assert numbers == [1, 2, 3, 4, 5, 6]


# Resuming


def test_a_resumed_run_starts_after_the_newest_step_that_all_stages_have() -> None:
    membership = Membership(2, 100, next_view=4, resume=True)
    effects = feed(membership, join("ben", s1=[50, 100]), join("ann", s0=[50]))
    stages = ((Replica("ann", ("/ann",)),), (Replica("ben", ("/ben",)),))
    assert effects == [Admit("ben"), Admit("ann"), Issue(View(4, 51, 100, stages))]
    assert membership.applied_everywhere == 50
    feed(membership, Heard("ann", 51))
    assert membership.applied_everywhere == 50


def test_a_fresh_run_takes_no_notice_of_old_checkpoints() -> None:
    membership = Membership(1, 100)
    effects = feed(membership, join("ann", s0=[50]))
    assert effects == [Admit("ann"), Issue(View(1, 1, 100, ((Replica("ann", ("/ann",)),),)))]


def test_a_resumed_run_with_no_common_step_fails_and_lists_what_there_is() -> None:
    membership = Membership(2, 100, resume=True)
    effects = feed(membership, join("ann", s0=[50, 40]), join("ben", s1=[60]))
    (end,) = [effect for effect in effects if isinstance(effect, End)]
    assert (end.step, end.failed) == (0, True)
    assert "(stage 0: [40, 50], stage 1: [60])" in end.reason
    assert "start the peers with the folders they had" in end.reason
    assert not any(isinstance(effect, Issue) for effect in effects)


def test_a_resumed_run_that_was_done_before_ends_without_a_step() -> None:
    membership = Membership(1, 100, resume=True)
    effects = feed(membership, join("ann", s0=[100]))
    assert effects[-1] == End(100, False, "all 100 steps were done before")


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"ann": {0: [5]}, "ben": {1: [5]}}, (5, ["ann", "ben"])),
        ({"ann": {1: [5]}, "ben": {0: [5]}}, (5, ["ben", "ann"])),
        ({"ann": {0: [5], 1: [5]}, "ben": {0: [5]}}, (5, ["ben", "ann"])),
        ({"ann": {0: [5], 1: [5]}, "ben": {1: [5]}}, (5, ["ann", "ben"])),
        ({"ann": {0: [5, 9], 1: [9]}, "ben": {1: [5]}}, (5, ["ann", "ben"])),
        ({"ann": {0: [3, 5, 7]}, "ben": {1: [7, 5, 2]}}, (7, ["ann", "ben"])),
    ],
)
def test_stages_go_to_peers_that_hold_them(held: dict[str, dict[int, list[int]]], expected: tuple[int, list]) -> None:  # type: ignore[type-arg]
    assert assign_stages(held, 2) == expected


def test_a_stage_gives_way_where_that_serves_all() -> None:
    held = {"a": {0: [5], 1: [5], 2: [5]}, "b": {0: [5]}, "c": {1: [5], 2: [5]}}
    found = assign_stages(held, 3)
    assert not isinstance(found, str)
    step, order = found
    assert step == 5 and sorted(order) == ["a", "b", "c"]
    assert all(step in held[peer].get(stage, ()) for stage, peer in enumerate(order))


@pytest.mark.parametrize(
    ("held", "described"),
    [
        ({"ann": {}, "ben": {}}, "stage 0: none, stage 1: none"),
        ({"ann": {0: [5], 1: [5]}, "ben": {}}, "stage 0: [5], stage 1: [5]"),
        ({"ann": {0: [4]}, "ben": {1: [5]}}, "stage 0: [4], stage 1: [5]"),
    ],
)
def test_what_cannot_be_assigned_is_described(held: dict[str, dict[int, list[int]]], described: str) -> None:
    found = assign_stages(held, 2)
    assert isinstance(found, str) and described in found


def test_a_peer_is_called_by_its_last_letters() -> None:
    assert short_peer("12D3KooWabcdefgh") == "abcdefgh"
