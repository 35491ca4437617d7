"""From one view to the next, and what is held against peers meanwhile."""

from __future__ import annotations

from protocol.agreement import STEPS_KEPT, Agreement
from protocol.conduct import MOST_LOST_TRACKS, RESYNC_STEPS, SHEETS_KEPT, Conduct
from protocol.quarrels import MOST_QUARRELS, Quarrels
from protocol.route import routes
from protocol.view import Replica, View
from protocol.view_change import bereft, drained, planned, with_last_step, with_learner, without

VIEW = View(5, 10, 99, ((Replica("ann"), Replica("ben"), Replica("cat")), (Replica("dan"),)))


def test_a_plan_gives_new_weights_and_keeps_the_old_ones_for_earlier_steps() -> None:
    view = planned(VIEW, 20, {"ann": 0.0, "ben": 0.5})
    assert (view.number, view.first_step) == (6, 20)
    assert [(r.weight, r.before) for r in view.stages[0]] == [(0, 1), (0.5, 1), (1, 1)]
    assert drained(view) == ("ann",)
    for step in range(10, 20):
        assert routes(view, 0, step, 8) == routes(VIEW, 0, step, 8)


def test_a_loss_moves_nothing_that_the_living_had() -> None:
    view = without(VIEW, ["ben"], past=True)
    assert [(r.peer, r.lost, r.weight) for r in view.stages[0]] == [("ann", 0, 1), ("ben", 6, 1), ("cat", 0, 1)]
    for step in range(10, 40):
        before, after = routes(VIEW, 0, step, 8), routes(view, 0, step, 8)
        assert all(a == b for a, b in zip(after, before, strict=True) if b != "ben")


def test_the_lost_stay_for_the_steps_that_they_were_in_and_no_longer() -> None:
    lost = without(VIEW, ["ben"], past=True)
    view = planned(lost, 20, {})
    assert [(r.peer, r.weight, r.before) for r in view.stages[0] if not r.alive] == [("ben", 0, 1)]
    assert routes(view, 0, 15, 8) == routes(lost, 0, 15, 8)
    assert all(r.alive for r in planned(view, 30, {}).stages[0])


def test_who_had_no_work_is_dropped_and_not_marked() -> None:
    learning = with_learner(VIEW, 1, "eve", ("/eve",), 14)
    assert learning.stages[1][-1] == Replica("eve", ("/eve",), 0.0, 0.0, 14)
    assert without(learning, ["eve"], past=False).stages == VIEW.stages
    draining = planned(VIEW, 20, {"ann": 0.0})
    assert [r.peer for r in without(draining, ["ann"], past=True).stages[0]] == ["ben", "cat"]
    assert without(draining, ["ann"], past=False).stages[0][0].lost == 7


def test_a_peer_can_be_lost_and_come_back() -> None:
    view = with_learner(without(VIEW, ["ben"], past=True), 0, "ben", (), 30)
    again = without(view, ["ben"], past=True)
    assert [(r.peer, r.lost) for r in again.stages[0]] == [("ann", 0), ("ben", 6), ("cat", 0)]


def test_a_stage_needs_somebody_for_the_steps_before_and_after() -> None:
    assert bereft(VIEW, past=True) == () and bereft(VIEW, True, ["dan"]) == (1,)
    draining = planned(VIEW, 20, {"ann": 0.0, "ben": 0.0})
    assert bereft(draining, True, ["cat"]) == (0,)
    entering = planned(with_learner(VIEW, 1, "eve", (), 14), 20, {"eve": 1.0})
    assert bereft(entering, True, ["dan"]) == () and bereft(entering, False, ["dan"]) == (1,)


def test_another_last_step() -> None:
    view = with_last_step(VIEW, 40)
    assert (view.number, view.last_step, view.stages) == (6, 40, VIEW.stages)


def test_agreement_is_by_stage_and_step_and_bounded() -> None:
    agreement = Agreement()
    agreement.note(0, 7, "x", "ann")
    agreement.note(0, 7, "", "ben")
    assert agreement.agrees(0, 7, "x") is True
    assert agreement.agrees(0, 7, "y") is False
    assert (
        agreement.agrees(1, 7, "x") is None
        and agreement.agrees(0, 8, "x") is None
        and agreement.agrees(0, 7, "") is None
    )
    for step in range(8, 8 + STEPS_KEPT):
        agreement.note(0, step, "x", "ann")
    assert agreement.agrees(0, 7, "x") is None and agreement.agrees(0, 8, "x") is True
    agreement.clear_after(8)
    assert agreement.agrees(0, 8, "x") is True and agreement.agrees(0, 9, "x") is None


def test_what_is_held_against_a_session_ends_with_it() -> None:
    conduct = Conduct()
    assert conduct.begin("ann", "1", 0.0) == ""
    conduct.bar("ann", "noise")
    assert conduct.begin("ann", "1", 0.0) == "noise"
    assert Conduct.from_json(conduct.to_json(), {}).begin("ann", "1", 0.0) == "noise"
    assert conduct.begin("ann", "2", 0.0) == "" and conduct.begin("ann", "1", 0.0) == ""


def test_resynchronisations_count_where_they_are_close() -> None:
    conduct = Conduct()
    conduct.begin("ann", "1", 0.0)
    assert [conduct.resynced("ann", step) for step in (1, 2 + RESYNC_STEPS, 3 + RESYNC_STEPS)] == [False] * 3
    assert conduct.resynced("ann", 4 + RESYNC_STEPS)


def test_lost_tracks_are_forgiven_to_who_catches_up() -> None:
    conduct = Conduct()
    for _ in range(3):
        assert not any(conduct.lost_track("ann") for _ in range(MOST_LOST_TRACKS - 1))
        conduct.caught_up("ann")
    assert [conduct.lost_track("ann") for _ in range(MOST_LOST_TRACKS)][-1]


def test_accusing_the_same_peer_again_is_one_quarrel() -> None:
    quarrels = Quarrels()
    for _ in range(9):
        quarrels.note("ann", "ben")
        assert quarrels.wrong("ann", "ben") == ""
    for number in range(1, MOST_QUARRELS):
        quarrels.note("ann", f"p{number}")
    assert quarrels.wrong("ann", f"p{MOST_QUARRELS - 1}") == "ann"


def test_sheets_are_bounded() -> None:
    conduct = Conduct()
    for n in range(SHEETS_KEPT + 1):
        conduct.begin(f"p{n}", "1", 0.0)
        conduct.bar(f"p{n}", "noise")
    assert len(conduct.to_json()) == SHEETS_KEPT
