"""Views as records, and the routes that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import RemoteError
from protocol.route import route
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
)
PINNED = [
    ("ben", "cat", "fay"),
    ("ben", "cat", "dan"),
    ("ben", "cat", "fay"),
    ("ann", "cat", "eve"),
    ("ben", "cat", "fay"),
    ("ben", "cat", "eve"),
]


def test_a_view_survives_its_json() -> None:
    assert View.from_json(VIEW.to_json()) == VIEW


def test_stage_and_replica_of_a_peer() -> None:
    assert [VIEW.stage_of(peer) for peer in ("ann", "ben", "cat", "fay", "gus")] == [0, 0, 1, 2, None]
    assert VIEW.replica("ben").weight == 2.5
    with pytest.raises(KeyError):
        VIEW.replica("gus")


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": "one"},
        {"number": None},
        {"first_step": 0},
        {"last_step": []},
        {"stages": []},
        {"stages": None},
        {"stages": 7},
        {"stages": [[]]},
        {"stages": [[["ann", [], 1.0]], []]},
        {"stages": [[["ann", []]]]},
        {"stages": [[["ann", [], "heavy"]]]},
        {"stages": [[["ann", 5, 1.0]]]},
        {"number": float("inf")},
        *({"stages": [[["ann", [], weight]]]} for weight in (0.0, -1.0, float("nan"), float("inf"), 10**400)),
    ],
    ids=str,
)
def test_a_view_that_cannot_be_acted_on_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteError, match=r"expected (a view|replicas of positive)"):
        View.from_json({**VIEW.to_json(), **change})


@pytest.mark.parametrize("missing", ["number", "first_step", "last_step", "stages"])
def test_a_view_without_a_field_is_refused(missing: str) -> None:
    value = VIEW.to_json()
    del value[missing]
    with pytest.raises(RemoteError, match="expected a view"):
        View.from_json(value)


@pytest.mark.parametrize("value", [None, 3, "view", [], {}])
def test_what_is_no_view_at_all_is_refused(value: Any) -> None:
    with pytest.raises(RemoteError, match="expected a view"):
        View.from_json(value)


def test_routes_are_pinned() -> None:
    """Every peer of every version must find these: a change here needs a new protocol version."""
    assert [route(VIEW, 11, m) for m in range(6)] == PINNED


def test_a_route_names_one_replica_of_each_stage() -> None:
    for step in range(1, 20):
        for microbatch in range(8):
            peers = route(VIEW, step, microbatch)
            assert [VIEW.stage_of(peer) for peer in peers] == [0, 1, 2]


def test_routes_do_not_depend_on_the_order_number_or_range_of_the_view() -> None:
    other = View(9, 1, 99, tuple(tuple(reversed(replicas)) for replicas in VIEW.stages))
    assert all(route(VIEW, t, m) == route(other, t, m) for t in range(1, 30) for m in range(4))


def test_each_step_and_each_stage_is_shuffled_anew() -> None:
    pair = (Replica("ann"), Replica("ben"))
    view = View(1, 1, 9, (pair, pair))
    drawn = {(t, m): route(view, t, m) for t in range(20) for m in range(20)}
    assert set(drawn.values()) == {(a, b) for a in ("ann", "ben") for b in ("ann", "ben")}
    assert len({tuple(drawn[t, m] for m in range(20)) for t in range(20)}) == 20


def test_shares_follow_the_weights() -> None:
    view = View(1, 1, 9, ((Replica("ann"), Replica("ben", (), 3.0), Replica("cat", (), 0.5)),))
    counts = Counter(route(view, t, m)[0] for t in range(150) for m in range(60))
    shares = {peer: count / 9000 for peer, count in counts.items()}
    assert shares == {"ann": pytest.approx(1 / 4.5, abs=0.02), "ben": pytest.approx(3 / 4.5, abs=0.02),
                      "cat": pytest.approx(0.5 / 4.5, abs=0.02)}  # fmt: skip


def test_raising_one_weight_moves_microbatches_only_to_it() -> None:
    before = View(1, 1, 9, ((Replica("ann"), Replica("ben"), Replica("cat")),))
    heavier = tuple(replace(r, weight=2.0) if r.peer == "ben" else r for r in before.stages[0])
    after = replace(before, stages=(heavier,))
    moves = {(route(before, t, 0)[0], route(after, t, 0)[0]) for t in range(500)}
    assert {new for old, new in moves if new != old} == {"ben"}
