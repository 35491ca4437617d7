"""What of the plan is done and what is missing, in lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from convergence import results
from convergence.jobs import readable, remaining_jobs, seconds_left
from convergence.plan import PlannedArm
from convergence.results import Results
from convergence.sweep import best_rate
from peers.cli.output import say


def say_list(arms: list[PlannedArm], path: Path, processes: int) -> None:
    """Print the state of `arms` and the time that is left on `processes`."""
    done = results.load(path)
    for line in _lines(arms, done):
        say(line)
    left = remaining_jobs(arms, done)
    seconds = seconds_left(left, done, processes)
    time = "of unknown length: no row like them is measured" if seconds is None else f"about {readable(seconds)}"
    say(f"{len(left)} rows left, {time} with {processes} jobs; sweeps whose best rate is at an edge take more")
    used = sum(len(done.of(arm)) for arm in arms)
    if len(done.rows) > used:
        say(f"{len(done.rows) - used} rows are of no arm listed here: an arm or a default changed, or it is left out")
    if done.unread:
        say(f"{len(done.unread)} rows have configurations that this release cannot read; they are not used")


def _lines(arms: list[PlannedArm], done: Results) -> Iterator[str]:
    group = None
    for arm in arms:
        if arm.group != group:
            group = arm.group
            yield f"{group}: seeds {_list(arm.seeds)}"
        losses = done.losses(arm)
        missing = len(remaining_jobs([arm], done))
        best = best_rate(arm, losses)
        lowest = min(losses.values(), default=math.inf)
        state = f"lowest loss {lowest:.4f}" if math.isfinite(lowest) else "all diverged" if losses else "no loss yet"
        rate = "sweep not finished" if best is None else f"best lr {best:g}"
        yield f"  {arm.name:28} {len(losses):3} done {missing:3} missing  {rate}, {state}"
        yield f"  {'':28} lr {_list(arm.learning_rates)}; horizons {_list(arm.horizons)}  {arm.description}"


def _list(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
