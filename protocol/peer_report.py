"""What a peer tells the coordinator of itself every two seconds and after each step, and its bounds.

The step rows of the same message are parsed elsewhere; here is what decisions are made from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import BadFrame
from protocol.plain_text import is_plain

MOST_STEPS = 1000
MOST_BROKEN = 64
LONGEST_PEER = 128
LONGEST_HASH = 128
LONGEST_SESSION = 64
LARGEST_STEP = 1 << 31
LEAST_SECONDS, MOST_SECONDS = 1e-7, 1e6  # of a microbatch or a step: none is shorter than a kernel's launch


@dataclass(frozen=True, slots=True)
class PeerReport:
    """A peer's own account.

    Attributes:
        view: the newest view that it acts on; 0: none.
        epoch: that view's epoch.
        stage: where it is in that view; None: nowhere.
        applied: the newest step whose update is in its weights; None: it has no state yet.
        weights: a hash of the weights after `applied`; "": unknown.
        held: `held[stage]` are the steps whose state it has in files.
        idle: it waits for others.
        done: computations finished since it started.
        broken: peers to which its link is down.
        microbatch_seconds: mean seconds of a recent microbatch, forward and backward; None: none yet.
        session: that of its join; "": not said.
        least_seconds: with adaptive rates, what a step takes here at the least; None: not known, or not asked for.
    """

    view: int = 0
    epoch: int = 0
    stage: int | None = None
    applied: int | None = None
    weights: str = ""
    held: Mapping[int, Sequence[int]] | None = None
    idle: bool = True
    done: int = 0
    broken: tuple[str, ...] = ()
    microbatch_seconds: float | None = None
    session: str = ""
    least_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields of a `reports` message, without its `type`, rows and byte counts."""
        held = {str(stage): list(steps)[-MOST_STEPS:] for stage, steps in (self.held or {}).items()}
        return {
            "view": self.view,
            "epoch": self.epoch,
            "stage": self.stage,
            "applied": self.applied,
            "weights": self.weights,
            "held": held,
            "idle": self.idle,
            "done": self.done,
            "broken": list(self.broken)[:MOST_BROKEN],
            "microbatch_seconds": self.microbatch_seconds,
            "session": self.session,
            **({} if self.least_seconds is None else {"least_seconds": self.least_seconds}),
        }


def parse_report(message: Mapping[str, Any], stages: int) -> PeerReport:
    """The account in a `reports` message.

    Raises:
        BadFrame: a field is missing, of another type, or beyond its bound.
    """
    counts = {name: message.get(name) for name in ("view", "epoch", "done")}
    if not all(is_count(value, 1 << 63) for value in counts.values()):
        raise BadFrame(f"expected counts for view, epoch and done in a report, got {str(counts)[:80]}")
    stage, applied = message.get("stage"), message.get("applied")
    if not (stage is None or is_count(stage, stages)) or not (applied is None or is_count(applied, LARGEST_STEP)):
        raise BadFrame(f"expected a stage below {stages} and a step, or none, got {str((stage, applied))[:80]}")
    weights, idle, broken = message.get("weights"), message.get("idle"), message.get("broken")
    if not is_text(weights, LONGEST_HASH) or type(idle) is not bool:
        raise BadFrame(f"expected a hash of at most {LONGEST_HASH} characters, and whether the peer is idle")
    if not isinstance(broken, list) or len(broken) > MOST_BROKEN or not all(is_text(p, LONGEST_PEER) for p in broken):
        raise BadFrame(f"expected at most {MOST_BROKEN} peers whose link is broken")
    session = message.get("session", "")
    if not is_text(session, LONGEST_SESSION):
        raise BadFrame(f"expected a session of at most {LONGEST_SESSION} characters in a report")
    return PeerReport(
        view=message["view"],
        epoch=message["epoch"],
        stage=stage,
        applied=applied,
        weights=str(weights),
        held=parse_held(message.get("held"), stages),
        idle=idle,
        done=message["done"],
        broken=tuple(broken),
        microbatch_seconds=_seconds(message.get("microbatch_seconds"), "a microbatch"),
        session=str(session),
        least_seconds=_seconds(message.get("least_seconds"), "a step"),
    )


def parse_held(held: Any, stages: int) -> dict[int, tuple[int, ...]]:
    """The steps of each stage that a peer has in files.

    Raises:
        BadFrame: not lists of steps by stage, or too many.
    """
    if not isinstance(held, dict) or not set(held) <= {str(stage) for stage in range(stages)}:
        raise BadFrame(f"expected checkpoints of stages 0 to {stages - 1}")
    for steps in held.values():
        if not isinstance(steps, list) or len(steps) > MOST_STEPS or not all(is_count(s, LARGEST_STEP) for s in steps):
            raise BadFrame(f"expected at most {MOST_STEPS} steps of each stage")
    return {int(stage): tuple(steps) for stage, steps in held.items()}


def is_count(value: Any, below: int) -> bool:
    """Whether `value` is an integer in 0..below-1."""
    return type(value) is int and 0 <= value < below


def is_text(value: Any, longest: int) -> bool:
    """Whether `value` is a string of at most `longest` characters that a terminal prints and does not obey."""
    return is_plain(value, longest)


def is_measure(value: Any, most: float) -> bool:
    """Whether `value` is a finite number in 0..most."""
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= most


def _seconds(value: Any, what: str) -> float | None:
    if value is None:
        return None
    # Bounded below as well: speeds are divided by it and added up, and must stay numbers.
    if not is_measure(value, MOST_SECONDS) or value < LEAST_SECONDS:
        raise BadFrame(f"expected {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds of {what}, got {str(value)[:40]}")
    return float(value)
