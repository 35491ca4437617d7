"""Peers that take no connections: two of them are not put beside each other, and where they are, it is said."""

from __future__ import annotations

import pytest
from coordinator_story import Peer, Story

from protocol.assignment import Assignment, Candidate, assign
from protocol.meeting import unmet
from protocol.membership import Effect, JoinAsked, Notice
from protocol.stage_cost import StageCost
from protocol.view import Replica, View


def join(told: Story, *names: str) -> list[Effect]:
    """They join, and take no connections."""
    found: list[Effect] = []
    for name in names:
        peer = told.peers.setdefault(name, Peer())
        found += told.feed(JoinAsked(name, (), {}, peer.session))
    return found


def notices(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Notice)]


def test_two_neighbours_that_can_never_meet_are_named_when_they_become_neighbours() -> None:
    told = Story(2)
    said = notices(join(told, "ann", "ben"))
    assert told.membership.view is not None
    (text,) = [text for text in said if "never meet" in text]
    assert "ann of stage 0 and ben of stage 1" in text and "--port --announce" in text
    assert not [text for text in notices(told.beat(10)) if "never meet" in text], "it is said once"


def test_who_can_be_reached_meets_everybody() -> None:
    told = Story(3)
    said = notices([*join(told, "ann"), *told.join("ben"), *join(told, "cat")])
    assert told.membership.view is not None and not [text for text in said if "never meet" in text]
    assert not unmet(told.membership.view)


@pytest.mark.parametrize(
    ("stages", "pairs"),
    [
        ([["a"], ["b"], ["c"]], [("a", "b"), ("b", "c")]),
        ([["a"], ["B"], ["c"]], []),
        ([["a", "b"], ["C"]], [("a", "b")]),
        ([["a", "B"], ["B2", "c"]], [("a", "c")]),
    ],
)
def test_those_that_must_meet_are_neighbours_and_replicas(
    stages: list[list[str]], pairs: list[tuple[str, str]]
) -> None:
    """Of those in small letters none can be reached."""
    made = tuple(tuple(Replica(p, () if p.islower() else ("/x",)) for p in peers) for peers in stages)
    assert [(one[0], other[0]) for one, other in unmet(View(1, 1, 9, made))] == pairs
    gone = tuple(tuple(Replica(r.peer, r.addresses, lost=1) for r in replicas) for replicas in made)
    assert not unmet(View(2, 1, 9, gone)), "who is lost meets nobody"


def test_a_newcomer_is_not_put_beside_one_that_it_can_never_meet() -> None:
    """Stage 2 is the only one that is not beside ann; all are equally in need, so it would have gone to stage 0."""
    told = Story(3)
    join(told, "ann")
    told.join("ben", "cat")
    told.steps(8)
    join(told, "dan")
    told.steps(8)
    view = told.membership.view
    assert view is not None and (view.stage_of("ann"), view.stage_of("dan")) == (0, 2)


def test_who_could_meet_nobody_waits_and_that_is_said() -> None:
    told = Story(2)
    join(told, "ann")
    told.join("ben")
    told.steps(8)
    said = notices([*join(told, "dan"), *told.beat(4)])
    view = told.membership.view
    assert view is not None and view.stage_of("dan") is None
    assert [text for text in said if "peer dan takes no connections" in text]


def test_one_more_at_the_start_is_not_put_beside_its_like() -> None:
    def hidden(name: str) -> Candidate:
        return Candidate(name, hidden=True)

    found = assign([hidden("ann"), Candidate("ben"), hidden("cat")], (StageCost(),) * 2, from_start=True)
    assert isinstance(found, Assignment) and found.stages == (("ann",), ("ben",))
    found = assign([hidden("ann"), Candidate("ben"), Candidate("cat")], (StageCost(),) * 2, from_start=True)
    assert isinstance(found, Assignment) and sum(map(len, found.stages)) == 3
