"""A peer's request to join, as it crosses the wire, and its bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import BadFrame
from protocol.frame import MAX_STRANGER_BYTES
from protocol.membership_events import JoinAsked
from protocol.peer_report import LONGEST_SESSION, MOST_STEPS, is_count, is_measure, is_text, parse_held

MOST_ADDRESSES = 16
LONGEST_ADDRESS = 256
MOST_ADDRESS_BYTES = 1024  # of all together: a view with every member's must fit into one signed record
SLOWEST_GFLOPS, FASTEST_GFLOPS = 1e-3, 1e9
MOST_MEMORY = 1 << 50
_PLAIN = re.compile(r"[!#-\[\]-~]+")  # neither a quotation mark nor a backslash


def join_message(
    addresses: Sequence[str],
    checkpoints: Mapping[int, Sequence[int]],
    session: str,
    speed: float = 0.0,
    memory: int = 0,
    config: str = "",
) -> dict[str, Any]:
    """The control message. `speed` in GFLOP/s and `memory` in bytes are 0 where unknown.

    `config` is the hash of the configuration by which the peer goes.

    Who asks is no member yet, so it fits into `MAX_STRANGER_BYTES`: of the checkpoints, the newest that find room. A
    member's reports name all.
    """
    message = {
        "type": "join",
        "addresses": _fitting(addresses),
        "checkpoints": {},
        "session": session,
        "speed": speed,
        "memory": memory,
        "config": config,
    }
    room = MAX_STRANGER_BYTES - len(json.dumps(message, separators=(",", ":")))
    return {**message, "checkpoints": _newest(checkpoints, room)}


def _newest(checkpoints: Mapping[int, Sequence[int]], room: int) -> dict[str, list[int]]:
    """As many of `checkpoints` as can be written in `room` bytes: of each stage its newest, then the one before."""
    found: dict[str, list[int]] = {}
    for place in range(1 + min(MOST_STEPS, max(map(len, checkpoints.values()), default=0))):
        for stage, steps in checkpoints.items():
            name, step = str(stage), list(steps[-place:][:1]) if 0 < place <= len(steps) else []
            room -= len(name) + len('"":[],') if name not in found else sum(len(f"{n},") for n in step)
            if room < 0:
                return found
            found[name] = [*step, *found.get(name, ())]
    return found


def goes_by(message: Mapping[str, Any], config: str) -> bool:
    """Whether who asks to join goes by the configuration with the hash `config`, as far as it says so."""
    return message.get("config", "") in ("", config)


def _fitting(addresses: Sequence[str]) -> list[str]:
    """The first ones that a coordinator takes."""
    fitting: list[str] = []
    for address in list(addresses)[:MOST_ADDRESSES]:
        if sum(map(len, fitting)) + len(address) > MOST_ADDRESS_BYTES:
            break
        fitting.append(address)
    return fitting


def parse_join(peer: str, message: Mapping[str, Any], stages: int) -> JoinAsked:
    """The request of `peer` in a control message.

    Raises:
        BadFrame: a field is missing, of another type, or beyond its bound.
    """
    addresses: Any = message.get("addresses")
    session: Any = message.get("session")
    speed, memory = message.get("speed"), message.get("memory")
    if not isinstance(addresses, list) or len(addresses) > MOST_ADDRESSES:
        raise BadFrame(f"expected a list of at most {MOST_ADDRESSES} addresses to join")
    # What JSON escapes takes up to fourteen times the room, and all addresses must fit into one message: the view.
    if not all(is_text(address, LONGEST_ADDRESS) and _PLAIN.fullmatch(address) for address in addresses):
        raise BadFrame(f"expected addresses of at most {LONGEST_ADDRESS} visible ASCII characters to join")
    if sum(map(len, addresses)) > MOST_ADDRESS_BYTES:
        raise BadFrame(f"expected addresses of at most {MOST_ADDRESS_BYTES} characters together to join")
    if not is_text(session, LONGEST_SESSION):
        raise BadFrame(f"expected a session of at most {LONGEST_SESSION} characters to join")
    if not _is_speed(speed) or not is_count(memory, MOST_MEMORY):
        raise BadFrame(f"expected a speed in GFLOP/s and memory in bytes to join, got {str((speed, memory))[:60]}")
    try:
        held = parse_held(message.get("checkpoints"), stages)
    except BadFrame as error:
        raise BadFrame(f"{error} to join") from error
    return JoinAsked(peer, tuple(addresses), held, session, float(speed or 0), int(memory or 0))


def _is_speed(value: Any) -> bool:
    """Whether `value` is a speed in GFLOP/s that a machine can have, or 0 for unknown: others are divided by it."""
    return is_measure(value, FASTEST_GFLOPS) and (value == 0 or value >= SLOWEST_GFLOPS)
