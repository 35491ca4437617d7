"""The machine's rules by script, at one replica a stage: work, questions, refusals, what waits, what a view changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import one_view, rules

from protocol.effects import (
    Accuse,
    Compute,
    Effect,
    Irreplaceable,
    Refuse,
    Send,
    SendUsed,
    SendWant,
    StepApplied,
    WantBlob,
)
from protocol.events import Arrived, Computed, Spoiled, Stalled, Used, ViewChanged, Wanted
from protocol.frame import Kind
from protocol.route import routes
from protocol.stage_machine import StageMachine
from protocol.view import View
from protocol.work import APPLY, RESET, Action, Verb


def view(number: int = 1, last_step: int = 2, stages: int = 3) -> View:
    return one_view(*(f"p{stage}" for stage in range(stages)), number=number, last_step=last_step)


def machine(stage: int, microbatches: int = 2, window: int = 4) -> StageMachine:
    made = StageMachine(f"p{stage}", rules(microbatches, window))
    made.handle(ViewChanged(view()))
    return made


def of_two(stage: int, microbatches: int) -> tuple[StageMachine, list[int]]:
    """The first of two peers of `stage`, and the microbatches that it serves in step 1; other stages have one each."""
    names = [f"p{s} q{s}" if s == stage else f"p{s}" for s in range(3)]
    made = StageMachine(f"p{stage}", rules(microbatches))
    made.handle(ViewChanged(one_view(*names)))
    served = routes(one_view(*names), stage, 1, microbatches)
    return made, [m for m, peer in enumerate(served) if peer == f"p{stage}"]


def forward(microbatch: int, step: int = 1, number: int = 1, peer: str = "p0") -> Arrived:
    return Arrived(peer, Kind.FORWARD, number, step, microbatch, f"x{microbatch}", 7)


def gradient(microbatch: int, step: int = 1, number: int = 1, peer: str = "p2") -> Arrived:
    return Arrived(peer, Kind.BACKWARD, number, step, microbatch, f"g{microbatch}", 8)


def done(text: str) -> Computed:
    action = Action.parse(text)
    return Computed(action, None if action in (APPLY, RESET) else f"made by {text}")


def spoiled(text: str, peer: str) -> Spoiled:
    return Spoiled(Action.parse(text), peer, "a NaN")


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
            case SendUsed():
                words.append(f"USED{effect.microbatch} of {effect.peer}")
            case Irreplaceable():
                words.append(f"IRREPLACEABLE {effect.step}")
            case SendWant():
                words += [f"WANT_F{m} of {effect.peer}" for m in effect.forward]
                words += [f"WANT_B{m} of {effect.peer}" for m in effect.backward]
            case StepApplied():
                words.append(f"APPLIED{effect.step}{'!' if effect.last else ''}")
            case Refuse():
                words.append("REFUSE STALE" if effect.stale else "REFUSE")
            case WantBlob():
                words.append(f"WANT {effect.key.kind} of {effect.peer}")
            case Accuse():
                words.append(f"ACCUSE {effect.peer}")
            case _:
                raise AssertionError(effect)
    return words


# Work


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
    assert middle.handle(forward(0)) == [Compute(1, Action.parse("F0"), "x0", 7, "p0")]
    assert middle.handle(done("F0")) == [Send("p2", Kind.FORWARD, 1, 1, 0, 2, "made by F0")]
    assert middle.handle(gradient(0)) == [Compute(1, Action.parse("B0"), "g0", 8, "p2")]
    assert middle.handle(done("B0")) == [Send("p0", Kind.BACKWARD, 1, 1, 0, 0, "made by B0")]


def test_a_single_stage_runs_alone_to_the_last_step() -> None:
    alone = StageMachine("p0", rules(1, 1))
    effects = alone.handle(ViewChanged(view(stages=1)))
    seen = []
    while effects:
        seen += short(effects)
        computed = [e for e in effects if isinstance(e, Compute)]
        effects = alone.handle(Computed(computed[0].action)) if computed else []
    assert seen == ["F0", "B0", "APPLY", "APPLIED1", "F0", "B0", "APPLY", "APPLIED2!"] and alone.finished


def test_a_machine_that_resumes_starts_after_what_it_has_applied() -> None:
    resumed = StageMachine("p0", rules(1, 1), applied=41)
    effects = resumed.handle(ViewChanged(one_view("p0", "p1", first_step=42, last_step=50)))
    assert effects == [Compute(42, Action.parse("F0"))]


def test_steps_may_have_different_numbers_of_microbatches() -> None:
    """Step 2 has one more than the others; here and in what is held early."""
    last = StageMachine("p2", rules(lambda step: 2 if step == 2 else 1))
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


# Asking and sending again


def test_a_stall_asks_for_what_is_missing_and_repeats_gradients_that_nobody_said_he_has_used() -> None:
    middle, (first, second, *_) = of_two(1, microbatches=6)
    for event in (forward(first), forward(second), done(f"F{first}"), done(f"F{second}"), gradient(first)):
        middle.handle(event)
    middle.handle(done(f"B{first}"))
    assert middle.waits_for() == f"the gradient of step 1, microbatch {second} from stage 2"
    assert f"SEND_B{first}" in short(middle.handle(Stalled()))
    for event in (Used("p0", 1, 1, first), Used("p0", 1, 1, first), Used("p0", 1, 2, 1), Used("p0", 1, 1, 2**31)):
        assert middle.handle(event) == []
    asked = short(middle.handle(Stalled()))
    assert f"WANT_B{second} of p2" in asked and f"SEND_B{first}" not in asked
    assert middle._flow._used == {(first, "p0")}, "no room for what is not of this step"


def test_who_is_alone_at_its_stage_asks_nobody_whether_gradients_were_used() -> None:
    """It leaves nobody who could apply the step without it."""
    middle = machine(1, microbatches=3)
    for event in (forward(0), forward(1), done("F0"), done("F1"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(Stalled())) == ["WANT_B1 of p2", "WANT_F2 of p0"]


def test_a_restored_link_gets_what_that_neighbour_may_have_missed_and_is_asked_for_what_is_missing() -> None:
    middle = machine(1)
    for event in (forward(0), forward(1), done("F0"), done("F1"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(Stalled("p0"))) == ["SEND_B0"]
    assert short(middle.handle(Stalled("p2"))) == ["WANT_B1 of p2", "SEND_F1"], "F0 had its gradient"
    assert middle.handle(Stalled("stranger")) == []


def test_a_question_is_answered_with_what_is_here_and_routed_to_who_asks() -> None:
    middle = machine(1)
    for event in (forward(0), forward(1), done("F0"), done("F1"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(Wanted("p2", 1, 1, (0, 1, 7), (0,)))) == ["SEND_F0", "SEND_F1"]
    assert short(middle.handle(Wanted("p0", 1, 1, (0,), (0, 1, -1)))) == ["SEND_B0"]
    assert middle.handle(Wanted("p0", 1, 2**31, (0,), (0,))) == []
    assert short(middle.handle(Wanted("stranger", 1, 1, (0,), (0,)))) == ["REFUSE"]


def test_a_question_of_another_view_waits_or_is_stale() -> None:
    middle = machine(1, microbatches=1)
    for event in (forward(0), done("F0")):
        middle.handle(event)
    assert short(middle.handle(Wanted("p2", 0, 1, (0,), ()))) == ["REFUSE STALE"]
    assert middle.handle(Wanted("p2", 2, 1, (0,), ())) == []
    assert short(middle.handle(ViewChanged(view(2)))) == ["WANT_B0 of p2", "SEND_F0"]


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
    assert short(middle.handle(forward(0, step=1))) == ["SEND_B0"], "two steps are kept"


def test_a_gradient_that_comes_again_is_answered_with_used_once_it_is() -> None:
    first = StageMachine("p0", rules(1))
    late = one_view("p0", "p1 q1")
    maker = routes(late, 1, 1, 1)[0]
    for event in (ViewChanged(late), done("F0"), gradient(0, peer=maker)):
        first.handle(event)
    assert first.handle(gradient(0, peer=maker)) == [], "not yet"
    used = SendUsed(maker, 1, 1, 0)
    assert used in first.handle(done("B0"))
    assert first.handle(gradient(0, peer=maker)) == [used]
    first.handle(done("APPLY"))
    assert first.handle(gradient(0, peer=maker)) == [used], "and when the step is past"


def test_what_went_down_with_its_maker_after_its_step_was_applied_nobody_can_make_again() -> None:
    resumed = StageMachine("p1", rules(1), applied=5)
    resumed.handle(ViewChanged(one_view("p0", "p1", "p2", first_step=5)))
    assert short(resumed.handle(Wanted("p0", 1, 5, (), (0,)))) == ["IRREPLACEABLE 5"]
    assert short(resumed.handle(Wanted("p2", 1, 5, (0,), ()))) == ["IRREPLACEABLE 5"]
    assert resumed.handle(Wanted("p2", 1, 5, (), (0,))) == [], "not his to ask for"
    assert resumed.handle(Wanted("p0", 1, 6, (), (0,))) == [], "it will be made"


def test_nobody_asks_the_first_stage_for_a_gradient_nor_the_last_for_coordinates() -> None:
    """Or one odd question would send the whole run back."""
    for own, asker, forward, backward in (("p0", "p2", (), (0,)), ("p2", "p0", (0,), ())):
        resumed = StageMachine(own, rules(1), applied=5)
        resumed.handle(ViewChanged(one_view("p0", "p1", "p2", first_step=5)))
        assert resumed.handle(Wanted(asker, 1, 5, forward, backward)) == []


def test_what_was_sent_is_kept_for_two_steps() -> None:
    middle = StageMachine("p1", rules(1))
    middle.handle(ViewChanged(view(last_step=9)))
    for step in (1, 2, 3):
        for event in (forward(0, step), done("F0"), gradient(0, step), done("B0"), done("APPLY")):
            middle.handle(event)
    assert [short(middle.handle(forward(0, step))) for step in (1, 2, 3)] == [[], ["SEND_B0"], ["SEND_B0"]]
    assert middle.kept == {"tensors": 4, "blobs": 0, "early": 0}


def test_repeats_change_nothing_in_any_phase() -> None:
    middle = machine(1, microbatches=1)
    assert short(middle.handle(forward(0))) == ["F0"]
    assert middle.handle(forward(0)) == []
    middle.handle(done("F0"))
    assert middle.handle(forward(0)) == []
    assert short(middle.handle(gradient(0))) == ["B0"]
    assert middle.handle(gradient(0)) == [] and middle.handle(forward(0)) == []


# What does not decode


def test_what_does_not_decode_costs_its_sender_a_word_and_is_awaited_again() -> None:
    middle = machine(1, microbatches=1)
    middle.handle(forward(0))
    assert short(middle.handle(spoiled("F0", "p0"))) == ["ACCUSE p0"]
    assert short(middle.handle(Stalled())) == ["WANT_F0 of p0"]
    for event in (forward(0), done("F0"), gradient(0)):
        middle.handle(event)
    assert short(middle.handle(spoiled("B0", "p2"))) == ["ACCUSE p2"]
    assert short(middle.handle(Stalled())) == ["WANT_B0 of p2"]
    assert short(middle.handle(gradient(0))) == ["B0"]


def test_a_sender_is_accused_once_in_a_view() -> None:
    middle = machine(1)
    for _ in range(2):
        middle.handle(forward(0))
        accused = short(middle.handle(spoiled("F0", "p0")))
    assert accused == []
    middle.handle(ViewChanged(view(2)))
    middle.handle(forward(0, number=2))
    assert short(middle.handle(spoiled("F0", "p0"))) == ["ACCUSE p0"]


# Refusals

AT = "of step 1, microbatch 0 at stage 1"


@pytest.mark.parametrize(
    ("event", "reason", "stale"),
    [
        (forward(0, peer="p2"), f"expected the forward {AT} from p0, it came from p2", False),
        (gradient(0, peer="p0"), f"expected the backward {AT} from p2, it came from p0", False),
        (forward(0, peer="eve"), "it is not in view 1", False),
        (forward(0, number=0), "view 0 is over, the newest is 1", True),
        (forward(2), "microbatch 2 of step 1 is not in 0..1", False),
        (forward(-1), "microbatch -1 of step 1 is not in 0..1", False),
        (forward(0, step=3), "step 3 is too early here: 0 steps are applied", False),
    ],
)
def test_refusals_name_the_reason(event: Arrived, reason: str, stale: bool) -> None:
    assert machine(1).handle(event) == [Refuse(event.peer, reason, stale)]


@pytest.mark.parametrize("stage", [0, 2])
def test_nobody_sends_to_the_ends(stage: int) -> None:
    event = forward(0, peer="p2") if stage == 0 else gradient(0, peer="p0")
    assert "from nobody" in machine(stage).handle(event)[0].reason  # type: ignore[union-attr]


def test_a_gradient_of_what_was_never_sent_is_ignored() -> None:
    middle = machine(1)
    assert middle.handle(gradient(0)) == []
    assert short(middle.handle(forward(0))) == ["F0"]


# What waits


def test_nothing_happens_before_a_view_but_what_came_is_held() -> None:
    early = StageMachine("p1", rules())
    assert early.handle(forward(0)) == [] and early.waits_for() == "a view" and early.stage == -1
    assert early.handle(Stalled()) == []
    assert short(early.handle(ViewChanged(view()))) == ["F0"], "and nobody is asked: a run begins"


def test_whoever_enters_a_run_that_went_back_asks_at_once() -> None:
    """The others may have sent all they have already."""
    back = StageMachine("p1", rules())
    assert short(back.handle(ViewChanged(replace(view(4), epoch=1)))) == ["WANT_F0 of p0", "WANT_F1 of p0"]


def test_frames_of_the_next_step_wait_for_it() -> None:
    middle = machine(1, microbatches=1)
    middle.handle(forward(0))
    assert middle.handle(forward(0, step=2)) == []
    for event in (done("F0"), gradient(0), done("B0")):
        middle.handle(event)
    assert short(middle.handle(done("APPLY"))) == ["APPLIED1", "F0"]


def test_held_frames_are_bounded_for_each_sender_and_a_refusal_says_so() -> None:
    middle = machine(1, microbatches=2)
    answers = [middle.handle(forward(0, number=number)) for number in range(2, 25)]
    assert [short(answer) for answer in answers] == [[]] * 20 + [["REFUSE"]] * 3
    assert "no room" in answers[-1][0].reason  # type: ignore[union-attr]
    assert middle.handle(gradient(0, number=2)) == [], "the other neighbour has room of its own"
    assert middle.kept["early"] == 21


def test_held_frames_of_all_senders_are_bounded_before_the_first_view_too() -> None:
    early = StageMachine("p1", rules(2))
    answers = [early.handle(forward(m, peer=f"stranger{n}")) for n in range(50) for m in range(2)]
    assert [short(answer) for answer in answers] == [[]] * 80 + [["REFUSE"]] * 20


def test_a_repeat_takes_no_room_and_strangers_share_theirs() -> None:
    middle = machine(1, microbatches=1)
    for _ in range(50):
        assert middle.handle(forward(0, number=9, peer="newcomer")) == [], "it may be in view 9"
    assert middle.kept["early"] == 1
    answers = [short(middle.handle(forward(0, number=9, peer=f"stranger{n}"))) for n in range(30)]
    assert answers == [[]] * 17 + [["REFUSE"]] * 13
    middle.handle(forward(0))
    assert middle.handle(forward(0, step=2)) == middle.handle(forward(0, step=2)) == []
    assert middle.handle(forward(0, number=2)) == []


# Views


def test_a_new_view_asks_for_what_is_missing_and_frees_what_waited_for_it() -> None:
    middle = machine(1, microbatches=2)
    for event in (forward(0), done("F0"), gradient(0), done("B0"), forward(1), done("F1")):
        middle.handle(event)
    assert middle.handle(gradient(1, number=2)) == []
    effects = middle.handle(ViewChanged(view(2)))
    assert short(effects) == ["WANT_B1 of p2", "B1"]
    assert {effect.view for effect in effects if isinstance(effect, SendWant)} == {2}
    assert short(middle.handle(forward(1))) == ["REFUSE STALE"]


def test_an_old_view_or_one_without_this_peer_changes_nothing() -> None:
    middle = machine(1)
    middle.handle(ViewChanged(view(3, last_step=9)))
    assert middle.handle(ViewChanged(view(2, last_step=5))) == [] == middle.handle(ViewChanged(view(3, last_step=5)))
    assert short(middle.handle(ViewChanged(view(4, stages=1)))) == ["REFUSE"]
    assert short(middle.handle(ViewChanged(one_view("p1", "p0", "p2", number=5)))) == ["REFUSE"], "another stage"
    assert short(middle.handle(ViewChanged(one_view("p0", "p1!6 q", "p2", number=6)))) == ["REFUSE"], "lost"
    assert middle.view is not None and (middle.view.number, middle.view.last_step) == (3, 9)


def test_a_view_with_an_earlier_last_step_ends_the_run_there_and_a_later_one_goes_on() -> None:
    last = StageMachine("p2", rules(1, 1))
    last.handle(ViewChanged(view(1, last_step=9)))
    last.handle(forward(0, peer="p1"))
    last.handle(ViewChanged(view(2, last_step=1)))
    for event in (Computed(Action.parse("F0")), done("B0")):
        last.handle(event)
    assert short(last.handle(done("APPLY"))) == ["APPLIED1!"] and last.finished
    assert last.handle(forward(0, step=2, number=2, peer="p1")) == []
    effects = last.handle(ViewChanged(view(3, last_step=2)))
    assert short(effects) == ["WANT_F0 of p1", "REFUSE STALE"], "what waited was of view 2"
    assert not last.finished and short(last.handle(forward(0, step=2, number=3, peer="p1"))) == ["F0"]


# Two replicas at the middle stage: what a view takes and gives

PAIR = one_view("p0", "p1 q1", "p2")
LOSS = one_view("p0", "p1 q1!2", "p2", number=2)
MINE = [m for m, peer in enumerate(routes(PAIR, 1, 1, 8)) if peer == "p1"]
THEIRS = [m for m in range(8) if m not in MINE]


def replica() -> StageMachine:
    made = StageMachine("p1", rules(8, 8))
    made.handle(ViewChanged(PAIR))
    return made


def finish(middle: StageMachine, microbatches: list[int], number: int = 1) -> list[Effect]:
    effects: list[Effect] = []
    for m in microbatches:
        for event in (forward(m, number=number), done(f"F{m}"), gradient(m, number=number), done(f"B{m}")):
            effects = middle.handle(event)
    return effects


def test_a_microbatch_that_a_loss_moves_here_is_asked_for_and_taken() -> None:
    middle = replica()
    assert short(middle.handle(forward(THEIRS[0]))) == ["REFUSE"]
    wants = short(middle.handle(ViewChanged(LOSS)))
    assert wants == [f"WANT_F{m} of p0" for m in range(8)]
    assert short(middle.handle(forward(THEIRS[0], number=2))) == [f"F{THEIRS[0]}"]


def test_a_late_planned_view_that_takes_what_is_done_begins_the_step_again() -> None:
    middle = StageMachine("p1", rules(8, 8))
    middle.handle(ViewChanged(one_view("p0", "p1", "p2")))
    finish(middle, [0, 1, 2])
    effects = middle.handle(ViewChanged(replace(PAIR, number=2)))
    assert Compute(1, RESET, None) in effects, "nothing can be taken out of a sum"
    words = short(effects)[:-1]
    assert [word for word in words if "WANT" in word] == [f"WANT_F{m} of p0" for m in MINE]
    assert middle.handle(done("RESET")) == []
    assert short(middle.handle(forward(MINE[0], number=2))) == [f"F{MINE[0]}"]


def test_a_late_planned_view_that_takes_what_is_not_done_drops_only_that() -> None:
    middle = StageMachine("p1", rules(8, 8))
    middle.handle(ViewChanged(one_view("p0", "p1", "p2")))
    gone, kept = THEIRS[0], MINE[0]
    for event in (forward(gone), done(f"F{gone}"), forward(kept)):
        middle.handle(event)
    effects = middle.handle(ViewChanged(replace(PAIR, number=2)))
    assert not any(isinstance(e, Compute) for e in effects), "one runs"
    assert short(middle.handle(done(f"F{kept}"))) == [f"SEND_F{kept}", "RESET"]


def test_what_runs_for_a_microbatch_that_a_view_takes_away_is_void() -> None:
    middle = StageMachine("p1", rules(8, 8))
    middle.handle(ViewChanged(one_view("p0", "p1", "p2")))
    gone = THEIRS[0]
    middle.handle(forward(gone))
    middle.handle(ViewChanged(replace(PAIR, number=2)))
    assert middle.handle(done(f"F{gone}")) == [Compute(1, RESET, (gone,))], "nothing of it is sent"
