"""Step reports: junk refused, bytes by what they were for, the run's summary. Rows are in test_step_table.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from peers.screen import in_all_line
from peers.step_reports import StepReport, WireTotals, summarise
from peers.transport import TrafficCounters
from protocol.config import parse_config
from protocol.errors import BadFrame
from protocol.frame import HEADER_BYTES, Frame, Header, Kind, control

# 2 stages, one boundary, 2 microbatches of 3 x 5 tokens: 30 tokens a step.
TWO = parse_config(
    {
        "model": {"dim": 64},
        "train": {"microbatches": 2, "microbatch_size": 3, "sequence_length": 5},
        "pipeline": {"stages": 2},
    },
    "test",
)


def report(step: int, stage: int, wire: WireTotals | None = None, **fields: Any) -> StepReport:
    values: dict[str, Any] = {"gradient_norm": 1.5 + stage, "learning_rate": 0.01, "seconds": 2.0 + stage}
    values |= {"compute_seconds": 0.5 * (1 + stage), "loss": 4.0 - step / 8 if stage == 1 else None, **fields}
    return StepReport(step=step, stage=stage, wire=wire or WireTotals(), **values)


def test_a_report_survives_json() -> None:
    for original in (
        report(7, 0, WireTotals(1, 2, 3, 4, 5, 6, 7)),
        report(7, 1, loss=0.0, microbatches=3, weights="0fa"),
    ):
        assert StepReport.from_json(json.loads(json.dumps(original.to_json()))) == original


@pytest.mark.parametrize("value", [None, 3, "report", [], {}, [1, 2], {"wire": [0] * 7}])
def test_junk_is_no_report(value: Any) -> None:
    with pytest.raises(BadFrame, match="expected "):
        StepReport.from_json(value)


@pytest.mark.parametrize("name", [*StepReport.__slots__])
def test_a_report_with_a_missing_field(name: str) -> None:
    value = report(7, 1).to_json()
    del value[name]
    with pytest.raises(BadFrame, match="expected "):
        StepReport.from_json(value)


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "learning_rate", "seconds", "compute_seconds"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "nan"])
def test_numbers_in_a_report_are_finite(name: str, bad: float | str) -> None:
    with pytest.raises(BadFrame, match="expected finite numbers in the report of step 7"):
        StepReport.from_json({**report(7, 1).to_json(), name: bad})


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": "x"},
        {"step": math.nan},
        {"stage": [1]},
        {"seconds": {}},
        {"wire": None},
        {"wire": 5},
        {"wire": ["a"] * 7},
        {"wire": [0] * 5},
        {"wire": [math.nan] * 7},
        {"microbatches": -1},
        {"microbatches": 1.5},
        {"weights": None},
        {"weights": "x"},
        {"weights": "0" * 200},
    ],
    ids=str,
)
def test_a_report_of_other_types(change: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="expected "):
        StepReport.from_json({**report(7, 1).to_json(), **change})


def test_totals_come_from_what_the_transport_sent() -> None:
    counters = TrafficCounters()
    for kind, sizes in ((Kind.FORWARD, (100, 50)), (Kind.BACKWARD, (70,))):
        for size in sizes:
            counters.sent[kind].add(Frame(Header(kind, size), bytes(size)))
    message = control({"type": "x"})
    counters.sent[Kind.CONTROL].add(message)
    for size in (1000, 24):
        counters.sent[Kind.CHUNK].add(Frame(Header(Kind.CHUNK, size), bytes(size)))
    counters.received[Kind.FORWARD].add(Frame(Header(Kind.FORWARD, 999), bytes(999)))
    h = HEADER_BYTES
    assert WireTotals.of(counters) == WireTotals(150, 2 * h, 70, h, len(message.payload) + h, 1024, 2 * h)


def test_totals_add_and_subtract() -> None:
    a, b = WireTotals(5, 4, 3, 2, 1, 6, 7), WireTotals(10, 20, 30, 40, 50, 60, 70)
    assert (a + b).as_tuple() == (15, 24, 33, 42, 51, 66, 77)
    assert b - a == WireTotals(5, 16, 27, 38, 49, 54, 63) and a + b - b == a
    assert a.larger(WireTotals(6, 0, 0, 0, 0, 0, 9)) == WireTotals(6, 4, 3, 2, 1, 6, 9)


def test_the_overhead_is_of_the_boundary() -> None:
    """What replicas exchange is a payload of its own: it neither frames the tensors nor hides their frames."""
    assert WireTotals(60, 4, 40, 2, 14).overhead_fraction == 0.2 and WireTotals().overhead_fraction == 0.0
    assert WireTotals(60, 4, 40, 2, 14, 10**6, 500).overhead_fraction == 0.2
    assert WireTotals(60, 4, 40, 2, 14).per_token(8, 2) == (4.0, 42 / 16)


def test_the_summary_by_hand() -> None:
    """Two steps of this start, 60 tokens; the row of an earlier start counts for the run, not for the wire."""
    rows = [{"step": s, "loss": 6.0 - s, "tokens": 30, "seconds": t} for s, t in ((1, 9.0), (2, 2.0), (3, 4.0))]
    wire = WireTotals(600, 120, 480, 120, 84, 5000, 40)
    summary = summarise(TWO, rows, wire, wire_tokens=60, payloads=(150, 120))
    assert {name: value for name, value in summary.items() if name != "wire"} == {
        "steps": 3,
        "tokens": 90,
        "loss_first": 5.0,
        "loss_last": 3.0,
        "step_seconds_median": 4.0,
        "floor": None,
        "step_over_floor": None,
    }
    assert summary["wire"] == {
        "forward_bytes_per_token": 12.0,
        "backward_bytes_per_token": 10.0,
        "dense_bf16_bytes_per_token": 128.0,
        "ratio_to_dense_bf16": pytest.approx(256 / 22),
        "forward_payload_bytes": 600,
        "backward_payload_bytes": 480,
        "header_bytes": 240,
        "control_bytes": 84,
        "chunk_payload_bytes": 5000,
        "chunk_header_bytes": 40,
        "overhead_fraction": pytest.approx(324 / 1080),
        "all_bytes": 6444,
        "dense_bf16_bytes": 2 * 128 * 60,
        "ratio_of_all_to_dense_bf16": pytest.approx(15_360 / 6444),
        "declared_ratio": {  # 4 microbatches of 150 and 120 bytes
            "forward": pytest.approx(720 / 600),
            "backward": pytest.approx(600 / 480),
            "all": pytest.approx(1404 / 1080),
        },
        "tokens": 60,
        "totals": (600, 120, 480, 120, 84, 5000, 40),
    }


def test_both_ratios_are_told() -> None:
    """What crosses the boundary may be the smaller part of what is sent: the first ratio alone would mislead."""
    wire = summarise(TWO, [], WireTotals(600, 120, 480, 120, 84, 5000, 40), 60, (150, 120))["wire"]
    assert in_all_line(wire) == "6,444 bytes sent, whatever for; dense bf16 boundaries alone 15,360: 2.4x less"
    assert wire["ratio_of_all_to_dense_bf16"] < wire["ratio_to_dense_bf16"]
    wire = summarise(TWO, [], WireTotals(chunk_payload=30_720), 60, (150, 120))["wire"]
    assert in_all_line(wire).endswith(": 2.0x more")


def test_the_summary_passes_over_rows_without_a_loss() -> None:
    rows = [{"step": s, "loss": loss, "tokens": 30, "seconds": 1.0} for s, loss in ((1, None), (2, 4.0), (3, None))]
    summary = summarise(TWO, rows, WireTotals(), 90, (150, 120))
    assert (summary["steps"], summary["loss_first"], summary["loss_last"]) == (3, 4.0, 4.0)


def test_the_summary_of_a_run_that_did_nothing() -> None:
    summary = summarise(TWO, [], WireTotals(), 0, (150, 120))
    assert (summary["steps"], summary["tokens"], summary["loss_last"]) == (0, 0, None)
    assert summary["wire"]["ratio_to_dense_bf16"] is None and summary["wire"]["overhead_fraction"] == 0.0
    json.dumps(summary)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("loss", 1e301), ("gradient_norm", 1e39), ("gradient_norm", -1.0), ("seconds", 1e10), ("learning_rate", 1e300)],
)
def test_numbers_in_a_report_are_such_as_a_step_can_have(name: str, bad: float) -> None:
    with pytest.raises(BadFrame, match="beyond what a step can have"):
        StepReport.from_json({**report(7, 1).to_json(), name: bad})


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_the_largest_float32_of_a_run_that_diverges_is_such_a_number(name: str) -> None:
    value = 3.4028234663852886e38
    assert getattr(StepReport.from_json({**report(7, 1).to_json(), name: value}), name) == value
