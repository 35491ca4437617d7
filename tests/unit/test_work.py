"""What a stage does next: actions as strings, the table of one step, and the outbox."""

from __future__ import annotations

import pytest

from protocol.frame import Kind
from protocol.outbox import Outbox
from protocol.step_state import Phase, Signal, StepState
from protocol.work import APPLY, Action, Schedule, Verb

# Actions


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3", Action(Verb.FORWARD, 3)),
        ("B0", Action(Verb.BACKWARD, 0)),
        ("SEND_F12", Action(Verb.SEND_FORWARD, 12)),
        ("SEND_B65535", Action(Verb.SEND_BACKWARD, 65535)),
        ("APPLY", APPLY),
        *((verb.value, Action(verb)) for verb in (Verb.PART, Verb.RESET, Verb.STATE, Verb.LOAD)),
    ],
)
def test_actions_print_and_parse_back(text: str, action: Action) -> None:
    assert str(action) == text and Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F", "f3", "F-1", "3", "APPLY3", "PART1", "RESET ", "load", "SEND_3", "F3 ", " F3", "F3B3", "B3\n"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action such as F3"):
        Action.parse(text)


# One step


def drive(state: StepState, *signals: tuple[int, Signal]) -> None:
    for microbatch, signal in signals:
        state.move(microbatch, signal)


FORWARD = (Signal.INPUT, Signal.START_F, Signal.END_F)
BACKWARD = (Signal.GRADIENT, Signal.START_B, Signal.END_B)


def test_the_first_stage_needs_no_input_and_the_last_no_gradient() -> None:
    first, last, only = StepState(1, [0], True, False), StepState(1, [0], False, True), StepState(1, [0], True, True)
    assert first.next_action(1) == Action.parse("F0") and last.next_action(1) is None
    drive(first, (0, Signal.START_F), (0, Signal.END_F))
    assert first.phase(0) is Phase.FORWARDED and first.next_action(1) is None
    drive(last, *((0, s) for s in FORWARD))
    assert last.next_action(1) == Action.parse("B0")
    drive(only, (0, Signal.START_F), (0, Signal.END_F), (0, Signal.START_B), (0, Signal.END_B))
    assert only.complete and only.next_action(1) is None


def test_a_backward_waits_for_all_older_ones() -> None:
    state = StepState(1, range(3), False, False)
    drive(state, *((m, s) for m in range(3) for s in FORWARD), (1, Signal.GRADIENT), (2, Signal.GRADIENT))
    assert state.next_action(3) is None
    state.move(0, Signal.GRADIENT)
    assert state.next_action(3) == Action.parse("B0")
    drive(state, (0, Signal.START_B), (0, Signal.END_B))
    assert state.next_action(3) == Action.parse("B1")


def test_a_backward_goes_before_a_forward() -> None:
    state = StepState(1, range(2), False, True)
    drive(state, *((0, s) for s in FORWARD), (1, Signal.INPUT))
    assert state.next_action(5) == Action.parse("B0")


def test_the_window_bounds_what_is_in_flight() -> None:
    state = StepState(1, range(4), True, False)
    for microbatch in range(2):
        assert state.next_action(2) == Action(Verb.FORWARD, microbatch)
        drive(state, (microbatch, Signal.START_F), (microbatch, Signal.END_F))
    assert state.in_flight() == 2 and state.next_action(2) is None
    drive(state, *((0, s) for s in BACKWARD))
    assert state.in_flight() == 1 and state.next_action(2) == Action.parse("F2")


def test_the_oldest_goes_forward_over_a_full_window() -> None:
    """Else a late oldest microbatch could never end, nor anything behind it."""
    state = StepState(1, range(4), False, False)
    drive(state, *((m, s) for m in (1, 2) for s in FORWARD), (3, Signal.INPUT))
    assert state.next_action(2) is None
    state.move(0, Signal.INPUT)
    assert state.next_action(2) == Action.parse("F0")
    drive(state, (0, Signal.START_F), (0, Signal.END_F))
    assert state.in_flight() == 3 and state.next_action(2) is None


def test_gpipe_does_all_forwards_first_whatever_the_credits() -> None:
    state = StepState(1, range(3), False, False)
    drive(state, *((0, s) for s in FORWARD), (0, Signal.GRADIENT), (1, Signal.INPUT))
    assert state.next_action(1, Schedule.GPIPE) == Action.parse("F1")
    drive(state, (1, Signal.START_F), (1, Signal.END_F))
    assert state.next_action(9, Schedule.GPIPE) is None, "B0 waits for F2, which has no input yet"
    drive(state, *((2, s) for s in FORWARD), (2, Signal.GRADIENT))
    assert state.next_action(1, Schedule.GPIPE) == Action.parse("B0")
    drive(state, (0, Signal.START_B), (0, Signal.END_B))
    assert state.next_action(1, Schedule.GPIPE) is None, "in microbatch order here, too"
    drive(state, *((1, s) for s in BACKWARD))
    assert state.next_action(1, Schedule.GPIPE) == Action.parse("B2")


def test_gpipe_goes_back_to_forwards_for_what_a_view_adds() -> None:
    state = StepState(1, range(2), True, True)
    drive(state, *((m, s) for m in range(2) for s in FORWARD[1:]), (0, Signal.START_B), (0, Signal.END_B))
    state.add([5])
    assert state.next_action(1, Schedule.GPIPE) == Action.parse("F5")


