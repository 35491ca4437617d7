"""Which weights the replicas of a stage have after a step, by their own reports: a learner is one of them when its are
the same.
"""

from __future__ import annotations

from collections import OrderedDict

STEPS_KEPT = 128


class Agreement:
    """Hashes that replicas reported, by stage and step; of each stage the oldest are forgotten."""

    def __init__(self) -> None:
        self._hashes: dict[int, OrderedDict[int, dict[str, set[str]]]] = {}

    def note(self, stage: int, step: int, weights: str, peer: str) -> None:
        """The replica `peer` has these weights."""
        if not weights:
            return
        steps = self._hashes.setdefault(stage, OrderedDict())
        steps.setdefault(step, {}).setdefault(weights, set()).add(peer)
        while len(steps) > STEPS_KEPT:
            steps.popitem(last=False)

    def agrees(self, stage: int, step: int, weights: str) -> bool | None:
        """Whether these weights are a replica's; None: no replica's are known for that step."""
        known = self._hashes[stage].get(step) if stage in self._hashes else None
        return None if known is None or not weights else weights in known

    def most(self, stage: int, step: int) -> str:
        """The weights that most replicas have which are known for that step; "": none are, or as many have others."""
        known = self._of(stage, step)
        counts = sorted(((len(peers), weights) for weights, peers in known.items()), reverse=True)
        alone = len(counts) == 1 or (len(counts) > 1 and counts[0][0] > counts[1][0])
        return counts[0][1] if alone else ""

    def reported(self, stage: int, step: int, weights: str, peer: str) -> bool:
        """Whether the replica `peer` has said that it has these weights."""
        return peer in self._of(stage, step).get(weights, ())

    def _of(self, stage: int, step: int) -> dict[str, set[str]]:
        return self._hashes[stage].get(step, {}) if stage in self._hashes else {}

    def clear_after(self, step: int) -> None:
        """The run goes back to `step`: later ones will be done again."""
        for steps in self._hashes.values():
            for later in [s for s in steps if s > step]:
                del steps[later]
