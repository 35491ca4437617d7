"""What a stage does next: actions as strings, the table of one step, the outbox, and the machine's rules by script."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.frame import Kind
from protocol.outbox import Outbox
from protocol.route import route
from protocol.stage_machine import (
    Arrived,
    Compute,
    Computed,
    Effect,
    Refuse,
    Send,
    StageMachine,
    Stalled,
    StepApplied,
    ViewChanged,
)
from protocol.step_state import Phase, Signal, StepState
from protocol.view import Replica, View
from protocol.work import APPLY, Action, Verb

# Actions


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3", Action(Verb.FORWARD, 3)),
        ("B0", Action(Verb.BACKWARD, 0)),
        ("SEND_F12", Action(Verb.SEND_FORWARD, 12)),
        ("SEND_B65535", Action(Verb.SEND_BACKWARD, 65535)),
        ("APPLY", APPLY),
    ],
)
def test_actions_print_and_parse_back(text: str, action: Action) -> None:
    assert str(action) == text and Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F", "f3", "F-1", "3", "APPLY3", "SEND_3", "F3 ", " F3", "F3B3", "B3\n"])
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
    assert only.next_action(1) == APPLY


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


def test_only_routed_microbatches_count() -> None:
    state = StepState(1, [5, 2], True, True)
    assert 2 in state and 3 not in state
    assert state.next_action(1) == Action.parse("F2")
    assert StepState(1, [], False, False).next_action(1) == APPLY


def test_repeats_are_told_apart() -> None:
    state = StepState(1, [0], False, False)
    assert state.accepts(0, Signal.INPUT) and not state.accepts(0, Signal.GRADIENT)
    state.move(0, Signal.INPUT)
    assert not state.accepts(0, Signal.INPUT)
    with pytest.raises(KeyError):
        state.move(0, Signal.INPUT)


# The outbox


def test_the_outbox_keeps_until_told() -> None:
    box = Outbox()
    box.keep(Kind.FORWARD, 1, 0, "f")
    box.keep(Kind.BACKWARD, 1, 0, "b")
    box.keep(Kind.FORWARD, 2, 1, "later")
    assert box.find(Kind.FORWARD, 1, 0) == "f" and box.find(Kind.FORWARD, 1, 1) is None
    assert list(box.kept(gradients=False)) == [(Kind.FORWARD, 1, 0, "f"), (Kind.FORWARD, 2, 1, "later")]
    assert len(list(box.kept(gradients=True))) == 3
    box.forget(Kind.FORWARD, 1, 0)
    box.forget(Kind.FORWARD, 1, 0)
    assert list(box.kept(gradients=True)) == [(Kind.BACKWARD, 1, 0, "b"), (Kind.FORWARD, 2, 1, "later")]
    box.forget_before(2)
    assert list(box.kept(gradients=True)) == [(Kind.FORWARD, 2, 1, "later")] and len(box) == 1


# The machine's rules


def always(microbatches: int) -> Callable[[int], int]:
    """So many in every step."""
    return lambda step: microbatches


def view(number: int = 1, last_step: int = 2, stages: int = 3) -> View:
    return View(number, 1, last_step, tuple((Replica(f"p{stage}"),) for stage in range(stages)))


def machine(stage: int, microbatches: int = 2, window: int = 4) -> StageMachine:
    made = StageMachine(f"p{stage}", always(microbatches), window)
    made.handle(ViewChanged(view()))
    return made


def forward(microbatch: int, step: int = 1, number: int = 1, peer: str = "p0") -> Arrived:
    return Arrived(peer, Kind.FORWARD, number, step, microbatch, f"x{microbatch}", 7)


def gradient(microbatch: int, step: int = 1, number: int = 1, peer: str = "p2") -> Arrived:
    return Arrived(peer, Kind.BACKWARD, number, step, microbatch, f"g{microbatch}", 8)


def done(text: str) -> Computed:
    action = Action.parse(text)
    return Computed(action, None if action == APPLY else f"made by {text}")


def short(effects: list[Effect]) -> list[str]:
    """Effects as short strings, as a schedule prints."""
    words = []
    for effect in effects:
        match effect:
            case Compute():
                words.append(str(effect.action))
            case Send():
                verb = Verb.SEND_FORWARD if effect.kind is Kind.FORWARD else Verb.SEND_BACKWARD
                words.append(str(Action(verb, effect.microbatch)))
            case StepApplied():
                words.append(f"APPLIED{effect.step}{'!' if effect.last else ''}")
            case Refuse():
                words.append("REFUSE")
    return words


def test_a_middle_stage_by_script() -> None:
    middle = machine(1)
    script = [
        (forward(0), ["F0"]),
        (forward(1), []),
        (done("F0"), ["SEND_F0", "F1"]),
        (gradient(0), []),
        (done("F1"), ["SEND_F1", "B0"]),
        (done("B0"), ["SEND_B0"]),
        (gradient(1), ["B1"]),
        (done("B1"), ["SEND_B1", "APPLY"]),
        (done("APPLY"), ["APPLIED1"]),
        (forward(0, step=2), ["F0"]),
    ]
    for event, expected in script:
        assert short(middle.handle(event)) == expected, event
    assert middle.applied == 1 and not middle.finished


def test_what_arrives_is_what_is_computed_on_and_what_was_made_is_what_is_sent() -> None:
    middle = machine(1)
    assert middle.handle(forward(0)) == [Compute(1, Action.parse("F0"), "x0", 7)]
    assert middle.handle(done("F0")) == [Send("p2", Kind.FORWARD, 1, 1, 0, 2, "made by F0")]
    assert middle.handle(gradient(0)) == [Compute(1, Action.parse("B0"), "g0", 8)]
    assert middle.handle(done("B0")) == [Send("p0", Kind.BACKWARD, 1, 1, 0, 0, "made by B0")]


def test_a_single_stage_runs_alone_to_the_last_step() -> None:
    alone = StageMachine("p0", always(1), 1)
    effects = alone.handle(ViewChanged(view(stages=1)))
    seen = []
    while effects:
        seen += short(effects)
        computed = [e for e in effects if isinstance(e, Compute)]
        effects = alone.handle(Computed(computed[0].action)) if computed else []
    assert seen == ["F0", "B0", "APPLY", "APPLIED1", "F0", "B0", "APPLY", "APPLIED2!"] and alone.finished


def test_nothing_happens_before_a_view_but_what_came_is_held() -> None:
    early = StageMachine("p1", always(2), 4)
    assert early.handle(forward(0)) == [] and early.waits_for() == "a view"
    assert short(early.handle(ViewChanged(view()))) == ["F0"]


def test_a_stall_sends_open_forwards_again_and_no_gradients() -> None:
    middle = machine(1, microbatches=3)
    for event in (forward(0), forward(1), done("F0"), done("F1"), gradient(0), done("B0")):
        middle.handle(event)
    assert middle.waits_for() == "the gradient of step 1, microbatch 1 from stage 2"
    assert short(middle.handle(Stalled())) == ["SEND_F1"]


def test_a_restored_link_gets_everything_of_that_neighbour_again_and_nothing_else() -> None:
    middle = machine(1)
    for event in (forward(0), forward(1), done("F0"), done("F1"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(Stalled("p0"))) == ["SEND_B0"]
    assert short(middle.handle(Stalled("p2"))) == ["SEND_F1"]
    assert middle.handle(Stalled("stranger")) == []


def test_a_forward_that_comes_again_gets_its_gradient_again() -> None:
    middle = machine(1, microbatches=1)
    for event in (forward(0), done("F0"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(forward(0))) == ["SEND_B0"], "before the step is applied"
    middle.handle(done("APPLY"))
    assert short(middle.handle(forward(0))) == ["SEND_B0"], "and after"
    for event in (forward(0, step=2), done("F0"), gradient(0, step=2), done("B0"), done("APPLY")):
        middle.handle(event)
    assert middle.finished and short(middle.handle(forward(0, step=2))) == ["SEND_B0"], "and when all is done"
    assert middle.handle(forward(0, step=1)) == [], "but step 2 began below, so the gradients of step 1 had arrived"


def test_repeats_change_nothing_in_any_phase() -> None:
    middle = machine(1, microbatches=1)
    assert short(middle.handle(forward(0))) == ["F0"]
    assert middle.handle(forward(0)) == []
    middle.handle(done("F0"))
    assert middle.handle(forward(0)) == []
    assert short(middle.handle(gradient(0))) == ["B0"]
    assert middle.handle(gradient(0)) == [] and middle.handle(forward(0)) == []


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (forward(0, peer="p2"), "expected the forward of step 1, microbatch 0 at stage 1 from p0, it came from p2"),
        (gradient(0, peer="p0"), "expected the backward of step 1, microbatch 0 at stage 1 from p2, it came from p0"),
        (forward(0, number=0), "view 0 is over, the newest is 1"),
        (forward(2), "microbatch 2 of step 1 is not in 0..1"),
        (forward(0, step=3), "step 3 is too early here: 0 steps are applied"),
    ],
)
def test_refusals_name_the_reason(event: Arrived, reason: str) -> None:
    assert machine(1).handle(event) == [Refuse(event.peer, reason)]


@pytest.mark.parametrize("stage", [0, 2])
def test_nobody_sends_to_the_ends(stage: int) -> None:
    event = forward(0, peer="p2") if stage == 0 else gradient(0, peer="p0")
    assert "from nobody" in machine(stage).handle(event)[0].reason  # type: ignore[union-attr]


def test_a_gradient_of_what_was_never_sent_is_ignored() -> None:
    middle = machine(1)
    assert middle.handle(gradient(0)) == []
    assert short(middle.handle(forward(0))) == ["F0"]


def test_frames_of_the_next_step_wait_for_it() -> None:
    middle = machine(1, microbatches=1)
    middle.handle(forward(0))
    assert middle.handle(forward(0, step=2)) == []
    for event in (done("F0"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(done("APPLY"))) == ["APPLIED1", "F0"]


def test_a_new_view_sends_all_again_under_its_number_and_frees_what_waited_for_it() -> None:
    middle = machine(1, microbatches=2)
    for event in (forward(0), done("F0"), gradient(0), done("B0"), forward(1), done("F1")):
        middle.handle(event)
    assert middle.handle(gradient(1, number=2)) == []
    effects = middle.handle(ViewChanged(view(2)))
    assert short(effects) == ["SEND_B0", "SEND_F1", "B1"]
    assert {effect.view for effect in effects if isinstance(effect, Send)} == {2}
    assert short(middle.handle(forward(1))) == ["REFUSE"]


def test_an_old_view_or_one_without_this_peer_changes_nothing() -> None:
    middle = machine(1)
    middle.handle(ViewChanged(view(3, last_step=9)))
    assert middle.handle(ViewChanged(view(2, last_step=5))) == [] == middle.handle(ViewChanged(view(3, last_step=5)))
    assert short(middle.handle(ViewChanged(view(4, stages=1)))) == ["REFUSE"]
    assert middle.view is not None and (middle.view.number, middle.view.last_step) == (3, 9)


def test_a_view_with_an_earlier_last_step_ends_the_run_there_and_a_later_one_goes_on() -> None:
    last = StageMachine("p2", always(1), 1)
    last.handle(ViewChanged(view(1, last_step=9)))
    last.handle(forward(0, peer="p1"))
    last.handle(ViewChanged(view(2, last_step=1)))
    for event in (Computed(Action.parse("F0")), done("B0")):
        last.handle(event)
    assert short(last.handle(done("APPLY"))) == ["APPLIED1!"] and last.finished
    assert last.handle(forward(0, step=2, number=2, peer="p1")) == []
    assert short(last.handle(ViewChanged(view(3, last_step=2)))) == ["SEND_B0", "REFUSE"], "what waited was of view 2"
    assert not last.finished and short(last.handle(forward(0, step=2, number=3, peer="p1"))) == ["F0"]


def test_a_machine_that_resumes_starts_after_what_it_has_applied() -> None:
    resumed = StageMachine("p0", always(1), 1, applied=41)
    effects = resumed.handle(ViewChanged(View(1, 42, 50, ((Replica("p0"),), (Replica("p1"),)))))
    assert effects == [Compute(42, Action.parse("F0"))]


def test_held_frames_are_bounded_for_each_sender_and_a_refusal_says_so() -> None:
    middle = machine(1, microbatches=2)
    answers = [middle.handle(forward(0, number=number)) for number in range(2, 8)]
    assert [short(answer) for answer in answers] == [[]] * 4 + [["REFUSE"]] * 2
    assert "no room" in answers[-1][0].reason  # type: ignore[union-attr]
    assert middle.handle(gradient(0, number=2)) == [], "the other neighbour has room of its own"


def test_held_frames_of_all_senders_are_bounded_before_the_first_view_too() -> None:
    early = StageMachine("p1", always(2), 4)
    answers = [early.handle(forward(m, peer=f"stranger{n}")) for n in range(20) for m in range(2)]
    assert [short(answer) for answer in answers] == [[]] * 16 + [["REFUSE"]] * 24


def test_a_repeat_takes_no_room_and_a_stranger_gets_none() -> None:
    middle = machine(1, microbatches=1)
    for _ in range(20):
        assert short(middle.handle(forward(0, number=9, peer="stranger"))) == ["REFUSE"]
    middle.handle(forward(0))
    assert middle.handle(forward(0, step=2)) == middle.handle(forward(0, step=2)) == []
    assert middle.handle(forward(0, number=2)) == []


def test_a_microbatch_that_a_new_view_moves_here_is_taken() -> None:
    pair = (Replica("p1"), Replica("q1"))
    before = View(1, 1, 9, ((Replica("p0"),), pair, (Replica("p2"),)))
    after = View(2, 1, 9, ((Replica("p0"),), pair[:1], (Replica("p2"),)))
    moved = [m for m in range(8) if route(before, 1, m)[1] == "q1"]
    middle = StageMachine("p1", always(8), 8)
    middle.handle(ViewChanged(before))
    assert short(middle.handle(forward(moved[0]))) == ["REFUSE"]
    middle.handle(ViewChanged(after))
    assert short(middle.handle(forward(moved[0], number=2))) == [f"F{moved[0]}"]


def test_steps_may_have_different_numbers_of_microbatches() -> None:
    """Step 2 has one more than the others; here and in what is held early."""
    last = StageMachine("p2", lambda step: 2 if step == 2 else 1, 4)
    last.handle(ViewChanged(view(1, last_step=9)))
    assert short(last.handle(forward(1, peer="p1"))) == ["REFUSE"]
    assert short(last.handle(forward(1, step=2, peer="p1"))) == []
    assert short(last.handle(forward(0, peer="p1"))) == ["F0"]
    assert short(last.handle(Computed(Action.parse("F0")))) == ["B0"]
    last.handle(done("B0"))
    assert short(last.handle(done("APPLY")))[-1] == "F1", "the one that was held"
    last.handle(Computed(Action.parse("F1")))
    assert "microbatch 0" in last.waits_for()
    assert short(last.handle(forward(0, step=2, peer="p1"))) == ["F0"]
    assert short(last.handle(Computed(Action.parse("F0")))) == ["B0"]
    assert [short(last.handle(done(text)))[-1] for text in ("B0", "B1")] == ["B1", "APPLY"]
    last.handle(done("APPLY"))
    assert short(last.handle(forward(1, step=3, peer="p1"))) == ["REFUSE"]
