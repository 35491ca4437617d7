"""Work at a stage as data: actions that print as short strings and parse back, and the rule that picks the next.

    F3        forward of microbatch 3
    B3        backward of microbatch 3
    APPLY     average, clip, optimiser step
    SEND_F3   send the coordinates of microbatch 3 to the next stage
    SEND_B3   send their gradient to the previous stage
    PART      hand out the sum of the step's gradients so far, for the other replicas
    RESET     forget microbatches that are routed elsewhere now
    STATE     hand out the stage's state, for a newcomer or to be kept
    LOAD      begin from such a state

The order (1f1b): backward before forward, oldest microbatch first. The other schedule, gpipe, is there to compare
with: all forwards of a step before its first backward. In both, backwards run strictly in microbatch order: gradients
are then summed in the same order in every run, whatever order they arrived in, so a run repeats to the last bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Verb(StrEnum):
    """What is done."""

    FORWARD = "F"
    BACKWARD = "B"
    APPLY = "APPLY"
    SEND_FORWARD = "SEND_F"
    SEND_BACKWARD = "SEND_B"
    PART = "PART"
    RESET = "RESET"
    STATE = "STATE"
    LOAD = "LOAD"


class Schedule(StrEnum):
    """In which order the forwards and backwards of a step are done."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


@dataclass(frozen=True, slots=True)
class Action:
    """A verb and the microbatch it is done to; -1 where it is done to the step or the stage."""

    verb: Verb
    microbatch: int = -1

    def __str__(self) -> str:
        return self.verb.value if self.microbatch < 0 else f"{self.verb.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`.

        Raises:
            ValueError: none does.
        """
        match = re.fullmatch(r"(F|B|SEND_F|SEND_B)(\d+)|(APPLY|PART|RESET|STATE|LOAD)", text)
        if match is None:
            raise ValueError(f"expected an action such as F3, B3, SEND_F3, SEND_B3 or APPLY, got {text!r}")
        return cls(Verb(match[3])) if match[3] else cls(Verb(match[1]), int(match[2]))


APPLY = Action(Verb.APPLY)
PART = Action(Verb.PART)
RESET = Action(Verb.RESET)
STATE = Action(Verb.STATE)
LOAD = Action(Verb.LOAD)
