"""What a step and a daemon cost: measured, bounded, survives the wire; the gauges of a daemon."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from typing import Any

import pytest

from peers.compute import ComputeThread
from peers.gauges import Gauges, LoopLag, cpu_seconds_of, memory_of
from peers.machine import compute_clock
from peers.memory_transport import MemoryNetwork
from peers.step_costs import MOST_LINKS, LinkFigures, PeerFigures, StepCosts, StepMeter
from peers.transport import TrafficCounters
from protocol.errors import BadFrame
from protocol.frame import HEADER_BYTES, Frame, Header, Kind
from protocol.work import Action, Verb

NUMBERS = PeerFigures().to_json()["numbers"]


def test_costs_and_figures_survive_json() -> None:
    costs = StepCosts(1.5, 0.25, 0.5, 1 << 40, 7)
    assert StepCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    figures = PeerFigures(7, 8, 2.5, 1.5, None, 3, 4, 5, 0.001, 0.5, 6, 7, {"p": LinkFigures(1e7, 0.1)})
    assert PeerFigures.from_json(json.loads(json.dumps(figures.to_json()))) == figures
    assert PeerFigures.from_json(PeerFigures().to_json()) == PeerFigures(links={})


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        [],
        [0, 0, 0, 0],
        [-1, 0, 0, 0, 0],
        [math.nan, 0, 0, 0, 0],
        [0, 0, 0, 0.5, 0],
        [0, "x", 0, 0, 0],
        [1e10] * 5,
    ],
    ids=str,
)
def test_junk_is_no_cost(value: Any) -> None:
    with pytest.raises(BadFrame, match="expected "):
        StepCosts.from_json(value)


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        {"numbers": NUMBERS},
        {"numbers": NUMBERS[1:], "links": {}},
        {"numbers": [-1, *NUMBERS[1:]], "links": {}},
        {"numbers": ["x", *NUMBERS[1:]], "links": {}},
        {"numbers": [math.inf, *NUMBERS[1:]], "links": {}},
        {"numbers": NUMBERS, "links": []},
        {"numbers": NUMBERS, "links": {"p": [1, -2]}},
        {"numbers": NUMBERS, "links": {"p": [1]}},
        {"numbers": NUMBERS, "links": {"p" * 200: [1, 2]}},
        {"numbers": NUMBERS, "links": {str(peer): [1, 2] for peer in range(MOST_LINKS + 1)}},
    ],
    ids=lambda value: str(value)[:50],
)
def test_junk_is_no_figure(value: Any) -> None:
    with pytest.raises(BadFrame, match="expected a peer's figures"):
        PeerFigures.from_json(value)


def test_many_links_are_cut() -> None:
    figures = PeerFigures(links={str(peer): LinkFigures() for peer in range(3 * MOST_LINKS)})
    assert len(PeerFigures.from_json(figures.to_json()).links or {}) == MOST_LINKS


def test_cpu_per_megabyte() -> None:
    """3 s of the process, 1 of them computing, and half a second of p2pd, for 5 MB."""
    assert PeerFigures(2_000_000, 3_000_000, 3.0, 1.0, 0.5).cpu_seconds_per_MB == pytest.approx(0.5)
    assert PeerFigures(0, 0, 3.0, 1.0).cpu_seconds_per_MB is None is PeerFigures(5, 5).cpu_seconds_per_MB


def test_a_lap_is_what_was_done_since_the_last() -> None:
    ticks = iter(range(100))
    compute, counters = ComputeThread(cpu_clock=lambda: float(next(ticks))), TrafficCounters()

    async def work() -> tuple[StepCosts, StepCosts, StepCosts]:
        await compute.run(lambda: None)
        meter = StepMeter(compute, counters)
        for verb in (Verb.FORWARD, Verb.FORWARD, Verb.BACKWARD):
            await compute.run(lambda: next(ticks), Action(verb, 0))  # 2 ticks each
        await compute.run(lambda: None, Action(Verb.APPLY))
        counters.sent[Kind.CHUNK].add(Frame(Header(Kind.CHUNK, 10), bytes(10)))
        counters.received[Kind.CONTROL].add(Frame(Header(Kind.CONTROL, 5), bytes(5)))
        return meter.lap(), meter.lap(), StepMeter(compute, counters).lap()

    first, second, none = asyncio.run(work())
    compute.close()
    assert first == StepCosts(7.0, 2.0, 2.0, 10 + HEADER_BYTES, 5 + HEADER_BYTES)
    assert second == none == StepCosts()
    assert compute.done(Verb.FORWARD) == (2, 4.0) and compute.cpu_seconds == 8.0


def test_the_compute_clock_does_not_count_waiting() -> None:
    """Unless torch computes on other threads, where a thread's own processor time would miss most of it."""
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        clock = compute_clock("cpu")
        start = clock()
        time.sleep(0.2)
        assert clock() - start < 0.2
        torch.set_num_threads(2)
        assert compute_clock("cpu") is time.perf_counter
    finally:
        torch.set_num_threads(before)


def test_the_lag_of_a_loop() -> None:
    lag = LoopLag()
    assert lag.median is None is lag.most
    for late in (0.001, 0.001, 0.001, 0.5, -0.1):
        lag.note(late)
    assert lag.most == 0.5 and lag.median == pytest.approx(0.001, rel=0.1)
    size = len(lag._buckets)
    lag.note(1e9)
    assert len(lag._buckets) == size and lag.most == 1e9
    lag.forget()
    assert lag.median is None


def test_a_blocked_loop_is_noticed() -> None:
    async def block() -> float:
        lag = LoopLag()
        watch = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        time.sleep(0.3)
        while lag.most is None:
            await asyncio.sleep(0.01)
        watch.cancel()
        return lag.most

    assert asyncio.run(block()) > 0.2


def test_what_this_system_says_of_a_process() -> None:
    now, most = memory_of(os.getpid())
    assert now is not None and most is not None and 1 << 20 < now <= most
    assert (cpu_seconds_of(os.getpid()) or 0) > 0
    assert memory_of(1 << 30) == (None, None) and cpu_seconds_of(1 << 30) is None


def test_gauges_count_from_the_first_step_on() -> None:
    async def read() -> tuple[PeerFigures, PeerFigures]:
        network = MemoryNetwork(1, delay=(0.1, 0.2), bandwidth_bytes_per_second=1000.0)
        a = network.join("a")
        network.join("b")
        compute = ComputeThread()
        gauges = Gauges(a, compute, os.getpid())
        for _ in range(2):
            a.send("b", Frame(Header(Kind.CONTROL, 4), b"1234"))
        before = gauges.read()
        gauges.begin()
        a.send("b", Frame(Header(Kind.CONTROL, 4), b"1234"))
        after = gauges.read()
        compute.close()
        return before, after

    before, after = asyncio.run(read())
    assert (before.sent_bytes, after.sent_bytes) == (2 * (4 + HEADER_BYTES), 4 + HEADER_BYTES)
    assert after.links is not None and after.links["b"].bytes_per_second == 1000.0
    assert after.memory_bytes and after.network_memory_bytes and after.network_seconds is not None
    assert PeerFigures.from_json(json.loads(json.dumps(after.to_json()))).sent_bytes == after.sent_bytes
