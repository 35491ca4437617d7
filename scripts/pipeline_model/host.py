"""One stage: its real machine, fed as `peers.stage_worker` feeds it, and a device that takes its time."""

from __future__ import annotations

from collections.abc import Callable

from simulated_swarm.clock import Clock

from pipeline_model.layout import Home, Layout
from protocol.credits import CreditMeter
from protocol.effects import Compute, Effect, Send, StepApplied
from protocol.events import Arrived, Computed, CreditsChanged, Event
from protocol.frame import Kind
from protocol.place import Rules
from protocol.stage_machine import StageMachine
from protocol.work import Verb

PAYLOAD = "numbers"


class StageHost:
    """Stage `index`. `send` takes (kind, the other stage, what happens there)."""

    def __init__(
        self, clock: Clock, layout: Layout, index: int, send: Callable[[Kind, int, Callable[[StageHost], None]], None]
    ) -> None:
        self._clock, self._layout, self._index, self._send = clock, layout, index, send
        self._home: Home = layout.homes[index]
        self.machine = StageMachine(peer_of(index), rules_of(layout))
        self._credits = CreditMeter(layout.window) if layout.measured else None
        self.applied_at: list[float] = []
        self.most_in_flight: list[int] = []  # of each step
        self.credits: list[int] = []  # after each step
        self.busy = 0.0

    def feed(self, event: Event) -> None:
        """As the stage worker does."""
        step, now = self.machine.applied + 1, self._clock.now
        credits = None if self._credits is None else self._credits.note(event, step, now)
        if credits is not None:
            self.credits.append(credits)
            self.feed(CreditsChanged(credits))
        for effect in self.machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Compute():
                seconds = self._home.seconds(effect.action.verb)
                self.busy += seconds
                event = Computed(effect.action, self._made(effect))
                self._clock.after(seconds, lambda: self.feed(event))
            case Send(_, kind, view, step, microbatch, stage, payload):
                arrived = Arrived(self.machine.peer, kind, view, step, microbatch, payload)
                self._send(kind, stage, lambda host: host.feed(arrived))
            case StepApplied():
                self.applied_at.append(self._clock.now)
                self.most_in_flight.append(effect.most_in_flight)
            case _:
                raise AssertionError(f"nothing fails here, so nobody should ask for {effect}")

    def _made(self, work: Compute) -> str | None:
        first, last = self._index == 0, self._index == self._layout.stages - 1
        passes_on = {Verb.FORWARD: not last, Verb.BACKWARD: not first}.get(work.action.verb, False)
        return PAYLOAD if passes_on else None


def peer_of(stage: int) -> str:
    """The name of the one that serves it."""
    return f"peer-{stage}"


def rules_of(layout: Layout) -> Rules:
    """The run's rules for the machines."""
    return Rules(
        microbatches=lambda step: layout.microbatches,
        window=layout.window,
        blob_bytes=lambda key: 0,
        copies=lambda step: 0,
        schedule=layout.schedule,
    )
