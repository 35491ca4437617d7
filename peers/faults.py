"""Faults on purpose: a peer kills or stops itself at a chosen point of its work, so that tests need no luck.

    PHASE@NUMBER[:kill|stop]      reduction@12      donor@3:stop

NUMBER is the step in whose work it happens, or the next in which it can; for `donor` and `newcomer` it counts chunks of
states. A fault happens once. Peers are started without one, and `Fault()` never happens.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.blob import BlobKind
from protocol.effects import Effect, SendChunk, SendOffer
from protocol.errors import UserError
from protocol.events import ChunkArrived, Event
from protocol.view import View
from protocol.work import Verb

_FORM = re.compile(r"([a-z-]+)@(\d{1,9})(?::(kill|stop))?")


class Phase(StrEnum):
    """Where in its work a peer is."""

    BEFORE_FORWARD = "before-forward"
    AFTER_FORWARD = "after-forward"  # computed, not sent
    AFTER_BACKWARD = "after-backward"  # computed, not sent
    REDUCTION = "reduction"  # the own part is made, those of the others are not all here
    APPLYING = "applying"  # the parameters are changed, nothing else is
    APPLIED = "applied"  # all of the step is done, and nobody knows
    CHECKPOINT = "checkpoint"  # the temporary file is whole and has no name yet
    DONOR = "donor"  # so many chunks of states went to peers of the same stage
    NEWCOMER = "newcomer"  # so many chunks came while there was no state


_BEFORE = {Verb.FORWARD: Phase.BEFORE_FORWARD}
_AFTER = {
    Verb.FORWARD: Phase.AFTER_FORWARD,
    Verb.BACKWARD: Phase.AFTER_BACKWARD,
    Verb.PART: Phase.REDUCTION,
    Verb.APPLY: Phase.APPLIED,
}


@dataclass(slots=True)
class Fault:
    """What is to happen to this process; by default nothing ever does."""

    phase: Phase | None = None
    number: int = 0
    signal: signal.Signals = signal.SIGKILL
    _chunks: int = 0
    _states: set[bytes] = field(default_factory=set)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that `text` means.

        Raises:
            UserError: it is not of the form PHASE@NUMBER[:kill|stop].
        """
        found = _FORM.fullmatch(text)
        phases = [phase.value for phase in Phase]
        if found is None or found[1] not in phases:
            raise UserError(
                f"expected a fault PHASE@NUMBER[:kill|stop], PHASE one of {', '.join(phases)}, got {text!r}"
            )
        return cls(Phase(found[1]), int(found[2]), signal.SIGSTOP if found[3] == "stop" else signal.SIGKILL)

    def reached(self, phase: Phase, number: int) -> None:
        """The work is at `phase` of the step `number`."""
        if phase is self.phase and number >= self.number:
            self._happen()

    def before(self, verb: Verb, step: int) -> None:
        """The compute thread begins with `verb` of `step`."""
        if self.phase is not None and verb in _BEFORE:
            self.reached(_BEFORE[verb], step)

    def after(self, verb: Verb, step: int) -> None:
        """The compute thread has done `verb` of `step`, and its outcome is not told to anybody."""
        if self.phase is not None and verb in _AFTER:
            self.reached(_AFTER[verb], step)

    def sent(self, effect: Effect, view: View | None) -> None:
        """`effect` is carried out: chunks of a state that go to a peer of the same stage count, not those of copies."""
        if self.phase is not Phase.DONOR:
            return
        if isinstance(effect, SendOffer) and effect.offer.key.kind is BlobKind.STATE:
            if view is not None and view.stage_of(effect.peer) == effect.offer.key.stage:
                self._states.add(effect.offer.id)
        elif isinstance(effect, SendChunk) and effect.blob in self._states:
            self._count()

    def came(self, event: Event, lacking: bool) -> None:
        """`event` came. `lacking`: this peer has no state yet."""
        if self.phase is Phase.NEWCOMER and lacking and isinstance(event, ChunkArrived):
            self._count()

    def _count(self) -> None:
        self._chunks += 1
        if self._chunks == self.number:
            self._happen()

    def _happen(self) -> None:
        self.phase = None
        os.kill(os.getpid(), self.signal)
