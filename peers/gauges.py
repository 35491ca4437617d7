"""What a daemon costs its machine: processor time, memory, how late its event loop is, what it keeps for others."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

from peers.compute import ComputeThread
from peers.step_costs import MOST_LINKS, LinkFigures, PeerFigures, bytes_of
from peers.transport import Transport
from protocol.stage_machine import StageMachine

TICK_SECONDS = 0.05
_SHORTEST_SECONDS = 1e-5
_FINENESS = 8  # buckets for each factor of two
_BUCKETS = 28 * _FINENESS  # up to 45 minutes


class LoopLag:
    """How late timers of the event loop are: what anything that blocks the loop costs all else. Its memory is fixed."""

    def __init__(self) -> None:
        self._buckets = [0] * _BUCKETS
        self.most: float | None = None

    def forget(self) -> None:
        """Begin anew."""
        self._buckets, self.most = [0] * _BUCKETS, None

    async def watch(self) -> None:
        """Look again and again. Never returns."""
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.note(time.monotonic() - due)

    def note(self, late: float) -> None:
        """A timer was so many seconds late."""
        self.most = max(self.most or 0.0, late)
        bucket, edge = 0, _SHORTEST_SECONDS
        while edge < late and bucket < _BUCKETS - 1:
            bucket, edge = bucket + 1, edge * 2 ** (1 / _FINENESS)
        self._buckets[bucket] += 1

    @property
    def median(self) -> float | None:
        """Half of the timers were no later, to a tenth; None before the first."""
        passed, half = 0, sum(self._buckets) / 2
        for bucket, count in enumerate(self._buckets):
            passed += count
            if count and passed >= half:
                return float(_SHORTEST_SECONDS * 2 ** (bucket / _FINENESS))
        return None


class Gauges:
    """The figures of one daemon, since the last `begin`. `network_pid`: of its p2pd, if it has one."""

    def __init__(self, transport: Transport, compute: ComputeThread, network_pid: int | None) -> None:
        self._transport, self._compute, self._network_pid = transport, compute, network_pid
        self.lag = LoopLag()
        self._most: dict[str, int] = {}
        self._before = self._totals()

    def begin(self) -> None:
        """Count from here: what came before was libraries that load, links that open and a first step that warms up."""
        self._before = self._totals()
        self.lag.forget()

    def _totals(self) -> tuple[int, int, float, float, float | None]:
        counters, network = self._transport.counters, self._network_pid
        moved = bytes_of(counters.sent), bytes_of(counters.received)
        of_network = None if network is None else cpu_seconds_of(network)
        return (*moved, time.process_time(), self._compute.cpu_seconds, of_network)

    def note(self, machine: StageMachine | None) -> None:
        """See how much `machine` keeps now."""
        for name, count in ({} if machine is None else machine.kept).items():
            self._most[name] = max(count, self._most.get(name, 0))

    def read(self) -> PeerFigures:
        """The figures as of now."""
        network, own = self._network_pid, memory_of(os.getpid())
        sent, received, process, compute, of_network = (
            None if now is None or before is None else now - before
            for now, before in zip(self._totals(), self._before, strict=True)
        )
        links = list(self._transport.links().items())[:MOST_LINKS]
        return PeerFigures(
            sent_bytes=int(sent or 0),
            received_bytes=int(received or 0),
            process_seconds=process,
            compute_seconds=compute,
            network_seconds=of_network,
            memory_bytes=own[0],
            peak_memory_bytes=own[1] or _peak_memory(),
            network_memory_bytes=None if network is None else memory_of(network)[1],
            lag_seconds=self.lag.median,
            most_lag_seconds=self.lag.most,
            most_tensors=self._most.get("tensors", 0),
            most_blobs=self._most.get("blobs", 0),
            links={peer: LinkFigures(x.bytes_per_second, x.rtt_seconds) for peer, x in links},
        )


def memory_of(pid: int) -> tuple[int | None, int | None]:
    """Bytes that a process has in memory now and has had at most; None: this system does not say, or it is gone."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("VmRSS:", "VmHWM:")):
                found[line[:5]] = int(line.split()[1]) * 1024
    return found.get("VmRSS"), found.get("VmHWM")


def cpu_seconds_of(pid: int) -> float | None:
    """Processor seconds of a process; None as above."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
