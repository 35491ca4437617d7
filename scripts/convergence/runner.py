"""Training what is missing: worker processes, and the results file as the only memory."""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from convergence import results
from convergence.plan import Cell, PlannedArm
from convergence.results import Results, Row
from convergence.sweep import Phase, due_cells, remaining_cells
from convergence.training import Values, prepare_worker, train_row
from peers.cli.common import say
from protocol.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]


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
    """The arms whose name, or group/name, fits the pattern `only` (None: all)."""
    pattern = "*" if only is None else only
    return [
        arm
        for arms in plan.values()
        for arm in arms
        if fnmatch.fnmatchcase(arm.name, pattern) or fnmatch.fnmatchcase(f"{arm.group}/{arm.name}", pattern)
    ]


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
        own = [row["seconds"] / row["steps"] for row in done.rows.values() if _size(results.config_of(row)) == size]
    return sum(own) / len(own) * job.cell.steps if own else None


def seconds_left(jobs: list[Job], done: Results, processes: int) -> float | None:
    """How long `jobs` will take on `processes`; None if nothing like one of them was measured yet."""
    known = [seconds_of(job, done) for job in jobs]
    return None if None in known else sum(filter(None, known)) / processes


def run(arms: list[PlannedArm], path: Path, processes: int) -> int:
    """Train what is missing of `arms` into the results file at `path`; the number of rows trained.

    Raises:
        UserError: the results file is damaged, or the data is missing.
        BrokenProcessPool: a worker was killed.
    """
    commit, trained = describe_commit(), 0
    running: dict[Future[Values], tuple[Job, float]] = {}
    with _pool(processes) as pool:
        while True:
            done = results.load(path)
            busy = {job.config.hash() for job, _ in running.values()}
            for job in _free(due_jobs(arms, done), busy, processes - len(running)):
                say(f"{_now()}  start  {job}{_about(seconds_of(job, done))}")
                running[pool.submit(train_row, job.config, os.getpid())] = job, time.monotonic()
            if not running:
                return trained
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, _ = running.pop(future)
                row = make_row(job.arm.group, job.arm.name, job.config, future.result(), commit)
                results.append(path, row)
                done.add(row)
                trained += 1
                left = remaining_jobs(arms, done)
                say(f"{_now()}  end    {job}  {describe(row)}{_left(left, seconds_left(left, done, processes))}")


def make_row(group: str, arm: str, config: RunConfig, values: Values, commit: str) -> Row:
    """The row as the results file holds it."""
    key = config.hash()
    return {
        "id": key[:12],
        "group": group,
        "arm": arm,
        "seed": config.seed,
        "learning_rate": config.train.learning_rate,
        "steps": config.train.steps,
        "config_hash": key,
        "config": config.model_dump(),
        "commit": commit,
        **values,
    }


def describe(row: Row) -> str:
    """The row's outcome in a few words."""
    if row["diverged"]:
        return f"diverged ({row['diverged']})  {row['seconds']:.0f} s  row {row['id']}"
    return (
        f"loss {row['held_out_loss']:.4f} +- {row['held_out_error']:.4f}  {row['wire']['forward']:.2f} + "
        f"{row['wire']['backward']:.2f} B/token  {row['seconds']:.0f} s  row {row['id']}"
    )


def describe_commit() -> str:
    """The commit of this checkout, with a "+" if files that git knows differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def readable(seconds: float) -> str:
    """A duration such as "3 h 05 min"."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 60 else _hours(minutes)


def _hours(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _pool(processes: int) -> ProcessPoolExecutor:
    """Workers of one thread each, started from scratch: a fork of a process whose threads have run hangs."""
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), prepare_worker)


def _free(jobs: list[Job], busy: set[str], places: int) -> Iterator[Job]:
    for job in jobs:
        key = job.config.hash()
        if places > 0 and key not in busy:
            busy.add(key)
            places -= 1
            yield job


def _size(config: RunConfig) -> tuple[int, int, int, int]:
    return config.model.dim, config.model.layers, config.tokens_per_step, config.data.vocab_size


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f"  (about {readable(seconds)})"


def _left(jobs: list[Job], seconds: float | None) -> str:
    return f"  ({len(jobs)} rows left{'' if seconds is None else f', ETA {readable(seconds)}'})" if jobs else ""
