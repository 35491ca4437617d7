"""The pipeline in simulated time, against what can be worked out by hand, and what it says of credits and schedules."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_model.commands import pipeline_scale
from pipeline_model.coordinator import step_bytes
from pipeline_model.floor import floor
from pipeline_model.host import StageHost
from pipeline_model.layout import UNLIMITED, Home, Layout, megabits
from pipeline_model.page import fill
from pipeline_model.simulation import simulate
from pipeline_model.study import Table
from pipeline_model.wires import PIECES

from protocol.errors import UserError
from protocol.events import CreditsChanged, Event, ViewChanged
from protocol.frame import HEADER_BYTES, Kind
from protocol.work import Schedule

ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("schedule", list(Schedule))
HOME = Home(0.02, 0.04, 0.0, megabits(80), megabits(80), 0.05)
SIZES = (286_740, 270_340)


def wide(home: Home, stages: int, microbatches: int, sizes: tuple[int, int] = (0, 0)) -> Layout:
    """Credits that bind nothing."""
    return Layout.of(home, stages, microbatches, sizes).with_window(UNLIMITED)


# Closed forms


@BOTH
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_without_a_wire_it_is_the_pipelines_bubble(stages: int, schedule: Schedule) -> None:
    layout = replace(wide(Home(1.0, 2.0, 0.5), stages, 8), schedule=schedule)
    # The update is done at all stages at once but at the first, which ends last.
    assert simulate(layout, 3).step_seconds == pytest.approx([3 * (8 + stages - 1) + 0.5] * 3)


@pytest.mark.parametrize(("schedule", "fill"), [(Schedule.ONE_F_ONE_B, 1 + 1), (Schedule.GPIPE, 1 + 2 + 1)])
def test_the_slowest_stage_sets_the_pace(schedule: Schedule, fill: float) -> None:
    """It waits for the first forward before it, and is waited for by the last backward. Under gpipe it also waits for
    the stage after it, between its forwards and its backwards.
    """
    homes = (Home(1.0, 1.0), Home(3.0, 5.0), Home(1.0, 1.0))
    layout = replace(Layout(homes, 10, window=UNLIMITED, measured=False), schedule=schedule)
    assert simulate(layout, 2).seconds == pytest.approx(10 * 8 + fill)


def test_one_slow_line_carries_its_bytes_at_its_rate() -> None:
    """Coordinates on a slow uplink; everything else takes no time."""
    size = PIECES * 10_000
    layout = wide(Home(0.0, 0.0, 0.0, up=1e6, delay=0.05), 2, 12, (size - HEADER_BYTES, 0))
    back = HEADER_BYTES / 1e6  # of the last gradient
    assert simulate(layout, 2).seconds == pytest.approx(12 * size / 1e6 + back + 2 * 0.05)


def test_a_frames_head_does_not_wait_for_its_tail_at_the_downlink() -> None:
    size = PIECES * 10_000
    layout = wide(Home(0.0, 0.0, 0.0, up=1e6, down=1e6, delay=0.05), 2, 1, (size - HEADER_BYTES, size - HEADER_BYTES))
    assert simulate(layout, 1).seconds == pytest.approx(2 * (size / 1e6 * (1 + 1 / PIECES) + 0.05))


def test_an_inner_uplink_is_shared_by_both_its_neighbours() -> None:
    size = PIECES * 10_000
    layout = wide(Home(0.0, 0.0, 0.0, up=1e6), 3, 50, (size - HEADER_BYTES, size - HEADER_BYTES))
    seconds = simulate(layout, 2).seconds
    assert 2 * 50 * size / 1e6 <= seconds <= 2 * 53 * size / 1e6
    assert floor(layout).seconds == pytest.approx(2 * 50 * size / 1e6)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_few_credits_make_a_round_trip_a_window(window: int) -> None:
    layout = wide(Home(0.0, 0.0, 0.0, delay=0.05), 2, 8).with_window(window)
    assert simulate(layout, 2).seconds == pytest.approx(8 / window * 0.1)


@pytest.mark.parametrize("order", ["fair", "fifo", "gradients first"])
def test_no_order_loses_or_adds_a_byte(order: str) -> None:
    layout = replace(wide(HOME, 3, 4, SIZES), order=order)
    frames = [layout.frame_bytes(kind) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert simulate(layout, 2).sent_bytes == pytest.approx([4 * frames[0], 4 * sum(frames), 4 * frames[1]])


def test_the_floor_has_its_parts() -> None:
    found = floor(Layout.of(HOME, 4, 32, (1_000_000 - HEADER_BYTES, 500_000 - HEADER_BYTES)))
    assert (found.compute_seconds, found.wire_seconds) == pytest.approx((32 * 0.06, 32 * 1.5e6 / 1e7))
    assert found.fill_seconds == pytest.approx(6 * 0.05 + 4 * 0.06)
    assert found.seconds == pytest.approx(found.wire_seconds + found.fill_seconds)


# Slices


def test_two_slices_halve_the_fill_and_double_the_crossings() -> None:
    """Two peers: the fill of a microbatch becomes one of half of it."""
    layout = replace(wide(Home(1.0, 1.0), 2, 1, SIZES), slices=2)
    assert simulate(layout, 2).seconds == pytest.approx(4.0), "one microbatch goes through all of the model"
    many = replace(layout, microbatches=16)
    whole, sliced = simulate(replace(many, slices=1), 2), simulate(many.with_window(4), 2)
    assert (sliced.seconds, whole.seconds) == pytest.approx((2 * (16 + 1 / 2), 2 * (16 + 1)))
    assert sum(sliced.sent_bytes) == pytest.approx(3 * sum(whole.sent_bytes)), "three boundaries instead of one"


# Credits


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("busy", [0.3, 2.0])
def test_measured_credits_are_as_fast_as_none_and_keep_less(stages: int, busy: float) -> None:
    """Where the device is the bottleneck, and where the wire is."""
    sizes = (int(busy * SIZES[0]), int(busy * SIZES[1]))
    layout = wide(HOME, stages, 48, sizes)
    without, measured = simulate(layout, 2), simulate(layout.with_window(UNLIMITED, measured=True))
    assert measured.seconds < 1.03 * without.seconds
    assert sum(measured.most_in_flight) < 0.75 * sum(without.most_in_flight)


def test_the_bound_holds() -> None:
    outcome = simulate(Layout.of(HOME, 8, 32, SIZES).with_window(6, measured=True), 3)
    assert max(outcome.most_in_flight) == 6 and outcome.over_floor > 2


def test_a_strangled_pipeline_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages begin with two credits, the least there are."""
    feed = StageHost.feed

    def strangled(host: StageHost, event: Event) -> None:
        if isinstance(event, ViewChanged):
            feed(host, CreditsChanged(2))
        feed(host, event)

    layout = Layout.of(HOME, 4, 32, SIZES).with_window(64, measured=True)
    usual = simulate(layout).seconds
    monkeypatch.setattr(StageHost, "feed", strangled)
    outcome = simulate(layout, 12)
    assert outcome.step_seconds[0] > 3 * usual
    assert outcome.seconds < 1.05 * usual


