"""The tensors of the step under way at one replica: what came in, what went out, what is missing.

A forward goes to the next stage's replica for that microbatch; its gradient comes back from there and goes to the
previous stage's. What was sent is kept for two steps: when this peer has applied step t + 2, some replica of every
stage has applied t + 1, for which it needed the part of every replica of its group, so all of them have applied t.
Steps that are passed over do not count for that: nobody needs anybody in them.
"""

from __future__ import annotations

from protocol.effects import Compute, Effect, Irreplaceable, Payload, Refuse, Send, SendUsed, SendWant
from protocol.events import Arrived, Used, Wanted
from protocol.frame import Kind
from protocol.outbox import Outbox
from protocol.place import Place
from protocol.step_state import Phase, Signal, StepState
from protocol.work import RESET, Action, Verb

_TOUCHED = (Phase.BACKWARD, Phase.DONE)  # its gradient is, or will be, in the sum
_KEPT = (Phase.FORWARDING, Phase.FORWARDED, Phase.READY_B)  # its activations are in memory


class StepFlow:
    """The step after `place.applied`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.state: StepState | None = None
        self._inputs: dict[tuple[Kind, int], tuple[Payload, int, str]] = {}
        self._outbox = Outbox()
        self._dropped: set[int] = set()
        self._used: set[tuple[int, str]] = set()
        self._restart = False
        self._credits = place.rules.window
        self.most_in_flight = 0  # of the step under way

    def __len__(self) -> int:
        """Payloads that are kept."""
        return len(self._outbox) + len(self._inputs)

    # The step's life

    def begin(self) -> None:
        """The next step begins."""
        step, place = self._place.applied + 1, self._place
        self.state = StepState(step, place.routed(step), place.stage == 0, place.stage == place.last_stage)
        self.most_in_flight = 0

    def end(self) -> None:
        """The step is applied."""
        self._outbox.forget_before(self._place.worked(2))
        self._inputs.clear()
        self._dropped.clear()
        self._used.clear()
        self.state, self._restart = None, False

    def reroute(self, running: Action | None) -> bool:
        """A new view: take what is routed here now, let go of the rest. Whether what `running` makes is void.

        What a loss moves comes in addition. Only where a planned view came late can something be taken away that was
        done already: then its gradient is in the sum, from which nothing can be taken out, and the step is done again.
        """
        if self.state is None:
            return False
        now = set(self._place.routed(self.state.step))
        gone = set(self.state) - now
        if any(self.state.phase(m) in _TOUCHED for m in gone):
            self._restart = True
            self._inputs.clear()
            self.begin()
            return running is not None
        self._dropped |= {m for m in gone if self.state.phase(m) in _KEPT}
        self._inputs = {key: value for key, value in self._inputs.items() if key[1] not in gone}
        self.state.drop(gone)
        self.state.add(now)
        return running is not None and running.microbatch in gone

    # Events

    def arrived(self, event: Arrived) -> list[Effect]:
        """A tensor of this step or an earlier one, by the newest view."""
        most = self._place.microbatches(event.step) - 1
        if not 0 <= event.microbatch <= most:
            return [Refuse(event.peer, f"microbatch {event.microbatch} of step {event.step} is not in 0..{most}")]
        refusal = self._misrouted(event)
        if refusal:
            return [Refuse(event.peer, refusal)]
        signal = Signal.INPUT if event.kind is Kind.FORWARD else Signal.GRADIENT
        if self.state is None or event.step < self.state.step or not self.state.accepts(event.microbatch, signal):
            return self._answer_repeat(event)
        self.state.move(event.microbatch, signal)
        self._inputs[event.kind, event.microbatch] = (event.payload, event.codec, event.peer)
        if event.kind is Kind.BACKWARD:
            self._outbox.answered(event.step, event.microbatch)
        return []

    def computed(self, action: Action, payload: Payload) -> list[Effect]:
        """A forward or a backward has ended."""
        assert self.state is not None
        forward = action.verb is Verb.FORWARD
        self.state.move(action.microbatch, Signal.END_F if forward else Signal.END_B)
        effects: list[Effect] = [] if forward else self._say_used(self.state.step, action.microbatch)
        if payload is None:
            return effects
        kind = Kind.FORWARD if forward else Kind.BACKWARD
        self._outbox.keep(kind, self.state.step, action.microbatch, payload)
        return [*effects, *self._send(kind, self.state.step, action.microbatch, payload)]

    def used(self, event: Used) -> list[Effect]:
        """A neighbour has used a gradient."""
        if self.state is not None and event.step == self.state.step and event.microbatch in self.state:
            self._used.add((event.microbatch, event.peer))
        return []

    def credits_changed(self, credits: int) -> None:
        """So many microbatches may be in flight, within the window; what is in flight beyond them goes on."""
        self._credits = max(1, min(credits, self._place.rules.window))

    def void(self, action: Action) -> None:
        """It has ended, but its microbatch is routed elsewhere now: its activations are not needed."""
        if action.verb is Verb.FORWARD:
            self._dropped.add(action.microbatch)

    def spoiled(self, action: Action) -> None:
        """What had come for it does not decode: it is missing again."""
        assert self.state is not None
        self.state.move(action.microbatch, Signal.SPOILED)

    # Work

    def next_compute(self) -> Compute | None:
        """What can be done, if anything."""
        assert self.state is not None
        if self._restart or self._dropped:
            payload = None if self._restart else tuple(sorted(self._dropped))
            self._restart = False
            self._dropped.clear()
            return Compute(self.state.step, RESET, payload)
        action = self.state.next_action(self._credits, self._place.rules.schedule)
        if action is None:
            return None
        forward = action.verb is Verb.FORWARD
        self.state.move(action.microbatch, Signal.START_F if forward else Signal.START_B)
        kind = Kind.FORWARD if forward else Kind.BACKWARD
        self.most_in_flight = max(self.most_in_flight, self.state.in_flight())
        payload, codec, sender = self._inputs.pop((kind, action.microbatch), (None, 0, ""))
        stage = self._place.stage + (1 if forward else -1)
        receiver = self._place.server(stage, self.state.step, action.microbatch) or ""
        return Compute(self.state.step, action, payload, codec, sender, receiver)

    # Asking and sending again

    def missing(self) -> list[tuple[int, Kind]]:
        """The inputs that are awaited from neighbours: (microbatch, kind)."""
        if self.state is None:
            return []
        kinds = {Phase.WAITING: Kind.FORWARD, Phase.FORWARDED: Kind.BACKWARD}
        return [(m, kinds[self.state.phase(m)]) for m in self.state if self.state.phase(m) in kinds]

    def waits_for(self) -> str:
        """What is awaited from neighbours, in words; "": nothing."""
        step, here = self._place.applied + 1, self._place.stage
        for microbatch, kind in self.missing():
            word, stage = ("coordinates", here - 1) if kind is Kind.FORWARD else ("gradient", here + 1)
            return f"the {word} of step {step}, microbatch {microbatch} from stage {stage}"
        for microbatch, peer in self.unused():
            return f"word that {peer} has used the gradient of step {step}, microbatch {microbatch}"
        return ""

    def unused(self) -> list[tuple[int, str]]:
        """(microbatch, peer): gradients of the step that are made and of which that peer has not said it used them.

        Who is alone in its group leaves nobody who could apply the step without it.
        """
        place = self._place
        if self.state is None or place.stage == 0 or len(place.group(self.state.step)) < 2:
            return []
        made = [m for m in self.state if self.state.phase(m) is Phase.DONE]
        served = [(m, place.server(place.stage - 1, self.state.step, m)) for m in made]
        return [(m, peer) for m, peer in served if peer is not None and (m, peer) not in self._used]

    def again_unused(self) -> list[Effect]:
        """Send the gradients again of which nothing was heard."""
        step = self._place.applied + 1
        sent = [(m, self._outbox.find(Kind.BACKWARD, step, m)) for m, _ in self.unused()]
        return [send for m, payload in sent for send in self._send(Kind.BACKWARD, step, m, payload)]

    def wants(self, only: str | None = None) -> list[Effect]:
        """Questions for what is missing, to each neighbour (or only that one) that is to send it."""
        asked: dict[str, dict[Kind, list[int]]] = {}
        for microbatch, kind in self.missing():
            assert self.state is not None
            stage = self._place.stage + (-1 if kind is Kind.FORWARD else 1)
            peer = self._place.server(stage, self.state.step, microbatch)
            if peer is not None and only in (None, peer):
                asked.setdefault(peer, {}).setdefault(kind, []).append(microbatch)
        step, view = self._place.applied + 1, self._place.newest.number
        return [
            SendWant(peer, view, step, tuple(kinds.get(Kind.FORWARD, ())), tuple(kinds.get(Kind.BACKWARD, ())))
            for peer, kinds in asked.items()
        ]

    def answer(self, event: Wanted) -> list[Effect]:
        """Send what a neighbour misses, as far as it is here and routed to it."""
        effects: list[Effect] = []
        for kind, microbatches in ((Kind.FORWARD, event.forward), (Kind.BACKWARD, event.backward)):
            for microbatch in microbatches:
                payload = self._outbox.find(kind, event.step, microbatch)
                if payload is not None:
                    effects += [s for s in self._send(kind, event.step, microbatch, payload) if s.peer == event.peer]
                else:
                    effects += self._irreplaceable(kind, event, microbatch)
        return effects

    def _irreplaceable(self, kind: Kind, event: Wanted, microbatch: int) -> list[Effect]:
        """What was made of two steps is kept, so what is wanted of those and is not here nobody has."""
        place, step = self._place, event.step
        asker = place.stage + (1 if kind is Kind.FORWARD else -1)
        if not place.worked(2) <= step <= place.applied or not place.newest.restored < step:
            return []
        if (place.server(place.stage, step, microbatch), place.server(asker, step, microbatch)) != (
            place.peer,
            event.peer,
        ):
            return []
        what = "coordinates" if kind is Kind.FORWARD else "gradient"
        reason = (
            f"{event.peer} needs the {what} of step {step}, microbatch {microbatch} from stage {place.stage}, which "
            "has applied that step with the part of a peer that is lost"
        )
        return [Irreplaceable(place.newest.epoch, step, reason)]

    def again(self, peer: str) -> list[Effect]:
        """The link to `peer` was broken: send what it may have missed."""
        sends = [send for kept in self._outbox.unanswered() for send in self._send(*kept)]
        return [send for send in sends if send.peer == peer]

    def _answer_repeat(self, event: Arrived) -> list[Effect]:
        payload = self._outbox.find(Kind.BACKWARD, event.step, event.microbatch)
        if event.kind is Kind.BACKWARD:
            past = event.step <= self._place.applied
            done = past or (event.microbatch in self._here and self._here.phase(event.microbatch) is Phase.DONE)
            return self._say_used(event.step, event.microbatch) if done else []
        if payload is None:
            return []
        return [*self._send(Kind.BACKWARD, event.step, event.microbatch, payload)]

    @property
    def _here(self) -> StepState:
        assert self.state is not None
        return self.state

    def _say_used(self, step: int, microbatch: int) -> list[Effect]:
        place, source = self._place, self._place.stage + 1
        if place.stage == place.last_stage or len(place.newest.group(source, step)) < 2:
            return []
        peer = place.server(source, step, microbatch)
        return [] if peer is None else [SendUsed(peer, place.newest.number, step, microbatch)]

    def _send(self, kind: Kind, step: int, microbatch: int, payload: Payload) -> list[Send]:
        stage = self._place.stage + (1 if kind is Kind.FORWARD else -1)
        peer = self._place.server(stage, step, microbatch)
        if peer is None:
            return []
        return [Send(peer, kind, self._place.newest.number, step, microbatch, stage, payload)]

    def _misrouted(self, event: Arrived) -> str | None:
        place = self._place
        source = place.stage - 1 if event.kind is Kind.FORWARD else place.stage + 1
        expected = None
        if 0 <= source <= place.last_stage:
            expected = place.server(source, event.step, event.microbatch)
        if event.peer == expected and place.server(place.stage, event.step, event.microbatch) == place.peer:
            return None
        what = f"{event.kind.name.lower()} of step {event.step}, microbatch {event.microbatch} at stage {place.stage}"
        return f"expected the {what} from {expected or 'nobody'}, it came from {event.peer}"
