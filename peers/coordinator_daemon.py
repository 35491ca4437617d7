"""The coordinator's daemon: admits peers, issues views, gathers the run's numbers. No tensor passes through it.

It may die and come back. Where the run's peers still train it takes over, by what its folder remembers; where they are
gone they join again, and the run goes on from their checkpoints. `peers.executive` does what is decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from peers.background import Background, next_event
from peers.coordinator_messages import LONGEST_REPORTS, parse_event, parse_goodbye, parse_rate, parse_reports
from peers.executive import Executive, Observer
from peers.floor_meter import Premises
from peers.reachability import Reachability
from peers.refusal_log import RefusalLog
from peers.run_folder import Memory, RunFolder
from peers.run_publisher import RunPublisher
from peers.step_costs import PeerFigures
from peers.step_reports import WireTotals
from peers.takeover import answers, last_view, reachable, restored
from peers.transport import (
    FrameReceived,
    FrameRefused,
    LinkLost,
    LinkRestored,
    Transport,
    TransportEvent,
    TransportLost,
)
from protocol.errors import BadFrame, NetworkError, UserError
from protocol.frame import Frame, Kind, parse_control
from protocol.join_request import goes_by, parse_join
from protocol.manifest import Manifest
from protocol.membership import Terms
from protocol.membership_events import End, Heard, JoinAsked, Left, LinkBroken, StopAsked, Tick
from protocol.signing import SigningKey
from protocol.stage_cost import stage_costs
from protocol.view import Replica

logger = logging.getLogger(__name__)

CHANGED = "the run goes on with another configuration since it was resumed: start this peer again, with the same invite"
TICK_SECONDS = 1.0
GOODBYE_SECONDS = 10.0
ABSENT_SECONDS = 6.0  # how long a peer that does not answer a coordinator that returns is looked for


class CoordinatorDaemon:
    """Runs one run until it ends.

    Args:
        last_step: where to stop, at most the configured steps.
        resume: go on with the run in `folder`: with its peers where they still train, else from their checkpoints.
        wait_for: peers that must be there before the first step; None: one for each stage.
        newcomers: whether others may still come. If not, a stage that has lost its last peer ends the run.
        premises: what is known of where the peers run, for the floor of a step.
    """

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        key: SigningKey,
        folder: RunFolder,
        observer: Observer,
        last_step: int,
        resume: bool = False,
        wait_for: int | None = None,
        newcomers: bool = True,
        clock: Callable[[], float] = time.monotonic,
        premises: Premises | None = None,
    ) -> None:
        self._transport, self._observer, self._clock = transport, observer, clock
        self._stages, self._steps = manifest.config.pipeline.stages, manifest.config.train.steps
        self._needed = max(self._stages, wait_for or 0)
        self._memory: Memory = folder.memory() if resume else {}
        self._terms = Terms(
            costs=stage_costs(manifest.config),
            last_step=last_step,
            wait_for=self._needed,
            resume=resume,
            # By whatever configuration: the run must not begin anew because it has more steps between checkpoints now.
            checkpoint_every=min(m.config.checkpoint.every for m in (manifest, *folder.manifests(key.public))),
            end_when_starved=not newcomers,
            skip_nonfinite=manifest.config.train.skip_nonfinite,
        )
        self._reached = max((row["step"] for row in folder.rows()), default=0) if resume else 0
        membership = restored(self._memory, self._terms, False, clock(), self._reached)
        self._executive = Executive(
            transport, manifest, key, folder, observer, membership, self._needed, clock, premises
        )
        transport.limit(Kind.CONTROL, LONGEST_REPORTS)
        if resume:  # they may still be at work, and what they report now is not a stranger's
            view = last_view(self._memory)
            transport.trust((), control_only=() if view is None else view.everybody())
        self._refusals = RefusalLog(logger, clock)
        self._publisher = RunPublisher(transport, lambda: self._executive.manifests.newest, key, clock)
        self._background = Background()
        self._reachability = Reachability(transport, self._join, self._background.spawn)
        self._heard: set[str] = set()
        self._parted: set[str] = set()

    async def refuse_change_beside_peers(self) -> None:
        """Check that nobody still trains by the configuration that this run is to have no more.

        Raises:
            UserError: somebody does.
        """
        view = last_view(self._memory)
        if self._executive.manifests.newest.from_step or view is None:
            return
        there = await reachable(self._transport, view)
        if there:
            raise UserError(
                f"expected nobody to train by the former configuration, {len(there)} of the run's peers still do: "
                "resume it without a RUN.toml, stop it by Ctrl-C, then resume it with the changed one"
            )

    async def publish_manifest(self) -> None:
        """Put the signed manifest into the DHT, where invited peers look for it."""
        await self._publisher.manifest()

    async def run(self) -> End:
        """Serve until the run ends; leaves metrics and report in the folder.

        Raises:
            NetworkError: this machine's network daemon ended.
        """
        try:
            await self._take_over()
            self._background.spawn(self._tick())
            self._background.spawn(self._publisher.keep(lambda: self._executive.view, self._progress))
            self._show_waiting()
            while not self._executive.ended.done():
                await self._next()
            await self._await_goodbyes()
        finally:
            await self._background.close()
            self._executive.conclude()
        return self._executive.ended.result()

    def stop(self, reason: str = "stopped as asked", failed: bool = False) -> None:
        """Wind the run down: all stages stop after the same step, a few steps from now."""
        self._executive.decide(StopAsked(reason, failed))

    async def _take_over(self) -> None:
        """If peers of the last view are still there, go on with them; else the run waits for peers and checkpoints."""
        view = last_view(self._memory)
        if view is None:
            return
        there = await reachable(self._transport, view)
        if not there:
            text = f"no peer of view {view.number} answers: the run goes on from checkpoints"
            self._executive.journal.note("takeover", text)
            return
        membership = restored(self._memory, self._terms, True, self._clock(), self._reached)
        self._executive.take_over(membership, view, there)
        for replica in view.peers():
            if replica.peer not in there:
                self._background.spawn(self._look_for(replica))

    async def _look_for(self, replica: Replica) -> None:
        """The run stands still for a peer that died while no coordinator was there: look again, but not for long."""
        deadline = self._clock() + ABSENT_SECONDS
        while self._clock() < deadline:
            await asyncio.sleep(TICK_SECONDS)
            if replica.peer in self._heard or await answers(self._transport, replica):
                return
        self._executive.decide(Left(replica.peer, "it was gone when the coordinator returned"))

    # Events

    async def _next(self) -> None:
        event = await next_event(self._transport, None, self._background.failure, self._executive.ended)
        if self._background.failure.done():
            raise self._background.failure.result()
        if event is not None:
            self._on_event(event)

    def _on_event(self, event: TransportEvent) -> None:
        match event:
            case FrameReceived(peer, frame) if frame.header.kind is Kind.CONTROL:
                self._on_control(peer, frame)
            case FrameReceived(peer, _):
                self._refusals.note(peer, "ignored a tensor: the coordinator takes none")
            case FrameRefused(peer, reason):
                self._refusals.note(peer, f"refused what it sent: {reason}")
                if peer not in self._executive.membership.members:  # it may take itself for one, and report as such
                    self._executive.answer_stranger(peer)
            case LinkLost(peer, reason):
                self._refusals.note(peer, f"the link to it broke: {reason}", logging.INFO)
                self._executive.decide(LinkBroken(peer))
            case LinkRestored(peer):
                self._executive.decide(Heard(peer))
            case TransportLost(reason):
                raise NetworkError(f"{reason}; the checkpoints are kept, resume the run from them")

    def _on_control(self, peer: str, frame: Frame) -> None:
        try:
            self._on_message(peer, parse_control(frame.payload))
        except BadFrame as error:
            self._refusals.note(peer, f"ignored its message: {error}")
        except Exception as error:  # the last net: whatever a peer says, it costs the peer and not the run
            self._executive.net.caught(error, peer)

    def _join(self, event: JoinAsked) -> None:
        try:
            self._executive.decide(event)
        except Exception as error:
            self._executive.net.caught(error, event.peer)
        self._show_waiting()

    def _on_message(self, peer: str, message: dict[str, Any]) -> None:
        executive = self._executive
        self._heard |= {peer} & executive.membership.members.keys()
        match message["type"]:
            case "join" if not goes_by(message, executive.manifests.newest.config.hash()):
                executive.tell_stranger(peer, {"type": "turned_away", "reason": CHANGED})
            case "join":
                self._parted.discard(peer)
                self._reachability.asked(parse_join(peer, message, self._stages))
            case "goodbye" if peer in executive.sessions:
                self._parted.add(peer)
                self._goodbye(peer, *parse_goodbye(message))
                executive.decide(Left(peer, "its daemon ended"))
            case _ if peer not in executive.membership.members:
                executive.answer_stranger(peer)
            case "reports":
                executive.reported(peer, parse_reports(message, self._stages))
            case "rate":
                step, reason = parse_rate(message)
                if executive.budget.may_note(peer):
                    executive.journal.note("rate", reason, show=False, peer=peer, step=step)
            case kind:
                event = parse_event(peer, message)
                if event is None:
                    raise BadFrame(f"expected a message of a known type, got {kind[:40]!r}")
                executive.decide(event)
        self._show_waiting()

    def _goodbye(self, peer: str, wire: WireTotals, figures: PeerFigures) -> None:
        executive, member = self._executive, self._executive.membership.members.get(peer)
        executive.record.note((peer, executive.sessions[peer]), wire)
        executive.record.tell(peer, figures, () if member is None else member.addresses)

    def _show_waiting(self) -> None:
        if self._executive.membership.view is None:
            self._observer.waiting(len(self._executive.membership.members), self._needed)

    # The clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._executive.decide(Tick())
                self._executive.tick()
            except Exception as error:  # what a member said before may be at the bottom of it
                self._executive.net.caught(error)
            self._refusals.tick()

    def _progress(self) -> dict[str, Any]:
        view = self._executive.view
        return {
            "phase": self._executive.membership.phase.name.lower(),
            "last_step": view.last_step if view else self._steps,
            "row": self._executive.record.last_row,
            "notice": self._executive.notice,
            "peers": self._executive.peers(),
        }

    async def _await_goodbyes(self) -> None:
        deadline = self._clock() + GOODBYE_SECONDS
        while not set(self._executive.membership.members) <= self._parted and self._clock() < deadline:
            event = await next_event(self._transport, deadline - self._clock(), self._background.failure)
            if event is None:
                return
            self._on_event(event)
