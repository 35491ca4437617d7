"""Step reports: rows in order, bytes counted once, junk refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from peers.step_reports import StepReport, StepTable, WireTotals, summarise
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


def test_a_row_by_hand() -> None:
    """Stage 0 sends 30 tokens x (8 + 2) bytes and 2 headers of 36 forward, stage 1 30 x 8 and 2 headers backward."""
    table = StepTable(TWO)
    assert table.add(report(1, 0, WireTotals(forward_payload=300, forward_header=72, control=1000))) == []
    (row,) = table.add(report(1, 1, WireTotals(backward_payload=240, backward_header=72, control=500)))
    assert row == {
        "step": 1,
        "loss": 3.875,
        "tokens": 30,
        "seconds": 2.0,
        "tokens_per_second": 15.0,
        "learning_rate": 0.01,
        "forward_bytes_per_token": 372 / 30,
        "backward_bytes_per_token": 312 / 30,
        "gradient_norms": [1.5, 2.5],
        "compute_seconds": [0.5, 1.0],
    }
    assert json.loads(json.dumps(row)) == row


def test_rows_count_only_what_was_sent_since_the_last() -> None:
    table = StepTable(TWO)
    rows = []
    for step, sent in ((1, 300), (2, 600), (3, 1500)):
        table.add(report(step, 0, WireTotals(forward_payload=sent)))
        rows += table.add(report(step, 1, WireTotals(backward_payload=2 * sent)))
    assert [row["forward_bytes_per_token"] for row in rows] == [10.0, 10.0, 30.0]
    assert [row["backward_bytes_per_token"] for row in rows] == [20.0, 20.0, 60.0]


def test_bytes_are_per_token_and_boundary() -> None:
    four = TWO.model_copy(update={"pipeline": TWO.pipeline.model_copy(update={"stages": 4})})
    table = StepTable(four)
    for stage in range(3):
        table.add(report(1, stage, WireTotals(forward_payload=300)))
    (row,) = table.add(report(1, 3, WireTotals()))
    assert row["forward_bytes_per_token"] == 900 / (30 * 3)


def test_one_stage_sends_nothing() -> None:
    one = TWO.model_copy(update={"pipeline": TWO.pipeline.model_copy(update={"stages": 1})})
    (row,) = StepTable(one).add(report(1, 0, loss=2.0))
    assert (row["forward_bytes_per_token"], row["backward_bytes_per_token"], row["loss"]) == (0.0, 0.0, 2.0)


def test_reports_out_of_order_give_rows_in_order() -> None:
    table = StepTable(TWO)
    assert table.add(report(2, 1)) == table.add(report(2, 0)) == table.add(report(3, 0)) == []
    assert table.add(report(1, 1)) == []
    assert [row["step"] for row in table.add(report(1, 0))] == [1, 2]
    assert [row["step"] for row in table.add(report(3, 1))] == [3]
    assert table.next_step == 4


def test_a_repeated_report_completes_nothing() -> None:
    table = StepTable(TWO)
    assert table.add(report(1, 0)) == table.add(report(1, 0)) == []
    assert len(table.add(report(1, 1))) == 1
    assert table.add(report(1, 1)) == table.add(report(1, 0)) == []
    assert not table._pending  # nothing of a step that is done is kept
    assert [row["step"] for row in table.add(report(2, 0)) + table.add(report(2, 1))] == [2]


@pytest.mark.parametrize(("step", "stage"), [(0, 0), (-1, 0), (1, 2), (1, -1)])
def test_a_report_of_nowhere_is_passed_over(step: int, stage: int) -> None:
    table = StepTable(TWO)
    table.add(report(1, 0))
    assert table.add(report(step, stage)) == []
    assert [row["gradient_norms"] for row in table.add(report(1, 1))] == [[1.5, 2.5]]


def test_a_resumed_table_starts_after_the_checkpoint() -> None:
    table = StepTable(TWO, next_step=51)
    assert table.add(report(50, 0)) == table.add(report(50, 1)) == table.add(report(51, 0)) == []
    assert [row["step"] for row in table.add(report(51, 1))] == [51]


def test_a_report_survives_json() -> None:
    for original in (report(7, 0, WireTotals(1, 2, 3, 4, 5)), report(7, 1, loss=0.0)):
        assert StepReport.from_json(json.loads(json.dumps(original.to_json()))) == original


@pytest.mark.parametrize("value", [None, 3, "report", [], {}, [1, 2], {"wire": [0] * 5}])
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
        {"wire": ["a"] * 5},
        {"wire": [0] * 6},
        {"wire": [math.nan] * 5},
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
    counters.received[Kind.FORWARD].add(Frame(Header(Kind.FORWARD, 999), bytes(999)))
    h = HEADER_BYTES
    assert WireTotals.of(counters) == WireTotals(150, 2 * h, 70, h, len(message.payload) + h)


def test_totals_add_and_subtract() -> None:
    a, b = WireTotals(5, 4, 3, 2, 1), WireTotals(10, 20, 30, 40, 50)
    assert (a + b).as_tuple() == (15, 24, 33, 42, 51) and b - a == WireTotals(5, 16, 27, 38, 49) and a + b - b == a
    assert WireTotals(60, 4, 40, 2, 14).overhead_fraction == 0.2 and WireTotals().overhead_fraction == 0.0
    assert WireTotals(60, 4, 40, 2, 14).per_token(8, 2) == (4.0, 42 / 16)


def test_the_summary_by_hand() -> None:
    """Two steps of this start, 60 tokens; the row of an earlier start counts for the run, not for the wire."""
    rows = [{"step": s, "loss": 6.0 - s, "tokens": 30, "seconds": t} for s, t in ((1, 9.0), (2, 2.0), (3, 4.0))]
    wire = WireTotals(600, 120, 480, 120, 84)
    summary = summarise(TWO, rows, wire, wire_tokens=60)
    assert {name: value for name, value in summary.items() if name != "wire"} == {
        "steps": 3,
        "tokens": 90,
        "loss_first": 5.0,
        "loss_last": 3.0,
        "step_seconds_median": 4.0,
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
        "overhead_fraction": pytest.approx(324 / 1080),
        "tokens": 60,
        "totals": (600, 120, 480, 120, 84),
    }


def test_the_summary_of_a_run_that_did_nothing() -> None:
    summary = summarise(TWO, [], WireTotals(), 0)
    assert (summary["steps"], summary["tokens"], summary["loss_last"]) == (0, 0, None)
    assert summary["wire"]["ratio_to_dense_bf16"] is None and summary["wire"]["overhead_fraction"] == 0.0
    json.dumps(summary)
