"""From which step a run starts or goes on, and who serves what."""

from __future__ import annotations

import pytest

from protocol.assignment import Assignment, Candidate, Shortage, assign, matched
from protocol.stage_cost import StageCost

Held = dict[int, list[int]]


def costs(stages: int, memory: int = 0) -> tuple[StageCost, ...]:
    return (StageCost(1.0, memory),) * stages


def candidates(held: dict[str, Held]) -> list[Candidate]:
    return [Candidate(peer, steps) for peer, steps in held.items()]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"ann": {0: [5]}, "ben": {1: [5]}}, (5, ["ann", "ben"])),
        ({"ann": {1: [5]}, "ben": {0: [5]}}, (5, ["ben", "ann"])),
        ({"ann": {0: [5], 1: [5]}, "ben": {0: [5]}}, (5, ["ben", "ann"])),
        ({"ann": {0: [5], 1: [5]}, "ben": {1: [5]}}, (5, ["ann", "ben"])),
        ({"ann": {0: [5, 9], 1: [9]}, "ben": {1: [5]}}, (9, ["ann", "ben"])),
        ({"ann": {0: [3, 5, 7]}, "ben": {1: [7, 5, 2]}}, (7, ["ann", "ben"])),
    ],
)
def test_stages_go_to_peers_that_hold_them(held: dict[str, Held], expected: tuple[int, list[str]]) -> None:
    found = assign(candidates(held), costs(2), from_start=False)
    assert isinstance(found, Assignment)
    assert (found.step, [peers[0] for peers in found.stages]) == expected


def test_a_stage_gives_way_where_that_serves_all() -> None:
    held: dict[str, Held] = {"a": {0: [5], 1: [5], 2: [5]}, "b": {0: [5]}, "c": {1: [5], 2: [5]}}
    found = assign(candidates(held), costs(3), from_start=False)
    assert isinstance(found, Assignment) and found.step == 5
    assert all(5 in held[peers[0]].get(stage, ()) for stage, peers in enumerate(found.stages))


def test_a_state_that_anyone_here_has_will_do() -> None:
    found = assign(candidates({"ann": {0: [5], 1: [5]}, "new": {}}), costs(2), from_start=False)
    assert found == Assignment(5, (("ann",), ("new",)), (("ann",), ("ann",)))


def test_who_has_its_stages_state_begins_at_once_and_others_are_left_for_later() -> None:
    held: dict[str, Held] = {"a0": {0: [5]}, "a1": {0: [5]}, "b0": {1: [5]}, "new": {}}
    found = assign(candidates(held), costs(2), from_start=False)
    assert isinstance(found, Assignment) and found.stages == (("a0", "a1"), ("b0",))


def test_at_the_start_all_are_spread_by_need() -> None:
    peers = [Candidate(f"p{n}") for n in range(6)]
    found = assign(peers, (StageCost(1.0), StageCost(4.5)), from_start=True)
    assert isinstance(found, Assignment) and found.holders == ((), ())
    assert [len(peers) for peers in found.stages] == [1, 5]


def test_the_start_will_not_do_where_a_checkpoint_should_be() -> None:
    found = assign(candidates({"ann": {0: [5]}, "ben": {}}), costs(2), from_start=False)
    assert isinstance(found, Shortage) and found.stages == (1,)


def test_files_of_a_future_that_was_given_up_do_not_count() -> None:
    held: dict[str, Held] = {"ann": {0: [5, 9]}, "ben": {1: [5, 9]}}
    found = assign(candidates(held), costs(2), from_start=False, most=8)
    assert isinstance(found, Assignment) and found.step == 5


def test_peers_stay_where_they_were() -> None:
    peers = [Candidate(p, {0: [5], 1: [5]}, stage) for p, stage in (("ann", 1), ("ben", 0), ("cat", 1))]
    found = assign(peers, costs(2), from_start=False)
    assert isinstance(found, Assignment) and found.stages == (("ben",), ("ann", "cat"))


def test_what_does_not_fit_is_not_served() -> None:
    small, large = Candidate("small", {}, memory=5), Candidate("large", {}, memory=50)
    needs = (StageCost(1.0, 10), StageCost(1.0, 1))
    assert assign([small, large], needs, True) == Assignment(0, (("large",), ("small",)), ((), ()))
    found = assign([small, Candidate("other", memory=5)], needs, True)
    assert isinstance(found, Shortage) and found.stages == (0,)


@pytest.mark.parametrize(
    ("held", "described", "stages"),
    [
        ({"ann": {}, "ben": {}}, "stage 0: none, stage 1: none", (0, 1)),
        ({"ann": {0: [5]}, "ben": {}}, "stage 0: [5], stage 1: none", (1,)),
        ({"ann": {0: [4]}, "ben": {1: [5]}}, "stage 0: [4], stage 1: [5]", (0,)),
    ],
)
def test_what_cannot_be_assigned_is_described(held: dict[str, Held], described: str, stages: tuple[int, ...]) -> None:
    found = assign(candidates(held), costs(2), from_start=False)
    assert isinstance(found, Shortage) and described in found.reason and found.stages == stages


def test_stages_without_a_peer_are_named() -> None:
    assert assign([], costs(2), True) == Shortage((0, 1), "stages 0, 1 need peers (0 are here)")
    assert assign([Candidate("ann")], costs(2), True) == Shortage((1,), "stage 1 needs a peer")


def test_the_stage_that_is_named_is_the_one_that_lost_its_peer() -> None:
    """Not another one, from which a peer could be taken for it."""
    there = [Candidate("ann", stage=0), Candidate("cleo", stage=2)]
    assert assign(there, costs(3), True) == Shortage((1,), "stage 1 needs a peer")


def test_what_was_matched_stays_matched() -> None:
    first = matched({0: ["ann"], 1: ["ann"]}, {})
    assert first == {0: "ann"}
    assert matched({0: ["ann", "ben"], 1: ["ann"]}, first) == {0: "ben", 1: "ann"}
