"""Of which history a state in a file is: the configurations and the steps passed over that led to it. Pure.

A run that goes back may go on otherwise: with another configuration, or past a step whose numbers were not finite. What
was written of later steps is then of a future that was given up, and another state than the run will have after the
same step. So a file says by which configuration it was written, and which steps had been passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace


def same_history(skipped: Collection[int], now: Collection[int], step: int) -> bool:
    """Whether a state after `step`, on the way to which `skipped` were passed over, is of a run that skips `now`."""
    return {s for s in skipped if s <= step} == {s for s in now if s <= step}


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run's history.

    Attributes:
        configs: (first step, hash of the configuration) as they followed one another. Each holds from its first step
            on, whatever was there before; 0: its first step is not known yet, since the run has not gone on with it.
        skipped: the steps that are passed over.
    """

    configs: tuple[tuple[int, str], ...]
    skipped: tuple[int, ...] = ()

    def begun(self, first_step: int) -> Lineage:
        """The same, now that all begin with `first_step`: the newest configuration holds from there at the latest."""
        since, config = self.configs[-1]
        if 0 < since <= first_step:
            return self
        return replace(self, configs=(*self.configs[:-1], (first_step, config)))

    def labels(self, step: int) -> dict[str, str]:
        """What a file of the state after `step` says of its history, as it is written now."""
        passed = [str(s) for s in self.skipped if s <= step]
        return {"config": self.configs[-1][1], "skipped": " ".join(passed)}

    def accepts(self, labels: Mapping[str, str], step: int) -> bool:
        """Whether a state after `step` with these labels is of this history."""
        try:
            skipped = [int(s) for s in labels.get("skipped", "").split()]
        except ValueError:
            return False
        first = self.configs[0][1]
        return labels.get("config", first) == self._in_force(step) and same_history(skipped, self.skipped, step)

    def _in_force(self, step: int) -> str:
        """The configuration by which `step` was done."""
        return next(config for first, config in reversed(self.configs) if 0 < first <= max(step, 1))
