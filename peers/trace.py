"""What a peer did and when, of its newest steps, in the trace-event format that Perfetto and Chrome show.

    compute        F0 F1 F2 B0 ...      spans: what the compute thread did
    step           step 7               spans: from one update to the next
    to PEER        F0 F1 ...            spans: a frame, from when it was queued to when its last byte was handed over
    from PEER      B0 ...               instants: a frame has come

Who has something to say calls `span` or `instant` with times of `time.monotonic()`; most runs have the tracer that
forgets it all. Spans of one track may overlap; those that do are drawn in rows of their own. All clocks of a machine
agree, so the traces of its peers fit together.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from peers.files import write_bytes
from protocol.errors import UserError
from protocol.frame import Header, Kind
from protocol.membership_events import short_peer

logger = logging.getLogger(__name__)

STEPS = 4
MOST_EVENTS = 50_000  # a step; what comes after is not kept

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}


class Tracer(Protocol):
    """Takes what happens."""

    def span(self, track: str, name: str, start: float, end: float) -> None:
        """Something lasted from `start` to `end`."""

    def instant(self, track: str, name: str) -> None:
        """Something happened now."""

    def step(self, step: int, start: float, end: float) -> None:
        """`step` is done; what comes is of the next one."""


class _Forgets:
    """The tracer of a run that is not traced."""

    def span(self, track: str, name: str, start: float, end: float) -> None:
        """Forget it."""

    def instant(self, track: str, name: str) -> None:
        """Forget it."""

    def step(self, step: int, start: float, end: float) -> None:
        """Forget it."""


NO_TRACE: Tracer = _Forgets()


class StepTracer:
    """Keeps the newest `steps` steps, and what has come since. May be called from any thread."""

    def __init__(self, steps: int = STEPS) -> None:
        self._steps: deque[list[tuple[str, str, float, float | None]]] = deque([[]], maxlen=steps + 1)
        self._epoch = time.time() - time.monotonic()

    def span(self, track: str, name: str, start: float, end: float) -> None:
        """See `Tracer`."""
        self._add((track, name, start, end))

    def instant(self, track: str, name: str) -> None:
        """See `Tracer`."""
        self._add((track, name, time.monotonic(), None))

    def step(self, step: int, start: float, end: float) -> None:
        """See `Tracer`."""
        self._add(("step", f"step {step}", start, end))
        self._steps.append([])

    def _add(self, event: tuple[str, str, float, float | None]) -> None:
        newest = self._steps[-1]
        if len(newest) < MOST_EVENTS:
            newest.append(event)

    def to_json(self, process: str) -> dict[str, Any]:
        """The trace of a process that is to be called `process`."""
        events = [event for step in list(self._steps) for event in list(step)]
        tracks = sorted({event[0] for event in events}, key=_order)
        rows = [row for track in tracks for row in _rows(track, [e for e in events if e[0] == track])]
        pid = os.getpid()
        made: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}]
        for tid, (name, row) in enumerate(rows, 1):
            made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
            made.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
            made += [self._event(event, pid, tid) for event in row]
        return {"traceEvents": made, "displayTimeUnit": "ms"}

    def write(self, path: Path, process: str) -> None:
        """Write it.

        Raises:
            OSError: it cannot be written.
        """
        write_bytes(path, json.dumps(self.to_json(process)).encode())

    def _event(self, event: tuple[str, str, float, float | None], pid: int, tid: int) -> dict[str, Any]:
        track, name, start, end = event
        made = {"name": name, "cat": track.split(" ")[0], "pid": pid, "tid": tid, "ts": self._microseconds(start)}
        if end is None:
            return {**made, "ph": "i", "s": "t"}
        return {**made, "ph": "X", "dur": round(1e6 * (end - start), 1)}

    def _microseconds(self, at: float) -> float:
        return round(1e6 * (at + self._epoch), 1)


class TraceFile:
    """Where the trace of a peer goes when it ends; without a `tracer`, nowhere."""

    def __init__(self, path: Path, tracer: StepTracer | None, peer: str) -> None:
        self._path, self._tracer, self._peer = path, tracer, peer

    def write(self, stage: int | None) -> None:
        """Write it. `stage`: the one that the peer served last. A full disk costs the trace, and nothing else."""
        if self._tracer is None:
            return
        place = "no stage" if stage is None else f"stage {stage}"
        try:
            self._tracer.write(self._path, f"{place}: peer {short_peer(self._peer)}")
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)


def frame_name(header: Header) -> str:
    """What to call a frame: F3, B3, control, chunk."""
    letter = _LETTERS.get(header.kind)
    return header.kind.name.lower() if letter is None else f"{letter}{header.microbatch}"


def merge(traces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One trace of several processes, in the order of their names."""
    whole = sorted((list(trace["traceEvents"]) for trace in traces), key=lambda events: str(_process_name(events)))
    events = [{**event, "pid": pid} for pid, events in enumerate(whole, 1) for event in events]
    order = [
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for pid in range(1, len(whole) + 1)
    ]
    return {"traceEvents": order + events, "displayTimeUnit": "ms"}


def read_trace(path: Path) -> dict[str, Any]:
    """The trace in `path`.

    Raises:
        UserError: there is none.
    """
    try:
        trace = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"expected a trace in {path}, as --trace writes it: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise UserError(f"expected a trace in {path}, as --trace writes it, got other JSON")
    return trace


def _process_name(events: Sequence[Mapping[str, Any]]) -> str:
    return next((event["args"]["name"] for event in events if event["name"] == "process_name"), "")


def _order(track: str) -> tuple[int, str]:
    first = ("step", "compute", "to", "from")
    word = track.split(" ")[0]
    return (first.index(word) if word in first else len(first)), track


def _rows(
    track: str, events: Sequence[tuple[str, str, float, float | None]]
) -> list[tuple[str, list[tuple[str, str, float, float | None]]]]:
    """The events of a track in as few rows as hold them without an overlap; each row with its name."""
    rows: list[list[tuple[str, str, float, float | None]]] = []
    free: list[float] = []  # from when on each row is
    for event in sorted(events, key=lambda event: event[2]):
        row = next((index for index, end in enumerate(free) if end <= event[2]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(0.0)
        rows[row].append(event)
        free[row] = event[2] if event[3] is None else event[3]
    return [(track if index == 0 else f"{track} ({index + 1})", row) for index, row in enumerate(rows)]
