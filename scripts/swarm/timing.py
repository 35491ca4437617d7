"""What each lost process cost: how long the run stood still, and when the coordinator had done with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from protocol.membership_events import short_peer
from swarm.director import Director, Done
from swarm.processes import Swarm

AFTER_SECONDS = 120.0  # how long after a death what the coordinator says of a peer is on account of it


@dataclass(frozen=True, slots=True)
class Loss:
    """One process that was lost.

    Attributes:
        excluded: seconds until a view did without the peer, or it had joined anew; None: never.
        why: the coordinator's words.
        stood: seconds that the run stood still, beyond a usual step.
    """

    done: Done
    excluded: float | None
    why: str
    stood: float


def losses(director: Director) -> list[Loss]:
    """What each death cost, in order."""
    acts = [done for done in director.done if done.is_loss]
    usual = _usual(director.rows)
    return [_loss(director, done, usual) for done in acts]


def _loss(director: Director, done: Done, usual: float) -> Loss:
    said = _said_of(director.swarm, done)
    excluded = None if said is None else said[0] - done.time
    return Loss(done, excluded, "" if said is None else said[1], _stood(director.rows, done.time, usual))


def _usual(rows: Sequence[tuple[float, int]]) -> float:
    gaps = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(rows) if b[1] > a[1]]
    return statistics.median(gaps) if gaps else 0.0


def _stood(rows: Sequence[tuple[float, int]], time: float, usual: float) -> float:
    """The longest time between two rows around `time` or soon after: steps under way come to an end first."""
    gaps = [b[0] - max(a[0], time) for a, b in pairwise(rows) if time <= b[0] and a[0] <= time + 3.0]
    return max(0.0, max(gaps, default=0.0) - usual)


def _said_of(swarm: Swarm, done: Done) -> tuple[float, str] | None:
    """When, and in which words, a view did without the peer that was lost."""
    for event in swarm.folder.noted():
        soon = done.time <= event["time"] <= done.time + AFTER_SECONDS
        if soon and event["kind"] == "view" and _is_of(event["text"], done.peer):
            return event["time"], event["text"].split(": ", 1)[1]
    return None


def _is_of(text: str, peer: str) -> bool:
    lost = short_peer(peer) in text and any(words in text for words in ("is out", "starts anew"))
    return bool(peer) and (lost or "goes on from step" in text)
