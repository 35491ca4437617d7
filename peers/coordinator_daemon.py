"""The coordinator's daemon: admits peers, issues views, gathers the run's numbers. No tensor passes through it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from peers.files import write_json
from peers.run_folder import RunFolder
from peers.step_reports import StepReport, StepTable, WireTotals, summarise
from peers.transport import FrameReceived, FrameRefused, LinkLost, LinkRestored, Transport, TransportEvent
from protocol.errors import BadFrame
from protocol.frame import Frame, Kind, control, parse_control
from protocol.manifest import Manifest
from protocol.membership import (
    Admit,
    Effect,
    End,
    Event,
    Heard,
    Issue,
    JoinAsked,
    Left,
    LinkBroken,
    Membership,
    StopAsked,
    Tick,
    TurnAway,
    short_peer,
)
from protocol.records import MANIFEST, PROGRESS, VIEW, record_key
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
        stages = manifest.config.pipeline.stages
        self._membership = Membership(stages, last_step, folder.next_view(), resume)
        self._table = StepTable(manifest.config)
        self._last_row: dict[str, Any] | None = None
        self._first_step, self._began = 1, False
        self._published = float("-inf")
        self._wire: dict[str, WireTotals] = {}
        self._parted: set[str] = set()
        self._end: End | None = None
        self._metrics: Any = None

    async def publish_manifest(self) -> None:
        """Put the signed manifest into the DHT, where invited peers look for it."""
        await self._store(MANIFEST, self._key.sign(MANIFEST, self._manifest.to_json()))

    async def run(self) -> End:
        """Serve until the run ends; leaves metrics and report in the folder."""
        background = [asyncio.create_task(self._tick()), asyncio.create_task(self._publish_often())]
        self._observer.waiting(0, self._manifest.config.pipeline.stages)
        try:
            while self._end is None:
                await self._on_event(await self._transport.receive())
            await self._await_goodbyes()
        finally:
            for task in background:
                task.cancel()
            if self._metrics is not None:
                self._metrics.close()
            self._write_report()
        return self._end

    def stop(self, reason: str = "stopped as asked", failed: bool = False) -> None:
        """Wind the run down: all stages stop after the same step, a few steps from now."""
        seconds = self._last_row["seconds"] if self._last_row else 1.0
        self._decide(StopAsked(seconds, reason, failed))

    # Events

    async def _on_event(self, event: TransportEvent) -> None:
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

    def _on_control(self, peer: str, frame: Frame) -> None:
        try:
            message = parse_control(frame.payload)
            match message["type"]:
                case "join":
                    self._on_join(peer, message)
                case "reports":
                    self._on_reports(peer, message)
                case "leave":
                    self._on_leave(peer)
                case "failed":
                    self._decide(Left(peer, str(message.get("reason"))[:500]))
                case "goodbye":
                    self._parted.add(peer)
                    self._wire[peer] = WireTotals.from_json(message["wire"])
                    self._decide(Left(peer, "its daemon ended"))
        except (BadFrame, KeyError, TypeError, ValueError) as error:
            logger.warning("ignored a message from %s: %s", short_peer(peer), error)

    def _on_join(self, peer: str, message: dict[str, Any]) -> None:
        held = {int(stage): tuple(map(int, steps)) for stage, steps in dict(message["checkpoints"]).items()}
        self._decide(JoinAsked(peer, tuple(map(str, message["addresses"])), held, str(message["session"])))
        members = len(self._membership.members)
        if self._membership.view is None:
            self._observer.waiting(members, self._manifest.config.pipeline.stages)

    def _on_leave(self, peer: str) -> None:
        if self._membership.view is None:
            self._decide(Left(peer, "its owner stopped it"))
            self._tell(peer, _end_message(End(0, False, "left before the run began")))
            self._observer.waiting(len(self._membership.members), self._manifest.config.pipeline.stages)
        elif peer in self._membership.members:
            self._decide(Heard(peer))
            self.stop(f"peer {short_peer(peer)} was stopped by its owner", failed=True)

    def _on_reports(self, peer: str, message: dict[str, Any]) -> None:
        if peer not in self._membership.members:
            return
        self._wire[peer] = WireTotals.from_json(message["wire"])
        reports = [StepReport.from_json(value) for value in message["reports"]]
        for report in reports:
            for row in self._table.add(report):
                self._on_row(row)
        newest = max((report.step for report in reports), default=None)
        self._decide(Heard(peer, newest))
        self._answer(peer, newest or 0, int(message["view"]))

    def _answer(self, peer: str, newest: int, view: int) -> None:
        """What was told before may have been lost, so every report is answered with what its sender does not know."""
        self._tell(peer, {"type": "seen", "step": newest})
        if self._membership.view is not None and view < self._membership.view.number:
            self._tell(peer, self._view_message(self._membership.view))
        if self._end is not None:
            self._tell(peer, _end_message(self._end))

    def _on_row(self, row: dict[str, Any]) -> None:
        if self._metrics is None:
            self._metrics = self._folder.metrics.open("a")
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        self._last_row = row
        self._observer.row(row)

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
                self._tell(peer, {"type": "turned_away", "reason": reason})
            case Issue(view):
                self._issue(view)
            case End():
                self._end = effect
                for peer in self._membership.members:
                    self._tell(peer, _end_message(effect))

    def _issue(self, view: View) -> None:
        self._folder.remember_view(view.number)
        if not self._began:
            self._began = True
            self._first_step = self._table.next_step = view.first_step
            self._folder.forget_rows_after(view.first_step - 1)
            self._observer.began(view.first_step, view.last_step)
        for peer in self._membership.members:
            self._tell(peer, self._view_message(view))
        self._published = float("-inf")

    def _view_message(self, view: View) -> dict[str, Any]:
        return {"type": "view", "record": self._key.sign(VIEW, view.to_json()).decode()}

    def _tell(self, peer: str, message: dict[str, Any]) -> None:
        self._transport.send(peer, control(message))

    # The clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._decide(Tick())

    async def _publish_often(self) -> None:
        while True:
            if self._clock() - self._published > RECORD_SECONDS / 4:
                self._published = self._clock()
                await self.publish_manifest()
                if self._membership.view is not None:
                    await self._store(VIEW, self._key.sign(VIEW, self._membership.view.to_json()))
            await self._store(PROGRESS, self._key.sign(PROGRESS, self._progress()))
            await asyncio.sleep(PUBLISH_SECONDS)

    async def _store(self, kind: str, record: bytes) -> None:
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
            "row": self._last_row,
            "peers": members,
            "time": time.time(),
        }

    # The end

    async def _await_goodbyes(self) -> None:
        deadline = self._clock() + GOODBYE_SECONDS
        while self._parted < set(self._membership.members) and self._clock() < deadline:
            try:
                event = await asyncio.wait_for(self._transport.receive(), deadline - self._clock())
            except TimeoutError:
                return
            await self._on_event(event)

    def _write_report(self) -> None:
        rows = list(self._folder.rows())
        tokens = self._manifest.config.tokens_per_step * sum(row["step"] >= self._first_step for row in rows)
        report = summarise(self._manifest.config, rows, list(self._wire.values()), tokens)
        report["unigram_loss"] = self._manifest.unigram_loss
        report["run_id"] = self._manifest.run_id
        report["ended"] = None if self._end is None else {"failed": self._end.failed, "reason": self._end.reason}
        view = self._membership.view
        report["peers"] = [
            {
                "peer": peer,
                "stage": view.stage_of(peer) if view else None,
                "steps": member.step,
                "sent_bytes": sum(self._wire.get(peer, WireTotals()).as_tuple()),
            }
            for peer, member in self._membership.members.items()
        ]
        write_json(self._folder.report, report)


def _end_message(end: End) -> dict[str, Any]:
    return {"type": "end", "step": end.step, "failed": end.failed, "reason": end.reason}
