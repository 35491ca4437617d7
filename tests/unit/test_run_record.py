"""The run's record: rows are seen when they are written, totals survive a coordinator, a restored run writes again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from peers import run_record
from peers.run_folder import RunFolder
from peers.run_record import RunRecord
from peers.step_reports import StepReport, WireTotals
from protocol.config import parse_config
from protocol.manifest import Manifest
from protocol.membership import End
from protocol.signing import SigningKey

KEY = SigningKey(bytes(range(32)))
CONFIG = parse_config({"name": "isle", "model": {"dim": 64, "layers": 4}, "pipeline": {"stages": 2}}, "test")
MANIFEST = Manifest(CONFIG, "f" * 64, 5.5, KEY.public, "00ff", None)
A, B = ("a", "s"), ("b", "s")
NOTHING = WireTotals()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create(MANIFEST, KEY)
    return made


def report(step: int, stage: int, sent: int = 0) -> StepReport:
    loss = 5.0 - step / 100 if stage == 1 else None
    return StepReport(step, stage, loss, 1.0, 0.01, 1.0, 0.5, WireTotals(forward_payload=sent))


def do(record: RunRecord, *steps: int) -> list[int]:
    """Both stages report `steps`; the rows that come of it."""
    rows: list[dict[str, Any]] = []
    for step in steps:
        rows += record.add(A, [report(step, 0)], step - 1, step) + record.add(B, [report(step, 1)], step, step)
    return [row["step"] for row in rows]


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in folder.rows()]


def test_rows_are_seen_when_both_stages_reported(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    assert record.seen == 0
    record.add(A, [report(1, 0), report(2, 0)], 2, 2)
    assert (record.seen, steps(folder)) == (0, [])
    record.add(B, [report(1, 1)], 2, 2)
    assert (record.seen, steps(folder)) == (1, [1])


def test_what_cannot_be_written_is_not_seen_and_is_written_later(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1)
    with monkeypatch.context() as patched:
        patched.setattr(run_record, "append_lines", full)
        assert do(record, 2, 3) == [2, 3], "they are shown all the same"
        assert (record.seen, steps(folder)) == (1, [1])
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    record.write()
    assert (record.seen, steps(folder)) == (3, [1, 2, 3])


def test_a_coordinator_that_returns_goes_on_after_its_last_row(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1, 2)
    record.add(A, [report(3, 0)], 3, 3)  # noted in memory only
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    again = RunRecord(folder, MANIFEST)
    again.take_over(0, 0)
    assert again.seen == 2
    assert do(again, 1, 2, 3, 4) == [3, 4] and steps(folder) == [1, 2, 3, 4]


def test_a_restored_run_writes_its_rows_again(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1, 2, 3, 4)
    record.restore(2, 1)
    assert (record.seen, steps(folder)) == (2, [1, 2]) and record.last_row is not None
    assert record.last_row["step"] == 2
    assert do(record, 3, 4, 5) == [3, 4, 5] and steps(folder) == [1, 2, 3, 4, 5]


def test_a_coordinator_that_died_while_it_went_back_forgets_the_rows_when_it_returns(folder: RunFolder) -> None:
    """The view of epoch 1 was stored, and nothing else."""
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1, 2, 3, 4)
    folder.remember({"wire": record.to_json(NOTHING)})
    again = RunRecord(folder, MANIFEST)
    again.take_over(1, 2)
    assert (again.seen, steps(folder)) == (2, [1, 2])
    do(again, 3)
    folder.remember({"wire": again.to_json(NOTHING)})
    third = RunRecord(folder, MANIFEST)
    third.take_over(1, 2)
    assert (third.seen, steps(folder)) == (3, [1, 2, 3])


def test_a_full_disk_does_not_keep_the_run_from_going_back(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1, 2, 3, 4)
    monkeypatch.setattr(RunFolder, "forget_rows_after", full)
    record.restore(2, 1)
    assert record.seen == 2
    assert do(record, 3, 4) == [3, 4] and steps(folder) == [1, 2, 3, 4]
    assert len(folder.metrics.read_text().splitlines()) == 6


def test_going_back_to_a_step_that_has_no_row_yet_forgets_none(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1)
    record.add(A, [report(2, 0), report(3, 0)], 3, 3)
    record.restore(2, 1)
    assert (record.seen, steps(folder)) == (1, [1])
    assert do(record, 3) == [] and [row["step"] for row in record.add(B, [report(2, 1)], 3, 3)] == [2, 3]


def test_totals_are_of_all_daemons_over_all_starts(folder: RunFolder) -> None:
    """Peer a is restarted, peer b lives through the coordinator's death; each byte counts once."""
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    record.note(A, WireTotals(control=100, chunk_payload=7))
    record.note(B, WireTotals(control=10))
    do(record, 1)
    folder.remember({"wire": record.to_json(WireTotals(control=1000))})
    do(record, 2)  # after the last note: the rows tell of it
    again = RunRecord(folder, MANIFEST)
    again.take_over(0, 0)
    again.note(("a", "t"), WireTotals(control=5))
    again.note(B, WireTotals(control=30))
    do(again, 3)
    again.report(End(3, False, "all steps are done"), [{"peer": "a", "stage": 0}], WireTotals(control=2000))
    found = json.loads(folder.report.read_text())
    assert found["wire"]["control_bytes"] == 100 + 5 + 30 + 1000 + 2000
    assert found["wire"]["tokens"] == 3 * CONFIG.tokens_per_step and found["steps"] == 3
    assert found["wire"]["chunk_payload_bytes"] == 7
    (peer,) = found["peers"]
    assert (peer["peer"], peer["stage"], peer["sent_bytes"]) == ("a", 0, 112)


