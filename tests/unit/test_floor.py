"""The floor of a step, by hand."""

from __future__ import annotations

import pytest

from protocol.floor import Floor, LinkFacts, PeerCosts, Source, floor_of

MB = 10**6
HOME = LinkFacts(10 * MB, 10 * MB, 0.025, Source.DECLARED)  # 80 Mbit/s


def costs(stage: int, cpu: float, sent: int = 0, received: int = 0, peer: str = "", **rest: object) -> PeerCosts:
    values = {"microbatch_seconds": 0.1 * (stage + 1), "line": HOME, **rest}
    return PeerCosts(peer or f"p{stage}", stage, cpu, sent, received, **values)  # type: ignore[arg-type]


THREE = [costs(0, 2.0, 20 * MB, 18 * MB), costs(1, 3.0, 38 * MB, 38 * MB), costs(2, 2.5, 18 * MB, 20 * MB)]


def known(floor: Floor | None) -> Floor:
    assert floor is not None
    return floor


def test_three_homes() -> None:
    """Wire: 38 MB at 10 MB/s. Fill: two boundaries of 25 + 25 ms, both ways, and microbatches of 0.1, 0.2 and 0.3 s."""
    floor = known(floor_of(THREE, 3, payloads=(MB, 2 * MB)))
    assert floor.compute_seconds == 3.0
    assert floor.wire_seconds == pytest.approx(3.8) and floor.busiest_link == "stage 1 up (p1)"
    assert floor.fill_seconds == pytest.approx(4 * 0.05 + 0.6)
    assert floor.seconds == pytest.approx(3.8 + 0.8)
    assert floor.serialisation_seconds == pytest.approx(2 * (0.1 + 0.2))
    assert (floor.rates, floor.delays) == (Source.DECLARED, Source.DECLARED)


def test_a_machine_that_all_share() -> None:
    """7.5 s of processor time on two cores are 3.75 s; on four the slowest stage decides."""
    assert known(floor_of(THREE, 3, cores=2)).compute_seconds == 3.75
    assert known(floor_of(THREE, 3, cores=4)).compute_seconds == 3.0


@pytest.mark.parametrize("cores", [None, 1, 2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 1), (4, 1), (4, 8), (4, 32), (6, 8)])
def test_no_schedule_beats_it(stages: int, microbatches: int, cores: int | None) -> None:
    """The steps of a greedy schedule, gradients first, for stages that take 60 ms forward and 120 back; delay 50 ms."""
    line = LinkFacts(None, None, 0.025, Source.DECLARED)
    same = [costs(k, 0.18 * microbatches, line=line, microbatch_seconds=0.18) for k in range(stages)]
    floor, greedy = known(floor_of(same, stages, cores)), greedy_step(stages, microbatches, cores or stages)
    assert floor.bound_seconds <= min(greedy, floor.seconds) + 1e-9
    if cores is None or cores >= stages or cores == 1:
        assert floor.bound_seconds == pytest.approx(greedy, rel=0.05 if cores == 1 else 1e-9)


def greedy_step(stages: int, microbatches: int, cores: int) -> float:
    """One step in ticks of 10 ms; a stage whose turn it is and for which a core is free begins the latest it can."""
    forward, backward, delay = 6, 12, 5
    ready = {(k, way): [] for k in range(stages) for way in "FB"}  # when each input is there
    ready[0, "F"] = [0] * microbatches
    done, free, now, most = 0, [0] * stages, 0, 0
    while done < stages * microbatches:
        for k in reversed(range(stages)):
            if free[k] > now or sum(until > now for until in free) >= cores:
                continue
            way = next((way for way in "BF" if ready[k, way] and ready[k, way][0] <= now), None)
            if way is None:
                continue
            ready[k, way].pop(0)
            most = free[k] = now + (forward if way == "F" else backward)
            done += way == "B"
            if way == "F":
                ready[min(k + 1, stages - 1), "F" if k < stages - 1 else "B"].append(free[k] + delay * (k < stages - 1))
            elif k:
                ready[k - 1, "B"].append(free[k] + delay)
        now += 1
    return max(most, *free) / 100


def test_a_slow_line_down_decides() -> None:
    slow = LinkFacts(10 * MB, 2 * MB, 0.025, Source.DECLARED)
    floor = known(floor_of([THREE[0], costs(1, 3.0, 38 * MB, 38 * MB, line=slow), THREE[2]], 3, payloads=(MB, 2 * MB)))
    assert floor.wire_seconds == pytest.approx(19.0) and floor.busiest_link == "stage 1 down (p1)"
    assert floor.serialisation_seconds == pytest.approx(0.5 + 0.2 + 0.1 + 1.0)


def test_the_slowest_replica_counts() -> None:
    far = LinkFacts(5 * MB, 5 * MB, 0.1, Source.DECLARED)
    replica = costs(1, 3.5, 20 * MB, 10 * MB, peer="q", microbatch_seconds=0.5, line=far)
    floor = known(floor_of([*THREE, replica], 3))
    assert floor.compute_seconds == 3.5
    assert floor.wire_seconds == pytest.approx(4.0) and floor.busiest_link == "stage 1 up (q)"
    assert floor.fill_seconds == pytest.approx(4 * 0.125 + 0.1 + 0.5 + 0.3)
    assert known(floor_of([*THREE, replica], 3, cores=2)).compute_seconds == 5.5


def test_measured_round_trips() -> None:
    """Both ends measure; the one that met no queue counts. Of the second boundary only one end knows."""
    bare = LinkFacts(10 * MB, None, None, Source.MEASURED)
    three = [
        costs(0, 1.0, MB, line=bare, rtts={"p1": 0.5}),
        costs(1, 1.0, line=LinkFacts(), rtts={"p0": 0.1, "p2": 0.2}),
        costs(2, 1.0, line=LinkFacts(), microbatch_seconds=0.0),
    ]
    floor = known(floor_of(three, 3))
    assert floor.fill_seconds == pytest.approx(0.1 + 0.2 + 0.1 + 0.2)
    assert (floor.rates, floor.delays) == (Source.MEASURED, Source.MEASURED)


def test_what_is_unknown_is_free() -> None:
    unknown = [costs(stage, 1.0, MB, MB, line=LinkFacts(), microbatch_seconds=0.25) for stage in range(2)]
    floor = known(floor_of(unknown, 2))
    assert (floor.wire_seconds, floor.fill_seconds, floor.seconds) == (0.0, 0.5, 1.5)
    assert (floor.rates, floor.delays, floor.busiest_link) == (Source.UNKNOWN, Source.UNKNOWN, "")


def test_a_declared_line_without_a_limit_is_free() -> None:
    open_line = LinkFacts(None, None, 0.0, Source.DECLARED)
    floor = known(floor_of([costs(stage, 1.0, MB, MB, line=open_line) for stage in range(2)], 2))
    assert (floor.wire_seconds, floor.rates, floor.delays) == (0.0, Source.DECLARED, Source.DECLARED)


def test_one_stage_has_no_boundary() -> None:
    floor = known(floor_of([costs(0, 2.0, line=LinkFacts())], 1))
    assert (floor.bound_seconds, floor.rates) == (2.0, Source.UNKNOWN), "its first microbatch is in its compute"


def test_without_a_stage_there_is_no_floor() -> None:
    assert floor_of(THREE[:2], 3) is None and floor_of([], 1) is None
