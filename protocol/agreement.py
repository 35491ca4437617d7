"""Which weights the replicas of a stage have after a step, by their own reports: a learner is one of them when its are
the same.
"""

from __future__ import annotations

from collections import OrderedDict

STEPS_KEPT = 128


class Agreement:
    """Hashes that replicas reported, by stage and step; of each stage the oldest are forgotten."""

    def __init__(self) -> None:
        self._hashes: dict[int, OrderedDict[int, set[str]]] = {}

    def note(self, stage: int, step: int, weights: str) -> None:
        """A replica has these weights."""
        if not weights:
            return
        steps = self._hashes.setdefault(stage, OrderedDict())
        steps.setdefault(step, set()).add(weights)
        while len(steps) > STEPS_KEPT:
            steps.popitem(last=False)

    def agrees(self, stage: int, step: int, weights: str) -> bool | None:
        """Whether these weights are a replica's; None: no replica's are known for that step."""
        known = self._hashes[stage].get(step) if stage in self._hashes else None
        return None if known is None or not weights else weights in known

    def clear(self) -> None:
        """The run goes back: later steps will be done again."""
        self._hashes.clear()
