"""The view: who serves which stage, from which step on. The coordinator numbers and signs it; all else follows.

Views are numbered from 1 without gaps. A peer acts only on the newest it has verified. `last_step` is where all
stop: the run's end, or an earlier step when the coordinator winds the run down, so that every stage stops after
the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from protocol.errors import RemoteError


@dataclass(frozen=True, slots=True)
class Replica:
    """A peer that serves a stage, and where it can be reached. `weight` is its share of the stage's microbatches."""

    peer: str
    addresses: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """`stages[s]` are the replicas of stage s that hold its weights."""

    number: int
    first_step: int
    last_step: int
    stages: tuple[tuple[Replica, ...], ...]

    def stage_of(self, peer: str) -> int | None:
        """The stage that `peer` serves, or None."""
        for stage, replicas in enumerate(self.stages):
            if any(replica.peer == peer for replica in replicas):
                return stage
        return None

    def replica(self, peer: str) -> Replica:
        """The entry of `peer`.

        Raises:
            KeyError: not in this view.
        """
        for replicas in self.stages:
            for replica in replicas:
                if replica.peer == peer:
                    return replica
        raise KeyError(peer)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {
            "number": self.number,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "stages": [[[r.peer, list(r.addresses), r.weight] for r in replicas] for replicas in self.stages],
        }

    @classmethod
    def from_json(cls, value: Any) -> View:
        """The view in `value`.

        Raises:
            RemoteError: not of the form `to_json` gives, or a stage without replicas.
        """
        try:
            stages = tuple(
                tuple(Replica(str(peer), tuple(map(str, where)), float(weight)) for peer, where, weight in replicas)
                for replicas in value["stages"]
            )
            view = cls(int(value["number"]), int(value["first_step"]), int(value["last_step"]), stages)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise RemoteError(f"expected a view, got {str(value)[:80]!r}") from error
        if view.number < 1 or view.first_step < 1 or not stages or not all(stages):
            raise RemoteError(f"expected a view from number 1 with a replica for each stage, got {str(value)[:80]!r}")
        if not all(0 < replica.weight < math.inf for replicas in stages for replica in replicas):
            raise RemoteError(f"expected replicas of positive, finite weight, got {str(value)[:80]!r}")
        return view
