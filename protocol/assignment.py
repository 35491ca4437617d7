"""Which peer serves which stage when a run is resumed: each must hold the state of its stage, of one common step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def assign_stages(held: Mapping[str, Mapping[int, Sequence[int]]], stages: int) -> tuple[int, list[str]] | str:
    """The newest step that all stages have, and the peer for each stage; or why there is none.

    `held[peer][stage]` are the steps whose state of that stage `peer` holds.
    """
    steps = sorted({s for holds in held.values() for held_steps in holds.values() for s in held_steps}, reverse=True)
    for step in steps:
        holders = {
            stage: [peer for peer, holds in held.items() if step in holds.get(stage, ())] for stage in range(stages)
        }
        order = _match(holders)
        if order is not None:
            return step, order
    have = {stage: sorted({s for h in held.values() for s in h.get(stage, ())}) for stage in range(stages)}
    described = ", ".join(f"stage {stage}: {steps or 'none'}" for stage, steps in have.items())
    return (
        f"no step has checkpoints of all {stages} stages among the peers that joined ({described}): "
        "start the peers with the folders they had"
    )


def _match(holders: Mapping[int, Sequence[str]]) -> list[str] | None:
    """A different peer for each stage, of those in `holders[stage]`; None if there is no such choice.

    Augmenting paths (Kuhn 1955): a stage may push another one off its peer if that one finds a peer elsewhere.
    """
    served: dict[str, int] = {}

    def place(stage: int, tried: set[str]) -> bool:
        for peer in holders[stage]:
            if peer in tried:
                continue
            tried.add(peer)
            if peer not in served or place(served[peer], tried):
                served[peer] = stage
                return True
        return False

    if not all(place(stage, set()) for stage in holders):
        return None
    peers = {stage: peer for peer, stage in served.items()}
    return [peers[stage] for stage in sorted(peers)]
