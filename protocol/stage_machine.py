"""The step protocol at one peer: events in, effects out. No I/O, no clock, no tensors; payloads are opaque.

Rules
  1. One compute action runs at a time; `protocol.step_state` picks it.
  2. A forward goes to the next stage's replica for that microbatch, its gradient comes back from there and goes to
     the previous stage's. Routes are `protocol.route` over the newest view.
  3. When every microbatch routed here is done, APPLY; then the next step starts. Nobody is asked.
  4. Messages are sent at least once and take effect once, by (step, microbatch, direction). A sender keeps a
     forward until its gradient is back, and a step's gradients until it has applied the *next* step: by then the
     previous stage has sent forwards of that next step, so it had them all.
  5. A forward that comes again for a finished microbatch means that its gradient was lost: the gradient is sent
     again. So a stalled stage need only send its open forwards again, and losses heal down the whole pipeline.
  6. What carries an older view is refused with the reason. What carries a newer one waits for that view.
     A new view sends everything kept again, under its number.
  7. What is held early (frames of the next step, or of a view still to come) is bounded, for each sender and for
     all; a repeat takes no room. With a view, only that view's peers are given room.

    view ----------> [ idle ] --first view--> [ step t ] --APPLY done, t = last_step--> [ finished ]
                                               ^      |
                                               +------+ APPLY done, t < last_step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.frame import Kind
from protocol.outbox import Outbox
from protocol.route import route
from protocol.step_state import Phase, Signal, StepState
from protocol.view import View
from protocol.work import Action, Verb

Payload = Any


@dataclass(frozen=True, slots=True)
class Arrived:
    """A tensor frame came from `peer`. `codec` is its tag, handed on to whoever decodes it."""

    peer: str
    kind: Kind
    view: int
    step: int
    microbatch: int
    payload: Payload
    codec: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """The action that was started has ended; `payload` is what it made for a neighbour, if anything."""

    action: Action
    payload: Payload = None


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """A newer view was verified."""

    view: View


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing came for a long time, or (with `peer`) the link to that peer was lost and is back."""

    peer: str | None = None


Event = Arrived | Computed | ViewChanged | Stalled


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `action` of `step` on `payload` and report `Computed`."""

    step: int
    action: Action
    payload: Payload = None
    codec: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Send a tensor frame to `peer`, which serves `stage`."""

    peer: str
    kind: Kind
    view: int
    step: int
    microbatch: int
    stage: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not act on what `peer` sent; log the reason."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The stage has applied `step`. `last` if the view ends here."""

    step: int
    last: bool


Effect = Compute | Send | Refuse | StepApplied


