"""One step at one stage: how far each microbatch is, and what can be done next.

    WAITING --input--> READY_F --start--> FORWARDING --done--> FORWARDED --gradient--> READY_B --start--> BACKWARD
                                              |                                            ^                 |
                                              +---- at the last stage the loss needs no gradient            done
                                                                                                             v
                                                                                                            DONE

At the first stage every microbatch starts in READY_F: it samples its own input. When all are DONE the step can be
applied, or shared with the stage's other replicas first. An input that comes twice changes nothing. An input that does
not decode is as if it had not come: FORWARDING goes back to WAITING, BACKWARD to FORWARDED.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto

from protocol.work import Action, Schedule, Verb


class Phase(Enum):
    """How far a microbatch is at this stage."""

    WAITING = auto()
    READY_F = auto()
    FORWARDING = auto()
    FORWARDED = auto()
    READY_B = auto()
    BACKWARD = auto()
    DONE = auto()


class Signal(Enum):
    """What happened to a microbatch."""

    INPUT = auto()
    START_F = auto()
    END_F = auto()
    GRADIENT = auto()
    START_B = auto()
    END_B = auto()
    SPOILED = auto()


# What is not in this table is either a repeat, which `accepts` tells apart, or a bug here.
_NEXT: dict[tuple[Phase, Signal], Phase] = {
    (Phase.WAITING, Signal.INPUT): Phase.READY_F,
    (Phase.READY_F, Signal.START_F): Phase.FORWARDING,
    (Phase.FORWARDING, Signal.END_F): Phase.FORWARDED,
    (Phase.FORWARDED, Signal.GRADIENT): Phase.READY_B,
    (Phase.READY_B, Signal.START_B): Phase.BACKWARD,
    (Phase.BACKWARD, Signal.END_B): Phase.DONE,
    (Phase.FORWARDING, Signal.SPOILED): Phase.WAITING,
    (Phase.BACKWARD, Signal.SPOILED): Phase.FORWARDED,
}


class StepState:
    """The microbatches of step `step` that are routed to this replica of `stage`."""

    def __init__(self, step: int, microbatches: Iterable[int], is_first: bool, is_last: bool) -> None:
        self.step = step
        self._is_first, self._is_last = is_first, is_last
        self._phases: dict[int, Phase] = {}
        self.add(microbatches)

    def add(self, microbatches: Iterable[int]) -> None:
        """More microbatches are routed here, by a new view."""
        start = Phase.READY_F if self._is_first else Phase.WAITING
        self._phases = {m: self._phases.get(m, start) for m in sorted({*self._phases, *microbatches})}

    def drop(self, microbatches: Iterable[int]) -> None:
        """These are routed elsewhere now."""
        gone = set(microbatches)
        self._phases = {m: phase for m, phase in self._phases.items() if m not in gone}

    def __iter__(self) -> Iterator[int]:
        return iter(self._phases)

    @property
    def complete(self) -> bool:
        """Whether all that is routed here is done."""
        return all(phase is Phase.DONE for phase in self._phases.values())

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._phases

    def phase(self, microbatch: int) -> Phase:
        """How far `microbatch` is."""
        return self._phases[microbatch]

    def accepts(self, microbatch: int, signal: Signal) -> bool:
        """Whether `signal` moves `microbatch` on; if not, it is a repeat, or not of this replica."""
        return microbatch in self and (self._phases[microbatch], signal) in _NEXT

    def move(self, microbatch: int, signal: Signal) -> Phase:
        """Move on.

        Raises:
            KeyError: the table has no such move.
        """
        phase = _NEXT[self._phases[microbatch], signal]
        if phase is Phase.FORWARDED and self._is_last:
            phase = Phase.READY_B
        self._phases[microbatch] = phase
        return phase

    def in_flight(self) -> int:
        """Microbatches whose forward has started and whose backward has not ended: what memory is held for."""
        held = (Phase.FORWARDING, Phase.FORWARDED, Phase.READY_B, Phase.BACKWARD)
        return sum(phase in held for phase in self._phases.values())

    def next_action(self, credits: int, schedule: Schedule = Schedule.ONE_F_ONE_B) -> Action | None:
        """The work order of `protocol.work`, with at most `credits` microbatches in flight; None also when all is done.

        Under gpipe all of them are in flight, whatever the credits.
        """
        oldest = next((m for m, phase in self._phases.items() if phase is not Phase.DONE), None)
        if oldest is None:
            return None
        ready = next((m for m, phase in self._phases.items() if phase is Phase.READY_F), None)
        if schedule is Schedule.GPIPE:
            forward, backward = ready, not self._forwards_left()
        else:
            forward, backward = self._with_credit(ready, oldest, credits), True
        if backward and self._phases[oldest] is Phase.READY_B:
            return Action(Verb.BACKWARD, oldest)
        return None if forward is None else Action(Verb.FORWARD, forward)

    def _with_credit(self, ready: int | None, oldest: int, credits: int) -> int | None:
        """The oldest microbatch goes forward even without: later ones may use up the credits while it is late, and none
        of those can end before it.
        """
        return ready if ready == oldest or self.in_flight() < credits else None

    def _forwards_left(self) -> bool:
        """Whether some microbatch has not been forward; one that a view adds late makes the backwards wait again."""
        return any(phase in (Phase.WAITING, Phase.READY_F, Phase.FORWARDING) for phase in self._phases.values())
