"""What a member's control message means to the coordinator, and its bounds. Joins are in `protocol.join_request`.

reports, leave, goodbye, failed, differs, accuse, lost_track, irreplaceable
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.errors import BadFrame
from protocol.membership_events import Accused, Differs, Failed, Heard, Irreplaceable, LeaveAsked, Left, LostTrack
from protocol.peer_report import LARGEST_STEP, LONGEST_HASH, LONGEST_PEER, is_count, is_text, parse_report

LONGEST_REASON = 500
MOST_HASHES = 256

PeerEvent = Heard | LeaveAsked | Left | Failed | Differs | Accused | LostTrack | Irreplaceable


def parse_peer_message(peer: str, message: Mapping[str, Any], stages: int) -> PeerEvent:
    """The event that a member's `message` is. Rows and byte counts in it are parsed elsewhere.

    Raises:
        BadFrame: an unknown type, or a field that is missing, of another type, or beyond its bound.
    """
    match message.get("type"):
        case "reports":
            return Heard(peer, parse_report(message, stages))
        case "leave":
            return LeaveAsked(peer)
        case "goodbye":
            return Left(peer, "its daemon ended")
        case "failed":
            return Failed(peer, _reason(message), message.get("fatal") is True)
        case "differs":
            return _differs(peer, message)
        case "accuse":
            accused = message.get("peer")
            if not is_text(accused, LONGEST_PEER):
                raise BadFrame(f"expected the accused peer, got {str(accused)[:40]!r}")
            return Accused(peer, str(accused), _reason(message))
        case "lost_track":
            return LostTrack(peer, _reason(message))
        case "irreplaceable":
            epoch, step = message.get("epoch"), message.get("step")
            if not is_count(epoch, LARGEST_STEP) or not is_count(step, LARGEST_STEP):
                raise BadFrame(f"expected an epoch and a step, got {str((epoch, step))[:40]}")
            return Irreplaceable(peer, int(epoch or 0), int(step or 0), _reason(message))
        case other:
            raise BadFrame(f"expected a message of a member, got one of type {str(other)[:40]!r}")


def _reason(message: Mapping[str, Any]) -> str:
    """What a peer says, for people: one bounded line, and nothing that a terminal would obey."""
    text = " ".join(str(message.get("reason", "it gave no reason")).split())[:LONGEST_REASON]
    return "".join(character if character.isprintable() else "?" for character in text)


def _differs(peer: str, message: Mapping[str, Any]) -> Differs:
    step, hashes = message.get("step"), message.get("hashes")
    if not is_count(step, LARGEST_STEP) or not isinstance(hashes, dict) or len(hashes) > MOST_HASHES:
        raise BadFrame(f"expected a step and at most {MOST_HASHES} hashes, got {str((step, hashes))[:80]}")
    if not all(is_text(who, LONGEST_PEER) and is_text(weights, LONGEST_HASH) for who, weights in hashes.items()):
        raise BadFrame(f"expected hashes of at most {LONGEST_HASH} characters by peer")
    return Differs(peer, int(step or 0), dict(hashes))
