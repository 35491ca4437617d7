"""The members of a run and its newest view, and what follows from both."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.peer_report import PeerReport
from protocol.placement import Worker, speeds
from protocol.shares import smoothed
from protocol.stage_cost import StageCost
from protocol.view import Replica, View

MOST_AHEAD = 4  # steps: stages are about one apart, and a few reports may be lost


@dataclass(slots=True)
class Member:
    """A peer that was admitted.

    Attributes:
        stage: where it serves or follows in the newest view; None: it waits for a place.
        since: the number of the view that gave it this place; what it reports of older ones does not count.
        start: the step whose state it begins from there.
        applied: the newest step whose update it has; None: it has no state yet.
        expected: it was a member before the coordinator was restarted, and has not been heard since.
        away: why it is not counted on for now; "": it is.
        leaving: until when it may be kept; None: it does not want to go.
        target: the stage that it is being moved to.
        source: the network address that it came from; "": unknown.
    """

    addresses: tuple[str, ...]
    session: str = ""
    held: Mapping[int, Sequence[int]] = field(default_factory=dict)
    speed: float = 0.0
    memory: int = 0
    stage: int | None = None
    since: int = 0
    start: int = 0
    applied: int | None = None
    weights: str = ""
    microbatch_seconds: float | None = None
    suspected: bool = False
    expected: bool = False
    away: str = ""
    leaving: float | None = None
    target: int | None = None
    source: str = ""

    @property
    def step(self) -> int:
        """The newest step that it has applied; 0 if it has no state."""
        return self.applied or 0

    def seat(self, stage: int, view: int, start: int, applied: int | None = None) -> None:
        """It gets a place, in view number `view`, with the state after step `start`."""
        if stage != self.stage:
            self.microbatch_seconds = None
        self.stage, self.since, self.start = stage, view, start
        self.applied, self.weights, self.target = applied, "", None

    def unseat(self) -> None:
        """It loses its place. Where it is going stays."""
        self.stage = self.applied = self.microbatch_seconds = None

    def take(self, report: PeerReport, view: View | None) -> bool:
        """Note its account. Whether it tells of a step, at the place that it has now."""
        if report.held is not None:
            self.held = report.held
        if view is None or report.epoch != view.epoch or report.stage != self.stage or report.view < self.since:
            return False
        if report.microbatch_seconds is not None:
            self.microbatch_seconds = smoothed(self.microbatch_seconds, report.microbatch_seconds)
        if report.applied is None or self.stage is None or report.applied < max(self.step, self.start):
            return False
        self.applied, self.weights = report.applied, report.weights
        return True

    def to_json(self) -> dict[str, Any]:
        """What must survive a restart of the coordinator."""
        return {
            "addresses": list(self.addresses), "session": self.session, "speed": self.speed, "memory": self.memory,
            "stage": self.stage, "since": self.since, "start": self.start, "source": self.source,
        }  # fmt: skip

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Member:
        """The member in `stored`."""
        return cls(tuple(stored["addresses"]), **{name: stored[name] for name in stored if name != "addresses"})


class Roster:
    """Members by peer, in the order in which they came, and the view."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.view: View | None = None

    def seated(self, stage: int | None = None) -> Iterator[tuple[Replica, Member]]:
        """The living entries of the view whose peers are members and have not restarted since; of one stage, or all."""
        for index, replicas in enumerate(self.view.stages if self.view else ()):
            for replica in replicas if stage in (None, index) else ():
                member = self.members.get(replica.peer)
                if replica.alive and member is not None and member.stage == index:
                    yield replica, member

    def workers(self, stage: int | None = None) -> Iterator[tuple[Replica, Member]]:
        """Those of `seated` that share the work, before or after the view's first step."""
        return ((r, m) for r, m in self.seated(stage) if r.weight > 0 or r.before > 0)

    def is_replica(self, peer: str, step: int) -> bool:
        """Whether `peer` has a part in `step` or later ones: till then it follows, also who is about to enter."""
        first = self.view.first_step if self.view is not None else 0
        return any(r.peer == peer and (r.before > 0 or step >= first) for r, _ in self.workers())

    def learners(self, stage: int | None = None) -> Iterator[tuple[Replica, Member]]:
        """Those of `seated` that only follow."""
        return ((r, m) for r, m in self.seated(stage) if r.weight == 0 and r.before == 0)

    def stayers(self, stage: int) -> list[str]:
        """Who will go on working at `stage`: there, not on the way out, to be counted on."""
        return [
            r.peer
            for r, m in self.workers(stage)
            if r.weight > 0 and m.leaving is None and m.target is None and not m.away
        ]

    @property
    def newest(self) -> int:
        """The newest step that is believed to be applied somewhere.

        Stages are about a step apart, so one absurd report must not decide: no more than the lower median and two.
        """
        steps = [member.step for _, member in self.workers()]
        if not steps:
            return self.view.restored if self.view is not None else 0
        return min(max(steps), statistics.median_low(steps) + 2)

    def most_applied(self, peer: str, last: int) -> int:
        """The newest step that `peer` can have applied: nobody gets far ahead of all others, on whom its steps depend.

        If reports of all were lost for long, the next ones are believed a few steps at a time. `last` is the run's.
        """
        others = [m.applied for r, m in self.workers() if r.peer != peer and m.applied is not None]
        return min(last, max(others, default=last) + MOST_AHEAD)

    @property
    def applied_everywhere(self) -> int:
        """The newest step that all who work have applied."""
        return min((member.step for _, member in self.workers()), default=0)

    @property
    def past(self) -> bool:
        """Whether the view's plan is past: nobody works on a step before its first step any more."""
        return self.past_without(())

    def past_without(self, gone: Collection[str]) -> bool:
        """The same, were those in `gone` not there."""
        first = self.view.first_step if self.view is not None else 0
        return all(m.applied is not None and m.applied >= first - 1 for r, m in self.workers() if r.peer not in gone)

    @property
    def blind(self) -> bool:
        """Whether somebody who works has not said yet how far it is: the coordinator has just been restarted."""
        return any(member.applied is None and not member.away for _, member in self.workers())

    def starved(self) -> tuple[int, ...]:
        """The stages at which some step has nobody to be counted on."""
        # A coordinator that has just been restarted takes its last view for one that can be carried out.
        past = self.blind or self.past_without([r.peer for r, m in self.workers() if m.away])

        def served(stage: int) -> bool:
            there = [r for r, m in self.workers(stage) if not m.away]
            return any(r.weight > 0 for r in there) and (past or any(r.before > 0 for r in there))

        return tuple(s for s in range(len(self.view.stages) if self.view else 0) if not served(s))

    def resources(self, costs: Sequence[StageCost]) -> list[Worker]:
        """All who can be counted on, as resources, where they are or go."""
        present = {p: m for p, m in self.members.items() if not m.away and m.leaving is None}
        rates = speeds(
            {peer: member.speed for peer, member in present.items()},
            {peer: member.microbatch_seconds for peer, member in present.items()},
            {peer: costs[m.stage].gflop for peer, m in present.items() if m.stage is not None},
        )
        works = {r.peer for r, m in self.workers() if r.weight > 0 and m.target is None}
        return [
            Worker(peer, m.stage if m.target is None else m.target, rates[peer], m.memory, movable=peer in works)
            for peer, m in present.items()
        ]
