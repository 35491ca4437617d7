"""What reaches a peer over p2pd, at several rates and round trips, and how soon: a page of Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab_checks.check import CEILING, Effort, ended, mbit, options, poured, said
from peers.lab.lab_file import parse_lab
from peers.lab.laboratory import Laboratory

RATES = [80.0, 200.0]
ROUND_TRIPS_MS = (0, 50, 100, 200)
ARMS = {"1": "1 stream", "4": "4 streams", "transport": "Isthmus"}
SINGLE_ARMS = {"1": "1 stream", "transport": "Isthmus"}
SINGLE_ROUND_TRIP_MS = 100
PAUSES = (0.05, 0.5, 2.0)  # as in `p2p_probe`, which loads hivemind
_BUFFER_SECONDS = 0.1  # what can wait, at each rate
_PROGRAM = [sys.executable, "-P", "-m", "lab_checks.p2p_probe"]

Say = Callable[[str], None]


def table(out: Path, rates: Sequence[float], effort: Effort, say: Say) -> None:
    """Measure all and write the page."""
    lines = [
        f"Mbit/s of content that reach the other home; {100 * CEILING:.1f} % of the rate is what TCP/IP leaves. p2pd's "
        "binary streams (hivemind 1.1.12), and this project's transport over them. "
        f"`python scripts/wan_lab p2pd`: {effort.seconds:g} s each after {effort.skip:g} s of warming up.",
        "",
        *_head(["Mbit/s", "round trip ms", "plain TCP", *ARMS.values()]),
    ]
    for rate in rates:
        for rtt in ROUND_TRIPS_MS:
            lines.append(_row(f"{rate:g}", str(rtt), *(f"{mbit(found):.0f}" for found in _busy(rate, rtt, effort))))
            say(lines[-1])
    pauses = [f"{name}, {pause:g} s" for name in SINGLE_ARMS.values() for pause in PAUSES]
    lines += [
        "",
        f"Milliseconds from a message of 300 kB to its answer, at a round trip of {SINGLE_ROUND_TRIP_MS} ms, after "
        "pauses between two (median of 5):",
        "",
        *_head(["Mbit/s", "least possible", *pauses]),
    ]
    for rate in rates:
        least = SINGLE_ROUND_TRIP_MS + 300_000 / CEILING * 8 / rate / 1e3
        lines.append(_row(f"{rate:g}", f"{least:.0f}", *(f"{1e3 * found:.0f}" for found in _singly(rate))))
        say(lines[-1])
    out.write_text("\n".join(lines) + "\n")
    say(f"written to {out}")


def _head(names: Sequence[str]) -> list[str]:
    return [_row(*names), f"|{'---|' * len(names)}"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _busy(rate: float, rtt: int, effort: Effort) -> list[float]:
    """Bytes a second of plain TCP and each arm."""
    with _laboratory(rate, rtt) as lab:
        found = poured(lab, [(0, 1)], effort)
        with _served(lab, str(effort.skip)) as (server, addresses):
            for arm in ARMS:
                send = [*_PROGRAM, "send", addresses, arm, str(effort.skip + effort.seconds)]
                with ended(lab.popen(0, send, **options())):
                    found.append(float(said(server)["bytes_per_second"]))
    return found


def _singly(rate: float) -> list[float]:
    """Seconds of a message after each pause, of each arm."""
    found: list[float] = []
    with _laboratory(rate, SINGLE_ROUND_TRIP_MS) as lab, _served(lab, "0") as (_, addresses):
        for arm in SINGLE_ARMS:
            with ended(lab.popen(0, [*_PROGRAM, "send", addresses, arm, "0"], **options())) as client:
                found += said(client)["seconds"]
    return found


def _laboratory(rate: float, rtt: int) -> Laboratory:
    buffer = max(64, round(rate * 1e6 / 8 * _BUFFER_SECONDS / 1024))
    home = {"up_mbit": rate, "down_mbit": rate, "delay_ms": rtt / 4, "buffer_kib": buffer}
    return Laboratory(parse_lab({"home": home}, "the table"), 2)


@contextmanager
def _served(lab: Laboratory, skip: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    serve = [*_PROGRAM, "serve", lab.address(1), skip]
    with ended(lab.popen(1, serve, stdin=subprocess.PIPE, **options())) as server:
        yield server, json.dumps(said(server))
        assert server.stdin is not None
        server.stdin.close()
