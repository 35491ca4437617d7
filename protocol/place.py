"""Where a peer stands: its stage, the newest view, the steps it has applied, and what follows from those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.blob import BlobKey
from protocol.route import holders, routes
from protocol.view import View
from protocol.work import Schedule

MOST_ROUTES = 64  # remembered: of three stages and a few steps


@dataclass(frozen=True, slots=True)
class Rules:
    """What is the same in the whole run.

    Attributes:
        microbatches: how many a step has.
        window: most microbatches in flight at a stage, whatever its credits.
        blob_bytes: the exact size of a blob.
        copies: how many peers of other stages keep the state after a step; 0 where it is not kept.
        schedule: the order of a step's work.
    """

    microbatches: Callable[[int], int]
    window: int
    blob_bytes: Callable[[BlobKey], int]
    copies: Callable[[int], int]
    schedule: Schedule = Schedule.ONE_F_ONE_B


@dataclass(slots=True)
class Place:
    """`peer`'s place. `applied` is the newest step it has applied, or is to begin after.

    `misled`: how often what it was handed as a newcomer of this stage led to weights that are no replica's. At first it
    takes states and totals from anyone; then all from one, and each time from the next, so that it finds who was wrong.
    """

    peer: str
    rules: Rules
    applied: int = 0
    stage: int = -1
    view: View | None = None
    misled: int = 0
    _routes: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    _routes_by: View | None = None

    @property
    def newest(self) -> View:
        """The view, which is known here."""
        assert self.view is not None
        return self.view

    @property
    def last_stage(self) -> int:
        """Its index."""
        return len(self.newest.stages) - 1

    def skips(self, step: int) -> bool:
        """Whether all pass over `step`."""
        return self.view is not None and step in self.view.skipped

    def microbatches(self, step: int) -> int:
        """How many `step` has: none if it is passed over."""
        return 0 if self.skips(step) else self.rules.microbatches(step)

    def worked(self, count: int) -> int:
        """The step of which `count` steps, up to `applied`, were not passed over since, itself among them.

        What is kept for others is kept by this: they can be late by so many steps in which all needed one another, and
        who passes over a step needs nobody.
        """
        step = self.applied
        while True:
            while self.skips(step):
                step -= 1
            count -= 1
            if count <= 0:
                return step
            step -= 1

    def ahead(self, step: int) -> int:
        """How many steps that are not passed over `step` is ahead of `applied`."""
        passed = () if self.view is None else self.view.skipped
        return step - self.applied - sum(self.applied < skipped <= step for skipped in passed)

    def server(self, stage: int, step: int, microbatch: int) -> str | None:
        """The peer of `stage` that serves a microbatch; None if there is none by this view."""
        servers = self._servers(stage, step)
        return servers[microbatch] if 0 <= microbatch < len(servers) else None

    def _servers(self, stage: int, step: int) -> tuple[str, ...]:
        """Of each microbatch of `step`. Remembered: every event asks for those of many microbatches."""
        if self._routes_by is not self.view or len(self._routes) >= MOST_ROUTES:
            self._routes, self._routes_by = {}, self.view
        if (stage, step) not in self._routes:
            self._routes[stage, step] = self._fresh(stage, step) if 0 <= stage <= self.last_stage else ()
        return self._routes[stage, step]

    def _fresh(self, stage: int, step: int) -> tuple[str, ...]:
        try:
            return routes(self.newest, stage, step, self.microbatches(step))
        except LookupError:
            return ()

    def routed(self, step: int, peer: str | None = None) -> list[int]:
        """The microbatches of `step` that are routed to `peer` (None: this one) at this stage."""
        who = peer or self.peer
        return [microbatch for microbatch, server in enumerate(self._servers(self.stage, step)) if server == who]

    def group(self, step: int) -> tuple[str, ...]:
        """Who adds up the gradients of `step` at this stage."""
        return self.newest.group(self.stage, step)

    def followers(self, step: int) -> tuple[str, ...]:
        """Who is handed their total."""
        return self.newest.followers(self.stage, step)

    def others(self) -> tuple[str, ...]:
        """The other living replicas of this stage."""
        return tuple(r.peer for r in self.newest.stages[self.stage] if r.alive and r.peer != self.peer)

    def holders(self, stage: int, step: int) -> tuple[str, ...]:
        """Who keeps a copy of the state of `stage` after `step`."""
        return holders(self.newest, stage, step, self.rules.copies(step))

    def sources(self, step: int) -> tuple[str, ...]:
        """Who has this stage's state after `step`, from which this peer is to begin."""
        view = self.newest
        if step == view.restored:
            held = view.holders[self.stage] if self.stage < len(view.holders) else ()
            return tuple(peer for peer in held if peer != self.peer)
        return self.guides(tuple(peer for peer in self.group(step) if peer != self.peer))

    def guides(self, peers: tuple[str, ...]) -> tuple[str, ...]:
        """Whom of `peers` it takes from: all, or one."""
        if not self.misled or len(peers) < 2:
            return peers
        return (sorted(peers)[(self.misled - 1) % len(peers)],)

    @property
    def guide(self) -> str:
        """The only one from whom it takes what it follows; "": there are several, or it follows nobody."""
        there = self.followed(self.applied + 1)
        return there[0] if len(there) == 1 else ""

    def misled_until(self, epoch: int, stage: int) -> tuple[int, str]:
        """See `protocol.stage_machine`."""
        anew = (self.newest.epoch, self.stage) == (epoch, stage) and self.peer not in self.group(self.applied + 1)
        return (self.misled + 1, self.guide) if anew else (0, "")

    def followed(self, step: int) -> tuple[str, ...]:
        """From whom it takes the total of `step`: nobody in particular if it has a share in it."""
        group = self.group(step)
        return () if self.peer in group else self.guides(group)

    def newcomers(self, step: int) -> tuple[str, ...]:
        """Who is to begin from this stage's state after `step`."""
        replicas = self.newest.stages[self.stage]
        return tuple(
            r.peer for r in replicas if r.alive and r.start == step > self.newest.restored and r.peer != self.peer
        )
