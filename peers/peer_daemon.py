"""A volunteer's daemon: joins a run, serves the stage it is given, stops when the run ends or its owner says so.

invite -> manifest (checked) -> data (checked) -> join -> view -> stage worker -> ... -> end
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from peers.checkpoints import Checkpoints
from peers.compute import ComputeThread
from peers.data.token_store import TokenStore
from peers.peer_options import PeerOptions
from peers.stage_worker import StageWorker, WorkerParts
from peers.step_reports import StepReport, WireTotals
from peers.transport import FrameReceived, FrameRefused, LinkLost, LinkRestored, Transport, TransportEvent
from protocol.errors import BadFrame, BadSignature, IsthmusError, NetworkError, RemoteError, RunFailed, UserError
from protocol.frame import Frame, Kind, control, parse_control
from protocol.invite import Invite
from protocol.manifest import Manifest, describe_difference
from protocol.membership import short_peer
from protocol.model.engine import payload_limits
from protocol.records import MANIFEST, record_key
from protocol.signing import open_record
from protocol.stage_machine import Arrived, Stalled, ViewChanged
from protocol.view import View

logger = logging.getLogger(__name__)

ADMISSION_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
ORPHAN_SECONDS = 120.0
MOST_REPORTS = 10_000  # kept for a coordinator that is away
MOST_REPORTS_SENT = 100  # in one message

Say = Callable[[str], None]


async def fetch_manifest(transport: Transport, invite: Invite) -> Manifest:
    """The run's manifest from the DHT, checked against the invite.

    Raises:
        UserError: there is no such run, or its manifest is not the invited one.
    """
    for _ in range(5):
        record = await transport.fetch(record_key(invite.run_id, MANIFEST))
        if record is not None:
            break
        await asyncio.sleep(1.0)
    else:
        raise UserError(
            f"expected run {invite.run_id} at {invite.addresses[0]}, nobody there knows it: "
            "the invite is old, or the coordinator has ended the run"
        )
    try:
        manifest = Manifest.from_json(open_record(record, MANIFEST, invite.coordinator_key))
    except BadSignature as error:
        raise UserError(f"the run's manifest was not signed by the inviting coordinator: {error}") from error
    except RemoteError as error:
        raise UserError(str(error)) from error
    if manifest.run_id != invite.run_id:
        raise UserError(f"expected run {invite.run_id}, the manifest is of run {manifest.run_id}: ask for a new invite")
    return manifest


class PeerDaemon:
    """Serves one run through `transport`, as `invite` says, with `tokens` that were checked against `manifest`."""

    def __init__(
        self,
        transport: Transport,
        invite: Invite,
        manifest: Manifest,
        tokens: TokenStore,
        options: PeerOptions,
        say: Say = logger.info,
    ) -> None:
        difference = describe_difference(manifest, tokens.fingerprint)
        if difference:
            raise UserError(difference)
        self._transport, self._invite, self._manifest, self._say = transport, invite, manifest, say
        self._coordinator = invite.addresses[0].rsplit("/p2p/", 1)[-1]
        self._compute = ComputeThread()
        checkpoints = Checkpoints(options.folder / "checkpoints", manifest.run_id, manifest.config.checkpoint.keep)
        self._parts = WorkerParts(
            manifest.config,
            transport,
            tokens,
            self._compute,
            checkpoints,
            self._on_report,
            options.device,
            options.gradients,
        )
        self._worker: StageWorker | None = None
        self._early: list[Arrived] = []
        self._reports: list[StepReport] = []
        self._admitted = self._done = False
        self._leaving = False
        self._coordinator_heard = time.monotonic()
        self._end: dict[str, Any] | None = None

    async def run(self) -> str:
        """Join and serve until the run ends. Returns how it ended, in words.

        Raises:
            UserError: the coordinator turned this peer away.
            NetworkError: the coordinator, or a neighbour and the coordinator, cannot be reached.
            RunFailed: the run ended without being done.
        """
        await self._join()
        beat = asyncio.create_task(self._beat())
        try:
            while self._end is None:
                await self._next()
        finally:
            beat.cancel()
            if self._worker is not None:
                await self._worker.close()
            self._compute.close()
            self._transport.send(self._coordinator, control({"type": "goodbye", "wire": self._wire()}))
            await self._transport.drain(3.0)
        if self._end.get("failed"):
            raise RunFailed(f"the run ended after step {self._end.get('step')}: {self._end.get('reason')}")
        return f"the run ended after step {self._end.get('step')}: {self._end.get('reason')}"

    def leave(self) -> None:
        """The owner wants to go: ask the coordinator to wind the run down, so that no step is lost."""
        self._leaving = True
        self._tell({"type": "leave"})

    # Joining

    async def _join(self) -> None:
        forward, backward = payload_limits(self._manifest.config)
        self._transport.limit(Kind.FORWARD, forward)
        self._transport.limit(Kind.BACKWARD, backward)
        await self._transport.connect(self._coordinator, self._invite.addresses)
        held = {str(stage): steps for stage, steps in self._parts.checkpoints.held().items()}
        request = {
            "type": "join",
            "addresses": await self._transport.addresses(),
            "checkpoints": held,
            "session": secrets.token_hex(8),
        }
        deadline = time.monotonic() + ADMISSION_SECONDS
        while not self._admitted:
            self._tell(request)
            await self._next(5.0)
            if time.monotonic() > deadline and not self._admitted:
                raise NetworkError(f"the coordinator did not answer within {ADMISSION_SECONDS:.0f} s: is it running?")
        self._say(f"joined run {self._manifest.run_id}; waiting for the other stages")

    # Events

    async def _next(self, seconds: float = HEARTBEAT_SECONDS) -> None:
        """Handle the next transport event, the worker's failure, or nothing for `seconds`."""
        receive = asyncio.ensure_future(self._transport.receive())
        waits: set[asyncio.Future[Any]] = {receive}
        if self._worker is not None:
            waits.add(self._worker.failure)
        done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if receive not in done:
            receive.cancel()
        if self._worker is not None and self._worker.failure.done():
            self._give_up(self._worker.failure.result())
        if receive in done:
            await self._on_event(receive.result())

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

    def _on_tensor(self, peer: str, frame: Frame) -> None:
        h = frame.header
        arrived = Arrived(peer, h.kind, h.view, h.step, h.microbatch, frame.payload, h.codec)
        if self._worker is not None:
            self._worker.feed(arrived)
        elif len(self._early) < 4 * self._manifest.config.train.microbatches:
            self._early.append(arrived)

    async def _on_control(self, peer: str, frame: Frame) -> None:
        if peer != self._coordinator:
            logger.warning("ignored a control message from %s, which is not the coordinator", short_peer(peer))
            return
        self._coordinator_heard = time.monotonic()
        try:
            message = parse_control(frame.payload)
            match message["type"]:
                case "admitted":
                    self._admitted = True
                case "turned_away":
                    raise UserError(f"the coordinator turned this peer away: {message.get('reason')}")
                case "view":
                    await self._on_view(str(message["record"]).encode())
                case "seen":
                    seen = int(message["step"])
                    self._reports = [report for report in self._reports if report.step > seen]
                case "end":
                    self._end = message
        except (BadFrame, BadSignature, KeyError, TypeError, ValueError) as error:
            logger.warning("ignored a message from the coordinator: %s", error)
        except RemoteError as error:
            logger.warning("ignored a view: %s", error)

    async def _on_view(self, record: bytes) -> None:
        view = View.from_json(open_record(record, "view", self._invite.coordinator_key))
        self._admitted = True
        stage = view.stage_of(self._transport.peer_id)
        if stage is None:
            return
        if self._worker is None:
            await self._begin(view, stage)
        assert self._worker is not None
        self._worker.feed(ViewChanged(view))
        await self._worker.checkpoint_at_end()
        early, self._early = self._early, []
        for arrived in early:
            self._worker.feed(arrived)

    async def _begin(self, view: View, stage: int) -> None:
        self._say(f"serving stage {stage} of {len(view.stages)} from step {view.first_step} on")
        neighbours = [r for s in (stage - 1, stage + 1) if 0 <= s < len(view.stages) for r in view.stages[s]]
        for neighbour in neighbours:
            await self._transport.connect(neighbour.peer, neighbour.addresses)
        self._worker = StageWorker(self._parts, stage, view.first_step - 1)
        await self._worker.build()

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

    def _give_up(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, IsthmusError | RemoteError) else repr(error)
        self._tell({"type": "failed", "reason": reason})
        if not isinstance(error, IsthmusError | RemoteError):
            logger.error("the stage failed", exc_info=error)
        raise RunFailed(reason) from error

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._send_reports()
            if self._leaving:
                self._tell({"type": "leave"})
            self._look_for_stall()

    def _look_for_stall(self) -> None:
        worker, now = self._worker, time.monotonic()
        if worker is None:
            return
        away = now - self._coordinator_heard
        missing = worker.machine.waits_for()
        if worker.machine.finished or missing != "nothing":
            if worker.stall.waited(now) > ORPHAN_SECONDS and away > ORPHAN_SECONDS and not worker.failure.done():
                what = "the run's end" if worker.machine.finished else missing
                reason = f"nothing was heard for {ORPHAN_SECONDS:.0f} s from the coordinator, nor {what}"
                worker.failure.set_result(
                    NetworkError(f"{reason}; the checkpoints are kept, resume when they are reachable again")
                )
            elif missing != "nothing" and worker.stall.due(now):
                logger.info("waiting for %s; sending again what may have been lost", missing)
                worker.feed(Stalled())
