"""A peer's disk: whole files of states, which outlive its process."""

from __future__ import annotations

from protocol.lineage import same_history
from simulated_swarm.toy_model import ToyState


class Disk:
    """States by (stage, step), each with the steps that were passed over. Of each stage only the newest `keep` stay.

    `skipped`: the steps that the run passes over, as far as they are known here; files of another history are not read.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._files: dict[tuple[int, int], tuple[ToyState, tuple[int, ...]]] = {}
        self.skipped: tuple[int, ...] = ()

    def write(self, stage: int, step: int, state: ToyState, skipped: tuple[int, ...]) -> None:
        """A file is whole and in its place."""
        self._files[stage, step] = state, skipped
        for old in sorted(s for kept, s in self._files if kept == stage)[: -self._keep]:
            del self._files[stage, old]

    def read(self, stage: int, step: int) -> ToyState | None:
        """What was written, if it is there."""
        state, skipped = self._files.get((stage, step), (None, ()))
        return state if same_history(skipped, self.skipped, step) else None

    def forget(self, stage: int, step: int) -> None:
        """A file is no use."""
        self._files.pop((stage, step), None)

    def held(self) -> dict[int, tuple[int, ...]]:
        """The steps that are there, by stage."""
        there = [key for key, (_, skipped) in self._files.items() if same_history(skipped, self.skipped, key[1])]
        stages = {stage for stage, _ in there}
        return {stage: tuple(sorted(step for kept, step in there if kept == stage)) for stage in sorted(stages)}
