"""The stage that a peer serves, by the newest view: here its worker is built, fed, replaced and let go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.neighbours import Neighbours
from peers.peer_inbox import PeerInbox
from peers.refusal_log import RefusalLog
from peers.stage_worker import IDLE, StageWorker, WorkerParts
from protocol.errors import RemoteError, RunFailed
from protocol.events import Event, Stalled, ViewChanged
from protocol.frame import Frame, control
from protocol.records import VIEW
from protocol.signing import open_record
from protocol.stage_machine import MISLED
from protocol.view import View

logger = logging.getLogger(__name__)

MOST_MET = 2000  # peers of former views


@dataclass(frozen=True, slots=True)
class Change:
    """What a view meant for this peer: it lost its place; the run went back to the step `restored`."""

    dropped: bool = False
    restored: int | None = None


class Tenure:
    """Serves what the views of the coordinator with `coordinator_key` ask of this peer."""

    def __init__(
        self,
        parts: WorkerParts,
        coordinator_key: str,
        inbox: PeerInbox,
        neighbours: Neighbours,
        say: Callable[[str], None],
        refusals: RefusalLog,
    ) -> None:
        self._parts, self._key, self._refusals = parts, coordinator_key, refusals
        self._inbox, self._neighbours, self._say = inbox, neighbours, say
        self.worker: StageWorker | None = None
        self.view: View | None = None
        self._record = ""
        self._met: frozenset[str] = frozenset()  # who was in any view
        self._misled = 0

    @property
    def epoch(self) -> int:
        """The newest view's."""
        return 0 if self.view is None else self.view.epoch

    @property
    def finished(self) -> bool:
        """Whether the newest view asks for no further step."""
        return self.worker is not None and self.worker.machine.finished

    def waits_for(self) -> str:
        """What is waited for, in words; `nothing`: it is at work, or has finished."""
        return "a view" if self.worker is None else self.worker.machine.waits_for()

    def state(self) -> dict[str, Any]:
        """What the coordinator is told in each report."""
        return IDLE if self.worker is None else self.worker.state()

    async def take(self, record: str) -> Change:
        """Act on a view, if it is newer than the newest.

        Raises:
            RemoteError: not signed by the coordinator, or no view.
        """
        if record == self._record:
            return Change()  # many neighbours may tell it
        view = View.from_json(open_record(record.encode(errors="replace"), VIEW, self._key))
        if self.view is not None and view.number <= self.view.number:
            return Change()
        me, served = self._parts.transport.peer_id, self.worker is not None
        stage, back = view.stage_of(me), view.goes_back(self.view, me)
        former, self.view, self._record = self.view, view, record
        self._met = view.everybody() | (self._met if len(self._met) < MOST_MET else frozenset())
        self._neighbours.changed(view, stage)
        await self._let_go(view)
        if back:  # only now: what the former worker was about may have been a checkpoint
            await self._parts.files.forget_after(view.restored)
        await self._parts.files.follow(view, former)
        if stage is not None:
            await self._serve(view, stage)
        return Change(stage is None and served, view.restored if back else None)

    async def _let_go(self, view: View) -> None:
        former = self.worker
        if former is not None and not former.serves(view):
            self.worker, self._misled = None, self._how_often_misled(former, view)
            await former.close()

    def _how_often_misled(self, former: StageWorker, view: View) -> int:
        """How often this peer has followed its stage to wrong weights. Who alone handed them out is told of."""
        stage = view.stage_of(former.machine.peer)
        misled, guide = (0, "") if stage is None else former.machine.misled_until(view.epoch, stage)
        if guide:
            self._parts.tell({"type": "accuse", "peer": guide, "reason": MISLED, "state": True})
        return misled

    async def _serve(self, view: View, stage: int) -> None:
        if self.worker is None:
            self.worker = await self._begin(view, stage)
        self.worker.feed(ViewChanged(view))
        await self.worker.checkpoint_at_end()
        for peer, what in self._inbox.release():
            self._feed(self.worker, peer, what)

    async def _begin(self, view: View, stage: int) -> StageWorker:
        replica = view.replica(self._parts.transport.peer_id)
        in_file = replica.start == view.restored and replica.start in self._parts.files.held().get(stage, [])
        held = replica.start == 0 or in_file
        how = f"from step {replica.start + 1} on" if held else f"as soon as it has the state after step {replica.start}"
        self._say(f"serving stage {stage} of {len(view.stages)} {how}")
        try:
            return await self._built(view, stage, lacking=not held)
        except RunFailed as error:
            if not in_file:
                raise
            # A damaged file of one peer must not end the run of all: it fetches what the others have, or says so.
            logger.warning("%s; the state is fetched from others", error)
            self._parts.files.changed()
            return await self._built(view, stage, lacking=True)

    async def _built(self, view: View, stage: int, lacking: bool) -> StageWorker:
        replica = view.replica(self._parts.transport.peer_id)
        worker = StageWorker(self._parts, stage, replica, view.epoch, lacking, self._tell_view, self._misled)
        await worker.build(view.hash_of(stage, replica.start))
        return worker

    def on_peer(self, peer: str, what: Frame | Event) -> None:
        """A tensor or chunk of another peer, or what it said."""
        if self.worker is None:
            self._inbox.hold(peer, what)
        else:
            self._feed(self.worker, peer, what)

    def _feed(self, worker: StageWorker, peer: str, what: Frame | Event) -> None:
        try:
            worker.feed(self._inbox.tensor(peer, what, worker.stage) if isinstance(what, Frame) else what)
        except RemoteError as error:
            self._refusals.note(peer, f"refused what it sent: {error}")

    def stalled(self, peer: str | None = None) -> None:
        """Nothing came for long, or the link to `peer` is back."""
        if self.worker is not None:
            self.worker.feed(Stalled(peer))

    def repeat(self) -> None:
        """Tell the coordinator again why this stage stands still, if it does: the first word may have been lost."""
        if self.worker is not None and self.worker.failure is not None:
            self._parts.tell(self.worker.failure)

    def budget(self, seconds: float | None) -> None:
        """The coordinator's word on what a link may take in a step; None: it has none."""
        if self.worker is not None and seconds is not None:
            self.worker.rates.told = seconds

    def _tell_view(self, peer: str) -> None:
        """Send the newest view to one who acts on an older one; a stranger gets none, for it is much for little."""
        if peer in self._met:
            self._parts.send(peer, control({"type": "view", "record": self._record}))

    async def close(self) -> None:
        """Let go of the stage."""
        if self.worker is not None:
            await self.worker.close()