class StageMachine:
    """The protocol state of `peer`, which has applied `applied` steps. `microbatches(step)` is how many a step has."""

    def __init__(self, peer: str, microbatches: Callable[[int], int], window: int, applied: int = 0) -> None:
        self.peer, self.applied = peer, applied
        self.view: View | None = None
        self.stage = -1
        self.step: StepState | None = None
        self._microbatches, self._window = microbatches, window
        self._inputs: dict[tuple[Kind, int], tuple[Payload, int]] = {}
        self._outbox = Outbox()
        self._early: dict[tuple[str, Kind, int, int, int], Arrived] = {}
        self._busy = False

    def handle(self, event: Event) -> list[Effect]:
        """The effects of `event`, in order."""
        match event:
            case Arrived():
                effects = self._arrived(event)
            case Computed():
                effects = self._computed(event)
            case ViewChanged():
                effects = self._view_changed(event.view)
            case Stalled(peer):
                effects = self._send_again(None if peer is None else peer, gradients=peer is not None)
        return effects + self._start_work()

    @property
    def finished(self) -> bool:
        """Whether the newest view asks for no further step."""
        return self.view is not None and self.applied >= self.view.last_step

    def waits_for(self) -> str:
        """What the machine is waiting for, for people: `nothing`, or the oldest input that is missing."""
        if self.view is None:
            return "a view"
        if self.step is None or self._busy:
            return "nothing"
        for microbatch in range(self._microbatches(self.step.step)):
            if microbatch in self.step and self.step.phase(microbatch) in (Phase.WAITING, Phase.FORWARDED):
                forward = self.step.phase(microbatch) is Phase.WAITING
                word, stage = ("coordinates", self.stage - 1) if forward else ("gradient", self.stage + 1)
                return f"the {word} of step {self.step.step}, microbatch {microbatch} from stage {stage}"
        return "nothing"

    # Events

    def _view_changed(self, view: View) -> list[Effect]:
        if self.view is not None and view.number <= self.view.number:
            return []
        stage = view.stage_of(self.peer)
        if stage is None:
            return [Refuse("coordinator", f"view {view.number} has no stage for this peer")]
        self.view, self.stage = view, stage
        if self.step is not None:
            self.step.add(self._routed(self.step.step))
        elif not self.finished:
            self._begin_step()
        return self._send_again(None, gradients=True) + self._replay_early()

    def _arrived(self, event: Arrived) -> list[Effect]:
        if self.view is None or event.view > self.view.number:
            return self._hold(event)
        if event.view < self.view.number:
            return [Refuse(event.peer, f"view {event.view} is over, the newest is {self.view.number}")]
        most = self._microbatches(event.step) - 1
        if not 0 <= event.microbatch <= most:
            return [Refuse(event.peer, f"microbatch {event.microbatch} of step {event.step} is not in 0..{most}")]
        refusal = self._misrouted(event)
        if refusal:
            return [Refuse(event.peer, refusal)]
        if event.step <= self.applied:
            return self._answer_repeat(event)
        if self.step is None or event.step > self.step.step:
            return self._hold(event)
        return self._take(event)

    def _take(self, event: Arrived) -> list[Effect]:
        assert self.step is not None
        signal = Signal.INPUT if event.kind is Kind.FORWARD else Signal.GRADIENT
        if not self.step.accepts(event.microbatch, signal):
            return self._answer_repeat(event)
        self.step.move(event.microbatch, signal)
        self._inputs[event.kind, event.microbatch] = (event.payload, event.codec)
        if event.kind is Kind.BACKWARD:
            self._outbox.forget(Kind.FORWARD, event.step, event.microbatch)
        return []

    def _computed(self, event: Computed) -> list[Effect]:
        assert self.step is not None and self.view is not None
        self._busy = False
        step, microbatch = self.step.step, event.action.microbatch
        match event.action.verb:
            case Verb.FORWARD:
                self.step.move(microbatch, Signal.END_F)
                return self._keep_and_send(Kind.FORWARD, step, microbatch, event.payload)
            case Verb.BACKWARD:
                self.step.move(microbatch, Signal.END_B)
                return self._keep_and_send(Kind.BACKWARD, step, microbatch, event.payload)
            case _:
                return self._step_applied(step)

    def _step_applied(self, step: int) -> list[Effect]:
        self.applied = step
        self._outbox.forget_before(step)
        self.step = None
        if self.finished:
            return [StepApplied(step, last=True)]
        self._begin_step()
        return [StepApplied(step, last=False), *self._replay_early()]

    # Parts

    def _begin_step(self) -> None:
        assert self.view is not None
        number, last = self.applied + 1, len(self.view.stages) - 1
        self.step = StepState(number, self._routed(number), self.stage == 0, self.stage == last)

    def _routed(self, step: int) -> list[int]:
        assert self.view is not None
        return [m for m in range(self._microbatches(step)) if route(self.view, step, m)[self.stage] == self.peer]

    def _start_work(self) -> list[Effect]:
        if self._busy or self.step is None:
            return []
        action = self.step.next_action(self._window)
        if action is None:
            return []
        self._busy = True
        payload, codec = None, 0
        if action.verb is not Verb.APPLY:
            forward = action.verb is Verb.FORWARD
            self.step.move(action.microbatch, Signal.START_F if forward else Signal.START_B)
            kind = Kind.FORWARD if forward else Kind.BACKWARD
            payload, codec = self._inputs.pop((kind, action.microbatch), (None, 0))
        return [Compute(self.step.step, action, payload, codec)]

    def _keep_and_send(self, kind: Kind, step: int, microbatch: int, payload: Payload) -> list[Effect]:
        if payload is None:
            return []
        self._outbox.keep(kind, step, microbatch, payload)
        return [self._send(kind, step, microbatch, payload)]

    def _send(self, kind: Kind, step: int, microbatch: int, payload: Payload) -> Send:
        assert self.view is not None
        stage = self.stage + 1 if kind is Kind.FORWARD else self.stage - 1
        peer = route(self.view, step, microbatch)[stage]
        return Send(peer, kind, self.view.number, step, microbatch, stage, payload)

    def _send_again(self, peer: str | None, gradients: bool) -> list[Effect]:
        if self.view is None:
            return []
        sends = [self._send(kind, step, m, payload) for kind, step, m, payload in self._outbox.kept(gradients)]
        return [send for send in sends if peer is None or send.peer == peer]

    def _answer_repeat(self, event: Arrived) -> list[Effect]:
        payload = self._outbox.find(Kind.BACKWARD, event.step, event.microbatch)
        if event.kind is Kind.BACKWARD or payload is None:
            return []
        return [self._send(Kind.BACKWARD, event.step, event.microbatch, payload)]

    def _misrouted(self, event: Arrived) -> str | None:
        assert self.view is not None
        source = self.stage - 1 if event.kind is Kind.FORWARD else self.stage + 1
        peers = route(self.view, event.step, event.microbatch)
        expected = peers[source] if 0 <= source < len(peers) else None
        if event.peer == expected and peers[self.stage] == self.peer:
            return None
        what = f"{event.kind.name.lower()} of step {event.step}, microbatch {event.microbatch} at stage {self.stage}"
        return f"expected the {what} from {expected or 'nobody'}, it came from {event.peer}"

    def _hold(self, event: Arrived) -> list[Effect]:
        refusal = self._no_room(event)
        if refusal:
            return [Refuse(event.peer, refusal)]
        self._early[event.peer, event.kind, event.view, event.step, event.microbatch] = event
        return []

    def _no_room(self, event: Arrived) -> str | None:
        if event.step > self.applied + 2:
            return f"step {event.step} is too early here: {self.applied} steps are applied"
        if self.view is not None and self.view.stage_of(event.peer) is None:
            return f"view {event.view} is not known here, and its sender is not in view {self.view.number}"
        two_steps = self._microbatches(self.applied + 1) + self._microbatches(self.applied + 2)
        from_peer = sum(peer == event.peer for peer, *_ in self._early)
        if from_peer >= two_steps or len(self._early) >= 4 * two_steps:
            return f"no room for more frames that are too early: {from_peer} of this sender are held"
        return None

    def _replay_early(self) -> list[Effect]:
        early, self._early = self._early, {}
        return [effect for event in early.values() for effect in self._arrived(event)]
