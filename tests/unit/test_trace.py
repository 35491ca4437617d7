"""Traces: the newest steps, rows without overlaps, one file of several peers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from peers import trace
from peers.compute import ComputeThread
from peers.trace import NO_TRACE, StepTracer, TraceFile, frame_name, merge, read_trace
from protocol.errors import UserError
from protocol.frame import Header, Kind
from protocol.work import Action, Verb


def named(made: dict[str, Any], phase: str) -> list[str]:
    return [event["name"] for event in made["traceEvents"] if event["ph"] == phase]


def rows(made: dict[str, Any]) -> dict[str, list[str]]:
    """What each row shows, by the row's name."""
    events = made["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return {
        name: [event["name"] for event in events if event["ph"] in "Xi" and event["tid"] == tid]
        for tid, name in names.items()
    }


def test_only_the_newest_steps_are_kept() -> None:
    tracer = StepTracer(steps=2)
    for step in range(1, 6):
        tracer.span("compute", f"F{step}", step, step + 0.5)
        tracer.step(step, step, step + 1)
    tracer.span("compute", "F9", 9.0, 9.5)
    assert named(tracer.to_json("p"), "X") == ["step 4", "step 5", "F4", "F5", "F9"]


def test_a_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 3)
    tracer = StepTracer()
    for _ in range(10):
        tracer.instant("from p", "F0")
    assert len(named(tracer.to_json("p"), "i")) == 3


def test_overlapping_spans_get_rows_of_their_own() -> None:
    tracer = StepTracer()
    for name, start, end in (("F0", 0.0, 2.0), ("F1", 1.0, 3.0), ("F2", 2.0, 4.0), ("F3", 2.5, 2.6)):
        tracer.span("to p", name, start, end)
    tracer.span("compute", "B0", 0.0, 1.0)
    assert rows(tracer.to_json("p")) == {
        "compute": ["B0"], "to p": ["F0", "F2"], "to p (2)": ["F1"], "to p (3)": ["F3"],
    }  # fmt: skip


def test_times_are_those_of_the_wall() -> None:
    tracer, start = StepTracer(), time.monotonic()
    tracer.span("compute", "F0", start, start + 0.25)
    (event,) = (event for event in tracer.to_json("p")["traceEvents"] if event["ph"] == "X")
    assert abs(event["ts"] / 1e6 - time.time()) < 60 and event["dur"] == pytest.approx(250_000)


def test_the_compute_thread_tells_its_tracer() -> None:
    tracer = StepTracer()
    compute = ComputeThread(tracer=tracer)
    asyncio.run(compute.run(lambda: 1, Action(Verb.FORWARD, 3)))
    asyncio.run(compute.run(lambda: 1))
    compute.close()
    assert rows(tracer.to_json("p")) == {"compute": ["F3", "other"]}


def test_traces_of_several_peers_become_one(tmp_path: Path) -> None:
    for stage, peer in ((1, "b"), (0, "a")):
        tracer = StepTracer()
        tracer.span("compute", f"F{stage}", 1.0, 2.0)
        TraceFile(tmp_path / f"{peer}.json", tracer, f"peer-{peer}").write(stage)
    made = merge(read_trace(path) for path in sorted(tmp_path.glob("*.json"), reverse=True))
    processes = {e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"}
    assert processes == {1: "stage 0: peer peer-a", 2: "stage 1: peer peer-b"}
    assert [(e["pid"], e["name"]) for e in made["traceEvents"] if e["ph"] == "X"] == [(1, "F0"), (2, "F1")]
    json.dumps(made)


def test_no_tracer_writes_nothing(tmp_path: Path) -> None:
    TraceFile(tmp_path / "t.json", None, "p").write(0)
    NO_TRACE.span("a", "b", 0.0, 1.0)
    NO_TRACE.instant("a", "b")
    NO_TRACE.step(1, 0.0, 1.0)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_the_trace_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TraceFile(tmp_path / "none" / "t.json", StepTracer(), "p").write(None)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"traceEvents": 3}'])
def test_what_is_no_trace(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="expected a trace in "):
        read_trace(path)


def test_frames_have_short_names() -> None:
    assert frame_name(Header(Kind.FORWARD, 1, microbatch=3)) == "F3"
    assert frame_name(Header(Kind.BACKWARD, 1, microbatch=0)) == "B0"
    assert (frame_name(Header(Kind.CONTROL, 1)), frame_name(Header(Kind.CHUNK, 1))) == ("control", "chunk")


def swarm_trace(steps: tuple[int, ...]) -> dict[str, Any]:
    """Two stages of two steps each; the second stage has only those in `steps`."""
    traces = []
    for stage in (0, 1):
        tracer, other = StepTracer(), f"QmPeer{1 - stage}"
        for step in (1, 2):
            if stage == 0 or step in steps:
                tracer.span("compute", "F0", step, step + 0.4)
                tracer.span(f"to {other}", "F0", step + 0.4, step + 0.6)
                tracer.span(f"to {other}", "F1", step + 0.5, step + 0.7)
                tracer.instant(f"from {other}", "B0")
                tracer.step(step, step, step + 1)
        traces.append(tracer.to_json(f"stage {stage}: peer QmPeer{stage}"))
    return merge(traces)


@pytest.mark.parametrize(("steps", "wanted", "code"), [((1,), "1", 0), ((1, 2), "", 0), ((1,), "2", 2), ((), "", 2)])
def test_one_step_is_drawn(steps: tuple[int, ...], wanted: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(swarm_trace(steps)))
    script = Path(__file__).resolve().parents[2] / "scripts" / "draw_trace"
    options = ["--step", wanted] if wanted else []
    command = [sys.executable, str(script), str(tmp_path / "trace.json"), *options, "-o", str(tmp_path / "step.png")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert (tmp_path / "step.png").exists() is (code == 0)
    assert code == 0 or "expected a step that all stages have" in result.stderr
