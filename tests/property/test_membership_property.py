"""The coordinator's decisions under events in any order: what must hold of views holds (`coordinator_story`), and
nothing raises.
"""

from __future__ import annotations

from typing import Any

from coordinator_story import Peer, Story
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.membership import (
    Accused,
    Differs,
    Failed,
    Irreplaceable,
    LeaveAsked,
    Left,
    LinkBroken,
    LostTrack,
    Membership,
    Phase,
    StopAsked,
)

NAMES = [f"p{index}" for index in range(7)]
names = st.sampled_from(NAMES)


class MembershipMachine(RuleBasedStateMachine):
    """A swarm of up to seven peers at two or three stages."""

    story: Story

    @initialize(
        stages=st.integers(2, 3),
        starved=st.booleans(),
        every=st.sampled_from([4, 50]),
        last=st.sampled_from([30, 400]),
        copies=st.booleans(),
    )
    def begin(self, stages: int, starved: bool, every: int, last: int, copies: bool) -> None:
        self.story = Story(stages, last, checkpoint_every=every, end_when_starved=starved)
        self.story.copies = copies
        self.story.join(*NAMES[: stages + 1])

    @rule(name=names)
    def join(self, name: str) -> None:
        self.story.peers.setdefault(name, Peer()).alive = True
        self.story.join(name)

    @rule(name=names)
    def restart(self, name: str) -> None:
        if name in self.story.peers:
            self.story.restart(name)

    @rule(name=names)
    def kill(self, name: str) -> None:
        if name in self.story.peers:
            self.story.kill(name)

    @rule(name=names)
    def revive(self, name: str) -> None:
        """It was only cut off."""
        if name in self.story.peers:
            self.story.peers[name].alive = True

    @rule(count=st.integers(1, 40), seconds=st.sampled_from([0.02, 0.5, 1.0]))
    def work(self, count: int, seconds: float) -> None:
        self.story.steps(count, seconds)

    @rule(seconds=st.sampled_from([2, 12, 70]))
    def time_passes(self, seconds: int) -> None:
        self.story.beat(seconds)

    @rule(name=names, fatal=st.sampled_from([False] * 9 + [True]))
    def failed(self, name: str, fatal: bool) -> None:
        self.story.feed(Failed(name, "its disk broke", fatal))

    @rule(name=names)
    def left(self, name: str) -> None:
        self.story.feed(Left(name, "goodbye"))

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.story.feed(LeaveAsked(name))

    @rule(name=names, other=names)
    def links(self, name: str, other: str) -> None:
        self.story.feed(LinkBroken(name))
        if other in self.story.peers:
            self.story.report(other, broken=(name,))

    @rule(name=names, data=st.data())
    def absurd(self, name: str, data: Any) -> None:
        """A report of anything at all."""
        if name in self.story.peers:
            fields = {
                "view": st.integers(0, 60),
                "epoch": st.integers(0, 3),
                "stage": st.none() | st.integers(0, 2),
                "applied": st.none() | st.integers(0, 1000),
                "weights": st.sampled_from(["", "x", "0-3"]),
                "idle": st.booleans(),
                "done": st.integers(0, 9),
                "microbatch_seconds": st.none() | st.floats(1e-6, 1e3),
                "held": st.none() | st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 50), max_size=3)),
            }
            chosen = data.draw(st.sets(st.sampled_from(sorted(fields)), max_size=3))
            self.story.report(name, **{field: data.draw(fields[field]) for field in sorted(chosen)})

    @rule(name=names, twist=st.sampled_from(["", "'"]))
    def twist(self, name: str, twist: str) -> None:
        """Its weights are others."""
        if name in self.story.peers:
            self.story.peers[name].twisted = twist

    @rule(name=names, hashes=st.dictionaries(names, st.sampled_from(["x", "y"])), step=st.integers(1, 50))
    def differs(self, name: str, hashes: dict[str, str], step: int) -> None:
        self.story.feed(Differs(name, step, hashes))

    @rule(name=names, other=names)
    def accused(self, name: str, other: str) -> None:
        self.story.feed(Accused(name, other, "it does not decode"))

    @rule(name=names, other=names)
    def misled(self, name: str, other: str) -> None:
        self.story.feed(Accused(name, other, "it is not the state", state=True))

    @rule(name=names, step=st.integers(0, 60), epoch=st.integers(0, 3))
    def irreplaceable(self, name: str, step: int, epoch: int) -> None:
        self.story.feed(Irreplaceable(name, epoch, step, "it went down"))

    @rule(liar=names, word=st.sampled_from(["failed", "accused", "misled", "differs"]), count=st.integers(1, 6))
    def lies(self, liar: str, word: str, count: int) -> None:
        """One peer says false things of others, and comes back each time."""
        others = [name for name in self.story.membership.members if name != liar]
        for other in others[:count]:
            hashes = {liar: "x", **dict.fromkeys(others, "y")}
            events = {
                "failed": Failed(liar, "nan", True), "accused": Accused(liar, other, "nan"),
                "misled": Accused(liar, other, "nan", state=True), "differs": Differs(liar, 9, hashes),
            }  # fmt: skip
            self.story.feed(events[word])
            if liar in self.story.peers:
                self.story.join(liar)

    @rule(name=names)
    def lost_track(self, name: str) -> None:
        self.story.feed(LostTrack(name, "too slow"))

    @rule(name=names, seconds=st.none() | st.floats(0.001, 10))
    def speed(self, name: str, seconds: float | None) -> None:
        if name in self.story.peers:
            self.story.peers[name].seconds = seconds

    @rule(chance=st.integers(0, 9))
    def stop(self, chance: int) -> None:
        if chance == 0:
            self.story.feed(StopAsked())

    @rule()
    def coordinator_restarts(self) -> None:
        self.story.reload()

    @invariant()
    def seats_are_of_the_view(self) -> None:
        membership: Membership = self.story.membership
        for peer, member in membership.members.items():
            if member.stage is not None:
                assert membership.view is not None
                assert membership.view.stage_of(peer) == member.stage
        if membership.phase is Phase.ENDED:
            assert membership.end is not None


MembershipMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMembership = MembershipMachine.TestCase
