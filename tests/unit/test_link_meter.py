"""The meter on a line whose rate and delay are known."""

import heapq

import pytest

from peers.link_meter import FIRST_WINDOW_BYTES, MOST_WINDOW_BYTES, LinkMeter, Stamp


class Line:
    """A sender that keeps to the meter's window, a line of `rate` bytes a second, and acknowledgements."""

    def __init__(self, rate: float, rtt: float, segment: int = 65_536) -> None:
        self.rate, self.rtt, self.segment = rate, rtt, segment
        self.meter, self.now, self.free = LinkMeter(), 0.0, 0.0
        self._answers: list[tuple[float, int, Stamp]] = []
        self._count = 0

    def run(self, seconds: float, waiting: int) -> None:
        """Send `waiting` segments as the window allows, and whatever is left of them, for `seconds`."""
        end = self.now + seconds
        while self.now < end:
            while waiting and self.meter.inflight < self.meter.window:
                waiting -= 1
                self._send(limited=not waiting)
            if not self._answers or self._answers[0][0] > end:
                self.now = end
                return
            self.now, _, stamp = heapq.heappop(self._answers)
            self.meter.acknowledged(self.now, stamp)

    def _send(self, limited: bool) -> None:
        self.free = max(self.free, self.now) + self.segment / self.rate
        self._count += 1
        stamp = self.meter.sent(self.now, self.segment, limited)
        heapq.heappush(self._answers, (self.free + self.rtt, self._count, stamp))


@pytest.mark.parametrize(("rate", "rtt"), [(1e7, 0.1), (2.5e7, 0.1), (1e6, 0.3), (1.25e8, 0.3), (1e8, 0.002)])
def test_rate_and_round_trip_are_found_from_a_full_line(rate: float, rtt: float) -> None:
    line = Line(rate, rtt)
    line.run(20 * rtt + 20 * 65_536 / rate, waiting=1_000_000)
    found = line.meter.measure(line.now)
    assert found.bytes_per_second == pytest.approx(rate, rel=0.05)
    assert found.rtt_seconds == pytest.approx(rtt + 65_536 / rate, rel=0.01)
    assert line.meter.window >= min(1.8 * rate * rtt, MOST_WINDOW_BYTES)


def test_a_line_that_has_little_to_do_tells_no_rate_but_its_round_trip() -> None:
    line = Line(1e7, 0.1)
    for _ in range(10):
        line.run(1.0, waiting=1)
    found = line.meter.measure(line.now)
    assert found.bytes_per_second is None and found.rtt_seconds == pytest.approx(0.1, rel=0.1)
    assert found.busy_seconds == pytest.approx(10 * found.rtt_seconds) and found.sent_bytes == 655_360
    assert line.meter.window == FIRST_WINDOW_BYTES


def test_a_slower_line_is_noticed_and_an_idle_one_keeps_its_rate() -> None:
    line = Line(1e7, 0.1)
    line.run(5.0, waiting=1_000)
    line.run(100.0, waiting=0)
    assert line.meter.measure(line.now).bytes_per_second == pytest.approx(1e7, rel=0.05)
    line.rate = 5e6
    line.run(20.0, waiting=100_000)
    assert line.meter.measure(line.now).bytes_per_second == pytest.approx(5e6, rel=0.05)


@pytest.mark.parametrize(("rate", "rtt"), [(1e6, 0.05), (1e7, 0.1)])
def test_a_line_that_is_never_idle_is_not_filled_ever_more(rate: float, rtt: float) -> None:
    line = Line(rate, rtt)
    line.run(5.0, waiting=1_000_000)
    window = line.meter.window
    before, line.meter.sent_bytes = line.now, 0
    line.run(100.0, waiting=1_000_000)
    found = line.meter.measure(line.now)
    assert line.meter.window <= 1.2 * window and found.rtt_seconds == pytest.approx(rtt, abs=0.02 + 3 * 65_536 / rate)
    assert found.sent_bytes > 0.98 * rate * (line.now - before), "what it costs to see the line empty"


def test_a_longer_way_is_noticed_on_a_line_that_is_never_idle() -> None:
    line = Line(1e7, 0.05)
    line.run(5.0, waiting=1_000_000)
    line.rtt = 0.4
    line.run(100.0, waiting=1_000_000)
    assert line.meter.rtt == pytest.approx(0.42, abs=0.02)
    assert line.meter.window > 1.8 * 1e7 * 0.4


def test_what_was_under_way_on_broken_streams_does_not_count() -> None:
    meter = LinkMeter()
    meter.sent(1.0, 100, True)
    meter.lost(3.0)
    assert meter.inflight == 0 and meter.measure(9.0).busy_seconds == pytest.approx(2.0)
    meter.acknowledged(10.5, meter.sent(10.0, 100, True))
    assert meter.measure(11.0).busy_seconds == pytest.approx(2.5)
