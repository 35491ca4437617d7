"""A peer's request to join, as it crosses the wire, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import BadFrame
from protocol.membership import JoinAsked

MOST_ADDRESSES = 16
LONGEST_ADDRESS = 256
MOST_STEPS = 1000
LONGEST_SESSION = 64


def join_message(addresses: Sequence[str], checkpoints: Mapping[int, Sequence[int]], session: str) -> dict[str, Any]:
    """The control message."""
    held = {str(stage): list(steps)[-MOST_STEPS:] for stage, steps in checkpoints.items()}
    return {
        "type": "join",
        "addresses": list(addresses)[:MOST_ADDRESSES],
        "checkpoints": held,
        "session": session,
    }


def parse_join(peer: str, message: Mapping[str, Any], stages: int) -> JoinAsked:
    """The request of `peer` in a control message.

    Raises:
        BadFrame: a field is missing, of another type, or beyond its bound.
    """
    addresses: Any = message.get("addresses")
    held: Any = message.get("checkpoints")
    session: Any = message.get("session")
    if not _is_list(addresses, str, MOST_ADDRESSES) or any(len(address) > LONGEST_ADDRESS for address in addresses):
        raise BadFrame(f"expected at most {MOST_ADDRESSES} addresses of {LONGEST_ADDRESS} characters to join")
    if not isinstance(session, str) or len(session) > LONGEST_SESSION:
        raise BadFrame(f"expected a session of at most {LONGEST_SESSION} characters to join")
    known = {str(stage) for stage in range(stages)}
    if not isinstance(held, dict) or not set(held) <= known:
        raise BadFrame(f"expected checkpoints of stages 0 to {stages - 1} to join")
    if not all(_is_list(steps, int, MOST_STEPS) for steps in held.values()):
        raise BadFrame(f"expected at most {MOST_STEPS} steps of each stage to join")
    return JoinAsked(peer, tuple(addresses), {int(stage): tuple(steps) for stage, steps in held.items()}, session)


def _is_list(value: Any, kind: type, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(type(item) is kind for item in value)
