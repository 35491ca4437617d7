"""A request to join is bounded before anything is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from peers.coordinator_messages import view_message
from protocol.errors import BadFrame
from protocol.frame import control, parse_control
from protocol.join_request import LONGEST_ADDRESS, MOST_ADDRESS_BYTES, MOST_ADDRESSES, join_message, parse_join
from protocol.membership import MOST_MEMBERS
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


def test_a_view_of_a_full_run_fits_into_its_record_and_its_message() -> None:
    key, longest = SigningKey.generate(), "x" * (MOST_ADDRESS_BYTES // MOST_ADDRESSES)
    asked = parse_join("peer", join_message([longest] * MOST_ADDRESSES, {}, ""), 1)
    assert len(asked.addresses) == MOST_ADDRESSES
    peers = tuple(Replica(f"{n:046d}", asked.addresses, 1 / 3, 1 / 3, 123456789) for n in range(MOST_MEMBERS))
    gone = tuple(replace(replica, lost=7) for replica in peers)
    view = View(1 << 30, 1 << 30, 1 << 30, (peers + gone,), holders=(tuple(r.peer for r in peers),))
    message = control(view_message(key.sign(VIEW, view.to_json())))
    record = parse_control(message.payload)["record"]
    assert View.from_json(open_record(record.encode(), VIEW, key.public)) == view


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": None},
        {"addresses": "abc"},
        {"addresses": [1]},
        {"addresses": ["x"] * (MOST_ADDRESSES + 1)},
        {"addresses": ["x" * (LONGEST_ADDRESS + 1)]},
        {"addresses": ["x" * 200] * (MOST_ADDRESS_BYTES // 200 + 1)},
        {"addresses": ["/dns4/\u00e9/tcp/1"]},
        {"addresses": ["/dns4/\ud800/tcp/1"]},
        {"addresses": ["/ip4/1.2.3.4/tcp/1\n"]},
        {"addresses": ['"']},
        {"addresses": [""]},
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