def test_what_killed_daemons_sent_unnoted_is_left_out_with_its_tokens(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1, 2)
    record.note(A, WireTotals(forward_payload=200))
    folder.remember({"wire": record.to_json(NOTHING)})
    do(record, 3, 4)  # then everything is killed, and goes on from the checkpoints of step 3
    again = RunRecord(folder, MANIFEST)
    again.begin(4, 1)
    rows = again.add(("a", "t"), [report(4, 0, 50)], 3, 4) + again.add(("b", "t"), [report(4, 1, 50)], 4, 4)
    assert rows[0]["forward_bytes_per_token"] == 100 / CONFIG.tokens_per_step
    again.note(("a", "t"), WireTotals(forward_payload=100))
    again.report(End(4, False, "done"), [], NOTHING)
    found = json.loads(folder.report.read_text())["wire"]
    assert (found["forward_payload_bytes"], found["tokens"]) == (300, 3 * CONFIG.tokens_per_step)


def test_trained_tokens_count_also_where_the_run_went_back(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1, 2, 3)
    record.restore(1, 1)
    do(record, 2)
    record.report(End(2, False, "done"), [], NOTHING)
    found = json.loads(folder.report.read_text())
    assert found["tokens"] == 2 * CONFIG.tokens_per_step and found["wire"]["tokens"] == 4 * CONFIG.tokens_per_step


def test_the_end_writes_rows_of_which_a_report_is_lost(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    do(record, 1)
    record.add(B, [report(2, 1), report(3, 1)], 2, 3)
    record.report(End(2, False, "stopped as asked"), [], NOTHING)
    assert [(row["step"], row.get("partial")) for row in folder.rows()] == [(1, None), (2, True)]


def test_nothing_is_touched_before_the_run_begins(folder: RunFolder) -> None:
    RunRecord(folder, MANIFEST).report(None, [], NOTHING)
    assert not folder.report.exists() and not folder.metrics.exists()


C, LIAR = ("c", "s"), ("liar", "s")


def false(step: int, stage: int) -> StepReport:
    return dataclasses.replace(report(step, stage), weights="bad0", gradient_norm=1e30)


def test_reports_of_steps_that_the_run_cannot_have_reached_make_no_row(folder: RunFolder) -> None:
    """The first report used to count for ever, up to 5,000 steps ahead."""
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    record.add(LIAR, [false(step, 0) for step in range(1, 5_000)], 0, 0)
    assert do(record, 1, 2) == [1, 2]
    assert [row["gradient_norms"] for row in folder.rows()] == [[1.0, 1.0], [1.0, 1.0]]


def test_a_row_waits_for_the_other_replicas_and_says_what_most_of_them_say(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    assert record.add(LIAR, [false(1, 0)], 0, 1) == record.add(B, [report(1, 1)], 0, 1) == []
    assert record.add(A, [report(1, 0)], 0, 1) == []
    (row,) = record.add(C, [report(1, 0)], 1, 1)
    assert row["gradient_norms"] == [1.0, 1.0]


def test_what_a_peer_reported_counts_no_more_when_it_is_turned_away(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    record.add(LIAR, [false(1, 0)], 0, 1)
    record.add(B, [report(1, 1)], 0, 1)
    record.disown("liar")
    assert record.add(B, [], 1, 1) == []
    (row,) = record.add(A, [report(1, 0)], 1, 1)
    assert row["gradient_norms"] == [1.0, 1.0]


def test_one_replica_that_says_nothing_of_its_steps_does_not_hold_up_the_rows(folder: RunFolder) -> None:
    record = RunRecord(folder, MANIFEST)
    record.begin(1, 0)
    for step in range(1, 1 + run_record.PATIENCE_STEPS):
        record.add(A, [report(step, 0)], 0, step)
        assert record.add(B, [report(step, 1)], 0, step) == []
    assert [row["step"] for row in record.add(B, [], 0, 2 + run_record.PATIENCE_STEPS)] == [1, 2]
