"""What a member may say is bounded before anything is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peers.coordinator_messages import LONGEST_REASON, MOST_HASHES, parse_event
from protocol.errors import BadFrame
from protocol.membership_events import Accused, Differs, Failed, Irreplaceable, LeaveAsked, LostTrack
from protocol.peer_report import MOST_BROKEN, MOST_STEPS, PeerReport, parse_report

REPORT = PeerReport(
    view=7, epoch=1, stage=2, applied=30, weights="ab12", held={0: (10, 20), 2: (20,)}, idle=False, done=99,
    broken=("ann",), microbatch_seconds=0.25,
)  # fmt: skip
GOOD: dict[str, Any] = {"type": "reports", **REPORT.to_json()}


def test_a_report_comes_back_as_it_was_sent() -> None:
    assert parse_report(json.loads(json.dumps(GOOD)), stages=3) == REPORT
    empty = PeerReport(held={})
    assert parse_report(json.loads(json.dumps(empty.to_json())), 3) == empty


def test_the_newest_steps_are_told_when_there_are_too_many() -> None:
    message = PeerReport(held={0: range(5000)}).to_json()
    held = parse_report(message, 1).held
    assert held is not None and held[0][-1] == 4999 and len(held[0]) == MOST_STEPS


@pytest.mark.parametrize(
    "change",
    [
        {"view": None},
        {"view": -1},
        {"epoch": 1.5},
        {"done": True},
        {"done": 1 << 70},
        {"stage": 3},
        {"stage": "0"},
        {"applied": -1},
        {"applied": 1 << 40},
        {"weights": None},
        {"weights": "x" * 129},
        {"idle": 1},
        {"broken": "ann"},
        {"broken": [1]},
        {"broken": ["x"] * (MOST_BROKEN + 1)},
        {"held": None},
        {"held": {"3": []}},
        {"held": {"0": 5}},
        {"held": {"0": [True]}},
        {"held": {"0": [-1]}},
        {"held": {"0": [1] * (MOST_STEPS + 1)}},
        {"microbatch_seconds": 0},
        {"microbatch_seconds": "1"},
        {"microbatch_seconds": float("nan")},
        {"microbatch_seconds": float("inf")},
    ],
    ids=str,
)
def test_any_other_report_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="expected"):
        parse_report({**GOOD, **change}, stages=3)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ({"type": "leave"}, LeaveAsked("ann")),
        ({"type": "failed", "reason": "no memory"}, Failed("ann", "no memory")),
        ({"type": "failed", "reason": "nan", "fatal": True}, Failed("ann", "nan", True)),
        ({"type": "failed", "reason": "nan", "fatal": "yes"}, Failed("ann", "nan")),
        ({"type": "differs", "step": 4, "hashes": {"ben": "y"}}, Differs("ann", 4, {"ben": "y"})),
        ({"type": "accuse", "peer": "ben", "reason": "a NaN"}, Accused("ann", "ben", "a NaN")),
        ({"type": "lost_track", "reason": "too old", "view": 4}, LostTrack("ann", "too old", 4)),
        ({"type": "irreplaceable", "epoch": 1, "step": 7, "reason": "gone"}, Irreplaceable("ann", 1, 7, "gone")),
        ({"type": "dance"}, None),
    ],
)  # fmt: skip
def test_messages_are_events(message: dict[str, Any], event: object) -> None:
    assert parse_event("ann", message) == event


def test_a_reason_is_cut() -> None:
    event = parse_event("ann", {"type": "failed", "reason": "x" * 9000})
    assert isinstance(event, Failed) and len(event.reason) == LONGEST_REASON


def test_a_reason_is_one_line_that_no_terminal_obeys() -> None:
    event = parse_event("ann", {"type": "failed", "reason": "a\n\x1b[2Jb \ud800\x07"})
    assert event == Failed("ann", "a ?[2Jb ??")
    event = parse_event("ann", {"type": "failed"})
    assert event == Failed("ann", "it gave no reason")


@pytest.mark.parametrize(
    "message",
    [
        {"type": "accuse"},
        {"type": "accuse", "peer": 7},
        {"type": "differs"},
        {"type": "differs", "step": 1, "hashes": []},
        {"type": "differs", "step": "1", "hashes": {}},
        {"type": "differs", "step": 1, "hashes": {"ann": 5}},
        {"type": "differs", "step": 1, "hashes": {"ann": "x" * 129}},
        {"type": "lost_track", "reason": "too old"},
        {"type": "lost_track", "reason": "too old", "view": -1},
        {"type": "irreplaceable", "epoch": 1, "step": "7"},
        {"type": "differs", "step": 1, "hashes": {f"p{n}": "x" for n in range(MOST_HASHES + 1)}},
    ],
    ids=str,
)
def test_other_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="expected"):
        parse_event("ann", message)
