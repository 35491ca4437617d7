"""Properties of routes, frames and the stage machine: whatever a neighbour or a stranger sends, the rules hold."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.errors import BadFrame
from protocol.frame import HEADER_BYTES, Header, Kind, control, parse_control
from protocol.route import route
from protocol.stage_machine import (
    Arrived,
    Compute,
    Computed,
    Effect,
    Event,
    Refuse,
    Send,
    StageMachine,
    Stalled,
    StepApplied,
    ViewChanged,
)
from protocol.view import Replica, View
from protocol.work import APPLY, Action, Verb

# Routes

NAMES = st.text("abcdef0123456789", min_size=4, max_size=12)
WEIGHTS = st.floats(0.1, 10.0)
PEERS = st.lists(st.tuples(NAMES, WEIGHTS), min_size=2, max_size=6, unique_by=lambda peer: peer[0])
STEPS = st.integers(1, 2**32 - 1)
TENSOR_KINDS = st.sampled_from([Kind.FORWARD, Kind.BACKWARD])


def one_stage(peers: list[tuple[str, float]]) -> View:
    return View(1, 1, 9, (tuple(Replica(name, (), weight) for name, weight in peers),))


@given(PEERS, STEPS, st.data())
def test_a_replica_that_goes_moves_only_its_own_microbatches(
    peers: list[tuple[str, float]], step: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(peers))
    left = one_stage([peer for peer in peers if peer is not gone])
    for microbatch in range(40):
        before, after = (route(view, step, microbatch)[0] for view in (one_stage(peers), left))
        assert after != gone[0] and before in (after, gone[0])


@given(PEERS, STEPS)
def test_a_stage_is_routed_whatever_the_others_are(peers: list[tuple[str, float]], step: int) -> None:
    view = one_stage(peers)
    wider = replace(view, stages=(*view.stages, (Replica("x"), Replica("y"))))
    assert all(route(wider, step, m)[0] == route(view, step, m)[0] for m in range(20))


@settings(max_examples=40)
@given(PEERS, st.integers(1, 2**31))
def test_shares_follow_the_weights(peers: list[tuple[str, float]], first_step: int) -> None:
    view, draws = one_stage(peers), 2000
    wins = Counter(route(view, first_step + t, m)[0] for t in range(draws // 20) for m in range(20))
    total = sum(weight for _, weight in peers)
    for name, weight in peers:
        share = weight / total
        assert abs(wins[name] - draws * share) <= 6 * (draws * share * (1 - share)) ** 0.5 + 1


# Frames

HEADERS = st.builds(
    Header,
    st.sampled_from(Kind),
    *(st.integers(0, (1 << bits) - 1) for bits in (32, 32, 32, 16, 8, 8)),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(HEADERS)
def test_headers_pack_and_unpack(header: Header) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_BYTES and Header.unpack(raw) == header


@given(HEADERS, HEADERS)
def test_different_headers_have_different_bytes(one: Header, other: Header) -> None:
    assert (one.pack() == other.pack()) == (one == other)


@given(st.binary(max_size=2 * HEADER_BYTES) | st.binary(min_size=16, max_size=16).map(lambda raw: b"Is\x01\x01" + raw))
def test_bytes_that_are_no_header_raise_bad_frame_and_nothing_else(raw: bytes) -> None:
    try:
        header = Header.unpack(raw)
    except BadFrame:
        return
    assert header.pack() == raw


@given(st.dictionaries(st.text(), JSON, max_size=5), st.text())
def test_control_messages_come_back(message: dict[str, Any], word: str) -> None:
    message["type"] = word
    assert parse_control(control(message).payload) == message


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()) | st.text().map(str.encode))
def test_bytes_that_are_no_message_raise_bad_frame_and_nothing_else(raw: bytes) -> None:
    try:
        message = parse_control(raw)
    except BadFrame:
        return
    assert isinstance(message["type"], str)


# The stage machine


class AnyNeighbours(RuleBasedStateMachine):
    """A stage machine among neighbours, honest and not, and a coordinator that changes its mind.

    Every third step has a microbatch more. The routes stay what they are (this release serves each stage by the same
    peers to the end); all else may come.
    """

    @initialize(
        stages=st.integers(1, 4),
        replicas=st.integers(1, 2),
        microbatches=st.integers(1, 4),
        window=st.integers(1, 3),
        applied=st.sampled_from([0, 5]),
        data=st.data(),
    )
    def start(
        self, stages: int, replicas: int, microbatches: int, window: int, applied: int, data: st.DataObject
    ) -> None:
        self.layout = tuple(tuple(Replica(f"s{s}r{r}") for r in range(replicas)) for s in range(stages))
        self.stage = data.draw(st.integers(0, stages - 1))
        self.peer = f"s{self.stage}r0"
        self.microbatches, self.window = microbatches, window
        self.machine = StageMachine(self.peer, self.plan, window, applied)
        self.everyone = [r.peer for rs in self.layout for r in rs] + ["stranger"]
        self.view = View(0, applied + 1, 0, self.layout)
        self.running: Compute | None = None
        self.began: set[tuple[int, str]] = set()
        self.ended: set[tuple[int, str]] = set()
        self.sent: set[tuple[Kind, int, int]] = set()
        self.applied = applied

    # What may happen

    @rule(
        peer=st.integers(0, 8),
        kind=TENSOR_KINDS,
        view=st.integers(0, 6) | st.just(2**32 - 1),
        ahead=st.integers(-3, 4) | st.just(2**31),
        microbatch=st.integers(-1, 5) | st.just(65535),
    )
    def anything_arrives(self, peer: int, kind: Kind, view: int, ahead: int, microbatch: int) -> None:
        sender = self.everyone[peer % len(self.everyone)]
        step = max(0, self.applied + ahead)
        effects = self.feed(Arrived(sender, kind, view, step, microbatch, "?"))
        if self.view.number == 0 or view > self.view.number:
            assert all(isinstance(effect, Refuse) for effect in effects), "held or refused"
            return
        welcome = microbatch in self.mine(step) and sender == self.sender(kind, step, microbatch)
        if view < self.view.number or not welcome:
            assert [type(effect) for effect in effects] == [Refuse]

    @rule(kind=TENSOR_KINDS, ahead=st.sampled_from([0, 1, 1, 1, 2]), later=st.booleans(), pick=st.integers(0, 4))
    def a_neighbour_sends(self, kind: Kind, ahead: int, later: bool, pick: int) -> None:
        """An honest frame: from the right peer, of about this step, under this view or, at times, the next."""
        step, microbatch = self.applied + ahead, pick % self.plan(self.applied + ahead)
        sender = self.sender(kind, step, microbatch)
        if sender is None or step < 1:
            return
        number = self.view.number + (later and pick == 0)
        effects = self.feed(Arrived(sender, kind, number, step, microbatch, "x"))
        repeat = kind is Kind.FORWARD and number == self.view.number and (step, f"B{microbatch}") in self.ended
        if repeat and ahead == 0:
            assert [type(effect) for effect in effects] == [Send], "its gradient was lost"

    @precondition(lambda self: self.view.number > 0 and self.stage > 0)
    @rule()
    def all_inputs_of_the_step_come(self) -> None:
        for microbatch in range(self.plan(self.applied + 1)):
            sender = route(self.view, self.applied + 1, microbatch)[self.stage - 1]
            self.feed(Arrived(sender, Kind.FORWARD, self.view.number, self.applied + 1, microbatch, "x"))

    @precondition(lambda self: self.running is not None)
    @rule()
    def the_computation_ends(self) -> None:
        work, self.running = self.running, None
        assert work is not None
        self.ended.add((work.step, str(work.action)))
        ends_here = {Verb.FORWARD: len(self.layout) - 1, Verb.BACKWARD: 0, Verb.APPLY: self.stage}
        made = None if self.stage == ends_here[work.action.verb] else f"{work.action}"
        self.feed(Computed(work.action, made))

    @rule(ahead=st.integers(-2, 5))
    def a_view_comes(self, ahead: int) -> None:
        self.view = replace(self.view, number=self.view.number + 1, last_step=max(1, self.applied + ahead))
        self.feed(ViewChanged(self.view))

    @rule(back=st.integers(0, 2), last_step=st.integers(0, 9))
    def an_old_view_comes(self, back: int, last_step: int) -> None:
        assume(self.view.number > back)
        self.feed(ViewChanged(replace(self.view, number=self.view.number - back, last_step=last_step)))

    @rule()
    def a_view_without_this_peer_comes(self) -> None:
        before = self.machine.view
        others = tuple((Replica(f"new{s}"),) for s in range(len(self.layout)))
        self.feed(ViewChanged(View(self.view.number + 1, 1, 99, others)))
        assert self.machine.view is before

    @rule(peer=st.none() | st.integers(0, 8))
    def a_stall_or_a_restored_link(self, peer: int | None) -> None:
        self.feed(Stalled(None if peer is None else self.everyone[peer % len(self.everyone)]))

    # What must hold

    def feed(self, event: Event) -> list[Effect]:
        refusals_ok = isinstance(event, Arrived | ViewChanged | Computed)
        effects = self.machine.handle(event)
        for effect in effects:
            assert refusals_ok or not isinstance(effect, Refuse)
            self.check(effect)
        assert self.machine.waits_for()
        return effects

    def check(self, effect: Effect) -> None:
        match effect:
            case Compute():
                self.check_compute(effect)
            case Send():
                self.check_send(effect)
            case StepApplied(step, last):
                assert (step, "APPLY") in self.ended and step == self.applied + 1 == self.machine.applied
                assert last == (step >= self.view.last_step)
                self.applied = step

    def check_compute(self, work: Compute) -> None:
        key = (work.step, str(work.action))
        assert self.running is None, f"{work} while {self.running} runs"
        assert key not in self.began, f"{work} a second time"
        assert self.view.number > 0 and work.step == self.applied + 1
        mine = self.mine(work.step)
        if work.action.verb is Verb.FORWARD:
            assert work.action.microbatch in mine and (work.payload is None) == (self.stage == 0)
        elif work.action.verb is Verb.BACKWARD:
            older = [m for m in mine if m < work.action.microbatch]
            assert (work.step, f"F{work.action.microbatch}") in self.ended, f"{work} before its forward"
            assert all((work.step, f"B{m}") in self.ended for m in older), f"{work} before an older one"
            assert (work.payload is None) == (self.stage == len(self.layout) - 1)
        else:
            assert work.action == APPLY and all((work.step, f"B{m}") in self.ended for m in mine)
        self.began.add(key)
        self.running = work

    def check_send(self, send: Send) -> None:
        forward = send.kind is Kind.FORWARD
        made = str(Action(Verb.FORWARD if forward else Verb.BACKWARD, send.microbatch))
        assert (send.step, made) in self.ended and send.payload == made
        assert send.stage == self.stage + (1 if forward else -1) and send.view == self.view.number
        assert send.peer == route(self.view, send.step, send.microbatch)[send.stage]
        assert send.step >= self.applied, "older steps are known to have arrived"

    def sender(self, kind: Kind, step: int, microbatch: int) -> str | None:
        """Who should send it, if anybody."""
        source = self.stage - 1 if kind is Kind.FORWARD else self.stage + 1
        return route(self.view, step, microbatch)[source] if 0 <= source < len(self.layout) else None

    def plan(self, step: int) -> int:
        return self.microbatches + (step % 3 == 0)

    def mine(self, step: int) -> list[int]:
        return [m for m in range(self.plan(step)) if route(self.view, step, m)[self.stage] == self.peer]

    @invariant()
    def memory_is_bounded(self) -> None:
        machine = self.machine
        held = Counter(peer for peer, *_ in machine._early)
        most = self.microbatches + 1
        assert held.total() <= 8 * most and all(n <= 2 * most for n in held.values())
        assert len(machine._outbox) <= 2 * most
        assert len(machine._inputs) <= most
        assert machine.step is None or machine.step.in_flight() <= self.window + 1

    @invariant()
    def no_work_lies_idle(self) -> None:
        machine = self.machine
        if machine.step is not None and self.running is None:
            assert machine.step.next_action(self.window) is None


AnyNeighbours.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestAnyNeighbours = AnyNeighbours.TestCase
