"""Interleaved stages: peer p of P holds the slices p, p + P, ...: each a stage of its own, all on one device.

The machines of the protocol serve one stage each, so this is simpler code around the same `StepState`: when the device
is free it does a backward if any slice has one, the deepest slice's first, else a forward of the deepest slice. The
deepest is the nearest to the loss. Credits are fixed: `layout.window` for each slice.
"""

from __future__ import annotations

from collections.abc import Callable

from simulated_swarm.clock import Clock

from pipeline_model.layout import Layout
from protocol.frame import Kind
from protocol.step_state import Signal, StepState
from protocol.work import APPLY, Action, Verb


class SlicedHost:
    """A peer with all its slices. `send` takes (kind, the other virtual stage, what happens there)."""

    def __init__(
        self, clock: Clock, layout: Layout, index: int, send: Callable[[Kind, int, Callable[[SlicedHost], None]], None]
    ) -> None:
        self._clock, self._layout, self._send = clock, layout, send
        self._home = layout.homes[index]
        self._stages = range(index, layout.stages, len(layout.homes))
        self._early: list[tuple[int, int, Signal, int]] = []
        self._running = False
        self._most = 0
        self.steps = 0  # how many are asked for
        self.applied_at: list[float] = []
        self.most_in_flight: list[int] = []
        self.credits: list[int] = []
        self.busy = 0.0
        self._begin()

    def start(self) -> None:
        """Begin to work."""
        if self._running or len(self.applied_at) >= self.steps:
            return
        stage, action = self._next()
        if action is None:
            return
        self._running = True
        share = 1 if action is APPLY else self._layout.slices
        seconds = self._home.seconds(action.verb) / share
        self.busy += seconds
        if action is not APPLY:
            signal = Signal.START_F if action.verb is Verb.FORWARD else Signal.START_B
            self._states[stage].move(action.microbatch, signal)
            self._most = max(self._most, sum(state.in_flight() for state in self._states.values()))
        self._clock.after(seconds, lambda: self._ended(stage, action))

    def arrived(self, stage: int, step: int, signal: Signal, microbatch: int) -> None:
        """Coordinates or a gradient."""
        if step != len(self.applied_at) + 1:
            self._early.append((stage, step, signal, microbatch))
            return
        self._states[stage].move(microbatch, signal)
        self.start()

    def _begin(self) -> None:
        step, last = len(self.applied_at) + 1, self._layout.stages - 1
        every = range(self._layout.microbatches)
        self._states = {stage: StepState(step, every, stage == 0, stage == last) for stage in self._stages}
        self._most = 0
        early, self._early = self._early, []
        for event in early:
            self.arrived(*event)

    def _next(self) -> tuple[int, Action | None]:
        found = [(s, self._states[s].next_action(self._layout.window)) for s in reversed(self._stages)]
        actions = [(stage, action) for stage, action in found if action is not None]
        backwards = [(stage, action) for stage, action in actions if action.verb is Verb.BACKWARD]
        if not actions:
            done = all(state.complete for state in self._states.values())
            return -1, APPLY if done else None
        return (backwards or actions)[0]

    def _ended(self, stage: int, action: Action) -> None:
        self._running = False
        step = len(self.applied_at) + 1
        if action is APPLY:
            self.applied_at.append(self._clock.now)
            self.most_in_flight.append(self._most)
            self._begin()
        else:
            self._pass_on(stage, step, action)
        self.start()

    def _pass_on(self, stage: int, step: int, action: Action) -> None:
        forward, m = action.verb is Verb.FORWARD, action.microbatch
        self._states[stage].move(m, Signal.END_F if forward else Signal.END_B)
        kind, to = (Kind.FORWARD, stage + 1) if forward else (Kind.BACKWARD, stage - 1)
        signal = Signal.INPUT if forward else Signal.GRADIENT
        if 0 <= to < self._layout.stages:
            self._send(kind, to, lambda host: host.arrived(to, step, signal, m))
