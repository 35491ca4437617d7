"""The rows still to be trained, and how long they will take."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from convergence.plan import Cell, PlannedArm
from convergence.results import Results, config_of
from convergence.sweep import Phase, due_cells, remaining_cells
from protocol.config import RunConfig
from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class Job:
    """A row to be trained."""

    arm: PlannedArm
    cell: Cell
    phase: Phase

    @property
    def config(self) -> RunConfig:
        """The whole configuration."""
        return self.arm.config(self.cell)

    def __str__(self) -> str:
        cell = self.cell
        return f"{self.arm.group}/{self.arm.name}  lr {cell.learning_rate:g}  seed {cell.seed}  {cell.steps} steps"


def chosen_arms(plan: Mapping[str, list[PlannedArm]], only: str | None) -> list[PlannedArm]:
    """The arms whose name, or group/name, fits the pattern `only` (None: all).

    Raises:
        UserError: none does.
    """
    arms = [arm for of_group in plan.values() for arm in of_group]
    names = {f"{arm.group}/{arm.name}": arm for arm in arms}
    chosen = [arm for name, arm in names.items() if only is None or _fits(name, only) or _fits(arm.name, only)]
    if not chosen:
        raise UserError(f"expected --only to fit an arm of {', '.join(names)}, got {only}: correct the pattern")
    return chosen


def due_jobs(arms: list[PlannedArm], done: Results) -> list[Job]:
    """What can be trained now: the sweeps of all arms first, then their seeds, then their horizons."""
    jobs = [Job(arm, cell, phase) for arm in arms for phase, cell in due_cells(arm, done.losses(arm))]
    return sorted(jobs, key=lambda job: job.phase)


def remaining_jobs(arms: list[PlannedArm], done: Results) -> list[Job]:
    """What is left if no sweep is extended further."""
    return [Job(arm, cell, phase) for arm in arms for phase, cell in remaining_cells(arm, done.losses(arm))]


def seconds_of(job: Job, done: Results) -> float | None:
    """How long the row will take, by the rows of its arm, else of rows with as many tokens and layers; or None."""
    own = [row["seconds"] / row["steps"] for row in done.of(job.arm).values()]
    if not own:
        size = _size(job.config)
        own = [row["seconds"] / row["steps"] for row in done.rows.values() if _size(config_of(row)) == size]
    return sum(own) / len(own) * job.cell.steps if own else None


def seconds_left(jobs: list[Job], done: Results, processes: int) -> float | None:
    """How long `jobs` will take on `processes`; None if nothing like one of them was measured yet."""
    known = [seconds_of(job, done) for job in jobs]
    return None if None in known else sum(filter(None, known)) / processes


def readable(seconds: float) -> str:
    """A duration such as "3 h 05 min"."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 60 else _hours(minutes)


def _hours(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _size(config: RunConfig) -> tuple[int, int, int, int]:
    return config.model.dim, config.model.layers, config.tokens_per_step, config.data.vocab_size
