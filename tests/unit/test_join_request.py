"""A request to join is bounded before anything is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from peers.coordinator_messages import view_message
from protocol.admission import MOST_MEMBERS
from protocol.errors import BadFrame
from protocol.frame import control, parse_control
from protocol.join_request import LONGEST_ADDRESS, MOST_ADDRESS_BYTES, MOST_ADDRESSES, join_message, parse_join
from protocol.peer_report import MOST_STEPS
from protocol.records import VIEW
from protocol.signing import SigningKey, open_record
from protocol.view import Replica, View

GOOD = join_message(["/ip4/127.0.0.1/tcp/1/p2p/Qm"], {0: [10, 20], 2: []}, "5e55", 123.5, 8 << 30)


def test_comes_back_as_it_was_sent() -> None:
    asked = parse_join("peer", json.loads(json.dumps(GOOD)), stages=3)
    assert (asked.peer, asked.addresses, asked.session) == ("peer", ("/ip4/127.0.0.1/tcp/1/p2p/Qm",), "5e55")
    assert asked.checkpoints == {0: (10, 20), 2: ()}
    assert (asked.speed, asked.memory) == (123.5, 8 << 30)


def test_the_newest_steps_are_told_when_there_are_too_many() -> None:
    message = join_message([], {0: list(range(5000))}, "")
    assert parse_join("peer", message, 1).checkpoints[0][-1] == 4999


def test_as_many_addresses_are_told_as_a_coordinator_takes() -> None:
    many = [f"/dns4/{n:03d}{'x' * 180}/tcp/1" for n in range(20)]
    asked = parse_join("peer", join_message(many, {}, ""), 1)
    assert 4 <= len(asked.addresses) < 6 and list(asked.addresses) == many[: len(asked.addresses)]


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": None},
        {"addresses": "abc"},
        {"addresses": [1]},
        {"addresses": ["x"] * (MOST_ADDRESSES + 1)},
        {"addresses": ["x" * (LONGEST_ADDRESS + 1)]},
        {"addresses": ["x" * 200] * (MOST_ADDRESS_BYTES // 200 + 1)},
        {"addresses": [""]},
        {"addresses": ['a"b']},
        {"addresses": ["a\\b"]},
        {"addresses": ["a b"]},
        {"addresses": ["\u00e9"]},
        {"session": None},
        {"session": "s" * 65},
        {"speed": None},
        {"speed": -1},
        {"speed": "fast"},
        {"speed": float("inf")},
        {"speed": 1e10},
        {"memory": None},
        {"memory": -1},
        {"memory": 1.5},
        {"memory": 1 << 60},
        {"checkpoints": []},
        {"checkpoints": {"3": [1]}},
        {"checkpoints": {"-1": [1]}},
        {"checkpoints": {"00": [1]}},
        {"checkpoints": {"0": 5}},
        {"checkpoints": {"0": ["1"]}},
        {"checkpoints": {"0": [True]}},
        {"checkpoints": {"0": [1] * (MOST_STEPS + 1)}},
    ],
    ids=str,
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="to join"):
        parse_join("peer", {**GOOD, **change}, stages=3)


def test_a_view_of_as_many_members_as_there_can_be_fits_into_its_record_and_one_message() -> None:
    key, longest = SigningKey.generate(), "/" + "x" * (MOST_ADDRESS_BYTES // MOST_ADDRESSES - 1)
    asked = parse_join("peer", {**GOOD, "addresses": [longest] * MOST_ADDRESSES}, 3)
    peers = tuple(Replica(f"{n:052d}", asked.addresses, 1 / 3, 1 / 3, 123456789) for n in range(MOST_MEMBERS))
    lost = tuple(replace(replica, lost=7) for replica in peers)  # they stay until the next plan
    view = View(1 << 30, 1 << 30, 1 << 30, (peers + lost,), holders=(tuple(r.peer for r in peers),))
    message = parse_control(control(view_message(key.sign(VIEW, view.to_json()))).payload)
    assert View.from_json(open_record(message["record"].encode(), VIEW, key.public)) == view
