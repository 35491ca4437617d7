"""A volunteer's daemon: joins a run, serves the stage it is given, stops when the run ends or its owner says so.

    join --admitted--> waiting --view--> serving --end, released--> done
              ^           |                 |  ^
              |           |                 |  +-- a view gives it another stage, or an earlier step: built anew
              +-----------+-----------------+----> dropped: asks to join again
                          +--> failed: turned away, the stage cannot go on, nobody answers

The main loop handles transport events in order. Whatever goes wrong beside it (the stage, a timer) ends it through
`Background.failure`, and the coordinator is told why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from peers.background import Background, next_event
from peers.checkpoints import Checkpoints
from peers.compute import ComputeThread
from peers.coordinator_line import CoordinatorLine
from peers.coordinator_messages import budget_in, failed_message
from peers.data.run_data import RunData
from peers.gauges import Gauges
from peers.load import LoadFile
from peers.machine import compute_clock, free_memory, measured_speed
from peers.neighbours import Neighbours
from peers.opening import check_agreement
from peers.patience import check_leaving, check_orphaned
from peers.peer_inbox import PeerInbox
from peers.peer_options import PeerOptions
from peers.refusal_log import RefusalLog
from peers.stage_compute import ComputeParts
from peers.stage_files import StageFiles
from peers.stage_worker import WorkerParts
from peers.step_reports import StepReport
from peers.tenure import Tenure
from peers.trace import NO_TRACE, TraceFile, Tracer, frame_name
from peers.transport import (
    FrameReceived,
    FrameRefused,
    LinkLost,
    LinkRestored,
    Transport,
    TransportEvent,
    TransportLost,
)
from protocol.errors import NetworkError, RemoteError, RunFailed, UserError
from protocol.frame import Frame, Kind, parse_control
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.membership_events import short_peer
from protocol.plain_text import plain

logger = logging.getLogger(__name__)

ADMISSION_SECONDS = 30.0
HEARTBEAT_SECONDS = 2.0

Say = Callable[[str], None]


class PeerDaemon:
    """Serves one run through `transport`, as `invite` says, with `data`.

    Raises:
        UserError: the data or the given basis is not the run's.
    """

    def __init__(
        self,
        transport: Transport,
        invite: Invite,
        manifest: Manifest,
        data: RunData,
        options: PeerOptions,
        say: Say = logger.info,
    ) -> None:
        check_agreement(manifest, data, options.basis_DK)
        self._transport, self._invite, self._manifest, self._say = transport, invite, manifest, say
        self._tracer: Tracer = options.tracer or NO_TRACE
        self._compute, self._background = ComputeThread(compute_clock(options.device), self._tracer), Background()
        self._gauges, self._measured = Gauges(transport, self._compute, options.network_pid), False
        self._line = CoordinatorLine(transport, invite.addresses[0].rsplit("/p2p/", 1)[-1], self._gauges.read)
        self._load = LoadFile(options.load, transport, self._line)
        self._neighbours = Neighbours(transport, self._background, keep=self._line.peer)
        self._inbox = PeerInbox(manifest.config)
        config, folder = manifest.config, options.folder / "checkpoints"
        parts = ComputeParts(
            config=config,
            data=data,
            checkpoints=Checkpoints(folder, manifest.run_id, config.checkpoint.keep, options.fault, manifest.lineage),
            device=options.device,
            basis_DK=options.basis_DK,
            gradients=options.gradients,
            fault=options.fault,
        )
        self._files = StageFiles(config, parts.checkpoints)
        self._parts = WorkerParts(
            compute_parts=parts,
            transport=transport,
            compute=self._compute,
            files=self._files,
            background=self._background,
            send=self._neighbours.send,
            report=self._on_report,
            tell=self._line.tell,
            tracer=self._tracer,
        )
        self._trace_file = TraceFile(options.folder / "trace.json", options.tracer, transport.peer_id)
        self._refusals = RefusalLog(logger)
        self._tenure = Tenure(self._parts, invite.coordinator_key, self._inbox, self._neighbours, say, self._refusals)
        self._admitted, self._ability = False, (0.0, 0)
        self._leaving_since: float | None = None
        self._end: dict[str, Any] | None = None

    async def run(self) -> str:
        """Join and serve until the run ends. Returns how it ended, in words.

        Raises:
            UserError: the coordinator turned this peer away.
            NetworkError: the coordinator, or a neighbour and the coordinator, cannot be reached.
            RunFailed: the run ended without being done, or this stage cannot go on.
        """
        try:
            await self._join()
            while self._end is None:
                await self._next()
        except UserError:
            raise
        except Exception as error:
            self._line.tell(failed_message(error, self._tenure.epoch))
            if isinstance(error, RemoteError):
                raise RunFailed(f"this stage cannot go on with what it was sent: {error}") from error
            raise
        finally:
            await self._close()
        if self._end.get("type") == "released":
            return "left the run; the others go on"
        outcome = f"the run ended after step {plain(self._end.get('step'), 20)}: {plain(self._end.get('reason'))}"
        if self._end.get("failed"):
            raise RunFailed(outcome)
        return outcome

    def leave(self) -> None:
        """The owner wants to go: ask the coordinator to be released, so that no step is lost."""
        self._leaving_since = self._leaving_since or time.monotonic()
        self._line.tell({"type": "leave"})

    async def _close(self) -> None:
        self._trace_file.write(None if self._tenure.worker is None else self._tenure.worker.stage)
        await self._tenure.close()
        await self._background.close()
        self._compute.close()
        self._line.goodbye()
        await self._transport.drain(3.0)

    # Joining

    async def _join(self) -> None:
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.CHUNK):
            self._transport.limit(kind, self._inbox.most(kind))
        await self._transport.connect(self._line.peer, self._invite.addresses)
        device = self._parts.compute_parts.device
        self._ability = (await self._compute.run(lambda: measured_speed(device)), free_memory(device))
        self._background.spawn(self._beat())
        self._background.spawn(self._gauges.lag.watch())
        deadline = time.monotonic() + ADMISSION_SECONDS
        while not self._admitted and self._end is None:
            await self._ask_to_join()
            await self._next()
            if time.monotonic() > deadline and not self._admitted:
                raise NetworkError(f"the coordinator did not answer within {ADMISSION_SECONDS:.0f} s: is it running?")
        if self._end is None and self._tenure.worker is None:
            self._say(f"joined run {self._manifest.run_id}; waiting for a stage")

    async def _ask_to_join(self) -> None:
        addresses, config = await self._transport.addresses(), self._manifest.config.hash()
        self._line.ask_to_join(addresses, self._files.held(), *self._ability, config)

    # Events

    async def _next(self) -> None:
        """Handle the next transport event, or nothing for a while."""
        event = await next_event(self._transport, HEARTBEAT_SECONDS, self._background.failure)
        if self._background.failure.done():
            raise self._background.failure.result()
        if event is not None:
            await self._on_event(event)

    async def _on_event(self, event: TransportEvent) -> None:
        match event:
            case FrameReceived(peer, frame) if peer == self._line.peer and frame.header.kind is Kind.CONTROL:
                await self._on_coordinator(frame)
            case FrameReceived(peer, frame):
                self._tracer.instant(f"from {short_peer(peer)}", frame_name(frame.header))
                await self._on_peer(peer, frame)
            case FrameRefused(peer, reason):
                self._refusals.note(peer, f"refused what it sent: {reason}")
            case LinkLost(peer, reason):
                self._refusals.note(peer, f"the link to it broke: {reason}")
                self._link_changed(peer, broken=True)
            case LinkRestored(peer):
                logger.info("the link to %s is back", short_peer(peer))
                self._link_changed(peer, broken=False)
                if peer != self._line.peer:
                    self._tenure.stalled(peer)
            case TransportLost(reason):
                raise NetworkError(f"{reason}; the checkpoints are kept, resume the run from them")

    def _link_changed(self, peer: str, *, broken: bool) -> None:
        if peer == self._line.peer:
            self._line.broken = broken
        else:
            self._neighbours.link_changed(peer, broken=broken)

    async def _on_peer(self, peer: str, frame: Frame) -> None:
        try:
            what = self._inbox.heard(peer, frame) if frame.header.kind is Kind.CONTROL else frame
            if isinstance(what, str):
                await self._on_view(what)
            else:
                self._tenure.on_peer(peer, what)
        except RemoteError as error:
            self._refusals.note(peer, f"refused what it sent: {error}")

    async def _on_coordinator(self, frame: Frame) -> None:
        self._line.heard()
        try:
            message = parse_control(frame.payload)
            if message["type"] == "view":
                await self._on_view(str(message["record"]))
            else:
                await self._on_order(message)
        except (RemoteError, KeyError, TypeError, ValueError) as error:
            self._refusals.note(self._line.peer, f"ignored a message from the coordinator: {error}")

    async def _on_order(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "admitted":
                self._admitted = True
            case "unknown":
                # It dropped this peer while nothing could be heard from it (a laptop slept), or it was restarted.
                await self._ask_to_join()
            case "turned_away":
                reason = plain(message.get("reason"))
                self._background.fail(UserError(f"the coordinator turned this peer away: {reason}"))
            case "seen":
                self._tenure.budget(budget_in(message))
                if int(message["epoch"]) == self._tenure.epoch and self._line.seen(int(message["step"])):
                    self._send_report()
            case "notice":
                self._say(plain(message["text"]))
            case "end" | "released":
                self._end = message

    async def _on_view(self, record: str) -> None:
        if not self._admitted:
            return  # it may count on what this peer had before it was restarted
        change = await self._tenure.take(record)
        if change.restored is not None:
            self._line.forget_after(change.restored)
        if change.dropped and self._leaving_since is None:
            self._say("the newest view does without this peer; asking to join again")
            await self._ask_to_join()

    # Telling the coordinator

    def _on_report(self, report: StepReport) -> None:
        self._line.add(report)
        if not self._measured:
            self._measured = True
            self._gauges.begin()
        if not self._line.quiet:
            self._send_report()

    def _send_report(self) -> None:
        state = {**self._tenure.state(), "broken": tuple(sorted(self._neighbours.broken))}
        self._line.report(self._tenure.view, state, self._files.held())

    # The clock

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._admitted:
                self._send_report()
                self._tenure.repeat()
            machine = None if self._tenure.worker is None else self._tenure.worker.machine
            self._load.note(machine)
            self._gauges.note(machine)
            self._refusals.tick()
            now = time.monotonic()
            if self._leaving_since is not None:
                check_leaving(now - self._leaving_since, self._line.away())
                self._line.tell({"type": "leave"})
            self._look_for_stall(now)

    def _look_for_stall(self, now: float) -> None:
        worker, missing, away = self._tenure.worker, self._tenure.waits_for(), self._line.away()
        finished = self._tenure.finished
        if missing == "nothing" and not finished:
            return
        waited = away if worker is None else worker.stall.waited(now)
        check_orphaned("the run's end" if finished else missing, waited, away)
        if worker is not None and not finished and worker.stall.due(now):
            logger.info("waiting for %s; asking again", missing)
            self._tenure.stalled()
