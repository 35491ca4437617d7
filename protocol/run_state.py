"""All that the coordinator knows of its run. The modules beside `protocol.membership` decide on it, one matter each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from protocol.agreement import Agreement
from protocol.conduct import Conduct
from protocol.detector import Detector
from protocol.membership_events import Effect, End, Issue, Notice, StopAsked
from protocol.pace import Pace
from protocol.roster import Member, Roster
from protocol.stage_cost import StageCost
from protocol.token_bucket import TokenBucket
from protocol.view import View

SEATINGS_A_SECOND, FREE_SEATINGS = 0.5, 8
MOST_LOST_PLACES = 256


class Phase(Enum):
    """Where the run is."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for the whole run.

    Attributes:
        costs: of each stage.
        last_step: where the run is done.
        wait_for: peers that must be there before the first step; at least one a stage.
        resume: the run was begun before: it goes on from checkpoints.
        checkpoint_every: steps between checkpoints; before the first, step 0 is the newest state there can be.
        end_when_starved: nobody new will come, so a stage that lost its last peer ends the run unless another takes
            its place at once.
        skip_nonfinite: steps with numbers that are not finite that may be passed over.
    """

    costs: tuple[StageCost, ...]
    last_step: int
    wait_for: int = 0
    resume: bool = False
    checkpoint_every: int = 50
    end_when_starved: bool = False
    skip_nonfinite: int = 0


@dataclass(slots=True)
class Differing:
    """Replicas of a stage say that weights differ before `step`: all hashes, by who says so, in one view."""

    step: int
    view: int
    since: float
    words: dict[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class RunState:
    """The run's state.

    Attributes:
        next_view: the first view number that was never used.
        next_epoch: the same for epochs.
        reached: the newest step that was ever applied, as far as known.
        done: the newest step that every stage had applied in earlier lives of the run.
        reached_known: it is known, for this coordinator was there.
        stop: why the run is to stop early; None: it is not.
        stop_issued: the view that stops it is out, or needs no other.
        winding: why the run goes to a common step at which it will pause; "": it does not.
        paused_at: it is there.
        skipped: the steps that all pass over.
        dead: `dead[stage]` is how the stage lost its last peer.
        waiting: the stages that need a peer or a state, and what is waited for, in words.
        unsettled: since when more peers may still come with newer states.
        progressed: when the newest step last grew, or the run last went on.
        followed: when it was last decided what follows; ticked: at a tick, the time for what is not urgent.
        seatings: bounds the views that give newcomers a place.
        differing: of a stage, who says whose weights differ before which step, until it is settled.
        diverged: of a stage, the step that some could not do, and who they were.
        lost_places: the stage where a peer was that lost its place lately.
        doubts: whose copies of states are not counted on, and who says that they are wrong.
        lost_at: the newest step there was when somebody who worked was lost.
        planned_at, moved_at: the steps of the last plan and move, and the time of the last plan.
    """

    terms: Terms
    next_view: int = 1
    next_epoch: int = 0
    reached: int = 0
    done: int = 0
    reached_known: bool = False
    phase: Phase = Phase.WAITING
    roster: Roster = field(default_factory=Roster)
    detector: Detector = field(default_factory=Detector)
    pace: Pace = field(default_factory=Pace)
    agreement: Agreement = field(default_factory=Agreement)
    conduct: Conduct = field(default_factory=Conduct)
    stop: StopAsked | None = None
    stop_issued: bool = False
    winding: str = ""
    paused_at: bool = False
    skipped: tuple[int, ...] = ()
    dead: dict[int, str] = field(default_factory=dict)
    waiting: tuple[tuple[int, ...], str] = ((), "")
    unsettled: float = 0.0
    progressed: float = 0.0
    followed: float = float("-inf")
    ticked: bool = False
    planned_at: tuple[int, float] = (0, 0.0)
    moved_at: int = 0
    seatings: TokenBucket = field(default_factory=lambda: TokenBucket(SEATINGS_A_SECOND, FREE_SEATINGS))
    differing: dict[int, Differing] = field(default_factory=dict)
    diverged: dict[int, tuple[int, set[str]]] = field(default_factory=dict)
    lost_at: int = -1
    doubts: dict[str, str] = field(default_factory=dict)
    lost_places: dict[str, int] = field(default_factory=dict)
    end: End | None = None
    _said: dict[str, str] = field(default_factory=dict)

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self.roster.view

    @property
    def members(self) -> dict[str, Member]:
        """By peer."""
        return self.roster.members

    @property
    def costs(self) -> Sequence[StageCost]:
        """Of each stage."""
        return self.terms.costs

    @property
    def stands(self) -> bool:
        """Whether the run cannot go on as it is."""
        return self.view is None or bool(self.dead) or self.paused_at or bool(self.roster.starved())

    @property
    def begins(self) -> bool:
        """Whether the run may still begin again from the seed.

        Until all stages have had the time for a second checkpoint, those of the first may have died half written.
        """
        return self.reached < 2 * self.terms.checkpoint_every

    @property
    def margin_step(self) -> int:
        """The first step that nobody begins before a view that is issued now has reached everybody."""
        return self.roster.newest + 1 + self.pace.margin

    def issue(self, view: View, reason: str) -> list[Effect]:
        """`view` is the newest one, under the next number."""
        self.roster.view = replace(view, number=self.next_view)
        self.next_view += 1
        return [Issue(self.roster.view, reason)]

    def place_of(self, peer: str) -> int | None:
        """The stage at which `peer` is, or was until it lost its place."""
        member = self.members.get(peer)
        return member.stage if member is not None and member.stage is not None else self.lost_places.get(peer)

    def note_place(self, peer: str, stage: int) -> None:
        """`peer` has lost its place at `stage`."""
        self.lost_places.pop(peer, None)
        self.lost_places[peer] = stage
        while len(self.lost_places) > MOST_LOST_PLACES:
            del self.lost_places[next(iter(self.lost_places))]

    def doubt(self, keeper: str, by: str) -> bool:
        """`by` could not begin from what `keeper` has in its files. Whether that is new."""
        new = self.doubts.get(keeper) != by
        self.doubts[keeper] = by
        return new

    @property
    def doubted(self) -> set[str]:
        """Those whose files are counted on only if there are no others."""
        return {keeper for keeper, by in self.doubts.items() if not self.conduct.quarrels.is_wrong(by)}

    def diverged_before(self, stage: int, step: int, peer: str) -> bool:
        """`peer` could not do `step`. Whether another one of its stage had said so of the same step.

        A report may have been lost, so the next step is the same.
        """
        known, peers = self.diverged.get(stage, (step, set()))
        if abs(known - step) > 1:
            known, peers = step, set()
        self.diverged[stage] = known, peers | {peer}
        return bool(peers - {peer})

    def say(self, about: str, text: str) -> list[Effect]:
        """A notice, if it is not what was said last about the same thing. "" is never said, and forgets the last."""
        if self._said.get(about, "") == text:
            return []
        if text:
            self._said[about] = text
            return [Notice(text)]
        del self._said[about]
        return []

    def finish(self, failed: bool, reason: str) -> list[Effect]:
        """The run is over. If it never got under way in this life, it is where the earlier ones left it."""
        self.phase = Phase.ENDED
        step = self.done if self.view is None else self.roster.applied_everywhere
        self.end = End(step, failed, reason)
        return [self.end]
