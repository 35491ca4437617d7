"""Links as homes have them: one uplink and one downlink a peer, shared by all it talks to, full duplex.

A frame goes in small pieces, so its head is on its way, or on the other's downlink, while its tail still waits: as a
stream's packets are. Nothing is lost and nobody's rate is throttled: what congestion control makes of it is the lab's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from simulated_swarm.clock import Clock

from pipeline_model.layout import Layout, Order
from protocol.frame import Kind

PIECES = 16  # a frame, at most
SMALLEST = 1500


@dataclass(slots=True)
class _Frame:
    kind: Kind
    to: int
    delay: float
    piece: float
    left: int
    arrived: Callable[[], None]


class _Line:
    """One direction of a home's link: pieces of several flows, by turns."""

    def __init__(self, clock: Clock, rate: float | None, leaves: Callable[[_Frame], None]) -> None:
        self._clock, self._rate, self._leaves = clock, rate, leaves
        self._flows: dict[Hashable, deque[_Frame]] = {}
        self._busy = False
        self.bytes = 0.0

    def put(self, flow: Hashable, frame: _Frame) -> None:
        """A piece to send."""
        if self._rate is None:
            self.bytes += frame.piece
            self._leaves(frame)
            return
        self._flows.setdefault(flow, deque()).append(frame)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        # A flow that was served goes to the end, unless flows are ranks: then the least has priority.
        ranked = all(isinstance(flow, float) for flow in self._flows)
        flow = min(self._flows, key=str) if ranked and self._flows else next(iter(self._flows), None)
        self._busy = flow is not None
        if flow is None:
            return
        waiting = self._flows.pop(flow)
        frame = waiting.popleft()
        if waiting:
            self._flows[flow] = waiting
        assert self._rate is not None
        self.bytes += frame.piece
        self._clock.after(frame.piece / self._rate, lambda: self._left(frame))

    def _left(self, frame: _Frame) -> None:
        self._leaves(frame)
        self._next()


class Wires:
    """All links of a layout."""

    def __init__(self, clock: Clock, layout: Layout) -> None:
        self._clock, self._layout = clock, layout
        self.up = [_Line(clock, home.up, self._fly) for home in layout.homes]
        self.down = [_Line(clock, home.down, self._land) for home in layout.homes]

    def send(self, source: int, to: int, kind: Kind, arrived: Callable[[], None]) -> None:
        """Send a frame, and call `arrived` at its last byte."""
        size = self._layout.frame_bytes(kind)
        pieces = max(1, min(PIECES, size // SMALLEST))
        frame = _Frame(kind, to, self._layout.delay(source, to), size / pieces, pieces, arrived)
        for _ in range(pieces):
            self.up[source].put(_flow(self._layout.order, frame), frame)

    def _fly(self, frame: _Frame) -> None:
        self._clock.after(frame.delay, lambda: self.down[frame.to].put("", frame))

    def _land(self, frame: _Frame) -> None:
        frame.left -= 1
        if frame.left == 0:
            frame.arrived()


def _flow(order: Order, frame: _Frame) -> Hashable:
    if order == "fair":
        return frame.to
    return "" if order == "fifo" else float(frame.kind is Kind.FORWARD)
