"""What a disturbed run is like, for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.table import Table

from peers.cli.common import console, say
from swarm.chaos import Outcome
from swarm.timing import Loss


def say_outcome(outcome: Outcome) -> None:
    """All of it."""
    console.print(_deeds(outcome))
    if outcome.losses:
        console.print(_losses(outcome.losses))
    found = outcome.comparison
    say(
        f"{outcome.seconds:.0f} s, {outcome.count('view')} views, {outcome.count('join')} joins, "
        f"{outcome.count('takeover')} coordinators that took over"
    )
    say(
        f"against the undisturbed run: losses within {found.loss:.1e}, parameters within {found.parameters:.1e}; "
        f"last states at {', '.join(map(str, found.replicas))} peers"
    )
    for text in outcome.wrong:
        say(f"WRONG: {text}")
    if not outcome.wrong:
        say("all as in the undisturbed run, and nothing left behind")


def _deeds(outcome: Outcome) -> Table:
    """What was done, and what the coordinator decided, in the order of time."""
    table = Table("time", "step", "done", "decided")
    lines = [(done.time, str(done.step), str(done.act), "") for done in outcome.done]
    lines += [(float(str(e["time"])), "", "", str(e["text"])) for e in outcome.events if e["kind"] != "notice"]
    for time, step, deed, decided in sorted(lines):
        table.add_row(datetime.fromtimestamp(time).strftime("%H:%M:%S.%f")[:-5], step, deed, decided)
    return table


def _losses(losses: Sequence[Loss]) -> Table:
    table = Table("lost", "at step", "without it after", "the run stood still", "why")
    for loss in losses:
        excluded = "-" if loss.excluded is None else f"{loss.excluded:.1f} s"
        table.add_row(str(loss.done.act), str(loss.done.step), excluded, f"{loss.stood:.1f} s", loss.why)
    return table


def matrix_line(name: str, outcome: Outcome) -> str:
    """One line for one case."""
    verdict = "ok    " if not outcome.wrong else "FAILED"
    stood = max((loss.stood for loss in outcome.losses), default=0.0)
    found = outcome.comparison
    line = (
        f"{verdict} {name:<32} losses {found.loss:.1e}  parameters {found.parameters:.1e}  "
        f"{outcome.count('view')} views  stood {stood:4.1f} s  {outcome.seconds:3.0f} s"
    )
    return line + "".join(f"\n         {text}" for text in outcome.wrong)
