"""The trace of one step of an arm: what its processes wrote, merged, and cut to the newest step of the window."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.files import write_bytes
from peers.run_folder import RunFolder
from peers.trace import merge, read_trace
from protocol.errors import UserError

STEP = re.compile(r"(part of )?step (\d+)")

Event = dict[str, Any]


def process_file(folder: Path, process: str) -> Path:
    """Where a worker process of an arm leaves its trace."""
    return folder / f"trace-{process}.json"


def write_arm_trace(folder: Path, path: Path, newest: int, about: dict[str, Any]) -> None:
    """From the traces in the arm's `folder` to the one of a step, not after step `newest`.

    Args:
        about: what the picture says of the arm; kept in the file as `otherData`.

    Raises:
        UserError: there is no trace, or no step in it.
        OSError: it cannot be written.
    """
    files = sorted(folder.glob("trace-*.json"))
    files += [file for peer in RunFolder(folder / "run").peers() if (file := peer / "trace.json").exists()]
    trace = one_step(merge(map(read_trace, files)), newest)
    trace["otherData"] |= about
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, json.dumps(trace).encode())


def one_step(trace: dict[str, Any], newest: int) -> dict[str, Any]:
    """What of `trace` lies in the newest whole step up to step `newest`, or in what there is of a step.

    A step is that of the first process that has steps: of stage 0, where a step begins and ends, or of a chain's
    trainer. `otherData` says which it is (`step`), whether it is `whole`, and from when to when it lasted (`start`,
    `end`, in microseconds).

    Raises:
        UserError: there is none.
    """
    events: list[Event] = trace["traceEvents"]
    steps = [(int(named[2]), not named[1], event) for event in events if (named := _step_name(event))]
    first = min((event["pid"] for *_, event in steps), default=None)
    own = [(whole, step, event) for step, whole, event in steps if event["pid"] == first and step <= newest]
    if not own:
        raise UserError(f"expected a trace with a step up to step {newest}, there is none")
    whole, step, span = max(own, key=lambda one: one[:2])
    start, end = span["ts"], span["ts"] + span["dur"]
    about = {"step": step, "whole": whole, "start": start, "end": end}
    return {**trace, "traceEvents": _within(events, start, end), "otherData": about}


def _step_name(event: Event) -> re.Match[str] | None:
    return STEP.fullmatch(event["name"]) if event["ph"] == "X" else None


def _within(events: Sequence[Event], start: float, end: float) -> list[Event]:
    """What happened between `start` and `end`, even in part, and the names of the rows that are left."""
    kept = [e for e in events if e["ph"] != "M" and e["ts"] < end and e["ts"] + e.get("dur", 0) > start]
    rows = {(event["pid"], event["tid"]) for event in kept}
    names = [e for e in events if e["ph"] == "M" and ("tid" not in e or (e["pid"], e["tid"]) in rows)]
    return names + kept
