"""The table of steps: rows in order, from any replica of a stage, partial only where a report can come no more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peers.step_reports import LATE_STEPS, StepReport, WireTotals
from peers.step_table import StepTable
from peers.wire_ledger import MOST_SOURCES, WireLedger
from protocol.config import parse_config
from protocol.errors import BadFrame

# 2 stages, one boundary, 2 microbatches of 3 x 5 tokens: 30 tokens a step.
TWO = parse_config(
    {
        "model": {"dim": 64},
        "train": {"microbatches": 2, "microbatch_size": 3, "sequence_length": 5},
        "pipeline": {"stages": 2},
    },
    "test",
)

A, B, C = ("a", "s"), ("b", "s"), ("c", "s")


def report(step: int, stage: int, wire: WireTotals | None = None, **fields: Any) -> StepReport:
    values: dict[str, Any] = {"gradient_norm": 1.5 + stage, "learning_rate": 0.01, "seconds": 2.0 + stage}
    values |= {"compute_seconds": 0.5 * (1 + stage), "loss": 4.0 - step / 8 if stage == 1 else None, **fields}
    return StepReport(step=step, stage=stage, wire=wire or WireTotals(), **values)


def test_a_row_by_hand() -> None:
    """Stage 0 sends 30 tokens x (8 + 2) bytes and 2 headers of 36 forward, stage 1 30 x 8 and 2 headers backward."""
    table = StepTable(TWO)
    assert table.add(report(1, 0, WireTotals(forward_payload=300, forward_header=72, control=1000)), A) == []
    (row,) = table.add(
        report(1, 1, WireTotals(backward_payload=240, backward_header=72, control=500), weights="0123456789abcdef" * 4),
        B,
    )
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
        "cpu_seconds": [0.0, 0.0],
        "weights": ["", "0123456789abcdef"],
        "floor": None,
        "step_over_floor": None,
    }
    assert json.loads(json.dumps(row)) == row


def test_rows_count_only_what_was_sent_since_the_last() -> None:
    table = StepTable(TWO)
    rows = []
    for step, sent in ((1, 300), (2, 600), (3, 1500)):
        table.add(report(step, 0, WireTotals(forward_payload=sent)), A)
        rows += table.add(report(step, 1, WireTotals(backward_payload=2 * sent)), B)
    assert [row["forward_bytes_per_token"] for row in rows] == [10.0, 10.0, 30.0]
    assert [row["backward_bytes_per_token"] for row in rows] == [20.0, 20.0, 60.0]


def test_bytes_are_per_token_and_boundary() -> None:
    four = TWO.model_copy(update={"pipeline": TWO.pipeline.model_copy(update={"stages": 4})})
    table = StepTable(four)
    for stage in range(3):
        table.add(report(1, stage, WireTotals(forward_payload=300)), (str(stage), "s"))
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


def full(table: StepTable, *steps: int) -> list[dict[str, Any]]:
    """The rows that reports of `steps` by both stages give."""
    return [row for step in steps for stage in (0, 1) for row in table.add(report(step, stage))]


def test_any_replica_reports_for_its_stage_and_the_first_counts() -> None:
    table = StepTable(TWO)
    assert table.add(report(1, 1, loss=3.0, seconds=1.0), B) == []
    assert table.add(report(1, 1, loss=9.0, seconds=8.0), C) == []
    (row,) = table.add(report(1, 0), A)
    assert (row["loss"], table.next_step) == (3.0, 2)


def test_bytes_of_all_replicas_count_each_once() -> None:
    """Two replicas share stage 0. The one whose report comes after the row is counted in the next row."""
    table = StepTable(TWO)
    table.add(report(1, 0, WireTotals(forward_payload=150)), A)
    (row,) = table.add(report(1, 1), B)
    assert row["forward_bytes_per_token"] == 5.0
    table.add(report(1, 0, WireTotals(forward_payload=150)), C)
    table.add(report(2, 0, WireTotals(forward_payload=300)), C)
    table.add(report(2, 0, WireTotals(forward_payload=300)), A)
    (row,) = table.add(report(2, 1), B)
    assert row["forward_bytes_per_token"] == 15.0


def test_a_restarted_peer_counts_from_zero_again() -> None:
    table, rows = StepTable(TWO), []
    for step, session, sent in ((1, "s", 300), (2, "s", 600), (3, "t", 90), (4, "t", 390)):
        table.add(report(step, 0, WireTotals(forward_payload=sent)), ("a", session))
        rows += table.add(report(step, 1), B)
    assert [row["forward_bytes_per_token"] for row in rows] == [10.0, 10.0, 3.0, 10.0]


def test_reports_of_later_steps_do_not_count_in_an_earlier_row() -> None:
    """As when a coordinator was away: many steps in one message."""
    table = StepTable(TWO)
    for step in (1, 2, 3):
        table.add(report(step, 0, WireTotals(forward_payload=300 * step)), A)
    rows = [row for step in (1, 2, 3) for row in table.add(report(step, 1), B)]
    assert [row["forward_bytes_per_token"] for row in rows] == [10.0, 10.0, 10.0]


def test_repeating_the_same_reports_takes_no_room() -> None:
    table = StepTable(TWO)
    for _ in range(1000):
        for step in (1, 2, 3):
            table.add(report(step, 0), A)
    assert sum(map(len, table._told.values())) == 3


def test_a_missing_report_makes_a_partial_row_once_it_can_come_no_more() -> None:
    table = StepTable(TWO)
    full(table, 1)
    table.add(report(2, 0), A)
    assert full(table, 3) == []
    assert table.give_up(2 + LATE_STEPS - 1) == []
    rows = table.give_up(2 + LATE_STEPS)
    assert [(row["step"], row.get("partial", False), row["loss"]) for row in rows] == [
        (2, True, None),
        (3, False, 3.625),
    ]
    assert rows[0]["gradient_norms"] == [1.5, None] and table.next_step == 4


def test_a_late_report_is_waited_for_as_long_as_no_later_row_is_complete() -> None:
    table = StepTable(TWO)
    for step in range(1, 20):
        table.add(report(step, 0), A)
    assert table.give_up(19) == [] and table.next_step == 1
    assert [row["step"] for row in table.add(report(1, 1), B)] == [1]


def test_steps_of_which_nothing_is_known_have_no_row() -> None:
    table = StepTable(TWO)
    full(table, 4)
    assert [row["step"] for row in table.give_up(100)] == [4] and table.next_step == 5


def test_the_end_writes_what_there_is() -> None:
    table = StepTable(TWO)
    full(table, 1)
    table.add(report(2, 1), B)
    full(table, 4)
    assert [(row["step"], "partial" in row) for row in table.finish(5)] == [(2, True), (4, False)]
    assert table.finish(5) == []


def test_going_back_forgets_the_abandoned_future_and_waits_for_it_anew() -> None:
    table = StepTable(TWO)
    assert len(full(table, 1, 2, 3)) == 3
    table.add(report(4, 0, loss=None), A)
    table.restore(1)
    assert table.next_step == 2 and not table._pending
    rows = full(table, 2, 3, 4)
    assert [row["step"] for row in rows] == [2, 3, 4] and not any("partial" in row for row in rows)


def test_going_back_keeps_what_earlier_steps_still_wait_for() -> None:
    table = StepTable(TWO)
    table.add(report(1, 0), A)
    table.add(report(3, 0), A)
    table.restore(2)
    assert table.next_step == 1 and list(table._pending) == [1]


def test_a_coordinator_that_returns_spreads_what_it_does_not_know() -> None:
    """It had noted the totals after step 4, wrote rows up to 6, and the next report is of step 7."""
    ledger = WireLedger()
    ledger.note(A, WireTotals(forward_payload=1200))
    table = StepTable(TWO)
    table.go_on(7, ledger, 4)
    table.add(report(7, 0, WireTotals(forward_payload=2100)), A)
    (row,) = table.add(report(7, 1), B)
    assert row["forward_bytes_per_token"] == 10.0


def test_the_ledger_adds_up_daemons_not_messages() -> None:
    ledger = WireLedger()
    for source, sent in ((A, 10), (A, 30), (A, 20), (("a", "t"), 5), (B, 7)):
        ledger.note(source, WireTotals(control=sent))
    assert ledger.total == WireTotals(control=42) and ledger.of_peer("a") == WireTotals(control=35)
    again = WireLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    again.note(A, WireTotals(control=31))
    assert (again.total, ledger.total) == (WireTotals(control=43), WireTotals(control=42))


def test_the_ledger_is_bounded_and_loses_no_byte() -> None:
    ledger = WireLedger()
    for index in range(MOST_SOURCES + 50):
        ledger.note((str(index), "s"), WireTotals(chunk_payload=1))
    assert len(ledger.to_json()["sources"]) == MOST_SOURCES
    assert ledger.total == WireTotals(chunk_payload=MOST_SOURCES + 50)


@pytest.mark.parametrize("value", [None, [], {}, {"gone": [0] * 7}, {"gone": [0] * 7, "sources": [["a"]]}], ids=str)
def test_junk_is_no_ledger(value: Any) -> None:
    with pytest.raises(BadFrame):
        WireLedger.from_json(value)
