"""The floor in a run's rows and in its report: whose costs count, where rates come from, what people are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.floor_meter import RECENT_STEPS, FloorMeter, Premises
from peers.floor_report import floor_fields, floor_line, floor_report
from peers.lab_lines import declared_lines
from peers.step_costs import LinkFigures, PeerFigures, StepCosts
from peers.step_reports import StepReport, WireTotals
from peers.step_table import StepTable
from protocol.config import parse_config
from protocol.floor import LinkFacts, Source

TWO = parse_config(
    {
        "model": {"dim": 64},
        "train": {"microbatches": 2, "microbatch_size": 3, "sequence_length": 5},
        "pipeline": {"stages": 2},
    },
    "test",
)
MB = 10**6


def meter(premises: Premises | None = None) -> FloorMeter:
    return FloorMeter(TWO, premises or Premises())


def fed(made: FloorMeter, step: int = 1) -> FloorMeter:
    made.note("a", 0, step, StepCosts(2.0, 0.25, 0.5, 8 * MB, 6 * MB))
    made.note("b", 1, step, StepCosts(1.0, 0.125, 0.25, 6 * MB, 8 * MB))
    return made


def test_without_links_there_is_compute_and_fill() -> None:
    floor = fed(meter()).floor(1)
    assert floor is not None and (floor.compute_seconds, floor.wire_seconds, floor.fill_seconds) == (2.0, 0.0, 1.125)
    assert floor.rates is Source.UNKNOWN


def test_measured_links() -> None:
    """`a` sends at 2 MB/s at best, so it needs 4 s; what `b` receives came over that link too."""
    made = fed(meter())
    made.tell("a", PeerFigures(links={"b": LinkFigures(2 * MB, 0.1), "coordinator": LinkFigures(MB, 0.2)}))
    made.tell("b", PeerFigures(links={"a": LinkFigures(None, 0.3)}))
    floor = made.floor(1)
    assert floor is not None and floor.wire_seconds == 4.0 and floor.fill_seconds == pytest.approx(1.125 + 0.1)
    assert (floor.rates, floor.delays) == (Source.MEASURED, Source.MEASURED)


@pytest.mark.parametrize("rate", [5e-324, 1e-300])
def test_no_peer_makes_a_row_that_is_no_json(rate: float) -> None:
    """Infinity in metrics.jsonl and in the progress record could be read by nobody."""
    made = fed(meter())
    made.tell("a", PeerFigures.from_json({**PeerFigures().to_json(), "links": {"b": [rate, 4e18]}}))
    for step, tiny in ((1, 1.0), (2, 5e-324)):
        made.note("a", 0, step, StepCosts.from_json([tiny, 0, 0, 1 << 61, 1]))
        made.note("b", 1, step, StepCosts.from_json([tiny, 0, 0, 1, 1]))
        json.dumps(floor_fields(made.floor(step), 1e300), allow_nan=False)


def test_declared_lines_come_first() -> None:
    lines = {"here": LinkFacts(4 * MB, 4 * MB, 0.025, Source.DECLARED)}
    made = fed(meter(Premises(2, lambda addresses: lines.get("".join(addresses)))))
    made.tell("a", PeerFigures(links={"b": LinkFigures(MB, 0.9)}), ["here"])
    made.tell("b", PeerFigures(links={"a": LinkFigures(MB, 0.9)}), ["here"])
    floor = made.floor(1)
    assert floor is not None and floor.wire_seconds == 2.0 and floor.fill_seconds == pytest.approx(1.125 + 0.1)
    assert (floor.rates, floor.delays, floor.compute_seconds) == (Source.DECLARED, Source.DECLARED, 2.0)


def test_a_laboratory_declares_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("[home]\nup_mbit = 80\ndelay_ms = 25\n[[homes]]\n[[homes]]\nup_mbit = 40\n")
    line = declared_lines(file)
    assert line(["/ip4/10.77.3.10/tcp/4000/p2p/Qm"]) == LinkFacts(10 * MB, None, 0.025, Source.DECLARED)
    assert line(["/ip4/10.77.3.11/tcp/4000"]) == LinkFacts(5 * MB, None, 0.025, Source.DECLARED)
    assert line(["/ip4/192.168.1.3/tcp/4000"]) is None and line([]) is None


def test_a_late_replica_is_judged_by_its_last_steps() -> None:
    made = fed(meter())
    made.note("c", 1, 1, StepCosts(5.0, 1.0, 1.0))
    fed(made, 2)
    fed(made, 1 + RECENT_STEPS)
    assert getattr(made.floor(1), "compute_seconds", None) == 5.0
    assert getattr(made.floor(2), "compute_seconds", None) == 5.0, "its report of step 2 is still to come"
    assert getattr(made.floor(1 + RECENT_STEPS), "compute_seconds", None) == 2.0, "it is gone"
    assert len(made._costs) == 2


def test_later_steps_wait_for_their_row() -> None:
    made = fed(meter())
    made.note("a", 0, 2, StepCosts(9.0))
    assert getattr(made.floor(1), "compute_seconds", None) == 2.0
    made.note("b", 1, 2, StepCosts(1.0))
    assert getattr(made.floor(2), "compute_seconds", None) == 9.0
    made.forget_after(1)
    assert getattr(made.floor(2), "compute_seconds", None) == 2.0


def test_rows_say_how_far_a_step_is_from_its_floor() -> None:
    table = StepTable(TWO)
    table.meter.tell("a", PeerFigures(links={"b": LinkFigures(2 * MB, 0.1)}))
    for peer, stage, costs in (("a", 0, StepCosts(2.0, 0.25, 0.5, 8 * MB)), ("b", 1, StepCosts(1.0, 0.25, 0.25))):
        rows = table.add(StepReport(1, stage, None, 1.0, 0.1, 10.7, 3.0, WireTotals(), costs=costs), (peer, "s"))
    (row,) = rows
    assert row["cpu_seconds"] == [2.0, 1.0] and row["floor"]["seconds"] == pytest.approx(4.0 + 1.25 + 0.1)
    assert row["step_over_floor"] == pytest.approx(2.0) and row["floor"]["busiest_link"] == "stage 0 up (a)"
    assert json.loads(json.dumps(row)) == row


def row(seconds: float, compute: float, wire: float, source: str = "declared") -> dict[str, Any]:
    parts = {"compute_seconds": compute, "wire_seconds": wire, "fill_seconds": 0.5, "serialisation_seconds": 0.25}
    parts["bound_seconds"] = max(compute, wire) + 0.25
    names = {"busiest_link": "stage 1 up (p)", "source": source, "delay_source": source}
    return {"seconds": seconds, "floor": {**parts, **names}}


ROWS = [row(99.0, 50.0, 50.0), row(4.0, 2.0, 3.0), row(3.5, 2.5, 2.0), row(5.0, 2.25, 2.75)]


def test_the_run_is_its_median_step_without_the_first() -> None:
    report = floor_report([*ROWS, {"seconds": 77.0}, {"seconds": 77.0, "floor": None}])
    floor = report["floor"]
    assert (floor["compute_seconds"], floor["wire_seconds"], floor["fill_seconds"]) == (2.25, 2.75, 0.5)
    assert floor["seconds"] == 3.25 and report["step_over_floor"] == 4.0 / 3.25
    assert (floor["bound_seconds"], floor["step_over_bound"]) == (3.0, 4.0 / 3.0)
    assert (floor["busiest_link"], floor["source"], floor["steps"]) == ("stage 1 up (p)", "declared", 3)
    line = "3.25 s = max(compute 2.25, wire 2.75) + fill 0.50; step / floor 1.23"
    assert floor_line(report) == line


def test_what_is_not_known_is_said() -> None:
    assert floor_report(ROWS[:1]) == floor_report([]) == {"floor": None, "step_over_floor": None}
    assert "not known" in floor_line(floor_report([]))
    line = floor_line(floor_report([row(1.0, 1.0, 0.0, "unknown")] * 2))
    assert line == (
        "1.50 s = max(compute 1.00, wire not known) + fill 0.50 (without delays, which are not known); "
        "step / floor 0.67"
    )
