"""The coordinator's daemon: admits peers, issues views, gathers the run's numbers. No tensor passes through it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from peers.background import Background, next_event
from peers.run_folder import RunFolder
from peers.run_record import RunRecord
from peers.step_reports import StepReport, WireTotals
from peers.transport import (
    FrameReceived,
    FrameRefused,
    LinkLost,
    LinkRestored,
    Transport,
    TransportEvent,
    TransportLost,
)
from protocol.errors import BadFrame, NetworkError
from protocol.frame import Frame, Kind, control, parse_control
from protocol.join_request import parse_join
from protocol.manifest import Manifest
from protocol.membership import (
    Admit,
    Effect,
    End,
    Event,
    Heard,
    Issue,
    Left,
    LinkBroken,
    Membership,
    StopAsked,
    Tick,
    TurnAway,
    short_peer,
)
from protocol.records import MANIFEST, PROGRESS, VIEW, record_key, sign_record
from protocol.signing import SigningKey
from protocol.view import View

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
PUBLISH_SECONDS = 3.0
RECORD_SECONDS = 600.0
GOODBYE_SECONDS = 10.0


class Observer(Protocol):
    """Who shows the run to a person."""

    def waiting(self, present: int, needed: int) -> None:
        """Peers are awaited."""

    def began(self, first_step: int, last_step: int) -> None:
        """All stages have a peer."""

    def row(self, row: dict[str, Any]) -> None:
        """A step is done everywhere."""

    def note(self, text: str) -> None:
        """Something a person should know."""


class CoordinatorDaemon:
    """Runs one run until it ends. `last_step` is where to stop, at most the configured steps."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        key: SigningKey,
        folder: RunFolder,
        observer: Observer,
        last_step: int,
        resume: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._manifest, self._key = transport, manifest, key
        self._folder, self._observer, self._clock = folder, observer, clock
        self._stages = manifest.config.pipeline.stages
        self._membership = Membership(self._stages, last_step, folder.next_view(), resume)
        self._record = RunRecord(folder, manifest)
        self._background = Background()
        self._ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._published = float("-inf")
        self._parted: set[str] = set()

    async def publish_manifest(self) -> None:
        """Put the signed manifest into the DHT, where invited peers look for it."""
        await self._store(MANIFEST, self._manifest.to_json())

    async def run(self) -> End:
        """Serve until the run ends; leaves metrics and report in the folder.

        Raises:
            NetworkError: this machine's network daemon ended.
        """
        self._background.spawn(self._tick())
        self._background.spawn(self._publish_often())
        self._show_waiting()
        try:
            while not self._ended.done():
                await self._next(None)
            await self._await_goodbyes()
        finally:
            await self._background.close()
            end = self._ended.result() if self._ended.done() else None
            self._record.report(end, self._membership, WireTotals.of(self._transport.counters))
        return self._ended.result()

    def stop(self, reason: str = "stopped as asked", failed: bool = False) -> None:
        """Wind the run down: all stages stop after the same step, a few steps from now."""
        row = self._record.last_row
        self._decide(StopAsked(row["seconds"] if row else 1.0, reason, failed))

    # Events

    async def _next(self, seconds: float | None) -> None:
        event = await next_event(self._transport, seconds, self._background.failure, self._ended)
        if self._background.failure.done():
            raise self._background.failure.result()
        if event is not None:
            self._on_event(event)

    def _on_event(self, event: TransportEvent) -> None:
        match event:
            case FrameReceived(peer, frame) if frame.header.kind is Kind.CONTROL:
                self._on_control(peer, frame)
            case FrameReceived(peer, _):
                logger.warning("ignored a tensor from %s: the coordinator takes none", short_peer(peer))
            case FrameRefused(peer, reason):
                logger.warning("refused what %s sent: %s", short_peer(peer), reason)
            case LinkLost(peer, reason):
                logger.info("the link to %s broke: %s", short_peer(peer), reason)
                self._decide(LinkBroken(peer))
            case LinkRestored(peer):
                self._decide(Heard(peer))
            case TransportLost(reason):
                raise NetworkError(f"{reason}; the checkpoints are kept, resume the run from them")

    def _on_control(self, peer: str, frame: Frame) -> None:
        try:
            message = parse_control(frame.payload)
            if message["type"] == "join":
                self._decide(parse_join(peer, message, self._stages))
                self._show_waiting()
            elif peer not in self._membership.members:
                self._tell_stranger(peer, {"type": "unknown"})
            else:
                self._on_member(peer, message)
        except (BadFrame, KeyError, TypeError, ValueError) as error:
            logger.warning("ignored a message from %s: %s", short_peer(peer), error)

    def _on_member(self, peer: str, message: dict[str, Any]) -> None:
        match message["type"]:
            case "reports":
                self._on_reports(peer, message)
            case "leave":
                self._on_leave(peer)
            case "failed":
                self._decide(Left(peer, str(message.get("reason"))[:500]))
            case "goodbye":
                self._parted.add(peer)
                self._record.add(peer, WireTotals.from_json(message["wire"]), ())
                self._decide(Left(peer, "its daemon ended"))
                self._show_waiting()

    def _on_leave(self, peer: str) -> None:
        if self._membership.view is None:
            self._decide(Left(peer, "its owner stopped it"))
            self._tell_stranger(peer, _end_message(End(0, False, "left before the run began")))
            self._show_waiting()
        else:
            self._decide(Heard(peer))
            self.stop(f"peer {short_peer(peer)} was stopped by its owner", failed=True)

    def _on_reports(self, peer: str, message: dict[str, Any]) -> None:
        view = self._membership.view
        stage = None if view is None else view.stage_of(peer)
        reports = [StepReport.from_json(value) for value in message["reports"]]
        if any(report.stage != stage for report in reports):
            raise BadFrame(f"expected reports of stage {stage} from its peer")
        for row in self._record.add(peer, WireTotals.from_json(message["wire"]), reports):
            self._observer.row(row)
        newest = max((report.step for report in reports), default=None)
        self._decide(Heard(peer, newest))
        self._answer(peer, newest or 0, int(message["view"]))

    def _answer(self, peer: str, newest: int, view: int) -> None:
        """What was told before may have been lost, so every report is answered with what its sender does not know."""
        self._tell(peer, {"type": "seen", "step": newest})
        if self._membership.view is not None and view < self._membership.view.number:
            self._tell(peer, self._view_message(self._membership.view))
        if self._ended.done():
            self._tell(peer, _end_message(self._ended.result()))

    # Decisions

    def _decide(self, event: Event) -> None:
        for effect in self._membership.handle(event, self._clock()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Admit(peer):
                self._tell(peer, {"type": "admitted"})
            case TurnAway(peer, reason):
                self._observer.note(f"turned peer {short_peer(peer)} away: {reason}")
                self._tell_stranger(peer, {"type": "turned_away", "reason": reason})
            case Issue(view):
                self._issue(view)
            case End():
                for peer in self._membership.members:
                    self._tell(peer, _end_message(effect))
                self._ended.set_result(effect)

    def _issue(self, view: View) -> None:
        self._folder.remember_view(view.number)
        if not self._record.began:
            self._record.begin(view.first_step)
            self._observer.began(view.first_step, view.last_step)
        for peer in self._membership.members:
            self._tell(peer, self._view_message(view))
        self._published = float("-inf")

    def _view_message(self, view: View) -> dict[str, Any]:
        return {"type": "view", "record": self._key.sign(VIEW, view.to_json()).decode()}

    def _tell(self, peer: str, message: dict[str, Any]) -> None:
        self._transport.send(peer, control(message))

    def _tell_stranger(self, peer: str, message: dict[str, Any]) -> None:
        self._tell(peer, message)
        self._transport.forget(peer)

    def _show_waiting(self) -> None:
        if self._membership.view is None:
            self._observer.waiting(len(self._membership.members), self._stages)

    # The clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._decide(Tick())
            self._show_waiting()

    async def _publish_often(self) -> None:
        while True:
            if self._clock() - self._published > RECORD_SECONDS / 4:
                self._published = self._clock()
                await self.publish_manifest()
                if self._membership.view is not None:
                    await self._store(VIEW, self._membership.view.to_json())
            await self._store(PROGRESS, self._progress())
            await asyncio.sleep(PUBLISH_SECONDS)

    async def _store(self, kind: str, body: dict[str, Any]) -> None:
        record = sign_record(self._key, kind, body, time.time() + RECORD_SECONDS)
        await self._transport.store(record_key(self._manifest.run_id, kind), record, RECORD_SECONDS)

    def _progress(self) -> dict[str, Any]:
        view = self._membership.view
        members = [
            {"peer": peer, "stage": view.stage_of(peer) if view else None, "step": member.step}
            for peer, member in self._membership.members.items()
        ]
        return {
            "phase": self._membership.phase.name.lower(),
            "last_step": view.last_step if view else self._manifest.config.train.steps,
            "row": self._record.last_row,
            "peers": members,
            "time": time.time(),
        }

    async def _await_goodbyes(self) -> None:
        deadline = self._clock() + GOODBYE_SECONDS
        while not set(self._membership.members) <= self._parted and self._clock() < deadline:
            event = await next_event(self._transport, deadline - self._clock(), self._background.failure)
            if event is None:
                return
            self._on_event(event)


def _end_message(end: End) -> dict[str, Any]:
    return {"type": "end", "step": end.step, "failed": end.failed, "reason": end.reason}
