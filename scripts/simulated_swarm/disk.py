"""A peer's disk: whole files of states, which outlive its process."""

from __future__ import annotations

from simulated_swarm.toy_model import ToyState


class Disk:
    """States by (stage, step). Of each stage only the newest `keep` stay."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._files: dict[tuple[int, int], ToyState] = {}

    def write(self, stage: int, step: int, state: ToyState) -> None:
        """A file is whole and in its place."""
        self._files[stage, step] = state
        for old in sorted(s for kept, s in self._files if kept == stage)[: -self._keep]:
            del self._files[stage, old]

    def read(self, stage: int, step: int) -> ToyState | None:
        """What was written, if it is there."""
        return self._files.get((stage, step))

    def forget(self, stage: int, step: int) -> None:
        """A file is no use."""
        self._files.pop((stage, step), None)

    def held(self) -> dict[int, tuple[int, ...]]:
        """The steps that are there, by stage."""
        stages = {stage for stage, _ in self._files}
        return {stage: tuple(sorted(step for kept, step in self._files if kept == stage)) for stage in sorted(stages)}
