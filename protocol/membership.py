"""Who is in the run: the coordinator's decisions, pure. The daemon feeds it events and carries out its effects.

    GATHERING --a peer for every stage--> RUNNING --last step everywhere--> ENDED
        |                                    |  \\
        |                                    |   stop asked: a view with an earlier last step, still RUNNING
        +------ stop asked, or impossible    +------ a peer lost --> ENDED (failed)

One replica a stage for now: a lost peer ends the run, with the reason and the way to resume. Views already name
replica lists, so that more replicas change the decisions here and nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from protocol.assignment import assign_stages
from protocol.view import Replica, View

SILENCE_SECONDS = 45.0
LINK_GRACE_SECONDS = 15.0
STOP_MARGIN_SECONDS = 2.0


class Phase(Enum):
    """Where the run is."""

    GATHERING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """`peer` asks to join. `checkpoints[stage]` are the steps whose state it holds.

    `session` is new each time a peer's daemon starts, so a repeated request is told from a restart.
    """

    peer: str
    addresses: tuple[str, ...]
    checkpoints: Mapping[int, Sequence[int]] = field(default_factory=dict)
    session: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """Something came from `peer`; it has applied `step` steps (None: unchanged)."""

    peer: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The link to `peer` is down."""

    peer: str


@dataclass(frozen=True, slots=True)
class Left:
    """`peer` says that it goes, and why."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The run is to stop soon, at a step that all stages have. `failed` if its owner did not ask for it."""

    step_seconds: float = 1.0
    reason: str = "stopped as asked"
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = JoinAsked | Heard | LinkBroken | Left | StopAsked | Tick


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell `peer` that it is in, and what is still missing."""

    peer: str


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Tell `peer` that it is not, and why."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Issue:
    """Sign `view`, put it into the DHT and send it to its peers."""

    view: View


@dataclass(frozen=True, slots=True)
class End:
    """The run is over after `step`."""

    step: int
    failed: bool
    reason: str


Effect = Admit | TurnAway | Issue | End


@dataclass(slots=True)
class _Member:
    addresses: tuple[str, ...]
    checkpoints: Mapping[int, Sequence[int]]
    heard: float
    session: str
    step: int = 0
    broken_since: float | None = None


class Membership:
    """The run's members and its newest view. `next_view` is the first number that was never used."""

    def __init__(self, stages: int, last_step: int, next_view: int = 1, resume: bool = False) -> None:
        self.phase = Phase.GATHERING
        self.view: View | None = None
        self.members: dict[str, _Member] = {}
        self._stages, self._last_step = stages, last_step
        self._next_view, self._resume = next_view, resume
        self._stop_asked: StopAsked | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of `event` at `now` (seconds on any steady clock)."""
        if self.phase is Phase.ENDED:
            return [TurnAway(event.peer, "the run has ended")] if isinstance(event, JoinAsked) else []
        match event:
            case JoinAsked():
                return self._join(event, now)
            case Heard(peer, step):
                return self._heard(peer, step, now)
            case LinkBroken(peer):
                return self._broken(peer, now)
            case Left(peer, reason):
                return self._lost(peer, reason) if peer in self.members else []
            case StopAsked():
                return self._stop(event)
            case Tick():
                return self._overdue(now)

    @property
    def applied_everywhere(self) -> int:
        """The newest step that every member has applied."""
        return min((member.step for member in self.members.values()), default=0)

    def _join(self, event: JoinAsked, now: float) -> list[Effect]:
        member = self.members.get(event.peer)
        if member is not None and member.session == event.session:
            member.heard = now
            return [Admit(event.peer), *([Issue(self.view)] if self.view else [])]
        if member is not None and self.phase is Phase.RUNNING:
            return self._lost(event.peer, "it restarted, and what it had computed since its last checkpoint is gone")
        if member is None and len(self.members) >= self._stages:
            return [
                TurnAway(
                    event.peer,
                    f"the run is full: {self._stages} stages have {len(self.members)} peers, "
                    "and this release serves each stage by one",
                )
            ]
        self.members[event.peer] = _Member(event.addresses, event.checkpoints, now, event.session)
        admitted: list[Effect] = [Admit(event.peer)]
        return admitted + (self._open() if len(self.members) == self._stages else [])

    def _open(self) -> list[Effect]:
        step, order = 0, list(self.members)
        if self._resume:
            held = {peer: member.checkpoints for peer, member in self.members.items()}
            found = assign_stages(held, self._stages)
            if isinstance(found, str):
                return self._end(0, True, found)
            step, order = found
        for member in self.members.values():
            member.step = step
        stages = tuple((Replica(peer, self.members[peer].addresses),) for peer in order)
        self.view = View(self._next_view, step + 1, self._last_step, stages)
        self._next_view += 1
        self.phase = Phase.RUNNING
        if step >= self._last_step:
            return [Issue(self.view), *self._end(step, False, f"all {self._last_step} steps were done before")]
        return [Issue(self.view)]

    def _heard(self, peer: str, step: int | None, now: float) -> list[Effect]:
        member = self.members.get(peer)
        if member is None:
            return []
        member.heard, member.broken_since = now, None
        if step is not None:
            member.step = max(member.step, step)
        if self.view is not None and self.applied_everywhere >= self.view.last_step:
            if self._stop_asked is None or self.view.last_step >= self._last_step:
                return self._end(self.applied_everywhere, False, "all steps are done")
            return self._end(self.applied_everywhere, self._stop_asked.failed, self._stop_asked.reason)
        return []

    def _broken(self, peer: str, now: float) -> list[Effect]:
        member = self.members.get(peer)
        if member is not None and member.broken_since is None:
            member.broken_since = now
        return []

    def _overdue(self, now: float) -> list[Effect]:
        for peer, member in self.members.items():
            if member.broken_since is not None and now - member.broken_since > LINK_GRACE_SECONDS:
                return self._lost(peer, f"its connection broke and did not come back in {LINK_GRACE_SECONDS:.0f} s")
            if now - member.heard > SILENCE_SECONDS:
                return self._lost(peer, f"nothing was heard from it for {SILENCE_SECONDS:.0f} s")
        return []

    def _lost(self, peer: str, reason: str) -> list[Effect]:
        if self.phase is Phase.GATHERING:
            del self.members[peer]
            return []
        assert self.view is not None
        where = f"stage {self.view.stage_of(peer)} lost its peer {short_peer(peer)}"
        return self._end(self.applied_everywhere, True, f"{where}: {reason}")

    def _stop(self, asked: StopAsked) -> list[Effect]:
        if self.view is None:
            return self._end(0, asked.failed, asked.reason)
        if self._stop_asked is not None:
            return []
        self._stop_asked = asked
        # Stages are at most a step apart, so one absurd report must not decide: no more than the lower median and one.
        steps = [member.step for member in self.members.values()]
        newest = min(max(steps), statistics.median_low(steps) + 1)
        # The view must reach every peer before any passes its last step, or stages would stop at different steps.
        last = newest + 1 + math.ceil(STOP_MARGIN_SECONDS / max(asked.step_seconds, 1e-3))
        if last >= self.view.last_step:
            return []
        self.view = replace(self.view, number=self._next_view, last_step=last)
        self._next_view += 1
        return [Issue(self.view)]

    def _end(self, step: int, failed: bool, reason: str) -> list[Effect]:
        self.phase = Phase.ENDED
        return [End(step, failed, reason)]


def short_peer(peer: str) -> str:
    """A peer id's last eight characters: its first ones are alike in all."""
    return peer[-8:]
