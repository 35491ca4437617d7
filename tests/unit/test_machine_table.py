"""The machine as a table: in each state, each event leads to a state that is named here, or to a refusal with a reason.

A replica of a middle stage with one other. What is of an older view, of a newer one, or from a stranger comes in every
state too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from machines import SIZE, one_view, part_of, rules, state_of, total_of

from protocol.blob import Blob, BlobKey, BlobKind
from protocol.effects import Compute, Refuse
from protocol.events import (
    Arrived,
    BlobGone,
    BlobWanted,
    ChunkArrived,
    ChunkAsked,
    Computed,
    CreditsChanged,
    Event,
    Offered,
    Spoiled,
    Stalled,
    StateFound,
    Taken,
    Used,
    ViewChanged,
    Wanted,
)
from protocol.frame import Kind
from protocol.route import routes
from protocol.stage_machine import StageMachine
from protocol.view import View
from protocol.work import Action

STEP = 3
VIEW = one_view("p", "a b", "q", first_step=STEP)
LEARNER = one_view("p", "a*2 b c", "q", first_step=STEP)
MINE, THEIRS = (next(m for m, who in enumerate(routes(VIEW, 1, STEP, 2)) if who == peer) for peer in "ab")
PART = part_of(1, STEP, [THEIRS], "w2")
ODD = part_of(1, STEP, [THEIRS], "other")
TOTAL = total_of(1, STEP, 2)
STATE = state_of(1, 2)
assert len(bytes(STATE.data)) == SIZE


def made(machine: StageMachine, text: str) -> Computed:
    """What the action makes."""
    payload = {
        "PART": part_of(1, STEP, machine._place.routed(STEP), "w2"),
        "APPLY": TOTAL,
        "STATE": STATE,
        "LOAD": "w2",
    }
    return Computed(Action.parse(text), payload.get(text, None if text == "RESET" else text))


def whole(donor: str, blob: Blob) -> list[Event]:
    return [Offered(donor, 1, blob.offer), ChunkArrived(donor, blob.offer.id, 0, blob.chunk(0))]


FORWARD = Arrived("p", Kind.FORWARD, 1, STEP, MINE, "x")
GRADIENT = Arrived("q", Kind.BACKWARD, 1, STEP, MINE, "g")
UP_TO: dict[str, list[Event | str]] = {
    "no view": [],
    "lacks": [ViewChanged(LEARNER)],
    "LOAD": [ViewChanged(LEARNER), *whole("b", STATE)],
    "follows": [ViewChanged(LEARNER), *whole("b", STATE), "LOAD"],
    "waits": [ViewChanged(VIEW)],
    "F": [ViewChanged(VIEW), FORWARD],
    "waits for B": [ViewChanged(VIEW), FORWARD, f"F{MINE}"],
    "B": [ViewChanged(VIEW), FORWARD, f"F{MINE}", GRADIENT],
    "unused": [ViewChanged(VIEW), FORWARD, f"F{MINE}", GRADIENT, f"B{MINE}"],
}
UP_TO["PART"] = [*UP_TO["unused"], Used("p", 1, STEP, MINE)]
UP_TO["reduces"] = [*UP_TO["PART"], "PART"]
UP_TO["APPLY"] = [*UP_TO["reduces"], *whole("b", PART)]
UP_TO["halted"] = [*UP_TO["reduces"], *whole("b", ODD)]
UP_TO["finished"] = [*UP_TO["waits"][:-1], ViewChanged(replace(VIEW, last_step=STEP - 1))]
UP_TO["STATE"] = [ViewChanged(one_view("p", "a b n*2", "q", first_step=STEP))]


def reached(state: str) -> StageMachine:
    """A machine in that state."""
    machine = StageMachine("a", rules(2), STEP - 1, lacking=UP_TO[state][:1] == [ViewChanged(LEARNER)])
    for event in UP_TO[state]:
        machine.handle(made(machine, event) if isinstance(event, str) else event)
    return machine


def name(machine: StageMachine) -> str:
    """The state that a machine is in."""
    if machine.view is None:
        return "no view"
    if machine._running is not None:
        return machine._running.action.verb.value
    if machine.lacking:
        return "lacks"
    if machine.finished:
        return "finished"
    if machine.peer not in machine._place.group(machine.applied + 1):
        return "follows"
    if machine._replication._halted:
        return "halted"
    state = machine._flow.state
    assert state is not None
    phases = {state.phase(m).name for m in state}
    if state.complete:
        return "unused" if machine._flow.unused() else "reduces"
    return "waits for B" if phases == {"FORWARDED"} else "waits"


KEYS = {blob.key.kind: blob.key for blob in (PART, TOTAL, STATE)}
EVENTS: dict[str, Callable[[StageMachine], Event | None]] = {
    "forward": lambda m: FORWARD,
    "gradient": lambda m: GRADIENT,
    "misrouted": lambda m: replace(FORWARD, peer="q"),
    "next step": lambda m: replace(FORWARD, step=STEP + 1),
    "far ahead": lambda m: replace(FORWARD, step=STEP + 5),
    "part": lambda m: Offered("b", 1, PART.offer),
    "total": lambda m: Offered("b", 1, TOTAL.offer),
    "state": lambda m: Offered("b", 1, STATE.offer),
    "chunk": lambda m: ChunkArrived("b", PART.offer.id, 0, PART.chunk(0)),
    "ask": lambda m: ChunkAsked("b", b"?" * 16, 0),
    "taken": lambda m: Taken("b", PART.offer.id),
    "want": lambda m: Wanted("q", 1, STEP, (MINE,), ()),
    "used": lambda m: Used("p", 1, STEP, MINE),
    "want part": lambda m: BlobWanted("b", 1, KEYS[BlobKind.PART]),
    "want state": lambda m: BlobWanted("b", 1, KEYS[BlobKind.STATE]),
    "gone": lambda m: BlobGone("b", 1, KEYS[BlobKind.TOTAL]),
    "no state": lambda m: BlobGone("b", 1, KEYS[BlobKind.STATE]),
    "found": lambda m: None if m.view is None else StateFound("b", BlobKey(BlobKind.STATE, 1, 1), None),
    "done": lambda m: None if m._running is None else made(m, str(m._running.action)),
    "spoiled": lambda m: None if name(m) not in ("F", "B", "APPLY", "LOAD") else spoiled(m),
    "view": lambda m: ViewChanged(replace(m.view or VIEW, number=2)),
    "loss": lambda m: ViewChanged(lost(m.view or VIEW)),
    "old view": lambda m: None if m.view is None else ViewChanged(replace(m.view, last_step=0)),
    "no place": lambda m: ViewChanged(one_view("p", "b", "q", number=3)),
    "credits": lambda m: CreditsChanged(3),
    "stall": lambda m: Stalled(),
    "link": lambda m: Stalled("b"),
}


def spoiled(machine: StageMachine) -> Spoiled:
    assert machine._running is not None
    return Spoiled(machine._running.action, "b", "a NaN")


def lost(view: View) -> View:
    """b is lost."""
    replicas = tuple(replace(r, lost=2) if r.peer == "b" else r for r in view.stages[1])
    return replace(view, number=2, stages=(view.stages[0], replicas, view.stages[2]))


REFUSED = "refused"
NEVER = dict.fromkeys(("far ahead", "ask", "no place"), REFUSED)  # wherever it is
AT_WORK = {**NEVER, "misrouted": REFUSED, "state": REFUSED}  # with a view and a state
TABLE: dict[str, dict[str, str]] = {
    "no view": {**NEVER, "view": "waits", "loss": "waits"},
    "lacks": NEVER,
    "LOAD": {**NEVER, "done": "follows", "spoiled": "lacks"},
    "follows": {**NEVER, "misrouted": REFUSED, "forward": REFUSED, "gradient": REFUSED},
    "waits": {**AT_WORK, "forward": "F"},
    "F": {**AT_WORK, "done": "waits for B", "spoiled": "waits"},
    "waits for B": {**AT_WORK, "gradient": "B", "loss": "waits"},
    "B": {**AT_WORK, "done": "unused", "spoiled": "waits for B"},
    "unused": {**AT_WORK, "used": "PART", "loss": "waits"},
    "PART": {**AT_WORK, "done": "reduces"},
    "reduces": {**AT_WORK, "loss": "waits"},
    "APPLY": {**AT_WORK, "done": "waits", "spoiled": "halted"},
    "halted": {**AT_WORK, "view": "reduces", "loss": "waits"},
    "finished": {**NEVER, "state": REFUSED},
    "STATE": {**AT_WORK, "done": "waits"},
}


@pytest.mark.parametrize("state", list(UP_TO))
def test_each_state_is_reached(state: str) -> None:
    assert name(reached(state)) == state


@pytest.mark.parametrize("event", list(EVENTS))
@pytest.mark.parametrize("state", list(UP_TO))
def test_each_event_in_each_state(state: str, event: str) -> None:
    """What is not in the table leaves the state as it is."""
    machine = reached(state)
    happens = EVENTS[event](machine)
    if happens is None:
        return  # it cannot happen here: nothing runs, or nobody knows a view to ask by
    expected = TABLE[state].get(event, state)
    effects = machine.handle(happens)
    refusals = [effect for effect in effects if isinstance(effect, Refuse)]
    assert bool(refusals) == (expected == REFUSED), effects
    assert all(refusal.reason for refusal in refusals)
    assert name(machine) == (state if expected == REFUSED else expected)
    assert machine.waits_for()
    started = [effect for effect in effects if isinstance(effect, Compute)]
    assert len(started) <= 1 and (not started or machine._running is started[0])


OF_A_VIEW = [
    event
    for event in EVENTS
    if isinstance(EVENTS[event](reached("waits")), Arrived | Offered | Wanted | Used | BlobWanted)
]


@pytest.mark.parametrize("event", OF_A_VIEW)
@pytest.mark.parametrize("state", list(UP_TO))
def test_what_is_of_another_view_or_from_a_stranger(state: str, event: str) -> None:
    machine = reached(state)
    happens = EVENTS[event](machine)
    assert isinstance(happens, Arrived | Offered | Wanted | Used | BlobWanted)
    later, early = machine.handle(replace(happens, view=7)), event == "far ahead"
    assert [type(effect) for effect in later] == [Refuse] * early, "it waits for its view"
    if state != "no view":
        assert machine.handle(replace(happens, view=0)) == [
            Refuse(happens.peer, "view 0 is over, the newest is 1", True)
        ]
        assert machine.handle(replace(happens, peer="eve")) == [Refuse("eve", "it is not in view 1")]
    assert name(machine) == state


def test_the_table_speaks_of_every_event() -> None:
    fed = {type(make(reached(state))) for make in EVENTS.values() for state in ("F", "waits")}
    assert fed - {type(None)} == set(Event.__args__)  # type: ignore[attr-defined]
