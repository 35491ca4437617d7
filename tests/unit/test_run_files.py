"""What a run leaves on disk and reads again: checkpoints, the run's folder, the TOML file, the step reports."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.checkpoints import Checkpoints
from peers.config_file import format_config, read_config
from peers.run_folder import RunFolder
from peers.step_reports import StepReport, StepTable, WireTotals, summarise
from peers.transport import TrafficCounters
from protocol.config import RunConfig, parse_config
from protocol.errors import BadFrame, ConfigError, RunFailed, UserError
from protocol.frame import HEADER_BYTES, Frame, Header, Kind, control
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.signing import SigningKey

ROOT = Path(__file__).resolve().parents[2]
KEY = SigningKey(bytes(range(32)))
MANIFEST = Manifest(RunConfig(name="isle"), "f" * 64, 5.5, KEY.public, "00ff")


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((2, 3), value), "moment1/a": torch.arange(6.0).reshape(3, 2).T}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", "isle-0123", keep=2)


def test_a_checkpoint_comes_back_to_the_bit(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(3, 50, state())
    assert path == checkpoints.folder / "stage-3" / "step-00000050.safetensors"
    loaded = checkpoints.load(3, 50)
    assert set(loaded) == set(state()) and all(torch.equal(loaded[name], x) for name, x in state().items())


def test_the_newest_of_each_stage_are_held(checkpoints: Checkpoints) -> None:
    assert checkpoints.held() == {}
    for step in (50, 100, 150):
        checkpoints.save(0, step, state(step))
    checkpoints.save(11, 50, state())
    assert checkpoints.held() == {0: [100, 150], 11: [50]}
    assert names(checkpoints.folder / "stage-0") == ["step-00000100.safetensors", "step-00000150.safetensors"]
    assert float(checkpoints.load(0, 150)["weight/a"][0, 0]) == 150


def test_a_step_is_written_again_in_place(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, 50, state(1.0))
    checkpoints.save(0, 50, state(2.0))
    assert checkpoints.held() == {0: [50]} and float(checkpoints.load(0, 50)["weight/a"][0, 0]) == 2.0


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1])
def test_a_torn_file_is_not_held(checkpoints: Checkpoints, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints.save(0, 50, state())
    path = checkpoints.save(0, 100, state())
    path.write_bytes(path.read_bytes()[:keep])
    assert checkpoints.held() == {0: [50]}
    assert "ignoring the checkpoint" in caplog.text
    with pytest.raises(RunFailed, match="expected a checkpoint of stage 0, step 100 of run isle-0123 at"):
        checkpoints.load(0, 100)
    assert checkpoints.load(0, 50)


def test_another_runs_checkpoint_is_not_ours(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, 50, state())
    other = Checkpoints(checkpoints.folder, "isle-9999", keep=2)
    assert other.held() == {}
    with pytest.raises(RunFailed, match="of run isle-9999"):
        other.load(0, 50)


def test_a_file_under_another_name_is_not_loaded_for_it(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(0, 50, state())
    path.rename(path.with_name("step-00000060.safetensors"))
    for stage, step in ((0, 50), (0, 60), (1, 50)):
        with pytest.raises(RunFailed, match=f"expected a checkpoint of stage {stage}, step {step}"):
            checkpoints.load(stage, step)


def test_leftovers_of_a_killed_writer_go_and_other_files_stay(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save(0, 50, state()).parent
    (folder / ".step-00000099.safetensors.x1y2.tmp").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    assert checkpoints.held() == {0: [50]}
    checkpoints.save(0, 100, state())
    assert names(folder) == ["notes.txt", "step-00000050.safetensors", "step-00000100.safetensors"]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_failed_write_leaves_the_old_ones(
    checkpoints: Checkpoints, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (50, 100):
        checkpoints.save(0, step, state(step))

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=str(error.strerror)):
        checkpoints.save(0, 150, state())
    assert names(checkpoints.folder / "stage-0") == ["step-00000050.safetensors", "step-00000100.safetensors"]
    assert float(checkpoints.load(0, 50)["weight/a"][0, 0]) == 50


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_leaves_the_old_ones(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save(0, 50, state()).parent
    folder.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            checkpoints.save(0, 100, state())
        assert names(folder) == ["step-00000050.safetensors"] and checkpoints.held() == {0: [50]}
    finally:
        folder.chmod(0o755)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(OSError, match="checkpoints"):
        Checkpoints(tmp_path / "checkpoints", "isle-0123", 2).save(0, 50, state())
    assert Checkpoints(tmp_path / "checkpoints", "isle-0123", 2).held() == {}


# The run's folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "isle")


def test_a_run_is_begun_once_and_opened_again(folder: RunFolder) -> None:
    assert not folder.exists()
    folder.refuse_existing()
    folder.create(MANIFEST, KEY)
    manifest, key = folder.open()
    assert (manifest, manifest.run_id, key.secret) == (MANIFEST, MANIFEST.run_id, KEY.secret)
    assert (folder.root / "coordinator.key").stat().st_mode & 0o777 == 0o600
    for begin in (folder.refuse_existing, lambda: folder.create(MANIFEST, KEY)):
        with pytest.raises(UserError, match=f"holds one: go on with it by --resume {folder.root}, or give another"):
            begin()
    assert folder.open()[0] == MANIFEST


def test_a_folder_without_a_run(folder: RunFolder) -> None:
    with pytest.raises(UserError, match=r"expected a run in .*, there is no manifest.json: start it without --resume"):
        folder.open()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("coordinator.key", b""),
        ("coordinator.key", b"00" * 31),
        ("coordinator.key", b"zz" * 32),
        ("coordinator.key", b"\xff\xfe"),
        ("coordinator.key", bytes(32).hex().encode()),
        ("manifest.json", b""),
        ("manifest.json", b"{}"),
        ("manifest.json", b"[1]"),
        ("manifest.json", KEY.sign("view", MANIFEST.to_json())),
        ("manifest.json", KEY.sign("manifest", {})),
        ("manifest.json", KEY.sign("manifest", {**MANIFEST.to_json(), "protocol_version": 999})),
        ("manifest.json", KEY.sign("manifest", {**MANIFEST.to_json(), "config_hash": "0" * 64})),
        ("manifest.json", KEY.sign("manifest", {**MANIFEST.to_json(), "config": {"model": {"dim": 3}}})),
        ("manifest.json", KEY.sign("manifest", MANIFEST.to_json()).replace(b"isle", b"aisl")),
    ],
)
def test_a_damaged_run_is_the_users_to_know(folder: RunFolder, name: str, content: bytes) -> None:
    folder.create(MANIFEST, KEY)
    (folder.root / name).write_bytes(content)
    with pytest.raises(UserError, match=f"the run in {folder.root} cannot be opened: "):
        folder.open()


def test_a_lost_key(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    (folder.root / "coordinator.key").unlink()
    with pytest.raises(UserError, match=r"cannot be opened: .*coordinator.key"):
        folder.open()


def test_where_the_files_are(folder: RunFolder) -> None:
    found = (folder.metrics, folder.report, folder.plot, folder.invite, folder.identity, folder.peer(3))
    expected = ("metrics.jsonl", "report.json", "loss.png", "invite.txt", "coordinator.id", "peers/3")
    assert [path.relative_to(folder.root).as_posix() for path in found] == list(expected)


def test_the_invite_file_is_what_a_volunteer_pastes(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    invite = Invite(MANIFEST.run_id, KEY.public, ("/ip4/10.0.0.1/tcp/31337/p2p/12D3KooW",))
    folder.invite.write_text(f"{invite}\n")
    assert Invite.parse(folder.invite.read_text()) == invite


def test_view_numbers_are_never_used_twice(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    assert folder.next_view() == 1
    for number in (1, 2, 7):
        folder.remember_view(number)
        assert RunFolder(folder.root).next_view() == number + 1


def test_rows_pass_over_a_torn_last_line(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    assert list(folder.rows()) == []
    whole = [{"step": step, "loss": step / 4} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in whole)
    for cut in range(1, len(json.dumps(whole[-1]))):
        folder.metrics.write_text(text[: -1 - cut])
        assert list(folder.rows()) == whole[:2], cut
    folder.metrics.write_text(text[:-1])  # whole, but for the end of the line
    assert list(folder.rows()) == whole


def test_a_resumed_run_forgets_the_rows_it_writes_again(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    whole = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3, 4))
    folder.metrics.write_text(whole + '{"step": 5, "l')
    folder.forget_rows_after(2)
    with folder.metrics.open("a") as file:
        file.write('{"step": 3}\n')
    assert [row["step"] for row in folder.rows()] == [1, 2, 3]
    folder.forget_rows_after(0)
    assert folder.metrics.read_text() == ""


def test_forgetting_before_the_first_row(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    folder.forget_rows_after(0)
    assert list(folder.rows()) == []


# The TOML file

ODD = parse_config(
    {
        "name": "a-0",
        "seed": 2**63 - 1,
        "model": {"rope_base": 5e5, "norm_epsilon": 1e-12, "qk_norm": False, "dtype": "bfloat16"},
        "data": {"source": "text", "path": 'C:\\my "text" # é🏝\n\t', "tokenizer": "ü.json", "vocab_size": 1 << 32},
        "train": {"epsilon": 1e-300, "learning_rate": 1.0, "clip_norm": 0.0},
    },
    "odd",
)


@pytest.mark.parametrize("config", [RunConfig(), ODD], ids=["default", "odd"])
def test_what_is_printed_reads_back_equal(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(format_config(config), encoding="utf-8")
    assert read_config(path) == config and read_config(path).hash() == config.hash()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_a_run(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    printed = tmp_path / "run.toml"
    printed.write_text(format_config(config), encoding="utf-8")
    assert read_config(printed) == config and config.name == path.stem


def test_every_field_is_printed_with_its_sentence() -> None:
    text = format_config(RunConfig())
    sections = [RunConfig, *(type(getattr(RunConfig(), name)) for name in tomllib.loads(text) if f"[{name}]" in text)]
    assert len(sections) == 7
    for section in sections:
        for name, field in section.model_fields.items():
            if field.description:
                assert any(name in line and field.description in line for line in text.splitlines()), name
    assert "# path =" in text and "\npath =" not in text  # without a value: shown, not set


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"dim = ", "expected TOML in .*run.toml: Invalid value"),
        (b"name = '\xff'", "expected TOML in .*run.toml: "),
        (b"[model]\ndimm = 3", "run.toml: unknown key 'model.dimm': did you mean 'dim'"),
        (b"[model]\ndim = 5", "run.toml: .*expected dim divisible by heads, got dim = 5"),
        (b"seed = 1\nseed = 2", "expected TOML in .*run.toml: Cannot overwrite a value"),
    ],
)
def test_a_file_that_is_no_run(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "run.toml")


@pytest.mark.parametrize(("name", "message"), [("none.toml", "No such file"), (".", "Is a directory")])
def test_no_file(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"expected a run's TOML file at .*, cannot read it: {message}"):
        read_config(tmp_path / name)


# Step reports

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
