"""A volunteer's daemon: joins a run, serves the stage it is given, stops when the run ends or its owner says so.

    join --admitted--> waiting --view--> serving --end--> done
                          |                 |
                          +-----------------+--> failed: turned away, the stage cannot go on, nobody answers

The main loop handles transport events in order. Whatever goes wrong beside it (the stage, a timer) ends it through
`Background.failure`, and the coordinator is told why.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from peers.background import Background, next_event
from peers.checkpoints import Checkpoints
from peers.compute import ComputeThread
from peers.data.run_data import RunData
from peers.opening import check_agreement
from peers.peer_options import PeerOptions
from peers.stage_worker import StageWorker, WorkerParts
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
from protocol.errors import BadFrame, IsthmusError, NetworkError, RemoteError, RunFailed, UserError
from protocol.frame import Frame, Kind, control, parse_control
from protocol.invite import Invite
from protocol.join_request import join_message
from protocol.manifest import Manifest
from protocol.membership import short_peer
from protocol.model.payload import PayloadCheck
from protocol.records import VIEW
from protocol.signing import open_record
from protocol.stage_machine import Arrived, Stalled, ViewChanged
from protocol.view import View

logger = logging.getLogger(__name__)

ADMISSION_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
ORPHAN_SECONDS = 120.0  # without the coordinator, nor what the stage waits for
LEAVE_SECONDS = 15.0  # how long a peer that leaves waits for a coordinator that does not answer
MOST_REPORTS = 10_000  # kept for a coordinator that is away
MOST_REPORTS_SENT = 100  # in one message

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
        self._coordinator = invite.addresses[0].rsplit("/p2p/", 1)[-1]
        self._compute, self._background = ComputeThread(), Background()
        config = manifest.config
        self._parts = WorkerParts(
            config=config,
            transport=transport,
            data=data,
            compute=self._compute,
            checkpoints=Checkpoints(options.folder / "checkpoints", manifest.run_id, config.checkpoint.keep),
            background=self._background,
            report=self._on_report,
            device=options.device,
            basis_DK=options.basis_DK,
            gradients=options.gradients,
        )
        self._payload_check = PayloadCheck(config)
        self._worker: StageWorker | None = None
        self._early: list[tuple[str, Frame]] = []
        self._reports: list[StepReport] = []
        self._request: dict[str, Any] = {}
        self._admitted = False
        self._leaving_since: float | None = None
        self._coordinator_heard = time.monotonic()
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
            self._tell({"type": "failed", "reason": _reason(error)})
            if isinstance(error, RemoteError):
                raise RunFailed(f"this stage cannot go on with what it was sent: {error}") from error
            raise
        finally:
            await self._close()
        outcome = f"the run ended after step {self._end.get('step')}: {self._end.get('reason')}"
        if self._end.get("failed"):
            raise RunFailed(outcome)
        return outcome

    def leave(self) -> None:
        """The owner wants to go: ask the coordinator to wind the run down, so that no step is lost."""
        self._leaving_since = self._leaving_since or time.monotonic()
        self._tell({"type": "leave"})

    async def _close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
        await self._background.close()
        self._compute.close()
        self._tell({"type": "goodbye", "wire": self._wire()})
        await self._transport.drain(3.0)

    # Joining

    async def _join(self) -> None:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            self._transport.limit(kind, self._payload_check.most(kind))
        await self._transport.connect(self._coordinator, self._invite.addresses)
        addresses, held = await self._transport.addresses(), self._parts.checkpoints.held()
        self._request = join_message(addresses, held, secrets.token_hex(8))
        self._background.spawn(self._beat())
        deadline = time.monotonic() + ADMISSION_SECONDS
        while not self._admitted and self._end is None:
            self._tell(self._request)
            await self._next()
            if time.monotonic() > deadline and not self._admitted:
                raise NetworkError(f"the coordinator did not answer within {ADMISSION_SECONDS:.0f} s: is it running?")
        if self._end is None:
            self._say(f"joined run {self._manifest.run_id}; waiting for the other stages")

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
            case FrameReceived(peer, frame) if frame.header.kind is Kind.CONTROL:
                await self._on_control(peer, frame)
            case FrameReceived(peer, frame):
                self._on_tensor(peer, frame)
            case FrameRefused(peer, reason):
                logger.warning("refused what %s sent: %s", short_peer(peer), reason)
            case LinkLost(peer, reason):
                logger.warning("the link to %s broke: %s", short_peer(peer), reason)
            case LinkRestored(peer):
                logger.info("the link to %s is back", short_peer(peer))
                if self._worker is not None and peer != self._coordinator:
                    self._worker.feed(Stalled(peer))
            case TransportLost(reason):
                raise NetworkError(f"{reason}; the checkpoints are kept, resume the run from them")

    def _on_tensor(self, peer: str, frame: Frame) -> None:
        header = frame.header
        try:
            self._payload_check.check(header)
        except BadFrame as error:
            logger.warning("refused a tensor from %s: %s", short_peer(peer), error)
            return
        if self._worker is not None and header.stage != self._worker.stage:
            logger.warning("refused a tensor from %s: it is for stage %d", short_peer(peer), header.stage)
        elif self._worker is not None:
            self._worker.feed(_arrived(peer, frame))
        elif len(self._early) < 4 * (self._manifest.config.train.microbatches + 1):
            self._early.append((peer, frame))

    async def _on_control(self, peer: str, frame: Frame) -> None:
        if peer != self._coordinator:
            logger.warning("ignored a control message from %s, which is not the coordinator", short_peer(peer))
            return
        self._coordinator_heard = time.monotonic()
        try:
            message = parse_control(frame.payload)
            view = self._take(message)
        except (RemoteError, KeyError, TypeError, ValueError) as error:
            logger.warning("ignored a message from the coordinator: %s", error)
            return
        if view is not None:
            await self._on_view(view)

    def _take(self, message: dict[str, Any]) -> View | None:
        """Act on a message of the coordinator; a verified view is returned, since acting on it takes a while."""
        match message["type"]:
            case "admitted":
                self._admitted = True
            case "unknown" if self._worker is None:
                # It dropped this peer while nothing could be heard from it (a laptop slept), or it was restarted.
                self._tell(self._request)
            case "turned_away":
                self._background.fail(UserError(f"the coordinator turned this peer away: {message.get('reason')}"))
            case "view":
                self._admitted = True
                record = str(message["record"]).encode()
                return View.from_json(open_record(record, VIEW, self._invite.coordinator_key))
            case "seen":
                seen = int(message["step"])
                self._reports = [report for report in self._reports if report.step > seen]
            case "end":
                self._end = message
        return None

    async def _on_view(self, view: View) -> None:
        stage = view.stage_of(self._transport.peer_id)
        if stage is None:
            logger.warning("ignored view %d, which has no stage for this peer", view.number)
            return
        if self._worker is None:
            self._worker = await self._begin(view, stage)
        self._worker.feed(ViewChanged(view))
        await self._worker.checkpoint_at_end()
        early, self._early = self._early, []
        for peer, frame in early:
            self._worker.feed(_arrived(peer, frame))

    async def _begin(self, view: View, stage: int) -> StageWorker:
        self._say(f"serving stage {stage} of {len(view.stages)} from step {view.first_step} on")
        neighbours = [r for s in (stage - 1, stage + 1) if 0 <= s < len(view.stages) for r in view.stages[s]]
        for neighbour in neighbours:
            await self._transport.connect(neighbour.peer, neighbour.addresses)
        worker = StageWorker(self._parts, stage, view.first_step - 1)
        await worker.build()
        return worker

    # Telling the coordinator

    def _on_report(self, report: StepReport) -> None:
        self._reports = [*self._reports, report][-MOST_REPORTS:]
        self._send_reports()

    def _send_reports(self) -> None:
        view = self._worker.machine.view if self._worker is not None else None
        self._tell(
            {
                "type": "reports",
                "reports": [report.to_json() for report in self._reports[:MOST_REPORTS_SENT]],
                "wire": self._wire(),
                "view": view.number if view is not None else 0,
            }
        )

    def _wire(self) -> tuple[int, ...]:
        return WireTotals.of(self._transport.counters).as_tuple()

    def _tell(self, message: dict[str, Any]) -> None:
        self._transport.send(self._coordinator, control(message))

    # The clock

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._admitted:
                self._send_reports()
            now = time.monotonic()
            if self._leaving_since is not None:
                self._keep_leaving(now, self._leaving_since)
            self._look_for_stall(now)

    def _keep_leaving(self, now: float, since: float) -> None:
        if now - max(since, self._coordinator_heard) > LEAVE_SECONDS:
            raise NetworkError(
                f"left without the coordinator, which was not heard for {LEAVE_SECONDS:.0f} s; "
                "the last checkpoint is kept"
            )
        self._tell({"type": "leave"})

    def _look_for_stall(self, now: float) -> None:
        missing = "a view" if self._worker is None else self._worker.machine.waits_for()
        away = now - self._coordinator_heard
        waited = away if self._worker is None else self._worker.stall.waited(now)
        finished = self._worker is not None and self._worker.machine.finished
        if missing == "nothing" and not finished:
            return
        if min(waited, away) > ORPHAN_SECONDS:
            what = "the run's end" if finished else missing
            raise NetworkError(
                f"nothing was heard for {ORPHAN_SECONDS:.0f} s from the coordinator, nor {what}; "
                "the checkpoints are kept, resume when they are reachable again"
            )
        if self._worker is not None and not finished and self._worker.stall.due(now):
            logger.info("waiting for %s; sending again what may have been lost", missing)
            self._worker.feed(Stalled())


def _arrived(peer: str, frame: Frame) -> Arrived:
    h = frame.header
    return Arrived(peer, h.kind, h.view, h.step, h.microbatch, frame.payload, h.codec)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, IsthmusError | RemoteError) else repr(error)
