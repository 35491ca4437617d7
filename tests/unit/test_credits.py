"""Credits from measured latency and rate: what they come to, what they do not count, and that too few do not last."""

from __future__ import annotations

import pytest

from peers.stage_credits import StageCredits
from protocol.config import parse_config
from protocol.credits import LEAST, STEPS, CreditMeter, credits
from protocol.events import Arrived, Computed, CreditsChanged, Event
from protocol.frame import Kind
from protocol.view import Replica, View
from protocol.work import APPLY, Action, Verb


@pytest.mark.parametrize(("latency", "interval", "expected"), [(4.0, 1.0, 7), (4.0, 0.1, 61), (0.1, 10.0, LEAST)])
def test_the_formula(latency: float, interval: float, expected: int) -> None:
    assert credits(latency, interval) == expected


@pytest.mark.parametrize(("window", "expected"), [(1, 1), (5, 5), (16, 7)])
def test_the_window_bounds_the_credits_and_what_is_needed_is_known(window: int, expected: int) -> None:
    meter = CreditMeter(window)
    assert (meter.credits, meter.needed) == (window, 0)
    assert (one_step(meter, *steady(4.0, 1.0)), meter.needed) == (expected, 7)


def test_gradients_that_come_all_at_once_ask_for_the_window() -> None:
    assert one_step(CreditMeter(16), [0.0] * 8, [1.0] * 8) == 16


def forward(microbatch: int) -> Event:
    return Computed(Action(Verb.FORWARD, microbatch), "x")


def gradient(microbatch: int, peer: str = "next", step: int = 1) -> Event:
    return Arrived(peer, Kind.BACKWARD, 1, step, microbatch, "g")


def one_step(meter: CreditMeter, sent: list[float], came: list[float], start: float = 0.0, step: int = 1) -> int:
    """Forwards that end at `sent`, gradients that come at `came`, in microbatch order; the next step's credits."""
    events = [(time, 0, forward(m)) for m, time in enumerate(sent)]
    events += [(time, 1, gradient(m, step=step)) for m, time in enumerate(came)]
    for time, _, event in sorted(events, key=lambda each: each[:2]):
        assert meter.note(event, step, start + time) is None
    found = meter.note(Computed(APPLY), step, start + max(came))
    assert found is not None
    return found


def steady(latency: float, interval: float, count: int = 12) -> tuple[list[float], list[float]]:
    """A stage whose forwards are a pipeline's width ahead of the gradients."""
    return [m * interval for m in range(count)], [latency + m * interval for m in range(count)]


def test_a_stage_begins_with_the_window_and_measures() -> None:
    meter = CreditMeter(16)
    assert meter.credits == 16
    assert one_step(meter, *steady(4.0, 1.0)) == 7 == meter.credits


def test_the_drain_does_not_count_when_there_was_a_steady_part() -> None:
    """After the last forward gradients come faster, and no credit is waited for."""
    sent = [max(0.0, m - 4.0) for m in range(12)]
    came = [4.0 + m if m < 4 else 7.0 + (m - 3) / 2 for m in range(12)]
    assert one_step(CreditMeter(16), sent, came) == 7


def test_a_step_that_is_all_drain_is_measured_as_it_is() -> None:
    assert one_step(CreditMeter(16), [0.0, 0.1, 0.2, 0.3], [4.0, 5.0, 6.0, 7.0]) == 7


def test_queues_are_not_latency() -> None:
    sent, came = [0.0] * 12, [4.0 + m for m in range(12)]
    assert one_step(CreditMeter(16), sent, came) == 7


def test_the_farther_of_two_replicas_counts() -> None:
    """Backwards are done in order: the near one's gradients wait for those of the far one."""
    meter = CreditMeter(64)
    for m in range(12):
        meter.note(forward(m), 1, float(m))
    for m in (0, 2, 4, 6, 8, 10):
        meter.note(gradient(m, "near"), 1, 20.0 + m)
    for m in (1, 3, 5, 7, 9, 11):
        meter.note(gradient(m, "far"), 1, 30.0 + m)
    assert meter.note(Computed(APPLY), 1, 50.0) == credits(30.0, 21 / 11) > credits(20.0, 21 / 11)


def test_repeats_other_steps_and_ends_of_the_pipeline_are_not_measured() -> None:
    meter = CreditMeter(16)
    meter.note(forward(0), 1, 0.0)
    meter.note(gradient(0), 1, 4.0)
    meter.note(gradient(0), 1, 99.0)
    meter.note(gradient(1), 1, 5.0)
    meter.note(gradient(0, step=2), 1, 6.0)
    meter.note(Computed(Action(Verb.FORWARD, 1), None), 1, 7.0)
    assert meter.note(Computed(APPLY), 1, 8.0) == 16, "one gradient tells nothing of their rate"


def test_a_longer_way_is_noticed_at_once_and_a_shorter_one_after_a_few_steps() -> None:
    meter = CreditMeter(64)
    one_step(meter, *steady(4.0, 1.0))
    assert one_step(meter, *steady(10.0, 1.0, 20), start=100.0, step=2) == 16
    found = [one_step(meter, *steady(4.0, 1.0), start=100.0 * step, step=step) for step in range(3, 3 + STEPS)]
    assert found == [16] * (STEPS - 1) + [7]


@pytest.mark.parametrize("latency", [0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("service", [0.1, 1.0])
def test_too_few_credits_grow_until_something_else_is_the_bottleneck(latency: float, service: float) -> None:
    """`w` microbatches go and come back in the time of one, or as fast as the stage itself does them."""
    meter, window, now = CreditMeter(1000), 2, 0.0
    enough = latency / service + 1
    for step in range(1, 300):
        interval = max((latency + service) / window, service)
        sent, came = steady(latency, interval, 60)
        after = one_step(meter, sent, came, start=now, step=step)
        assert after > window or window >= enough
        window, now = after, now + 2 * max(came)
    assert enough <= window <= 1.5 * enough + 3


def test_gradients_of_others_than_the_next_stage_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who answers every forward at once must not leave a stage with two microbatches in flight."""
    now = 0.0
    monkeypatch.setattr("peers.stage_credits.time.monotonic", lambda: now)
    config = parse_config(
        {"model": {"layers": 3}, "pipeline": {"stages": 3, "window": 16, "credits": "measured"}}, "test"
    )
    stage, view = StageCredits(config, 1), View(1, 1, 9, tuple((Replica(peer),) for peer in ("first", "me", "next")))
    for m in range(12):
        now = float(m)
        stage.note(forward(m), 1, view)
        now += 0.5
        for peer in ("stranger", "first"):
            stage.note(gradient(m, peer), 1, view)
    for m in range(12):
        now = 20.0 + m
        stage.note(gradient(m), 1, view)
    assert stage.note(Computed(APPLY), 1, view) == CreditsChanged(16)
