"""Views as records, and the routes that follow from them: shares, losses, and what they leave where it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import RemoteError
from protocol.route import holders, route, routes
from protocol.view import Replica, View

VIEW = View(
    3,
    11,
    40,
    (
        (Replica("ann", ("/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/2")), Replica("ben", (), 2.5)),
        (Replica("cat"),),
        (Replica("dan"), Replica("eve"), Replica("fay")),
    ),
    1,
    8,
    (("ann",), (), ("dan", "ann")),
)
PINNED = [
    ("ben", "cat", "fay"),
    ("ben", "cat", "dan"),
    ("ben", "cat", "fay"),
    ("ann", "cat", "eve"),
    ("ben", "cat", "eve"),
    ("ann", "cat", "dan"),
]


def one_stage(*replicas: Replica, number: int = 1, first_step: int = 1) -> View:
    return View(number, first_step, 99, (replicas,))


# Views


def test_a_view_survives_its_json() -> None:
    assert View.from_json(VIEW.to_json()) == VIEW
    changed = replace(VIEW.stages[2][1], weight=0.0, before=0.5, start=12, lost=2)
    view = replace(VIEW, stages=(*VIEW.stages[:2], (VIEW.stages[2][0], changed)))
    assert View.from_json(view.to_json()) == view


def test_stage_and_replica_of_a_peer() -> None:
    assert [VIEW.stage_of(peer) for peer in ("ann", "ben", "cat", "fay", "gus")] == [0, 0, 1, 2, None]
    assert VIEW.replica("ben").weight == 2.5
    with pytest.raises(KeyError):
        VIEW.replica("gus")


def test_a_share_changes_at_the_first_step_and_a_loss_at_once() -> None:
    enters, drains, follows = Replica("a", (), 2.0, 0.0, 5), Replica("b", (), 0.0, 1.0), Replica("c", (), 0.0, 0.0, 9)
    view = one_stage(enters, drains, follows, Replica("d", (), 1.0, 1.0, lost=1), first_step=7)
    assert view.group(0, 6) == ("b",) and view.followers(0, 6) == ("a", "c")
    assert view.group(0, 7) == ("a",) and view.followers(0, 7) == ("b", "c")
    assert [view.share(enters, step) for step in (6, 7)] == [0.0, 2.0]
    assert [r.peer for r in view.peers()] == ["a", "b", "c"] and view.stage_of("d") is None


def test_a_peer_that_was_lost_and_is_back_is_the_living_entry() -> None:
    view = one_stage(Replica("a", lost=2), Replica("b"), Replica("a", (), 0.0, 0.0, 9), number=2)
    assert view.stage_of("a") == 0 and view.replica("a").start == 9
    assert view.group(0, 1) == ("b",) and view.followers(0, 1) == ("a",)


def entry(**change: Any) -> list[list[list[Any]]]:
    """Stages of one replica with one field changed."""
    whole = {"peer": "ann", "addresses": [], "weight": 1.0, "before": 1.0, "start": 0, "lost": 0}
    return [[list({**whole, **change}.values())]]


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": "one"},
        {"number": None},
        {"first_step": 0},
        {"last_step": []},
        {"restored": -1},
        {"epoch": {}},
        {"holders": None},
        {"holders": [3]},
        {"stages": []},
        {"stages": None},
        {"stages": 7},
        {"stages": [[]]},
        {"stages": [*entry(), []]},
        {"stages": [[["ann", []]]]},
        {"stages": [[["ann", [], 1.0]]]},
        {"stages": entry(addresses=5)},
        {"stages": entry(start="soon")},
        {"stages": entry(lost=None)},
        {"stages": entry(lost=2)},
        {"number": float("inf")},
        *(
            {"stages": entry(**{share: value})}
            for share in ("weight", "before")
            for value in ("heavy", -1.0, float("nan"), float("inf"), 10**400, 1e300)
        ),
    ],
    ids=str,
)
def test_a_view_that_cannot_be_acted_on_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteError, match=r"expected (a view|replicas of)"):
        View.from_json({**VIEW.to_json(), **change})


@pytest.mark.parametrize("missing", list(VIEW.to_json()))
def test_a_view_without_a_field_is_refused(missing: str) -> None:
    value = VIEW.to_json()
    del value[missing]
    with pytest.raises(RemoteError, match="expected a view"):
        View.from_json(value)


@pytest.mark.parametrize("value", [None, 3, "view", [], {}])
def test_what_is_no_view_at_all_is_refused(value: Any) -> None:
    with pytest.raises(RemoteError, match="expected a view"):
        View.from_json(value)


# Routes


def test_routes_are_pinned() -> None:
    """Every peer of every version must find these: a change here needs a new protocol version."""
    assert [route(VIEW, 11, m, 6) for m in range(6)] == PINNED


def test_a_route_names_one_replica_of_each_stage() -> None:
    for step in range(1, 20):
        for microbatch in range(8):
            peers = route(VIEW, step, microbatch, 8)
            assert [VIEW.stage_of(peer) for peer in peers] == [0, 1, 2]
        assert routes(VIEW, 2, step, 8) == tuple(route(VIEW, step, m, 8)[2] for m in range(8))


def test_routes_do_not_depend_on_the_order_number_or_range_of_the_view() -> None:
    other = View(9, 11, 99, tuple(tuple(reversed(replicas)) for replicas in VIEW.stages), 4, 2)
    assert all(route(VIEW, t, m, 4) == route(other, t, m, 4) for t in range(1, 30) for m in range(4))


def test_each_step_and_each_stage_is_shuffled_anew() -> None:
    pair = (Replica("ann"), Replica("ben"))
    view = View(1, 1, 9, (pair, pair))
    drawn = {(t, m): route(view, t, m, 20) for t in range(20) for m in range(20)}
    assert set(drawn.values()) == {(a, b) for a in ("ann", "ben") for b in ("ann", "ben")}
    assert len({tuple(drawn[t, m] for m in range(20)) for t in range(20)}) == 20


def test_a_step_is_shared_exactly_as_the_weights_say() -> None:
    view = one_stage(Replica("ann"), Replica("ben", (), 3.0), Replica("cat", (), 0.5))
    for step in range(1, 40):
        counts = Counter(routes(view, 0, step, 16))
        for replica in view.stages[0]:
            assert abs(counts[replica.peer] - 16 * replica.weight / 4.5) < 1


def test_shares_follow_the_weights_in_the_long_run() -> None:
    """Where a step cannot be shared exactly, and even where some have less than one microbatch a step."""
    view = one_stage(Replica("ann"), Replica("ben", (), 3.0), Replica("cat", (), 0.5))
    for count in (1, 3, 8):
        steps = 4800 // count
        counts = Counter(peer for t in range(steps) for peer in routes(view, 0, t, count))
        for replica in view.stages[0]:
            assert counts[replica.peer] / (steps * count) == pytest.approx(replica.weight / 4.5, abs=0.03)


def test_shares_of_steps_before_the_first_are_those_of_before() -> None:
    learner = one_stage(Replica("ann"), Replica("ben", (), 1.0, 0.0, 5), first_step=7)
    assert set(routes(learner, 0, 6, 8)) == {"ann"}
    assert Counter(routes(learner, 0, 7, 8)) == {"ann": 4, "ben": 4}
    drained = one_stage(Replica("ann"), Replica("ben", (), 0.0, 1.0), first_step=7)
    assert routes(drained, 0, 6, 8) == routes(one_stage(Replica("ann"), Replica("ben")), 0, 6, 8)
    assert set(routes(drained, 0, 7, 8)) == {"ann"}


def test_nobody_serves_a_stage_whose_shares_are_all_lost() -> None:
    view = one_stage(Replica("ann", lost=2), Replica("ben", (), 1.0, 0.0), first_step=7)
    with pytest.raises(LookupError, match="stage 0 has no replica in step 6 of view 1"):
        routes(view, 0, 6, 4)
    assert Counter(routes(view, 0, 7, 4))["ben"] == 4


# Losses

FOUR = (Replica("ann"), Replica("ben", (), 2.0, 2.0), Replica("cat"), Replica("dan", (), 0.5, 0.5))


def lose(replicas: tuple[Replica, ...], peer: str, number: int) -> tuple[Replica, ...]:
    return tuple(replace(r, lost=number) if r.peer == peer and r.alive else r for r in replicas)


@pytest.mark.parametrize("step", range(1, 12))
def test_over_several_losses_only_the_lost_ones_microbatches_move(step: int) -> None:
    replicas = FOUR
    before = routes(one_stage(*replicas), 0, step, 24)
    for number, gone in enumerate(("ben", "dan", "cat"), start=2):
        replicas = lose(replicas, gone, number)
        after = routes(one_stage(*replicas, number=number), 0, step, 24)
        assert gone not in after
        assert all(old == new for old, new in zip(before, after, strict=True) if old != gone)
        before = after
    assert set(before) == {"ann"}


def test_a_loss_is_shared_out_by_weight() -> None:
    view = one_stage(*lose((Replica("ann"), Replica("ben"), Replica("cat", (), 2.0)), "ben", 2))
    for step in range(1, 30):
        counts = Counter(routes(view, 0, step, 16))
        assert abs(counts["cat"] - 32 / 3) <= 1.5 and counts["ann"] + counts["cat"] == 16


def test_joins_and_leaves_that_are_planned_move_nothing_before_their_step() -> None:
    before = one_stage(*FOUR, first_step=1)
    heavier = tuple(replace(r, weight=5.0) if r.peer == "cat" else r for r in FOUR)
    drained = tuple(replace(r, weight=0.0) if r.peer == "ann" else r for r in heavier)
    view = one_stage(*drained, Replica("eve", (), 1.0, 0.0, 4), Replica("fay", (), 0.0, 0.0, 9), first_step=7)
    for step in range(1, 7):
        assert routes(view, 0, step, 24) == routes(before, 0, step, 24)
    assert {peer for step in range(7, 12) for peer in routes(view, 0, step, 24)} == {"ben", "cat", "dan", "eve"}


@pytest.mark.parametrize("step", [6, 7])
def test_a_loss_with_a_planned_change_pending_moves_only_its_own_in_either_step(step: int) -> None:
    replicas = (*FOUR, Replica("eve", (), 1.0, 0.0, 4))
    before = routes(one_stage(*replicas, first_step=7), 0, step, 24)
    for gone in ("cat", "eve"):
        after = routes(one_stage(*lose(replicas, gone, 2), first_step=7), 0, step, 24)
        assert [new for old, new in zip(before, after, strict=True) if old != gone] == [p for p in before if p != gone]


def test_a_lost_one_whose_plan_is_past_counts_only_in_the_steps_before_it() -> None:
    """The next planned view gives it no weight; it is still in the steps that it was in."""
    ghost = Replica("ben", (), 0.0, 2.0, lost=2)
    view = one_stage(FOUR[0], ghost, FOUR[2], first_step=7)
    assert routes(view, 0, 7, 24) == routes(one_stage(FOUR[0], FOUR[2]), 0, 7, 24)
    earlier = one_stage(FOUR[0], replace(ghost, weight=2.0), FOUR[2])
    assert routes(view, 0, 6, 24) == tuple(routes(replace(earlier, first_step=7), 0, 6, 24))


def test_the_same_peer_lost_and_back_as_a_learner_moves_nothing() -> None:
    lost = lose(FOUR, "cat", 2)
    back = (*lost, Replica("cat", (), 0.0, 0.0, 9))
    assert routes(one_stage(*back), 0, 3, 24) == routes(one_stage(*lost), 0, 3, 24)
    given = (*lost[:2], replace(lost[2], weight=0.0), lost[3], Replica("cat", (), 1.0, 0.0, 9))
    planned = one_stage(*given, first_step=12)
    assert routes(planned, 0, 11, 24) == routes(one_stage(*lost), 0, 11, 24)
    assert "cat" in routes(planned, 0, 12, 24)


def test_a_peer_that_is_lost_twice_hands_over_twice() -> None:
    twice = (Replica("ann"), Replica("cat", lost=2), Replica("cat", (), 1.0, 1.0, 9, lost=3), Replica("ben"))
    assert Counter(routes(one_stage(*twice), 0, 1, 24)).keys() == {"ann", "ben"}


# Holders


def test_copies_are_held_by_living_peers_of_other_stages() -> None:
    view = replace(VIEW, stages=(*VIEW.stages[:2], (Replica("dan"), Replica("eve", lost=2), Replica("fay"))))
    for step in range(1, 20):
        chosen = holders(view, 0, step, 2)
        assert len(set(chosen)) == 2 and set(chosen) <= {"cat", "dan", "fay"}
        assert holders(view, 0, step, 9)[:2] == chosen and len(holders(view, 0, step, 9)) == 3
    assert holders(view, 0, 8, 0) == ()
    assert len({holders(view, 0, step, 1) for step in range(20)}) == 3, "not always the same"
