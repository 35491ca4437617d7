"""One direction of a line: when what is put on it is at the other end, to the byte."""

from __future__ import annotations

import pytest

from peers.lab.link_model import JITTER_SECONDS, LinkModel


def test_bytes_leave_at_the_rate_and_travel_for_the_delay() -> None:
    line = LinkModel(bytes_per_second=1000.0, delay=0.5)
    assert [line.put(100, 10.0) for _ in range(3)] == pytest.approx([10.6, 10.7, 10.8])
    assert line.put(100, 20.0) == pytest.approx(20.6), "it was free meanwhile"
    assert line.counters.bytes == 400 and line.counters.packets == 4
    assert abs(line.counters.busy_seconds - 0.4) < 1e-9


def test_without_a_rate_nothing_waits() -> None:
    line = LinkModel()
    assert line.is_free and [line.put(10**9, 3.0) for _ in range(3)] == [3.0, 3.0, 3.0]
    assert not LinkModel(delay=0.1).is_free


def test_the_buffer_drops_what_has_no_room() -> None:
    line = LinkModel(bytes_per_second=1000.0, buffer_bytes=251)
    assert [line.put(100, 0.0) for _ in range(3)] == [0.1, 0.2, None]
    assert line.counters.dropped == 1 and line.counters.packets == 2
    assert line.put(100, 0.05) == pytest.approx(0.3), "half of the first has left: there is room for one more"
    assert line.put(100, 0.1) is None and line.counters.dropped == 2


def test_a_change_of_rate_holds_for_what_comes_after() -> None:
    line = LinkModel(bytes_per_second=1000.0)
    assert line.put(100, 0.0) == 0.1
    line.bytes_per_second = 500.0
    assert line.put(100, 0.0) == pytest.approx(0.3)
    line.bytes_per_second = None
    assert (line.put(100, 0.0) or 0.0) > 0.29, "it does not overtake"


def test_the_delay_may_shrink_and_nothing_overtakes() -> None:
    line = LinkModel(delay=1.0)
    first = line.put(1, 0.0)
    line.delay = 0.1
    second = line.put(1, 0.2)
    assert first == second == 1.0 and line.put(1, 5.0) == pytest.approx(5.1)


def test_jitter_lasts_for_a_while_and_is_of_the_seed() -> None:
    def arrivals(seed: int) -> list[float]:
        line = LinkModel(delay=0.05, jitter=0.01, seed=seed)
        return [line.put(1, n * JITTER_SECONDS / 4) or 0.0 for n in range(400)]

    first = arrivals(1)
    assert first == arrivals(1) != arrivals(2) and first == sorted(first)
    late = [arrival - n * JITTER_SECONDS / 4 - 0.05 for n, arrival in enumerate(first)]
    assert min(late) >= -1e-9 and max(late) <= 0.01 + 1e-9
    assert max(late) > 0.007 and min(late) < 0.003
    assert abs(late[0] - late[1]) < 1e-9, "within a while it is the same"


def test_losses_use_the_line_all_the_same() -> None:
    line = LinkModel(bytes_per_second=1e6, loss=0.25, seed=3)
    fates = [line.put(1000, 0.0) for _ in range(4000)]
    assert 850 < fates.count(None) == line.counters.lost < 1150
    assert abs(line.busy_until - 4.0) < 1e-6


def test_a_frame_is_on_the_second_line_while_it_still_comes_down_the_first() -> None:
    up, down = LinkModel(bytes_per_second=1000.0, delay=0.5), LinkModel(bytes_per_second=1000.0, delay=0.5)
    last = up.put(100, 0.0)
    assert last == pytest.approx(0.6)
    first = up.first_arrival(100, last)
    assert abs(first - 0.5) < 1e-9
    assert abs((down.put(100, last, first) or 0.0) - 1.1) < 1e-9, "not 1.2"


def test_a_slow_second_line_takes_its_time_and_a_fast_one_waits_for_the_first() -> None:
    slow, fast = LinkModel(bytes_per_second=100.0), LinkModel(bytes_per_second=1e6)
    assert slow.put(100, 0.6, 0.5) == 1.5
    assert fast.put(100, 0.6, 0.5) == 0.6
