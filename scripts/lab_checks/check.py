"""A laboratory proves itself: plain TCP reaches the rate, one way and both; round trips and losses are as asked.

All is measured between neighbours, home 0 and 1, then 1 and 2 and so on. TCP's own ceiling is 96.5 % of a line: 1,448
bytes of content in a packet of 1,500. A connection has no more under way than its send buffer allows, so over a long
line, or where both ways fill their queues and the answers wait in them, the window is the ceiling.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.lab.lab_file import LabFile
from peers.lab.laboratory import Laboratory
from protocol.errors import RunFailed

CEILING = 1448 / 1500
WINDOW_BYTES = 2.7e6  # under way, of a send buffer of 4 MB
LEAST = 0.85  # of the ceiling: TCP halts now and then after a full buffer
ROUND_TRIPS = 30
LATE_SECONDS = 0.01  # a busy machine
_SCRIPTS = Path(__file__).resolve().parents[1]
_PROGRAM = [sys.executable, "-P", "-m", "lab_checks.probe"]
_ENDING_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: what was asked for, what was measured, and whether that is right."""

    what: str
    asked: str
    measured: str
    right: bool


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: rates for `seconds` after `skip` seconds of warming up, losses of so many `datagrams`."""

    seconds: float
    skip: float = 3.0
    datagrams: int = 3000


def check(lab_file: LabFile, homes: int, effort: Effort) -> Iterator[Line]:
    """The figures, as they come."""
    with Laboratory(lab_file, homes) as lab:
        for one in range(homes - 1):
            yield _round_trip(lab, one, one + 1)
            yield from _rates(lab, one, one + 1, effort)
            yield _losses(lab, one, one + 1, effort.datagrams)
        before = lab.counters()["cpu_seconds"]
        yield Line("the hub's CPU in all", "", f"{before:.1f} s", True)


def _round_trip(lab: Laboratory, one: int, other: int) -> Line:
    asked = 2 * lab.lab.one_way_seconds(one, other)
    jitter = 2 * (lab.lab.at(one).jitter_ms + lab.lab.at(other).jitter_ms) / 1e3
    with served(lab, other, "echo"):
        found = said(lab.popen(one, [*_PROGRAM, "round-trips", lab.address(other), str(ROUND_TRIPS)], **options()))
    times = found["seconds"]
    least, median = min(times), statistics.median(times)
    right = asked <= least <= asked + jitter + LATE_SECONDS
    wished = f"{1e3 * asked:.0f} ms" + (f" and up to {1e3 * jitter:.0f} more" if jitter else "")
    return Line(f"round trip {one}-{other}", wished, f"least {1e3 * least:.1f}, median {1e3 * median:.1f} ms", right)


def _rates(lab: Laboratory, one: int, other: int, effort: Effort) -> Iterator[Line]:
    yield _rate(lab, f"TCP {one} to {other}", (one, other), poured(lab, [(one, other)], effort)[0], 0.0)
    yield _rate(lab, f"TCP {other} to {one}", (other, one), poured(lab, [(other, one)], effort)[0], 0.0)
    both = [(one, other), (other, one)]
    for way, rate in zip(both, poured(lab, both, effort), strict=True):
        yield _rate(lab, f"TCP {way[0]} to {way[1]}, both at once", way, rate, _queues(lab, both))


def _queues(lab: Laboratory, ways: list[tuple[int, int]]) -> float:
    """How long a packet and its answer can wait, in seconds."""
    rates = [(lab.lab.at(source).buffer_kib, lab.lab.bytes_per_second(source, to)) for source, to in ways]
    return sum(1024 * kib / rate for kib, rate in rates if rate)


def _rate(lab: Laboratory, what: str, way: tuple[int, int], rate: float, queued: float) -> Line:
    """`queued`: how much longer a round trip can be than without queues, in seconds."""
    asked, rtt = lab.lab.bytes_per_second(*way), 2 * lab.lab.one_way_seconds(*way) + queued
    measured = f"{mbit(rate):.1f} Mbit/s"
    if asked is None:
        return Line(what, "no limit", measured, True)
    lossy = lab.lab.at(way[0]).loss + lab.lab.at(way[1]).loss > 0  # TCP is slower then, which is what it is for
    least = min(CEILING * asked, WINDOW_BYTES / rtt if rtt else CEILING * asked)
    right = rate <= CEILING * asked * 1.02 and (lossy or rate >= LEAST * least)
    return Line(what, f"{mbit(asked):.0f} Mbit/s, {mbit(CEILING * asked):.1f} of content", measured, right)


def poured(lab: Laboratory, ways: list[tuple[int, int]], effort: Effort) -> list[float]:
    """What plain TCP brings each of the `ways` while all are in use, in bytes of content a second."""
    with ExitStack() as stack:
        sinks = [stack.enter_context(served(lab, to, "sink", str(effort.skip))) for _, to in ways]
        for source, to in ways:
            pour = [*_PROGRAM, "pour", lab.address(to), str(effort.skip + effort.seconds)]
            stack.enter_context(ended(lab.popen(source, pour, **options())))
        return [float(said(sink)["bytes_per_second"]) for sink in sinks]


def _losses(lab: Laboratory, one: int, other: int, datagrams: int) -> Line:
    homes = lab.lab.at(one), lab.lab.at(other)
    asked = 1.0 - (1.0 - homes[0].loss) * (1.0 - homes[1].loss)
    with served(lab, other, "count") as server:
        shower = [*_PROGRAM, "shower", lab.address(other), str(datagrams), "0.0005"]
        lab.run(one, shower, timeout=_ENDING_SECONDS, **options())
        lost = datagrams - said(server)["came"]
    deviation = (datagrams * asked * (1 - asked)) ** 0.5
    right = abs(lost - datagrams * asked) <= 5 * deviation
    return Line(f"lost of {datagrams} datagrams", f"{datagrams * asked:.1f}", str(lost), right)


def mbit(bytes_per_second: float) -> float:
    """In Mbit/s."""
    return bytes_per_second * 8 / 1e6


def options() -> dict[str, Any]:
    """Of all programs of this folder: they say what they have to say in one line."""
    paths = os.pathsep.join([str(_SCRIPTS.parent), str(_SCRIPTS)])
    return {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "PYTHONPATH": paths}}


@contextmanager
def served(lab: Laboratory, place: int, verb: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A probe that has said that it is ready."""
    with ended(lab.popen(place, [*_PROGRAM, verb, lab.address(place), *arguments], **options())) as process:
        said(process)
        yield process


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Its end is awaited, or where an error came first brought about."""
    try:
        yield process
        process.wait(_ENDING_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that a program of this folder says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RunFailed(f"a program of the check ended with exit code {process.wait()} before it said anything")
    found: dict[str, Any] = json.loads(line)
    return found