def test_gpipe_keeps_all_and_is_no_faster() -> None:
    layout = wide(HOME, 4, 16, SIZES)
    usual, gpipe = simulate(layout, 2), simulate(replace(layout, schedule=Schedule.GPIPE), 2)
    assert set(gpipe.most_in_flight) == {16}
    assert gpipe.seconds > usual.seconds
    assert usual.most_in_flight[-1] == 1


# The page and the command


def test_reports_grow_with_peers_and_time_only() -> None:
    assert step_bytes(8, 2.0) == 2 * step_bytes(4, 2.0) > 4 * 500
    assert step_bytes(4, 20.0) > step_bytes(4, 2.0)


def test_the_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- one -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):
        fill(path, {"one": Table(("a", "b"), (("1", "2"),))})
        expected = "before\n<!-- one -->\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n<!-- end -->\nafter\n"
        assert path.read_text() == expected
    with pytest.raises(UserError, match="expected the marks <!-- two -->"):
        fill(path, {"two": Table(("a",), ())})


def test_the_command() -> None:
    command = [sys.executable, "scripts/pipeline_scale", "--microbatches", "4", "--steps", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "step / floor" in result.stdout, result


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"forward": "1,2"}, "expected --forward as seconds, one number or 4 with commas, got '1,2'"),
        ({"backward": "-1"}, "expected --backward as seconds"),
        ({"credits": "many"}, "expected --credits measured or fixed, got 'many'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        pipeline_scale(**options)  # type: ignore[arg-type]
