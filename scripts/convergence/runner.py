"""Training what is missing: worker processes, and the results file as the only memory."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from convergence import results
from convergence.jobs import Job, due_jobs, readable, remaining_jobs, seconds_left, seconds_of
from convergence.plan import PlannedArm
from convergence.results import Row
from peers.cli.output import say
from protocol.config import RunConfig
from protocol.errors import RunFailed

ROOT = Path(__file__).resolve().parents[2]


def run(arms: list[PlannedArm], path: Path, processes: int) -> int:
    """Train what is missing of `arms` into the results file at `path`; the number of rows trained.

    When a row fails, no other begins; those that run end and are kept, and then the error is raised.

    Raises:
        UserError: the results file is damaged, or the data is missing.
        RunFailed: a worker was killed.
    """
    from convergence.training import train_row

    commit, trained, failure = describe_commit(), 0, None
    running: dict[Future[dict[str, Any]], Job] = {}
    with _pool(processes) as pool:
        while True:
            done = results.load(path)
            busy = {job.config.hash() for job in running.values()}
            due = [] if failure else due_jobs(arms, done)
            for job in _free(due, busy, processes - len(running)):
                say(f"{_now()}  start  {job}{_about(seconds_of(job, done))}")
                running[pool.submit(train_row, job.config)] = job
            if failure and not running:
                raise failure
            if not running:
                return trained
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if error := _error(future):
                    say(f"{_now()}  failed {job}: {error}; waiting for the rows that run")
                    failure = failure or error
                    continue
                row = make_row(job.arm.group, job.arm.name, job.config, future.result(), commit)
                results.append(path, row)
                done.add(row)
                trained += 1
                left = remaining_jobs(arms, done)
                say(f"{_now()}  end    {job}  {describe(row)}{_left(left, seconds_left(left, done, processes))}")


def _error(future: Future[dict[str, Any]]) -> BaseException | None:
    """Why the row of a finished `future` failed; None if it did not."""
    if isinstance(future.exception(), BrokenProcessPool):
        return RunFailed(
            "a worker process was killed, perhaps for its memory: finished rows are kept; lower --jobs, and run again"
        )
    return future.exception()


def make_row(group: str, arm: str, config: RunConfig, values: dict[str, Any], commit: str) -> Row:
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


def limit_to_one_thread() -> None:
    """For processes started from here, and this one if it has not loaded torch yet."""
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def _pool(processes: int) -> ProcessPoolExecutor:
    """Workers of one thread each, started from scratch: a fork of a process whose threads have run hangs."""
    limit_to_one_thread()
    from convergence.training import prepare_worker

    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), prepare_worker, (os.getpid(),))


def _free(jobs: list[Job], busy: set[str], places: int) -> Iterator[Job]:
    for job in jobs:
        key = job.config.hash()
        if places > 0 and key not in busy:
            busy.add(key)
            places -= 1
            yield job


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f"  (about {readable(seconds)})"


def _left(jobs: list[Job], seconds: float | None) -> str:
    return f"  ({len(jobs)} rows left{'' if seconds is None else f', ETA {readable(seconds)}'})" if jobs else ""
