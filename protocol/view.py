"""The view: who serves which stage, from which step on. The coordinator numbers and signs it; all else follows.

Views are numbered from 1 without gaps. A peer acts only on the newest it has verified, and that one view answers for
every step that is under way: the shares of a stage's replicas are `before` in the steps before `first_step`, and
`weight` from it on. So a change that is planned (a peer enters, leaves, gets another share) names a step that nobody
has begun, while a loss acts at once: the lost replica stays in the list, marked, since the microbatches that it had
are what moves (`protocol.route`).

`last_step` is where all stop: the run's end, or an earlier step when the coordinator winds the run down, so that every
stage stops after the same step. `epoch` counts how often the run went back to an earlier step, `restored` is that step.
`skipped` are steps whose numbers were not finite: every stage passes over them, without microbatches and without an
update. A step is added to them with a new epoch only, so all views of an epoch agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.errors import RemoteError
from protocol.plain_text import is_plain, plain

MOST_SKIPPED = 1000
MOST_SHARE = 1e9  # sums and products of shares must stay finite
_NUMBERS = ("number", "first_step", "last_step", "epoch", "restored")


@dataclass(frozen=True, slots=True)
class Replica:
    """A peer at a stage, and where it can be reached.

    Attributes:
        weight: its share of the stage's microbatches from the view's `first_step` on; 0: it only follows.
        before: the same in earlier steps.
        start: the step whose state it begins from: the view's `restored`, or for a newcomer a later one, of which the
            stage's replicas keep a copy for it.
        lost: the number of the view that lost it; 0: it is alive.
    """

    peer: str
    addresses: tuple[str, ...] = ()
    weight: float = 1.0
    before: float = 1.0
    start: int = 0
    lost: int = 0

    @property
    def alive(self) -> bool:
        """Whether it still counts."""
        return self.lost == 0


@dataclass(frozen=True, slots=True)
class View:
    """`stages[s]` are the replicas of stage s; `holders[s]` are peers that have its state after `restored` in files.

    `restored_hashes[s]`: the hash of that state's weights, as its replicas had reported it; "": not known.
    """

    number: int
    first_step: int
    last_step: int
    stages: tuple[tuple[Replica, ...], ...]
    epoch: int = 0
    restored: int = 0
    holders: tuple[tuple[str, ...], ...] = ()
    restored_hashes: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()

    def stage_of(self, peer: str) -> int | None:
        """The stage at which `peer` is, alive; or None."""
        for stage, replicas in enumerate(self.stages):
            if any(replica.peer == peer and replica.alive for replica in replicas):
                return stage
        return None

    def replica(self, peer: str) -> Replica:
        """The living entry of `peer`.

        Raises:
            KeyError: not in this view.
        """
        for replicas in self.stages:
            for replica in replicas:
                if replica.peer == peer and replica.alive:
                    return replica
        raise KeyError(peer)

    def goes_back(self, former: View | None, peer: str) -> bool:
        """Whether all begin again from `restored`, as `peer` sees it, whose newest view was `former`.

        Who comes in mid-run, and has no former view, begins from a later state, and alone.
        """
        if former is not None:
            return self.epoch > former.epoch
        return self.stage_of(peer) is not None and self.replica(peer).start == self.restored

    def hash_of(self, stage: int, step: int) -> str:
        """The hash that the weights of `stage` after `step` must have; "": any."""
        known = step == self.restored and 0 <= stage < len(self.restored_hashes)
        return self.restored_hashes[stage] if known else ""

    def share(self, replica: Replica, step: int) -> float:
        """The weight of `replica` in `step`."""
        return replica.weight if step >= self.first_step else replica.before

    def group(self, stage: int, step: int) -> tuple[str, ...]:
        """The living replicas of `stage` that share the work of `step` and add up its gradients, in view order."""
        return tuple(r.peer for r in self.stages[stage] if r.alive and self.share(r, step) > 0)

    def followers(self, stage: int, step: int) -> tuple[str, ...]:
        """The living replicas of `stage` that take no part in `step` and are handed its total."""
        return tuple(r.peer for r in self.stages[stage] if r.alive and self.share(r, step) <= 0)

    def peers(self) -> tuple[Replica, ...]:
        """All living replicas."""
        return tuple(replica for replicas in self.stages for replica in replicas if replica.alive)

    def everybody(self) -> frozenset[str]:
        """All peers that it names: replicas, also those that were lost last, and holders."""
        replicas = {replica.peer for replicas in self.stages for replica in replicas}
        return frozenset(replicas.union(*self.holders))

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {
            "number": self.number,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "epoch": self.epoch,
            "restored": self.restored,
            "holders": [list(peers) for peers in self.holders],
            "restored_hashes": list(self.restored_hashes),
            "skipped": list(self.skipped),
            "stages": [
                [[r.peer, list(r.addresses), r.weight, r.before, r.start, r.lost] for r in replicas]
                for replicas in self.stages
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> View:
        """The view in `value`.

        Raises:
            RemoteError: not of the form `to_json` gives, or a stage without replicas.
        """
        try:
            stages = tuple(tuple(_replica(entry) for entry in replicas) for replicas in value["stages"])
            number, first, last, epoch, restored = (int(value[name]) for name in _NUMBERS)
            holders = tuple(tuple(plain(peer) for peer in peers) for peers in value["holders"])
            hashes = tuple(plain(digest) for digest in value["restored_hashes"])
            skipped = tuple(int(step) for step in value["skipped"])
            view = cls(number, first, last, stages, epoch, restored, holders, hashes, skipped)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise RemoteError(f"expected a view, got {str(value)[:80]!r}") from error
        alive = all(any(r.alive for r in replicas) for replicas in stages)
        if view.number < 1 or view.first_step < 1 or view.restored < 0 or not stages or not alive:
            raise RemoteError(f"expected a view from number 1 with a replica for each stage, got {str(value)[:80]!r}")
        if len(skipped) > MOST_SKIPPED or any(step < 1 for step in skipped):
            raise RemoteError(f"expected at most {MOST_SKIPPED} steps to pass over, got {str(skipped)[:80]}")
        shares = [share for replicas in stages for r in replicas for share in (r.weight, r.before)]
        if not all(0 <= share <= MOST_SHARE for share in shares):
            raise RemoteError(f"expected replicas of a weight in 0..{MOST_SHARE:.0f}, got {str(value)[:80]!r}")
        return view


def _replica(entry: Any) -> Replica:
    peer, addresses, weight, before, start, lost = entry
    if not all(is_plain(text) for text in (peer, *addresses)):
        raise ValueError("a peer or an address that cannot be printed")
    return Replica(peer, tuple(addresses), float(weight), float(before), int(start), int(lost))
