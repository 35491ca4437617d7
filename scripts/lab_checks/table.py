"""What reaches a peer over p2pd, at several rates and round trips: a page of Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab_checks.check import CEILING, SKIP_SECONDS, ended, mbit, options, poured, said
from peers.lab.lab_file import parse_lab
from peers.lab.laboratory import Laboratory

RATES = [80.0, 200.0]
ROUND_TRIPS_MS = (0, 50, 100, 200)
ARMS = {"1": "1 stream", "4": "4 streams", "transport": "Isthmus"}
_BUFFER_SECONDS = 0.1  # what can wait, at each rate
_PROGRAM = [sys.executable, "-m", "lab_checks.p2p_probe"]


def table(out: Path, rates: Sequence[float], seconds: float, say: Callable[[str], None]) -> None:
    """Measure all and write the page."""
    head = ["Mbit/s", "round trip ms", "plain TCP", *ARMS.values()]
    lines = [
        f"Mbit/s of content that reach the other home; {100 * CEILING:.1f} % of the rate is what TCP/IP leaves. p2pd's "
        "binary streams (hivemind 1.1.12, noise, yamux), and this project's transport over them. "
        f"`python scripts/wan_lab p2pd`, {seconds:g} s each after {SKIP_SECONDS:g} s of warming up.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for rate in rates:
        for rtt in ROUND_TRIPS_MS:
            cells = [f"{rate:g}", str(rtt), *(f"{mbit(found):.0f}" for found in _measured(rate, rtt, seconds))]
            lines.append(f"| {' | '.join(cells)} |")
            say(lines[-1])
    out.write_text("\n".join(lines) + "\n")
    say(f"written to {out}")


def _measured(rate: float, rtt: int, seconds: float) -> list[float]:
    buffer = max(64, round(rate * 1e6 / 8 * _BUFFER_SECONDS / 1024))
    home = {"up_mbit": rate, "down_mbit": rate, "delay_ms": rtt / 4, "buffer_kib": buffer}
    with Laboratory(parse_lab({"home": home}, "the table"), 2) as lab:
        found = poured(lab, [(0, 1)], seconds)
        serve = [*_PROGRAM, "serve", lab.address(1), str(SKIP_SECONDS)]
        with ended(lab.popen(1, serve, stdin=subprocess.PIPE, **options())) as server:
            addresses = json.dumps(said(server))
            for arm in ARMS:
                send = [*_PROGRAM, "send", addresses, arm, str(SKIP_SECONDS + seconds)]
                with ended(lab.popen(0, send, **options())):
                    found.append(float(said(server)["bytes_per_second"]))
            assert server.stdin is not None
            server.stdin.close()
    return found
