"""What a disturbed run is like, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from peers.cli.output import say
from swarm.chaos import Outcome
from swarm.hostile import Verdict
from swarm.script import format_script
from swarm.timing import Loss


def say_outcome(outcome: Outcome) -> None:
    """All of it."""
    for line in _deeds(outcome):
        say(line)
    say("how long the run stood still, and when it did without the peer:")
    for line in _losses(outcome.losses):
        say(line)
    found = outcome.comparison
    say(
        f"{outcome.seconds:.0f} s, {outcome.count('view')} views, {outcome.count('join')} joins, "
        f"{outcome.count('takeover')} coordinators that took over"
    )
    say(
        f"against the undisturbed run: losses within {found.loss:.1e}, parameters within {found.parameters:.1e}; "
        f"last states at {', '.join(map(str, found.replicas))} peers"
    )
    if outcome.undone:
        say(f"the run was done before these acts, which are left out: {format_script(outcome.undone)}")
    for text in outcome.wrong:
        say(f"WRONG: {text}")
    if not outcome.wrong:
        say("all as in the undisturbed run, and nothing left behind")


def _deeds(outcome: Outcome) -> Iterator[str]:
    """What was done, and what the coordinator decided, in the order of time."""
    lines = [(done.time, f"step {done.step:<5} {done.act}") for done in outcome.done]
    lines += [(float(str(e["time"])), f"           - {e['text']}") for e in outcome.events if e["kind"] != "notice"]
    for time, text in sorted(lines):
        yield f"{datetime.fromtimestamp(time).strftime('%H:%M:%S.%f')[:-5]}  {text}"


def _losses(losses: Sequence[Loss]) -> Iterator[str]:
    for loss in losses:
        out = "-" if loss.excluded is None else f"{loss.excluded:.1f} s"
        yield f"{loss.done.act!s:<20} step {loss.done.step:<5} out after {out:<7} stood {loss.stood:5.1f} s  {loss.why}"


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


def hostile_line(name: str, verdict: Verdict, usual: float | None) -> str:
    """One line for a run beside a hostile process; `usual`: steps per second beside nobody."""
    ok = "ok    " if not verdict.wrong else "FAILED"
    pace = "-" if verdict.pace is None else f"{verdict.pace:.2f} steps/s"
    part = "" if verdict.pace is None or not usual else f" ({verdict.pace / usual:.2f} of the usual)"
    line = (
        f"{ok} {name:<20} {pace}{part}  coordinator {verdict.descriptors} descriptors, {verdict.memory / 1e6:.0f} MB  "
        f"log {verdict.log_bytes / 1e3:.0f} kB  turned away {verdict.refused} times"
    )
    return line + "".join(f"\n         {text}" for text in verdict.wrong)