def test_only_routed_microbatches_count() -> None:
    state = StepState(1, [5, 2], True, True)
    assert 2 in state and 3 not in state
    assert state.next_action(1) == Action.parse("F2")
    nothing = StepState(1, [], False, False)
    assert nothing.complete and nothing.next_action(1) is None


def test_repeats_are_told_apart() -> None:
    state = StepState(1, [0], False, False)
    assert state.accepts(0, Signal.INPUT) and not state.accepts(0, Signal.GRADIENT)
    state.move(0, Signal.INPUT)
    assert not state.accepts(0, Signal.INPUT)
    with pytest.raises(KeyError):
        state.move(0, Signal.INPUT)


REACHED_BY = {
    Phase.WAITING: (),
    Phase.READY_F: FORWARD[:1],
    Phase.FORWARDING: FORWARD[:2],
    Phase.FORWARDED: FORWARD,
    Phase.READY_B: FORWARD + BACKWARD[:1],
    Phase.BACKWARD: FORWARD + BACKWARD[:2],
    Phase.DONE: FORWARD + BACKWARD,
}
NEXT = {
    (Phase.WAITING, Signal.INPUT): Phase.READY_F,
    (Phase.READY_F, Signal.START_F): Phase.FORWARDING,
    (Phase.FORWARDING, Signal.END_F): Phase.FORWARDED,
    (Phase.FORWARDING, Signal.SPOILED): Phase.WAITING,
    (Phase.FORWARDED, Signal.GRADIENT): Phase.READY_B,
    (Phase.READY_B, Signal.START_B): Phase.BACKWARD,
    (Phase.BACKWARD, Signal.END_B): Phase.DONE,
    (Phase.BACKWARD, Signal.SPOILED): Phase.FORWARDED,
}


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("phase", list(Phase))
def test_each_signal_in_each_phase_moves_on_or_is_told_apart(phase: Phase, signal: Signal) -> None:
    state = StepState(1, [0], False, False)
    drive(state, *((0, s) for s in REACHED_BY[phase]))
    assert state.phase(0) is phase
    expected = NEXT.get((phase, signal))
    assert state.accepts(0, signal) == (expected is not None)
    if expected is None:
        with pytest.raises(KeyError):
            state.move(0, signal)
        assert state.phase(0) is phase
    else:
        assert state.move(0, signal) is expected is state.phase(0)


def test_what_is_routed_here_later_or_elsewhere_now_keeps_the_others_where_they_are() -> None:
    state = StepState(1, [1, 5], False, False)
    drive(state, *((5, s) for s in FORWARD))
    state.add([3, 5])
    assert list(state) == [1, 3, 5] and state.phase(5) is Phase.FORWARDED and state.phase(3) is Phase.WAITING
    state.drop([1, 9])
    assert list(state) == [3, 5] and not state.complete
    assert not state.accepts(1, Signal.INPUT), "not here any more"
    first = StepState(1, [], True, False)
    first.add([0])
    assert first.phase(0) is Phase.READY_F


def test_what_does_not_decode_is_as_if_it_had_not_come() -> None:
    state = StepState(1, [0], False, False)
    drive(state, (0, Signal.INPUT), (0, Signal.START_F), (0, Signal.SPOILED))
    assert state.next_action(1) is None and state.in_flight() == 0
    drive(state, *((0, s) for s in FORWARD), (0, Signal.GRADIENT), (0, Signal.START_B), (0, Signal.SPOILED))
    assert state.next_action(1) is None and state.in_flight() == 1
    assert state.accepts(0, Signal.GRADIENT)


# The outbox


def test_the_outbox_keeps_until_told() -> None:
    box = Outbox()
    box.keep(Kind.FORWARD, 1, 0, "f")
    box.keep(Kind.BACKWARD, 1, 0, "b")
    box.keep(Kind.FORWARD, 2, 1, "later")
    assert box.find(Kind.FORWARD, 1, 0) == "f" and box.find(Kind.FORWARD, 1, 1) is None
    assert list(box.unanswered()) == [
        (Kind.FORWARD, 1, 0, "f"),
        (Kind.BACKWARD, 1, 0, "b"),
        (Kind.FORWARD, 2, 1, "later"),
    ]
    box.forget_before(2)
    assert list(box.unanswered()) == [(Kind.FORWARD, 2, 1, "later")] and len(box) == 1


def test_an_answered_forward_is_kept_for_an_heir_but_not_sent_again_by_itself() -> None:
    box = Outbox()
    box.keep(Kind.FORWARD, 1, 0, "f")
    box.keep(Kind.BACKWARD, 1, 0, "b")
    box.answered(1, 0)
    assert list(box.unanswered()) == [(Kind.BACKWARD, 1, 0, "b")]
    assert box.find(Kind.FORWARD, 1, 0) == "f"
    box.forget_before(2)
    box.keep(Kind.FORWARD, 1, 0, "anew")
    assert list(box.unanswered()) == [(Kind.FORWARD, 1, 0, "anew")], "what was answered is forgotten with it"


def test_what_is_made_again_takes_the_place_of_the_old() -> None:
    box = Outbox()
    box.keep(Kind.FORWARD, 1, 0, "f")
    box.keep(Kind.FORWARD, 1, 0, "f again")
    assert len(box) == 1 and box.find(Kind.FORWARD, 1, 0) == "f again"
