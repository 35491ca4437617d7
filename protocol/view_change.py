"""From one view to the next: what may change in it, and how. Pure.

    planned    new weights from a step that nobody has begun; only when the previous plan is past
    without    replicas are lost: marked where microbatches were theirs, dropped where none were; at once
    learner    an entry that only follows; at once

A plan is past when every replica has applied the step before it: then nobody works on a step of the old shares, and
what only had shares then can be dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from protocol.view import Replica, View


def planned(view: View, first_step: int, weights: Mapping[str, float]) -> View:
    """The next view, with new `weights` from `first_step` on. The plan of `view` must be past, `drained(view)` gone."""

    def change(replica: Replica) -> Replica | None:
        if not replica.alive:
            return replace(replica, before=replica.weight, weight=0.0) if replica.weight > 0 else None
        return replace(replica, before=replica.weight, weight=weights.get(replica.peer, replica.weight))

    return _changed(replace(view, number=view.number + 1, first_step=first_step), change)


def without(view: View, peers: Collection[str], past: bool) -> View:
    """The next view, in which the living entries of `peers` are lost. `past`: whether the plan of `view` is."""

    def change(replica: Replica) -> Replica | None:
        if not replica.alive or replica.peer not in peers:
            return replica
        had_work = replica.weight > 0 or (replica.before > 0 and not past)
        return replace(replica, lost=view.number + 1, addresses=()) if had_work else None

    return _changed(replace(view, number=view.number + 1), change)


def _changed(view: View, change: object) -> View:
    assert callable(change)
    stages = tuple(
        tuple(changed for replica in replicas if (changed := change(replica)) is not None) for replicas in view.stages
    )
    return replace(view, stages=stages)


def with_learner(view: View, stage: int, peer: str, addresses: tuple[str, ...], start: int) -> View:
    """The next view, in which `peer` follows `stage` from the state after step `start` on."""
    learner = Replica(peer, addresses, weight=0.0, before=0.0, start=start)
    stages = tuple((*replicas, learner) if stage == index else replicas for index, replicas in enumerate(view.stages))
    return replace(view, number=view.number + 1, stages=stages)


def with_last_step(view: View, last_step: int) -> View:
    """The next view, which stops at another step."""
    return replace(view, number=view.number + 1, last_step=last_step)


def drained(view: View) -> tuple[str, ...]:
    """Those whose share ends with the view's plan."""
    return tuple(r.peer for r in view.peers() if r.weight == 0 and r.before > 0)


def bereft(view: View, past: bool, gone: Collection[str] = ()) -> tuple[int, ...]:
    """The stages with nobody to work on some step, counting living replicas other than `gone`."""

    def served(replicas: tuple[Replica, ...]) -> bool:
        left = [r for r in replicas if r.alive and r.peer not in gone]
        return any(r.weight > 0 for r in left) and (past or any(r.before > 0 for r in left))

    return tuple(stage for stage, replicas in enumerate(view.stages) if not served(replicas))
