"""The traces of the comparison's arms: one step of them, whose messages were when under way, and their panels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline_bench.hivemind_trace import step_spans
from pipeline_bench.panels import Bar, Panel, Row, axis_seconds, draw_panels, in_order, panel, rows
from pipeline_bench.torch_trace import in_transit
from pipeline_bench.traces import one_step, process_file, write_arm_trace

from peers.trace import StepTracer, merge
from protocol.errors import UserError

ABOUT = {"arm": "isthmus", "title": "ours", "link": "80", "step_seconds": 4.0}
Told = tuple[str, str, float, float]  # track, name, start, end


def traced(process: str, *spans: Told) -> dict[str, Any]:
    tracer = StepTracer()
    tracer._epoch = 0.0
    for span in spans:
        tracer.span(*span)
    return tracer.to_json(process)


def names(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_newest_whole_step_of_the_first_process_is_cut_out() -> None:
    first = traced("stage 0", *(("step", f"step {n}", 10.0 * n, 10.0 * n + 10) for n in (1, 2, 3)))
    work = [("compute", "F1", 11.0, 12.0), ("compute", "B0", 19.0, 21.0), ("to stage 0", "B3", 30.0, 31.0)]
    made = one_step(merge([traced("stage 1", ("step", "step 2", 5.0, 50.0), *work), first]), 2)
    assert made["otherData"] == {"step": 2, "whole": True, "start": 20e6, "end": 30e6}
    assert names(made) == ["step 2", "step 2", "B0"]
    left = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "thread_name"]
    assert left == ["step", "step", "compute"], "a row that is empty goes"


def test_part_of_a_step_is_shown_where_there_is_no_whole_one() -> None:
    part = ("step", "part of step 2", 20.0, 25.0)
    assert one_step(traced("trainer", ("step", "step 1", 1.0, 2.0), part), 9)["otherData"]["step"] == 1
    assert one_step(traced("trainer", part), 9)["otherData"] == {"step": 2, "whole": False, "start": 20e6, "end": 25e6}
    with pytest.raises(UserError, match="a step up to step 1"):
        one_step(traced("trainer", part), 1)


def test_rounds_make_up_steps() -> None:
    rounds = [(1, 1, 0.0, 1.0), (2, 1, 1.0, 2.0), (2, 1, 2.0, 4.0), (3, 1, 4.0, 5.0)]
    assert step_spans(rounds, 2) == [("part of step 1", 0.0, 1.0), ("step 2", 1.0, 4.0), ("part of step 3", 4.0, 5.0)]


def test_a_message_of_gloo_moves_when_it_is_sent_and_asked_for() -> None:
    came = [{"B0": (1.0, 7.0)}, {}, {"F0": (5.0, 6.0), "F1": (2.0, 4.0)}]
    sent = {"F0": 3.0, "F1": 3.0, "B0": 3.0, "F9": 3.0}
    assert in_transit(1, sent, came) == [(2, "F0", 5.0, 6.0), (2, "F1", 3.0, 4.0), (0, "B0", 3.0, 7.0)]


def test_the_traces_of_an_arm_become_one_file(tmp_path: Path) -> None:
    for stage in (1, 0):
        trace = traced(f"stage {stage}", ("step", "step 1", 1.0, 3.0), ("compute", "F0", 1.0, 2.0))
        process_file(tmp_path, f"stage-{stage}").write_text(json.dumps(trace))
    path = tmp_path / "traces" / "isthmus-80.json"
    write_arm_trace(tmp_path, path, 1, ABOUT)
    shown = panel(json.loads(path.read_text()), "it")
    assert (shown.arm, shown.step_seconds, shown.whole, len(shown.rows)) == ("isthmus", 2.0, True, 4)
    with pytest.raises(UserError, match="there is none"):
        write_arm_trace(tmp_path / "empty", path, 1, ABOUT)


def came(trace: dict[str, Any], sender: str, name: str, at: float) -> dict[str, Any]:
    """`trace`, to whose process `name` has come, by its own words."""
    pid, track = trace["traceEvents"][0]["pid"], {"name": f"from {sender}"}
    trace["traceEvents"] += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 99, "args": track},
        {"ph": "i", "name": name, "pid": pid, "tid": 99, "ts": 1e6 * at},
    ]
    return trace


def test_our_messages_are_under_way_until_they_have_come() -> None:
    sent = [("to bob", "F0", 1.0, 1.125), ("to bob", "F1", 1.5, 1.625), ("to coordinator", "control", 1.0, 2.0)]
    first = traced("stage 0: peer alice", ("compute", "F0", 0.0, 1.0), *sent)
    second = came(traced("stage 1: peer bob", ("compute", "APPLY", 2.0, 3.0)), "alice", "F0", 2.0)
    made = merge([first, second])["traceEvents"]
    shown = [(row.label, row.computes, row.bars) for row in rows(made, 0.5e6, 2.5e6)]
    assert shown == [
        ("stage 0", True, [Bar("forward", 0.0, 0.5)]),
        ("it sends", False, [Bar("forward", 0.5, 1.5, 0), Bar("forward", 1.0, 1.125, 1)]),
        ("stage 1", True, [Bar("update, other", 1.5, 2.0)]),
        ("it sends", False, []),
    ]


def test_calls_are_rows_of_the_stage_that_is_called() -> None:
    trainer = traced("trainer", ("calls of stage 0", "B1", 0.0, 2.0), ("calls of stage 0", "B2", 1.0, 2.0))
    made = merge([trainer, traced("stage 0", ("compute", "B", 0.5, 1.0))])["traceEvents"]
    shown = rows(made, 0.0, 2e6)
    assert [row.label for row in shown] == ["stage 0", "calls to it"] and shown[1].lanes == 2
    assert shown[1].bars == [Bar("backward", 0.0, 2.0, 0), Bar("backward", 1.0, 2.0, 1)]


def a_panel(arm: str, step: float, seconds: float, whole: bool) -> Panel:
    return Panel(arm, arm, "80", step, seconds, whole, [Row("stage 0", True), Row("it sends", False)])


def test_a_step_that_is_far_longer_is_cut_and_says_so(tmp_path: Path) -> None:
    chain, ours = a_panel("hivemind-serial", 160.0, 90.0, False), a_panel("isthmus", 13.0, 13.0, True)
    assert [one.arm for one in in_order([chain, ours])] == ["isthmus", "hivemind-serial"]
    assert axis_seconds([chain, ours]) == 26.0 and axis_seconds([ours, a_panel("x", 20.0, 20.0, True)]) == 20.0
    assert ours.heading(26.0) == "isthmus: step 13 s"
    assert ours.heading(5.0) == "isthmus: step 13 s (only its first 5 s are shown)"
    assert chain.heading(26.0) == "hivemind-serial: step about 160 s (only its first 26 s are shown)"
    assert "first 90 s" in chain.heading(100.0)
    draw_panels([ours, chain], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_another_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(traced("stage 0", ("compute", "F0", 0.0, 1.0))))
    script = Path(__file__).resolve().parents[2] / "scripts" / "draw_trace"
    command = [sys.executable, str(script), "--arms", str(tmp_path / "t.json"), "-o", str(tmp_path / "p.png")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "expected traces of scripts/bench_pipeline run --trace" in result.stderr
