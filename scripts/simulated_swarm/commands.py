"""The command: runs many seeds, or replays one."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from simulated_swarm.checks import SimulationFailed
from simulated_swarm.scenario import Scenario
from simulated_swarm.swarm import Swarm

LEEWAY_SECONDS = 60.0  # a run of a few seconds, that a silent peer holds up once


def main() -> None:
    """Parse the arguments, and run."""
    parser = argparse.ArgumentParser(prog="simulate", description="A swarm in simulation: seeded faults, exact checks.")
    parser.add_argument("--seeds", type=int, default=100, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--trace", action="store_true", help="print every event and effect of a replay")
    asked = parser.parse_args()
    sys.exit(replay(asked.seed, asked.trace) if asked.seed is not None else many(asked.first, asked.seeds, asked.jobs))


def replay(seed: int, trace: bool) -> int:
    """Run one seed."""
    scenario = Scenario.drawn(seed)
    sys.stdout.write(f"{scenario}\n")
    counts, failure = one(seed, trace)
    sys.stdout.write(failure + table(counts))
    return bool(failure)


def many(first: int, seeds: int, jobs: int) -> int:
    """Run seeds, print progress, failures and a table; also when it is interrupted."""
    total: Counter[str] = Counter()
    failures, number = 0, 0
    began = time.monotonic()
    try:
        for number, (counts, failure) in enumerate(_results(range(first, first + seeds), jobs), 1):
            total += counts
            failures += bool(failure)
            if failure:
                sys.stdout.write(f"{failure}\n")
            if number % 100 == 0 or failure:
                sys.stdout.write(f"{number} of {seeds} seeds, {failures} failed, {time.monotonic() - began:.0f} s\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\n")
    sys.stdout.write(table(total))
    sys.stdout.write(f"{number - failures} of {number} seeds are green\n")
    return bool(failures) or number < seeds


def _results(seeds: range, jobs: int) -> Iterable[tuple[Counter[str], str]]:
    if jobs == 1:
        return map(one, seeds)
    return multiprocessing.Pool(jobs).imap_unordered(one, seeds, chunksize=5)


def one(seed: int, trace: bool = False) -> tuple[Counter[str], str]:
    """What happened in a run, and how it failed; "" if it did not."""
    swarm = Swarm(Scenario.drawn(seed), trace)
    try:
        swarm.run()
    except SimulationFailed as failed:
        cause = failed.__cause__
        where = "" if cause is None else "".join(traceback.format_exception(cause)[-4:])
        return swarm.counts, f"FAILED {failed}\n{where}"
    return swarm.counts, _slowed(swarm)


def _slowed(swarm: Swarm) -> str:
    """Whether a hostile peer has slowed the run down to less than half: by the same seed without it.

    Only where nothing else disturbs the run: a fault at another moment takes another time to heal.
    """
    scenario = swarm.scenario
    if not scenario.hostile or scenario.faults:
        return ""
    alone = Swarm(replace(scenario, hostile=False)).run()
    swarm.counts["hostile: runs timed against the same without it"] += 1
    swarm.counts["hostile: tenths of its time"] += round(10 * swarm.clock.now / alone.clock.now)
    if swarm.clock.now <= 2 * alone.clock.now + LEEWAY_SECONDS:
        return ""
    return (
        f"FAILED seed {scenario.seed}: {swarm.clock.now:.0f} s beside a hostile peer, {alone.clock.now:.0f} s without\n"
        f"  replay: {scenario.command}\n"
    )


def table(counts: Counter[str]) -> str:
    """What happened, a line each."""
    width = max(map(len, counts), default=0)
    return "".join(f"  {name:{width}} {counts[name]:12,}\n" for name in sorted(counts))
